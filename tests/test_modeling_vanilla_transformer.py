"""The Hugging Face side: Auto classes, caches, tied weights, outputs, initialisation."""

import copy
import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling

from hf_vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
)
from hf_vanilla_transformer.modeling_vanilla_transformer import shift_right
from tiny_models import BOS, EOS, PAD, SEPARATE, SOURCE, TARGET, V, embedding_tables, random_model

TYING = {
    "three-way": {},
    "two-way": {"share_encoder_decoder_embeddings": False},
    "none": {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
}


def sharing(model):
    """Which of source embedding, target embedding and output projection are one tensor, as in "AAB"."""
    pointers = [table.data_ptr() for table in embedding_tables(model)]
    return "".join("ABC"[sorted(set(pointers), key=pointers.index).index(pointer)] for pointer in pointers)


def run_python(code, *arguments):
    """Run code in a fresh process; its standard output."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class TestAutoClasses:
    def test_after_importing_the_package(self, tmp_path, tiny_model):
        tiny_model.save_pretrained(tmp_path)
        code = (
            "import sys, hf_vanilla_transformer\n"
            "heavy = {'datasets', 'evaluate', 'matplotlib', 'sacrebleu', 'pandas'}\n"
            "print(*(heavy & set(sys.modules)))\n"
            "from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM\n"
            "for auto in (AutoConfig, AutoModel, AutoModelForSeq2SeqLM):\n"
            "    print(type(auto.from_pretrained(sys.argv[1])).__name__)\n"
        )
        heavy, *classes = run_python(code, tmp_path).splitlines()
        assert heavy == ""
        assert classes == [
            "VanillaTransformerConfig",
            "VanillaTransformerModel",
            "VanillaTransformerForConditionalGeneration",
        ]

    def test_the_headless_model_loads_the_same_weights(self, tmp_path, tiny_model):
        tiny_model.save_pretrained(tmp_path)
        ours = VanillaTransformerModel.from_pretrained(tmp_path).state_dict()
        for name, weight in tiny_model.model.state_dict().items():
            torch.testing.assert_close(ours[name], weight, atol=0, rtol=0)


class TestForward:
    def test_shift_right(self):
        labels = torch.tensor([[5, 6, EOS], [7, EOS, -100], [-100, 8, EOS]])
        expected = [[BOS, 5, 6], [BOS, 7, EOS], [BOS, PAD, 8]]
        assert shift_right(labels, PAD, BOS).tolist() == expected
        assert labels[1, 2] == -100

    def test_decoder_input_comes_from_the_labels(self):
        model, labels = random_model(), torch.tensor([[4, 5, 6, EOS]] * 3)
        given = model(SOURCE, decoder_input_ids=shift_right(labels, PAD, BOS)).logits
        torch.testing.assert_close(model(SOURCE, labels=labels).logits, given, atol=0, rtol=0)

    def test_logits_are_the_output_projection(self):
        model = random_model()
        hidden = model.model(SOURCE, decoder_input_ids=TARGET).last_hidden_state
        logits = model(SOURCE, decoder_input_ids=TARGET).logits
        np.testing.assert_allclose(
            logits.detach(), hidden.detach().numpy() @ model.lm_head.weight.detach().numpy().T, atol=1e-4
        )

    def test_training_with_labels_makes_no_logits(self):
        output = random_model().train()(SOURCE, labels=TARGET)
        assert output.logits is None
        assert output.past_key_values is None
        assert output.loss.requires_grad

    @pytest.mark.parametrize("training", [True, False])
    def test_logits_are_made_or_skipped_as_asked(self, training):
        model = random_model(dropout=0.0).train(training)
        made, skipped = (model(SOURCE, labels=TARGET, skip_logits=skip) for skip in (False, True))
        assert skipped.logits is None
        assert made.logits.shape == (*TARGET.shape, model.config.vocab_size)
        torch.testing.assert_close(made.loss, skipped.loss)

    @pytest.mark.parametrize(
        "register",
        [
            "register_forward_hook",
            "register_forward_pre_hook",
            "register_full_backward_hook",
            "register_full_backward_pre_hook",
        ],
    )
    def test_hooks_of_the_output_projection_are_called_in_training(self, register):
        model, calls = random_model().train(), []
        hook = getattr(model.lm_head, register)(lambda *_: calls.append(1))
        model(SOURCE, labels=TARGET).loss.backward()
        hook.remove()
        assert calls == [1]
        assert model(SOURCE, labels=TARGET).logits is None

    def test_another_forward_of_the_output_projection_counts_in_training(self):
        model = random_model().train()
        original = model.lm_head.forward
        model.lm_head.forward = lambda states: original(states).tanh()
        output = model(SOURCE, labels=TARGET)
        assert output.logits.abs().max() <= 1
        assert output.loss < np.log(V) + 2

    def test_a_pass_without_numbers_leaves_nothing_behind(self):
        """As tools make it that estimate memory."""
        model, expected = random_model().train(), random_model().train()(SOURCE, labels=TARGET).loss
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert model(SOURCE, labels=TARGET).loss.shape == ()
        torch.testing.assert_close(model(SOURCE, labels=TARGET).loss, expected)

    @pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.torch.jit:DeprecationWarning")
    def test_a_new_model_can_be_traced(self):
        class Logits(nn.Module):
            def __init__(self):
                super().__init__()
                self.model = random_model()

            def forward(self, source, target):
                return self.model(input_ids=source, decoder_input_ids=target, use_cache=False).logits

        traced = torch.jit.trace(Logits(), (SOURCE, TARGET))
        expected = random_model()(SOURCE, decoder_input_ids=TARGET).logits
        torch.testing.assert_close(traced(SOURCE, TARGET), expected)

    def test_gradients_of_torch_func_in_training(self):
        """Dropout and loss have gradients written by hand, which it cannot use."""
        model = random_model(dropout=0.0).train()
        parameters = dict(model.named_parameters())

        def loss(parameters):
            return torch.func.functional_call(model, parameters, (SOURCE,), {"labels": TARGET}).loss

        found = torch.func.grad(loss)(parameters)
        model(SOURCE, labels=TARGET).loss.backward()
        for name, parameter in parameters.items():
            torch.testing.assert_close(found[name], parameter.grad, atol=1e-5, rtol=1e-4)
        torch.func.grad(loss)(dict(random_model(dropout=0.1).train().named_parameters()))
        fresh = random_model()
        torch.func.jvp(lambda weight: fresh(SOURCE, decoder_input_ids=TARGET).logits * weight, *[(torch.ones(()),)] * 2)
        copy.deepcopy(fresh)  # with a table of positions that is none of torch.func's

    def test_the_decoder_sees_no_later_token(self):
        model, changed = random_model(), TARGET.clone()
        changed[:, 2:] = 17
        before, after = (model(SOURCE, decoder_input_ids=ids).logits for ids in (TARGET, changed))
        torch.testing.assert_close(before[:, :2], after[:, :2])
        assert not torch.allclose(before[:, 2:], after[:, 2:])

    def test_the_order_of_source_words_matters(self):
        model = random_model()
        there, back = (model(ids, decoder_input_ids=TARGET).logits for ids in (SOURCE[:1], SOURCE[:1].flip(1)))
        assert not torch.allclose(there, back, atol=1e-2)

    @pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
    def test_padding_of_the_source_changes_nothing(self, attn_implementation):
        """Neither on the right nor on the left, with the mask given or found out from the padding id."""
        model = random_model()
        model.set_attn_implementation(attn_implementation)
        expected = model(SOURCE[1:2, :3], decoder_input_ids=TARGET[1:2]).logits
        right, left = SOURCE[1:2], SOURCE[1:2].roll(3, dims=1)
        for source in (right, left):
            for mask in (None, source.ne(PAD).long()):
                logits = model(source, attention_mask=mask, decoder_input_ids=TARGET[1:2]).logits
                torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)

    @pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
    def test_padding_of_the_target_on_the_left(self, attn_implementation):
        model = random_model()
        model.set_attn_implementation(attn_implementation)
        expected = model(SOURCE, decoder_input_ids=TARGET).logits
        padded = nn.functional.pad(TARGET, (2, 0), value=PAD)
        logits = model(SOURCE, decoder_input_ids=padded, decoder_attention_mask=padded.ne(PAD).long()).logits
        torch.testing.assert_close(logits[:, 2:], expected, atol=1e-5, rtol=1e-4)

    def test_the_encoder_alone_finds_the_padding_out_itself(self):
        encoder = random_model().get_encoder()
        expected = encoder(SOURCE, attention_mask=SOURCE.ne(PAD).long()).last_hidden_state
        torch.testing.assert_close(encoder(SOURCE).last_hidden_state, expected)

    def test_a_source_that_is_all_padding_is_the_same_on_every_backend(self):
        model, source = random_model(), torch.full((2, 4), PAD)
        source[0] = SOURCE[0, :4]
        logits = []
        for attn_implementation in ("eager", "sdpa"):
            model.set_attn_implementation(attn_implementation)
            logits.append(model(source, decoder_input_ids=TARGET[:2]).logits)
        assert logits[0].isfinite().all()
        torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-4)

    @pytest.mark.parametrize(
        "form",
        [
            lambda x: x,
            lambda x: x.to_tuple(),
            lambda x: BaseModelOutput(x[0]),
            lambda x: BaseModelOutputWithPooling(x[0]),
        ],
    )
    def test_encoder_outputs_given(self, form):
        model, mask = random_model(), SOURCE.ne(PAD).long()
        expected = model(SOURCE, decoder_input_ids=TARGET)
        encoder_outputs = form(model.get_encoder()(SOURCE, attention_mask=mask))
        output = model(encoder_outputs=encoder_outputs, attention_mask=mask, decoder_input_ids=TARGET)
        torch.testing.assert_close(output.logits, expected.logits, atol=0, rtol=0)

    def test_embeddings_given(self):
        model, mask = random_model(), SOURCE.ne(PAD).long()
        expected = model(SOURCE, decoder_input_ids=TARGET).logits
        output = model(
            inputs_embeds=model.model.encoder.embed_tokens(SOURCE),
            attention_mask=mask,
            decoder_inputs_embeds=model.model.decoder.embed_tokens(TARGET),
        )
        torch.testing.assert_close(output.logits, expected, atol=0, rtol=0)

    def test_embeddings_without_mask_are_all_real(self):
        model, source = random_model(), SOURCE[:1]
        output = model(inputs_embeds=model.get_input_embeddings()(source), decoder_input_ids=TARGET[:1])
        torch.testing.assert_close(output.logits, model(source, decoder_input_ids=TARGET[:1]).logits)

    def test_return_tuple(self):
        model = random_model()
        logits, *_ = model(SOURCE, decoder_input_ids=TARGET, return_dict=False)
        torch.testing.assert_close(logits, model(SOURCE, decoder_input_ids=TARGET).logits)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision(self, dtype):
        model = random_model()
        expected = model(SOURCE, decoder_input_ids=TARGET).logits.softmax(-1)
        logits = model.to(dtype)(SOURCE, decoder_input_ids=TARGET).logits
        assert logits.dtype == dtype
        torch.testing.assert_close(logits.float().softmax(-1), expected, atol=0.1, rtol=0.1)

    @pytest.mark.parametrize(
        ("inputs", "message"),
        [
            ({"decoder_input_ids": TARGET}, "give exactly one of input_ids and inputs_embeds"),
            (
                {"input_ids": SOURCE, "inputs_embeds": torch.zeros(3, 6, 32), "decoder_input_ids": TARGET},
                "give exactly one of input_ids and inputs_embeds",
            ),
            ({"input_ids": SOURCE}, r"give exactly one of decoder_input_ids and decoder_inputs_embeds \(or labels\)"),
            (
                {
                    "input_ids": SOURCE,
                    "decoder_input_ids": TARGET,
                    "decoder_inputs_embeds": torch.zeros(3, 4, 32),
                },
                "give exactly one of decoder_input_ids and decoder_inputs_embeds",
            ),
        ],
    )
    def test_wrong_inputs(self, inputs, message):
        with pytest.raises(ValueError, match=message):
            random_model()(**inputs)

    def test_decoder_without_memory(self):
        with pytest.raises(ValueError, match="the decoder needs encoder_hidden_states: it attends to the encoder's"):
            random_model().get_decoder()(TARGET)

    def test_decoder_rows_that_are_no_beams(self):
        with pytest.raises(ValueError, match="2 rows of the decoder do not divide among 3 source sentences"):
            random_model()(SOURCE, decoder_input_ids=TARGET[:2])


class TestRecordedOutputs:
    @torch.no_grad()
    def test_shapes_and_values(self):
        model = random_model(encoder_layers=3, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=2)
        model.set_attn_implementation("eager")
        output = model(SOURCE, decoder_input_ids=TARGET, output_attentions=True, output_hidden_states=True)
        b, s, t = *SOURCE.shape, TARGET.shape[1]
        shapes = {
            "encoder_attentions": [(b, 4, s, s)] * 3,
            "decoder_attentions": [(b, 2, t, t)] * 2,
            "cross_attentions": [(b, 2, t, s)] * 2,
            "encoder_hidden_states": [(b, s, 32)] * 4,
            "decoder_hidden_states": [(b, t, 32)] * 3,
        }
        for name, expected in shapes.items():
            assert [tuple(x.shape) for x in output[name]] == expected, name
        for name in ("encoder_attentions", "decoder_attentions", "cross_attentions"):
            for weights in output[name]:
                torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
        padding = SOURCE.eq(PAD)[:, None, None, :]
        for weights in (*output.encoder_attentions, *output.cross_attentions):
            assert weights.masked_select(padding).eq(0).all()
        for weights in output.decoder_attentions:
            assert weights.triu(1).eq(0).all()
        torch.testing.assert_close(output.encoder_hidden_states[-1], output.encoder_last_hidden_state)
        torch.testing.assert_close(model.lm_head(output.decoder_hidden_states[-1]), output.logits)

    @torch.no_grad()
    def test_first_hidden_state_is_the_embedded_input(self):
        model = random_model(position_embedding_type="learned")
        output = model(SOURCE[:1], decoder_input_ids=TARGET[:1], output_hidden_states=True)
        for stack, ids, states in (
            (model.model.encoder, SOURCE[:1], output.encoder_hidden_states),
            (model.model.decoder, TARGET[:1], output.decoder_hidden_states),
        ):
            embedded = stack.embed_tokens.weight[ids] * 32**0.5 + stack.embed_positions.weight[: ids.shape[1]]
            torch.testing.assert_close(states[0], embedded)


class TestBackends:
    def test_switched_after_loading(self, tmp_path, tiny_model):
        tiny_model.save_pretrained(tmp_path)
        model = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)
        logits, functions = {}, {}
        for name in ("sdpa", "eager"):
            model.set_attn_implementation(name)
            functions[name] = model.model.decoder._attention_function()
            logits[name] = model(SOURCE, decoder_input_ids=TARGET).logits
        assert functions["eager"] is not functions["sdpa"]
        torch.testing.assert_close(logits["eager"], logits["sdpa"], atol=1e-5, rtol=1e-4)
        output = model(SOURCE, decoder_input_ids=TARGET, output_attentions=True)
        assert all(weights is not None for weights in output.cross_attentions)

    def test_chosen_while_loading(self, tmp_path, tiny_model):
        tiny_model.save_pretrained(tmp_path)
        load = VanillaTransformerForConditionalGeneration.from_pretrained
        assert load(tmp_path).config._attn_implementation == "sdpa"
        assert load(tmp_path, attn_implementation="eager").config._attn_implementation == "eager"


class TestCache:
    @pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
    @pytest.mark.parametrize("steps", [[1, 1, 1, 1], [3, 1], [2, 2]])
    @torch.no_grad()
    def test_cached_equals_uncached(self, attn_implementation, steps):
        model = random_model()
        model.set_attn_implementation(attn_implementation)
        expected = model(SOURCE, decoder_input_ids=TARGET, use_cache=False).logits
        encoder_outputs = model.get_encoder()(SOURCE, attention_mask=SOURCE.ne(PAD).long())
        logits, cache = [], None
        for ids in TARGET.split(steps, dim=1):
            output = model(
                encoder_outputs=encoder_outputs,
                attention_mask=SOURCE.ne(PAD).long(),
                decoder_input_ids=ids,
                past_key_values=cache,
                use_cache=True,
            )
            logits.append(output.logits)
            cache = output.past_key_values
        torch.testing.assert_close(torch.cat(logits, dim=1), expected, atol=1e-5, rtol=1e-4)
        assert cache.get_seq_length() == TARGET.shape[1]

    @torch.no_grad()
    def test_cached_equals_uncached_with_padding_of_the_target(self):
        model = random_model()
        target = nn.functional.pad(TARGET, (2, 0), value=PAD)
        target[0], mask = TARGET[0].repeat(2)[:6], target.ne(PAD).long()
        mask[0] = 1
        expected = model(SOURCE, decoder_input_ids=target, decoder_attention_mask=mask, use_cache=False).logits
        logits, cache = [], None
        for start, end in ((0, 3), (3, 4), (4, 6)):
            output = model(
                SOURCE,
                decoder_input_ids=target[:, start:end],
                decoder_attention_mask=mask[:, :end],
                past_key_values=cache,
                use_cache=True,
            )
            logits.append(output.logits)
            cache = output.past_key_values
        real = mask.bool()
        torch.testing.assert_close(torch.cat(logits, dim=1)[real], expected[real], atol=1e-5, rtol=1e-4)

    def test_use_cache_of_the_configuration(self):
        output = random_model(use_cache=False)(SOURCE, decoder_input_ids=TARGET)
        assert output.past_key_values is None
        output = random_model(use_cache=True)(SOURCE, decoder_input_ids=TARGET)
        assert output.past_key_values.get_seq_length() == TARGET.shape[1]


class TestTying:
    @pytest.mark.parametrize(("name", "pattern"), [("three-way", "AAA"), ("two-way", "ABB"), ("none", "ABC")])
    class TestEach:
        def test_shared_storage(self, name, pattern):
            assert sharing(random_model(**TYING[name])) == pattern

        def test_saved_once_and_loaded(self, tmp_path, name, pattern):
            model = random_model(**TYING[name])
            model.save_pretrained(tmp_path)
            tables = re.compile("embed_tokens|lm_head")
            assert len(list(filter(tables.search, load_file(tmp_path / "model.safetensors")))) == len(set(pattern))
            loaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)
            assert sharing(loaded) == pattern
            for x, y in zip(embedding_tables(loaded), embedding_tables(model), strict=True):
                torch.testing.assert_close(x, y, atol=0, rtol=0)
            expected = model(SOURCE, decoder_input_ids=TARGET).logits
            torch.testing.assert_close(loaded(SOURCE, decoder_input_ids=TARGET).logits, expected, atol=0, rtol=0)

        def test_headless(self, name, pattern):
            model = random_model(VanillaTransformerModel, **TYING[name])
            shared = model.encoder.embed_tokens.weight is model.decoder.embed_tokens.weight
            assert shared == (pattern == "AAA")

    def test_what_is_tied_is_saved_as_tied(self, tmp_path):
        """Tied weights are saved once: a configuration that denied it would give a random output projection."""
        model = random_model(**TYING["two-way"])
        model.config.tie_word_embeddings = False
        model.save_pretrained(tmp_path)
        loaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)
        assert sharing(loaded) == "ABB"
        expected = model(SOURCE, decoder_input_ids=TARGET).logits
        torch.testing.assert_close(loaded(SOURCE, decoder_input_ids=TARGET).logits, expected, atol=0, rtol=0)

    def test_input_embeddings(self):
        for name in TYING:
            model, table = random_model(**TYING[name]), nn.Embedding(V, 32)
            assert model.get_input_embeddings() is model.model.encoder.embed_tokens
            model.set_input_embeddings(table)
            assert model.model.encoder.embed_tokens is table
            assert (model.model.decoder.embed_tokens is table) == (name == "three-way")


class TestSeparateVocabularies:
    def test_shapes(self):
        model = random_model(**SEPARATE)
        assert [table.shape[0] for table in embedding_tables(model)] == [31, V, V]
        assert sharing(model) == "ABB"

    def test_source_ids_that_the_target_does_not_have(self):
        model = random_model(**SEPARATE)
        logits = model(torch.tensor([[30, 29, EOS]]), decoder_input_ids=TARGET[:1]).logits
        assert logits.shape == (1, 4, V)
        assert model.generate(torch.tensor([[30, 29, EOS]]), max_length=8, num_beams=3).max() < V

    def test_saved_and_loaded(self, tmp_path):
        model = random_model(**SEPARATE)
        model.save_pretrained(tmp_path)
        loaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)
        expected = model(SOURCE, decoder_input_ids=TARGET).logits
        torch.testing.assert_close(loaded(SOURCE, decoder_input_ids=TARGET).logits, expected, atol=0, rtol=0)


class TestTraining:
    @pytest.mark.parametrize("name", ["dropout", "attention_dropout", "activation_dropout"])
    @pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
    def test_dropout_is_on_in_training_only(self, name, attn_implementation):
        model = random_model(**{name: 0.3})
        model.set_attn_implementation(attn_implementation)
        once, again = (model(SOURCE, labels=TARGET).loss for _ in range(2))
        assert once == again
        model.train()
        once, again = (model(SOURCE, labels=TARGET).loss for _ in range(2))
        assert once != again

    def test_every_parameter_gets_a_gradient(self):
        for norm_position in ("post", "pre"):
            model = random_model(norm_position=norm_position, position_embedding_type="learned").train()
            model(SOURCE, labels=TARGET).loss.backward()
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None, name

    def test_it_learns_to_copy(self):
        """Thirty sentences are learned by heart and translated without an error."""
        torch.manual_seed(0)
        config = VanillaTransformerConfig.preset("test", vocab_size=V, dropout=0.0, label_smoothing=0.0)
        model = VanillaTransformerForConditionalGeneration(config)
        ids = torch.randint(4, V, (30, 7))
        ids[:, -1] = EOS
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
        for _ in range(150):
            optimizer.zero_grad()
            model(ids, labels=ids).loss.backward()
            optimizer.step()
        output = model.eval().generate(ids, max_length=8, num_beams=2)
        assert (output[:, 1:] == ids).all()


class TestInitialisation:
    def test_table(self):
        """Every parameter has the value that the docstring of `_init_weights` promises."""
        torch.manual_seed(0)
        config = VanillaTransformerConfig(
            vocab_size=500,
            d_model=64,
            position_embedding_type="learned",
            norm_position="pre",
            tie_word_embeddings=False,
            share_encoder_decoder_embeddings=False,
        )
        model = VanillaTransformerForConditionalGeneration(config)
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                bound = (6 / sum(module.weight.shape)) ** 0.5
                assert 0.95 * bound < module.weight.abs().max() <= bound, name
                assert module.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
                assert module.bias is None or module.bias.eq(0).all()
            elif isinstance(module, nn.Embedding):
                assert module.weight.std().item() == pytest.approx(64**-0.5, rel=0.03), name
                assert module.weight.abs().max() > 3 * 64**-0.5
            elif isinstance(module, nn.LayerNorm):
                assert module.weight.eq(1).all()
                assert module.bias.eq(0).all()

    def test_weights_that_a_checkpoint_lacks_are_initialised(self, tmp_path):
        """A headless checkpoint with an untied head: the head is fresh, the rest is loaded."""
        model = random_model(VanillaTransformerModel, **TYING["none"])
        model.save_pretrained(tmp_path)
        loaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)
        for name, weight in model.state_dict().items():
            torch.testing.assert_close(loaded.model.state_dict()[name], weight, atol=0, rtol=0)
        assert loaded.lm_head.weight.abs().max() <= (6 / (V + 32)) ** 0.5


class TestNamesForTransformers:
    def test_only_safetensors_are_saved(self, tmp_path, tiny_model):
        tiny_model.save_pretrained(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "config.json",
            "generation_config.json",
            "model.safetensors",
        ]
        assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "vanilla_transformer"

    def test_tensor_parallel_plan_names_modules(self, tiny_model):
        names = [name for name, _ in tiny_model.model.named_modules()]
        plan = type(tiny_model.config).base_model_tp_plan  # older transformers add to that of the instance
        for pattern in plan:
            expression = re.escape(pattern).replace(r"\*", r"\d+")
            assert any(re.fullmatch(expression, name) for name in names), pattern
        linear = {
            re.sub(r"\.\d+\.", ".*.", name)
            for name, module in tiny_model.model.named_modules()
            if isinstance(module, nn.Linear)
        }
        assert set(plan) == linear
        assert set(tiny_model._tp_plan) >= {"lm_head"}

    def test_no_split_modules_exist(self, tiny_model):
        classes = {type(module).__name__ for module in tiny_model.modules()}
        assert set(tiny_model._no_split_modules) <= classes

    def test_the_trainer_passes_the_number_of_items(self, tiny_model):
        assert tiny_model.accepts_loss_kwargs
