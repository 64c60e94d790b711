"""The Hugging Face side: Auto classes, caches, generation, tied weights, outputs, initialisation."""

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
from transformers import GenerationConfig, GenerationMixin
from transformers.cache_utils import EncoderDecoderCache, StaticCache
from transformers.modeling_outputs import BaseModelOutput

from hf_vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
)
from hf_vanilla_transformer.layers import FeedForward
from hf_vanilla_transformer.modeling_vanilla_transformer import shift_right

V, PAD, BOS, EOS = 20, 1, 2, 3
SOURCE = torch.tensor([[5, 6, 7, 8, 9, EOS], [10, 11, EOS, PAD, PAD, PAD], [12, 13, 14, 15, EOS, PAD]])
TARGET = torch.tensor([[BOS, 4, 5, 6], [BOS, 7, 8, 9], [BOS, 10, 11, 12]])
TYING = {
    "three-way": {},
    "two-way": {"share_encoder_decoder_embeddings": False},
    "none": {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
}
SEPARATE = {"encoder_vocab_size": 31, "share_encoder_decoder_embeddings": False}


def random_model(head=VanillaTransformerForConditionalGeneration, seed=0, **overrides):
    """Evaluation mode, no dropout; norms and biases are random as well, and EOS is likely now and then."""
    torch.manual_seed(seed)
    config = VanillaTransformerConfig.preset("test", **{"vocab_size": V, "dropout": 0.0, **overrides})
    model = head(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def embedding_tables(model):
    return (model.model.encoder.embed_tokens.weight, model.model.decoder.embed_tokens.weight, model.lm_head.weight)


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

    @pytest.mark.parametrize("form", [lambda x: x, lambda x: x.to_tuple(), lambda x: BaseModelOutput(x[0])])
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

    def test_attention_of_beams(self):
        model = random_model()
        model.set_attn_implementation("eager")
        output = model.generate(
            SOURCE, max_new_tokens=3, num_beams=2, return_dict_in_generate=True, output_attentions=True
        )
        assert [tuple(x.shape) for x in output.cross_attentions[0]] == [(6, 4, 1, 6)] * 2


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

    def test_compiled_training_step(self):
        """One graph without breaks, and the same loss and gradients as without compilation."""
        torch.compiler.reset()
        model = random_model().train()
        expected = model(SOURCE, attention_mask=SOURCE.ne(PAD).long(), labels=TARGET).loss
        expected.backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        loss = compiled(SOURCE, attention_mask=SOURCE.ne(PAD).long(), labels=TARGET).loss
        loss.backward()
        torch.testing.assert_close(loss, expected)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, atol=1e-5, rtol=1e-4)


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


class StockModel(VanillaTransformerForConditionalGeneration):
    """Generation as transformers does it: the source is copied for each beam, both caches are reordered."""

    _expand_inputs_for_generation = GenerationMixin._expand_inputs_for_generation

    @staticmethod
    def _reorder_cache(past_key_values, beam_idx):
        past_key_values.reorder_cache(beam_idx)
        return past_key_values


class TestGeneration:
    @torch.no_grad()
    def greedy_by_hand(self, model, source, length):
        """Without any cache, one sentence at a time."""
        sentences = []
        for row in source:
            row, ids = row[row != PAD][None], [BOS]
            while len(ids) < length and ids[-1] != EOS:
                logits = model(row, decoder_input_ids=torch.tensor([ids]), use_cache=False).logits
                ids.append(logits[0, -1].argmax().item())
            sentences.append(ids + [PAD] * (length - len(ids)))
        longest = max(len(ids) - ids.count(PAD) for ids in sentences)
        return torch.tensor(sentences)[:, :longest]

    @pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
    @pytest.mark.parametrize(
        "overrides",
        [{}, {"norm_position": "pre"}, {"encoder_layers": 1, "decoder_layers": 3}, {"encoder_layers": 3}, SEPARATE],
        ids=["post", "pre", "deep decoder", "deep encoder", "separate vocabularies"],
    )
    def test_greedy(self, attn_implementation, overrides):
        model = random_model(**overrides)
        model.set_attn_implementation(attn_implementation)
        expected = self.greedy_by_hand(model, SOURCE, 12)
        for options in ({}, {"use_cache": False}, {"attention_mask": SOURCE.ne(PAD).long()}):
            output = model.generate(SOURCE, max_length=12, do_sample=False, **options)
            assert output.tolist() == expected.tolist()

    def test_static_cache(self):
        model = random_model()
        expected = self.greedy_by_hand(model, SOURCE, 12)
        output = model.generate(SOURCE, max_length=12, cache_implementation="static")
        assert output.tolist() == expected.tolist()

    def test_a_compiled_step_with_a_static_cache(self):
        """One graph, whatever the position, as `_can_compile_fullgraph` promises."""
        model = random_model()
        memory = model.get_encoder()(SOURCE)
        steps = torch.tensor([[2, 7, 8, 9]] * len(SOURCE))
        expected = model(encoder_outputs=memory, attention_mask=SOURCE.ne(PAD).long(), decoder_input_ids=steps).logits

        def cache():
            pair = (StaticCache(config=model.config, max_cache_len=size) for size in (12, SOURCE.shape[1]))
            return EncoderDecoderCache(*pair)

        torch._dynamo.reset()
        step = torch.compile(model, fullgraph=True, backend="eager")
        with torch.no_grad():
            past = cache()
            options = {"encoder_outputs": memory, "attention_mask": SOURCE.ne(PAD).long(), "past_key_values": past}
            model(decoder_input_ids=steps[:, :1], **options)  # the first step fills the cross-attention cache
            for position in range(1, 4):
                logits = step(decoder_input_ids=steps[:, position : position + 1], **options).logits
                assert torch.allclose(logits[:, 0], expected[:, position], atol=1e-5)

    @pytest.mark.parametrize("num_beams", [1, 4])
    def test_padding_of_the_source(self, num_beams):
        """On the right, on the left, or none; with the mask or without it."""
        model = random_model()
        options = {"max_length": 12, "num_beams": num_beams, "do_sample": False}
        left = torch.stack([row.roll(int(row.eq(PAD).sum())) for row in SOURCE])
        expected = model.generate(SOURCE, attention_mask=SOURCE.ne(PAD).long(), **options)
        assert model.generate(SOURCE, **options).tolist() == expected.tolist()
        assert model.generate(left, **options).tolist() == expected.tolist()
        alone = model.generate(SOURCE[1:2, :3], **options)[0]
        assert alone.tolist() == expected[1, : len(alone)].tolist()

    @pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
    @pytest.mark.parametrize(
        "options",
        [
            {"num_beams": 4},
            {"num_beams": 4, "use_cache": False},
            {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.6, "early_stopping": True},
            {"num_beams": 4, "cache_implementation": "static"},
            {"num_beams": 3, "do_sample": True, "num_return_sequences": 2},
            {"do_sample": True, "num_return_sequences": 4, "top_k": 0},
        ],
        ids=str,
    )
    def test_beams_that_share_their_source_equal_the_stock_path(self, options, attn_implementation):
        model = random_model(seed=3)
        stock = StockModel(model.config).eval()
        stock.load_state_dict(model.state_dict())
        outputs = []
        for variant in (model, stock):
            variant.set_attn_implementation(attn_implementation)
            torch.manual_seed(7)
            output = variant.generate(
                SOURCE, max_length=14, return_dict_in_generate=True, output_scores=True, **options
            )
            outputs.append(output)
        ours, expected = outputs
        assert ours.sequences.tolist() == expected.sequences.tolist()
        assert len({tuple(row) for row in ours.sequences.tolist()}) > 2
        for x, y in zip(ours.scores, expected.scores, strict=True):
            torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)
        if options.get("num_beams"):
            torch.testing.assert_close(ours.sequences_scores, expected.sequences_scores, atol=1e-5, rtol=1e-5)

    def test_one_memory_for_all_beams(self):
        """The cross-attention cache has a row for each sentence, not for each beam."""
        output = random_model().generate(SOURCE, max_length=5, num_beams=4, return_dict_in_generate=True)
        cache = output.past_key_values
        assert {layer.keys.shape[0] for layer in cache.cross_attention_cache.layers} == {3}
        assert {layer.keys.shape[0] for layer in cache.self_attention_cache.layers} == {12}

    @pytest.mark.parametrize("num_beams", [1, 4])
    def test_encoder_outputs_given_and_left_as_they_are(self, num_beams):
        model, mask = random_model(), SOURCE.ne(PAD).long()
        options = {"max_length": 10, "num_beams": num_beams, "do_sample": False}
        encoder_outputs = model.get_encoder()(SOURCE, attention_mask=mask)
        kept = copy.deepcopy(encoder_outputs.last_hidden_state.detach())
        expected = model.generate(SOURCE, **options)
        for _ in range(2):
            output = model.generate(encoder_outputs=encoder_outputs, attention_mask=mask, **options)
            assert output.tolist() == expected.tolist()
        torch.testing.assert_close(encoder_outputs.last_hidden_state, kept, atol=0, rtol=0)

    @pytest.mark.parametrize("options", [{"num_beams": 1}, {"num_beams": 3}], ids=str)
    @pytest.mark.parametrize("overrides", [{}, SEPARATE], ids=["joint", "separate"])
    def test_transition_scores(self, overrides, options):
        """The log-probability of each generated token, equal to log-softmax of the whole translation's logits."""
        model = random_model(**overrides)
        source = SOURCE.where(SOURCE < 4, SOURCE + 10) if overrides else SOURCE  # ids that the target does not have
        output = model.generate(
            source, max_length=10, do_sample=False, return_dict_in_generate=True, output_scores=True, **options
        )
        scores = model.compute_transition_scores(
            output.sequences, output.scores, getattr(output, "beam_indices", None), normalize_logits=True
        )
        with torch.no_grad():
            logits = model(source, decoder_input_ids=output.sequences, use_cache=False).logits
        chosen = output.sequences[:, 1:]
        expected = logits[:, :-1].log_softmax(-1).gather(2, chosen[..., None])[..., 0]
        generated = chosen.ne(PAD)
        torch.testing.assert_close(scores[generated], expected[generated], atol=1e-4, rtol=1e-4)

    def test_a_misspelt_option_is_an_error(self):
        with pytest.raises(ValueError, match="num_beam"):
            random_model().generate(SOURCE, num_beam=3)

    def test_generation_config_is_complete(self, tmp_path):
        model = random_model()
        model.generation_config = GenerationConfig(
            pad_token_id=1, bos_token_id=2, eos_token_id=3, decoder_start_token_id=2, max_length=9, num_beams=2
        )
        model.save_pretrained(tmp_path)
        loaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)
        expected = model.generate(SOURCE, max_length=9, num_beams=2)
        assert loaded.generate(SOURCE).tolist() == expected.tolist()


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

        @pytest.mark.parametrize("size", [V + 7, V - 4])
        def test_resized(self, tmp_path, name, pattern, size):
            model = random_model(**TYING[name])
            before = model(SOURCE, decoder_input_ids=TARGET).logits
            model.resize_token_embeddings(size)
            assert sharing(model) == pattern
            assert {table.shape for table in embedding_tables(model)} == {(size, 32)}
            assert model.config.vocab_size == model.lm_head.out_features == size
            after = model(SOURCE, decoder_input_ids=TARGET).logits
            torch.testing.assert_close(after[..., : V - 4], before[..., : V - 4])
            model.save_pretrained(tmp_path)
            loaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)
            torch.testing.assert_close(loaded(SOURCE, decoder_input_ids=TARGET).logits, after, atol=0, rtol=0)

        def test_headless(self, name, pattern):
            model = random_model(VanillaTransformerModel, **TYING[name])
            shared = model.encoder.embed_tokens.weight is model.decoder.embed_tokens.weight
            assert shared == (pattern == "AAA")

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

    def test_resizing_is_ambiguous(self):
        with pytest.raises(ValueError, match="resize_token_embeddings needs a joint vocabulary: it cannot tell which"):
            random_model(**SEPARATE).resize_token_embeddings(40)


class TestTraining:
    @pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_activation_checkpointing(self, use_reentrant):
        """Equal gradients, dropout included, from layers that run twice."""
        model = random_model(dropout=0.2, attention_dropout=0.2, activation_dropout=0.2).train()
        calls, gradients = [], []
        for module in model.modules():
            if isinstance(module, FeedForward):
                module.register_forward_hook(lambda *_: calls.append(1))
        for checkpointing in (False, True):
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
                model.enable_input_require_grads()
            model.zero_grad()
            torch.manual_seed(5)
            model(SOURCE, labels=TARGET).loss.backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
        assert len(calls) == 4 + 8
        for x, y in zip(*gradients, strict=True):
            torch.testing.assert_close(x, y)

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
        plan = tiny_model.config.base_model_tp_plan
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
