"""Every attention backend against `eager`: padding on both sides, training, caches, generation, rows without keys.

Two backends do not run on a CPU, so their last step is replaced: FlashAttention's kernels by plain torch that checks
its arguments (all of ours and of transformers around them is real), flex_attention by its own uncompiled form. The
tests marked `gpu` and `slow` run the real ones.
"""

import copy
import importlib.util
import inspect
import json
import re
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention as torch_flex
from transformers import modeling_flash_attention_utils as flash_utils
from transformers.cache_utils import EncoderDecoderCache, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from hf_vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
    cpu_attention,
)
from hf_vanilla_transformer import modeling_vanilla_transformer as modeling
from hf_vanilla_transformer.attention import MultiHeadAttention, scaled_dot_product_attention
from hf_vanilla_transformer.attention_backends import Packing, sdpa_on_cpu
from hf_vanilla_transformer.errors import UserError

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask"),
]

V, PAD, BOS, EOS = 20, 1, 2, 3
BACKENDS = ["sdpa", "flex_attention", "flash_attention_2", "flash_attention_3"]
RIGHT = torch.tensor([[5, 6, 7, 8, 9, EOS], [10, 11, EOS, PAD, PAD, PAD], [12, 13, 14, 15, EOS, PAD]])
SOURCES = {
    "right": RIGHT,
    "left": torch.stack([row.roll(int(row.eq(PAD).sum())) for row in RIGHT]),
    "none": RIGHT[:1].repeat(3, 1),
}
TARGET = torch.tensor([[BOS, 4, 5, 6], [BOS, 7, 8, 9], [BOS, 10, 11, 12]])
LABELS = torch.tensor([[4, 5, 6, EOS], [7, EOS, -100, -100], [10, 11, EOS, -100]])


def attend_one(query, key, value, scale, causal, dropout):
    """One sentence, (n, H, K) and (m, H, K). FlashAttention aligns a causal mask at the last query and the last key."""
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if causal:
        earlier_keys = len(key) - len(query)
        for position in range(len(query)):
            scores[:, position, position + earlier_keys + 1 :] = -torch.inf
    weights = nn.functional.dropout(scores.softmax(dim=-1), dropout)
    return torch.einsum("hqk,khd->qhd", weights, value)


class Kernels:
    """FlashAttention's two functions in plain torch, with its demands; `calls` says what they were asked for."""

    def __init__(self):
        self.calls = []

    def dense(self, query, key, value, scale, causal, dropout):
        """(B, T, H, K)."""
        assert query.dtype == key.dtype == value.dtype in (torch.float16, torch.bfloat16, torch.float64)
        assert len(query) == len(key) == len(value)
        self.calls.append({"packed": False, "dropout": dropout, "causal": causal, "dtype": query.dtype})
        rows = zip(query, key, value, strict=True)
        return torch.stack([attend_one(*row, scale, causal, dropout) for row in rows])

    def packed(self, query, key, value, starts, longest, scale, causal, dropout):
        """(N, H, K), all sentences end to end."""
        assert query.dtype == key.dtype == value.dtype in (torch.float16, torch.bfloat16, torch.float64)
        lengths = []
        for states, ends, most in zip((query, key), starts, longest, strict=True):
            assert ends.dtype == torch.int32
            assert ends.is_contiguous()
            assert ends[0] == 0
            assert ends[-1] == len(states)
            assert type(most) is int
            assert most == ends.diff().max()
            assert ends.diff().min() >= 0
            lengths.append(ends.diff().tolist())
        assert all(keys > 0 for queries, keys in zip(*lengths, strict=True) if queries), "queries without keys"
        self.calls.append(
            {"packed": True, "dropout": dropout, "causal": causal, "dtype": query.dtype, "lengths": tuple(lengths)}
        )
        sentences = zip(query.split(lengths[0]), key.split(lengths[1]), value.split(lengths[1]), strict=True)
        return torch.cat([attend_one(*sentence, scale, causal, dropout) for sentence in sentences])

    def functions(self, version):
        """In the signatures of flash_attn 2, or 3 (which knows no dropout)."""

        def dense_2(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, deterministic=False):
            return self.dense(q, k, v, softmax_scale, causal, dropout_p)

        def packed_2(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            dropout_p=0.0, softmax_scale=None, causal=False, deterministic=False,
        ):  # fmt: skip
            starts, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
            return self.packed(q, k, v, starts, longest, softmax_scale, causal, dropout_p)

        def dense_3(q, k, v, softmax_scale=None, causal=False, deterministic=False):
            return self.dense(q, k, v, softmax_scale, causal, 0.0), None

        def packed_3(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            softmax_scale=None, causal=False, deterministic=False,
        ):  # fmt: skip
            starts, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
            return self.packed(q, k, v, starts, longest, softmax_scale, causal, 0.0), None

        return (dense_2, packed_2) if version == 2 else (dense_3, packed_3)


def put_in_place(kernels, version, monkeypatch):
    """Where transformers would import flash_attn; everything else of its FlashAttention path stays."""
    functions = (*kernels.functions(version), None, flash_utils._pad_input, flash_utils._unpad_input)
    monkeypatch.setattr(flash_utils, "_lazy_imports", lambda *args, **kwargs: functions)
    monkeypatch.setattr(flash_utils, "_loaded_implementation", None)
    monkeypatch.setattr(
        modeling.VanillaTransformerPreTrainedModel, "_flash_attn_can_dispatch", lambda *args, **kwargs: True
    )


@pytest.fixture
def kernels(request, monkeypatch):
    """FlashAttention 2 on a CPU, or the version that the test names."""
    kernels = Kernels()
    put_in_place(kernels, getattr(request, "param", 2), monkeypatch)
    return kernels


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    """The name of a backend that can be used on this CPU as long as the test runs."""
    name = request.param
    if name == "flex_attention":
        # Only the compiled form lacks a backward on CPUs; the uncompiled one has it, but the same check forbids it.
        monkeypatch.setattr(torch_flex, "_validate_device", lambda *args: None)
        with torch.compiler.set_stance("force_eager"):
            yield name
        return
    if name.startswith("flash"):
        put_in_place(Kernels(), int(name[-1]), monkeypatch)
    yield name


def random_model(attn_implementation="eager", **overrides):
    """64-bit floats, which show the smallest difference; evaluation mode, no dropout, no parameter at its default."""
    torch.manual_seed(3)  # with which every sentence gets another translation, and some end
    overrides = {"vocab_size": V, "dropout": 0.0, **overrides}
    model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig.preset("test", **overrides))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.set_attn_implementation(attn_implementation)
    return model.double().eval()


def loss_and_gradients(model, **inputs):
    """In training mode; a dictionary by the parameters' names, with the loss as one more."""
    model.train().zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: parameter.grad for name, parameter in model.named_parameters()}


def flat(results):
    return torch.cat([tensor.flatten().double() for tensor in results.values()])


def relative_distance(ours, expected):
    return (ours - expected).norm() / expected.norm()


class TestSameAsEager:
    @pytest.mark.parametrize("side", SOURCES)
    def test_training(self, backend, side):
        inputs = {"input_ids": SOURCES[side], "labels": LABELS}
        ours, expected = (loss_and_gradients(random_model(name), **inputs) for name in (backend, "eager"))
        assert all(gradient.ne(0).any() for gradient in expected.values())
        torch.testing.assert_close(ours, expected)

    @pytest.mark.parametrize("form", ["right", "left", "holes"])
    def test_training_with_padding_in_the_target(self, backend, form):
        """Whatever the padding, real tokens see the real tokens up to themselves."""
        mask = torch.tensor({"right": [1, 1, 1, 0], "left": [0, 1, 1, 1], "holes": [1, 0, 1, 1]}[form]).repeat(3, 1)
        mask[0] = 1
        inputs = {
            "input_ids": SOURCES["right"],
            "decoder_input_ids": TARGET,
            "decoder_attention_mask": mask,
            "labels": LABELS.masked_fill(mask == 0, -100),
        }
        ours, expected = (loss_and_gradients(random_model(name), **inputs) for name in (backend, "eager"))
        torch.testing.assert_close(ours, expected)

    @pytest.mark.parametrize("side", ["right", "left"])
    @pytest.mark.parametrize("steps", [[1, 1, 1, 1], [3, 1], [1, 3], [2, 2]], ids=str)
    @torch.no_grad()
    def test_cache(self, backend, side, steps):
        """Steps of any length, with padding in source and target, equal one uncached pass."""
        source, mask = SOURCES[side], SOURCES[side].ne(PAD).long()
        target_mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 1, 1]])
        inputs = {"attention_mask": mask, "decoder_attention_mask": target_mask, "decoder_input_ids": TARGET}
        expected = random_model()(source, use_cache=False, **inputs).logits
        model, logits, cache, end = random_model(backend), [], None, 0
        memory = model.get_encoder()(source, attention_mask=mask)
        for ids in TARGET.split(steps, dim=1):
            end += ids.shape[1]
            output = model(
                encoder_outputs=memory,
                attention_mask=mask,
                decoder_input_ids=ids,
                decoder_attention_mask=target_mask[:, :end],
                past_key_values=cache,
                use_cache=True,
            )
            logits.append(output.logits)
            cache = output.past_key_values
        real = target_mask.bool()
        torch.testing.assert_close(torch.cat(logits, dim=1)[real], expected[real])

    @pytest.mark.parametrize("side", ["right", "left"])
    @pytest.mark.parametrize(
        "options",
        [
            {"num_beams": 1},
            {"num_beams": 1, "use_cache": False},
            {"num_beams": 4},
            {"num_beams": 3, "num_return_sequences": 3, "use_cache": False},
        ],
        ids=str,
    )
    def test_generation(self, backend, side, options):
        source, outputs = SOURCES[side], []
        for name in (backend, "eager"):
            output = random_model(name).generate(
                source, max_length=9, do_sample=False, return_dict_in_generate=True, output_logits=True, **options
            )
            outputs.append(output)
        ours, expected = outputs
        assert ours.sequences.tolist() == expected.sequences.tolist()
        assert len({tuple(row) for row in ours.sequences.tolist()}) > 1
        torch.testing.assert_close(ours.logits, expected.logits, atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("num_beams", [1, 3])
    def test_static_cache(self, backend, num_beams):
        options = {"max_length": 9, "num_beams": num_beams, "cache_implementation": "static"}
        expected = random_model().generate(RIGHT, **options)
        if backend == "flex_attention":  # its mask would be computed after the cache has counted on
            message = "'flex_attention' cannot use a static cache: leave out cache_implementation or choose attn_impl"
            with pytest.raises(UserError, match=message):
                random_model(backend).generate(RIGHT, **options)
        else:
            assert random_model(backend).generate(RIGHT, **options).tolist() == expected.tolist()

    def test_a_target_prefix_with_padding_on_the_left(self, backend):
        prefix = torch.tensor([[BOS, 4, 5], [PAD, BOS, 6], [PAD, PAD, BOS]])
        options = {"decoder_input_ids": prefix, "decoder_attention_mask": prefix.ne(PAD).long(), "max_new_tokens": 4}
        for num_beams in (1, 3):
            ours, expected = (
                random_model(name).generate(RIGHT, num_beams=num_beams, **options) for name in (backend, "eager")
            )
            assert ours.tolist() == expected.tolist()

    @pytest.mark.parametrize("empty", [[0], [0, 1, 2]], ids=["one sentence", "all sentences"])
    def test_a_source_of_padding_only(self, backend, empty):
        """Its attention is zero: the same outputs and gradients, none of them infinite."""
        source = RIGHT.clone()
        source[empty] = PAD
        results = []
        for name in (backend, "eager"):
            model = random_model(name)
            contexts = []
            projection = model.model.decoder.stack.layers[0].encoder_attn.out_proj
            projection.register_forward_pre_hook(lambda _, args, contexts=contexts: contexts.append(args[0].detach()))
            results.append(loss_and_gradients(model, input_ids=source, labels=LABELS))
            assert contexts[0][empty].eq(0).all()
            assert contexts[0].eq(0).all() == (len(empty) == 3)
        for name, expected in results[1].items():
            ours = results[0][name]
            if ours is None:  # a backend that was never called
                ours = torch.zeros_like(expected)
            assert expected.isfinite().all()
            torch.testing.assert_close(ours, expected, msg=name)

    def test_a_target_that_starts_with_padding(self, backend):
        """The first query sees no key at all; nothing of it reaches the real tokens."""
        mask = torch.tensor([[0, 0, 1, 1]] * 3)
        inputs = {"decoder_input_ids": TARGET, "decoder_attention_mask": mask}
        ours, expected = (random_model(name)(RIGHT, **inputs).logits for name in (backend, "eager"))
        torch.testing.assert_close(ours[:, 2:], expected[:, 2:])
        assert ours.isfinite().all()

    @pytest.mark.parametrize("use_reentrant", [False, True])
    @pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
    def test_activation_checkpointing(self, backend, use_reentrant):
        inputs, model = {"input_ids": RIGHT, "labels": LABELS}, random_model(backend)
        expected = loss_and_gradients(model, **inputs)
        expected = {name: value.clone() for name, value in expected.items()}
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.enable_input_require_grads()
        torch.testing.assert_close(loss_and_gradients(model, **inputs), expected)


class TestSwitching:
    def test_after_loading(self, backend, tmp_path):
        random_model().save_pretrained(tmp_path)
        model = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)
        expected = model(RIGHT, decoder_input_ids=TARGET).logits
        for name in (backend, "eager", backend):
            model.set_attn_implementation(name)
            assert {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")} == {name}
            torch.testing.assert_close(model(RIGHT, decoder_input_ids=TARGET).logits, expected)

    def test_while_loading(self, backend, tmp_path):
        expected = random_model()
        expected.save_pretrained(tmp_path)
        load = VanillaTransformerForConditionalGeneration.from_pretrained
        model = load(tmp_path, attn_implementation=backend)
        assert model.config._attn_implementation == backend
        inputs = {"input_ids": RIGHT, "decoder_input_ids": TARGET}
        torch.testing.assert_close(model(**inputs).logits, expected(**inputs).logits)

    def test_transformers_sees_that_the_backend_can_be_switched(self):
        """It reads the source text of the model's module."""
        for cls in (VanillaTransformerForConditionalGeneration, VanillaTransformerModel):
            assert cls._can_set_attn_implementation()
        assert "ALL_ATTENTION_FUNCTIONS.get_interface(" in inspect.getsource(modeling)

    @pytest.mark.skipif(is_flash_attn_2_available(), reason="FlashAttention is there")
    def test_a_backend_that_is_not_installed(self):
        model = random_model()
        with pytest.raises(ImportError, match="FlashAttention2 has been toggled on, but it cannot be used"):
            model.set_attn_implementation("flash_attention_2")
        assert model.config._attn_implementation == "eager"


def test_bfloat16_on_the_cpu_is_computed_in_float32():
    """Of the same rounded inputs, the result is the rounded one of float32, and so are the gradients."""
    generator = torch.Generator().manual_seed(0)
    wide = [torch.randn(2, 4, 6, 8, generator=generator).bfloat16().float().requires_grad_() for _ in range(3)]
    half = [states.detach().bfloat16().requires_grad_() for states in wide]
    attention, mask = random_model("sdpa").model.decoder.stack.layers[0].self_attn, torch.ones(6, 6).tril().bool()
    attend = random_model("sdpa")._attention_function()
    results = [attend(attention, *states, mask[None, None], scaling=0.3)[0] for states in (wide, half)]
    assert results[1].dtype == torch.bfloat16
    assert torch.equal(results[0].bfloat16(), results[1])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attend(attention, *half, mask[None, None], scaling=0.3)[0], results[1])
    for result in results:
        result.float().square().sum().backward()
    for x, y in zip(wide, half, strict=True):
        torch.testing.assert_close(x.grad, y.grad.float(), atol=0.03, rtol=0.03)


@pytest.mark.parametrize("amx", [True, False])
def test_one_query_in_bfloat16_on_the_cpu(amx, monkeypatch):
    monkeypatch.setattr(cpu_attention, "HAS_AMX", amx)
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(2, 4, length, 8, generator=generator).bfloat16() for length in (1, 6, 6)]
    mask = torch.arange(6).lt(torch.tensor([[6], [2]]))[:, None, None]
    computed_in = []

    def kernel(module, query, *others, **settings):
        computed_in.append(query.dtype)
        return sdpa_attention_forward(module, query, *others, **settings)

    found, _ = sdpa_on_cpu(kernel, torch.nn.Module(), *states, mask, 0.3)
    expected, _ = scaled_dot_product_attention(None, *(x.double() for x in states), mask, 0.3)
    assert computed_in == [torch.bfloat16 if amx else torch.float32]
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, atol=0.02, rtol=0.02)


class TestWhatABackendCannotDo:
    def test_attention_weights(self, backend):
        model = random_model(backend)
        message = f"output_attentions=True needs the weights, which '{backend}' does not make: call model.set_attn_impl"
        with pytest.warns(UserWarning, match=re.escape(message)):
            output = model(RIGHT, decoder_input_ids=TARGET, output_attentions=True)
        assert not any(weights is not None for weights in output.cross_attentions)
        with pytest.warns(UserWarning, match=re.escape(message)):
            model.generate(RIGHT, max_length=4, output_attentions=True, return_dict_in_generate=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            model(RIGHT, decoder_input_ids=TARGET, output_attentions=False)

    def test_attention_weights_by_the_configuration(self):
        """transformers refuses the setting with its own words, but not the later switch."""
        model = random_model("sdpa")
        with pytest.raises(ValueError, match="`output_attentions` attribute is not supported"):
            model.config.output_attentions = True
        model.set_attn_implementation("eager")
        model.config.output_attentions = True
        assert len(model(RIGHT, decoder_input_ids=TARGET).cross_attentions) == 2
        model.set_attn_implementation("sdpa")
        with pytest.warns(UserWarning, match="output_attentions=True needs the weights, which 'sdpa' does not make"):
            model(RIGHT, decoder_input_ids=TARGET)

    def test_attention_dropout(self, backend):
        model = random_model(backend, attention_dropout=0.25).train()
        inputs = {"input_ids": RIGHT, "labels": LABELS}
        if backend in ("sdpa", "flash_attention_2"):
            assert model(**inputs).loss != model(**inputs).loss
        else:
            message = (
                f"'{backend}' cannot drop attention weights (attention_dropout=0.25): train with attention_dropout=0 "
                "or attn_implementation='sdpa'"
            )
            with pytest.raises(UserError, match=re.escape(message)):
                model(**inputs)
        assert model.eval()(**inputs).loss == model(**inputs).loss

    def test_flex_attention_with_a_static_cache_outside_generate(self):
        model = random_model("flex_attention")
        memory = BaseModelOutput(torch.zeros(3, 6, 32, dtype=torch.float64))
        cache = EncoderDecoderCache(*(StaticCache(config=model.config, max_cache_len=size) for size in (8, 6)))
        with pytest.raises(UserError, match="'flex_attention' cannot use a static cache"):
            model(encoder_outputs=memory, decoder_input_ids=TARGET, past_key_values=cache)


class TestFlashAttention:
    """What the kernels get to see."""

    def test_padding_of_the_source_is_cut_from_the_keys_and_not_from_the_decoder(self, kernels):
        random_model("flash_attention_2")(RIGHT, decoder_input_ids=TARGET)
        encoder, self_attention, cross_attention = kernels.calls[:2], kernels.calls[2::2], kernels.calls[3::2]
        assert [call["lengths"] for call in encoder] == [([6, 3, 5], [6, 3, 5])] * 2
        assert [call["packed"] for call in self_attention] == [False] * 2
        assert [call["lengths"] for call in cross_attention] == [([4, 4, 4], [6, 3, 5])] * 2
        assert [call["causal"] for call in kernels.calls] == [False, False, True, False, True, False]

    def test_beams_are_queries_of_one_sentence(self, kernels):
        random_model("flash_attention_2").generate(RIGHT, max_length=4, num_beams=5, min_length=4)
        cross = [call["lengths"] for call in kernels.calls[2:] if call["packed"]]
        assert cross == [([5, 5, 5], [6, 3, 5])] * len(cross)
        assert len(cross) == 2 * 3

    def test_without_padding_nothing_is_packed(self, kernels):
        random_model("flash_attention_2")(SOURCES["none"], decoder_input_ids=TARGET)
        assert [call["packed"] for call in kernels.calls] == [False] * 6

    def test_padding_is_found_once_and_not_in_every_layer(self, kernels, monkeypatch):
        made, of = [], Packing.of
        monkeypatch.setattr(Packing, "of", lambda *masks: made.append(masks) or of(*masks))
        random_model("flash_attention_2", encoder_layers=3, decoder_layers=3)(RIGHT, decoder_input_ids=TARGET)
        assert len(made) == 2

    def test_dropout_reaches_the_kernel_in_training_only(self, kernels):
        model = random_model("flash_attention_2", attention_dropout=0.25)
        for training in (True, False):
            kernels.calls.clear()
            model.train(training)(RIGHT, labels=LABELS)
            assert [call["dropout"] for call in kernels.calls] == [0.25 if training else 0.0] * 6

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_a_model_in_16_bits(self, kernels, dtype):
        inputs = {"input_ids": RIGHT, "decoder_input_ids": TARGET}
        expected = random_model()(**inputs).logits.softmax(dim=-1)
        logits = random_model("flash_attention_2").to(dtype)(**inputs).logits
        assert logits.dtype == dtype
        assert {call["dtype"] for call in kernels.calls} == {dtype}
        torch.testing.assert_close(logits.double().softmax(dim=-1), expected, atol=0.05, rtol=0.1)

    def test_mixed_precision(self, kernels):
        """Weights of 32 bits under autocast, which is what `--bf16 true` does."""
        model = random_model("flash_attention_2").float()
        expected = loss_and_gradients(random_model(), input_ids=RIGHT, labels=LABELS)
        with torch.autocast("cpu", torch.bfloat16):
            ours = loss_and_gradients(model, input_ids=RIGHT, labels=LABELS)
        assert {call["dtype"] for call in kernels.calls} == {torch.bfloat16}
        assert abs(ours["loss"] - expected["loss"]) < 0.05
        assert relative_distance(flat(ours), flat(expected)) < 0.1

    def test_32_bits(self, kernels):
        message = (
            "FlashAttention computes in 16 bits, the model has 32: load it with dtype='bfloat16', train with --bf16"
        )
        with pytest.raises(UserError, match=message):
            random_model("flash_attention_2").float()(RIGHT, decoder_input_ids=TARGET)

    def test_a_mask_for_each_query(self, kernels):
        mask = torch.ones(3, 1, 6, 6, dtype=torch.bool)
        with pytest.raises(
            ValueError, match=r"FlashAttention takes masks of the shape \(B, S\) only: choose attn_impl"
        ):
            random_model("flash_attention_2").get_encoder()(RIGHT, attention_mask=mask)


@pytest.fixture
def script(monkeypatch):
    """scripts/attention_backends.py as a module."""
    path = Path(__file__).resolve().parents[1] / "scripts" / "attention_backends.py"
    specification = importlib.util.spec_from_file_location("attention_backends_script", path)
    module = importlib.util.module_from_spec(specification)
    monkeypatch.syspath_prepend(path.parent)
    specification.loader.exec_module(module)
    return module


def test_what_was_measured_is_close(script):
    rows = json.loads(script.RESULT.read_text(encoding="utf-8"))["rows"]
    assert [(row["backend"], row["dtype"]) for row in rows] == [
        (name, str(dtype).removeprefix("torch.")) for name, dtype in script.VARIANTS
    ]
    for row in rows:
        assert script.kept(row), row
    for worse in (1.0, "other words"):
        assert not script.kept({"dtype": "bfloat16", "differences": {"beam, left": worse}})


@pytest.mark.skipif(is_flash_attn_2_available(), reason="FlashAttention is there")
def test_the_table_of_backends(script, monkeypatch, tmp_path, capsys):
    """Of one that runs here and one that does not."""
    monkeypatch.setattr(script, "VARIANTS", [("sdpa", torch.float32), ("flash_attention_2", torch.bfloat16)])
    monkeypatch.setattr(script, "RESULT", tmp_path / "result.json")
    monkeypatch.setattr(sys, "argv", ["attention_backends.py"])
    monkeypatch.setattr(script, "trained_model", partial(script.trained_model, steps=2))
    assert script.main() == 0
    head, _, sdpa, flash, _, note = capsys.readouterr().out.strip().split("\n")
    assert sdpa.startswith("| `sdpa`, float32 | ")
    assert flash == "| `flash_attention_2`, bfloat16 | " + " | ".join(["not run (1)"] * 9) + " |"
    assert note.startswith("1. FlashAttention2 has been toggled on, but it cannot be used")
    record = json.loads((tmp_path / "result.json").read_text())
    differences = record["rows"][0]["differences"]
    assert " | ".join(differences) in head
    assert all(0 <= value < 1e-4 for value in differences.values())
    assert record["device"] in ("cpu", "cuda")
    assert record["versions"]["torch"]


@pytest.mark.slow
class TestCompiledFlexAttention:
    """The real thing on a CPU, which has no backward there. Needs a C++ compiler."""

    @torch.no_grad()
    def test_forward_and_generation(self):
        expected, ours = random_model().float(), random_model("flex_attention").float()
        for source in (SOURCES["right"], SOURCES["left"]):
            inputs = {"input_ids": source, "decoder_input_ids": TARGET}
            torch.testing.assert_close(ours(**inputs).logits, expected(**inputs).logits, atol=1e-5, rtol=1e-4)
            for num_beams in (1, 3):
                options = {"max_length": 6, "num_beams": num_beams}
                assert ours.generate(source, **options).tolist() == expected.generate(source, **options).tolist()

    def test_training(self):
        """A message of torch; when it is gone, the table of backends can say yes."""
        with pytest.raises(NotImplementedError, match="FlexAttention does not support backward on CPU"):
            random_model("flex_attention").float()(RIGHT, labels=LABELS)


DEVICE = "cuda"
LIMITS = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
FLASH = {"flash_attention_2": is_flash_attn_2_available, "flash_attention_3": is_flash_attn_3_available}
REAL = [
    pytest.param(
        name,
        dtype,
        id=f"{name}-{str(dtype).removeprefix('torch.')}",
        marks=pytest.mark.skipif(name in FLASH and not FLASH[name](), reason=f"{name} is not installed"),
    )
    for name in ("eager", *BACKENDS)
    for dtype in LIMITS
    if not (name in FLASH and dtype == torch.float32)
]


def sentences(side):
    """Sixteen sentences of 1 to 11 words; the source padded on this side, the target on the right."""
    generator = torch.Generator().manual_seed(1)
    source, labels = torch.full((16, 12), PAD), torch.full((16, 12), -100)
    for row, length in enumerate(torch.randint(1, 12, (16,), generator=generator).tolist()):
        words = torch.cat([torch.randint(4, V, (length,), generator=generator), torch.tensor([EOS])])
        source[row, : len(words)] = labels[row, : len(words)] = words
        if side == "left":
            source[row] = source[row].roll(12 - len(words))
    return source.to(DEVICE), labels.to(DEVICE)


@pytest.fixture(scope="module")
def teacher():
    """A model that has learned to copy, so that half the bits do not change what it says."""
    torch.manual_seed(0)
    config = VanillaTransformerConfig.preset(
        "test", vocab_size=V, d_model=128, dropout=0.0, label_smoothing=0.0, attn_implementation="eager"
    )
    model = VanillaTransformerForConditionalGeneration(config).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98))
    source, labels = sentences("right")
    for _ in range(200):
        optimizer.zero_grad()
        model(source, labels=labels).loss.backward()
        optimizer.step()
    return model.eval()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("name", "dtype"), REAL)
class TestOnTheGPU:
    """Nothing replaced, against `eager` in 32 bits on the same device."""

    def student(self, teacher, name, dtype):
        model = VanillaTransformerForConditionalGeneration(copy.deepcopy(teacher.config)).to(DEVICE)
        model.load_state_dict(teacher.state_dict())
        model.to(dtype).set_attn_implementation(name)
        return model.eval()

    @pytest.mark.parametrize("side", ["right", "left"])
    def test_training(self, teacher, name, dtype, side):
        source, labels = sentences(side)
        wrong = torch.where(labels >= 4, (labels - 4 + 7) % (V - 4) + 4, labels)  # or there is nothing to learn
        expected = loss_and_gradients(teacher, input_ids=source, labels=wrong)
        ours = loss_and_gradients(self.student(teacher, name, dtype), input_ids=source, labels=wrong)
        assert relative_distance(flat(ours), flat(expected)) < LIMITS[dtype]

    @pytest.mark.parametrize("side", ["right", "left"])
    @pytest.mark.parametrize("num_beams", [1, 4])
    def test_generation(self, teacher, name, dtype, side, num_beams):
        source, labels = sentences(side)
        output = self.student(teacher, name, dtype).generate(source, max_length=13, num_beams=num_beams)
        expected = labels.masked_fill(labels == -100, PAD)[:, : output.shape[1] - 1]
        assert output[:, 1:].tolist() == expected.tolist()

    def test_static_cache(self, teacher, name, dtype):
        source, labels = sentences("right")
        if name == "flex_attention":
            pytest.skip("refused, as on a CPU")
        model = self.student(teacher, name, dtype)
        output = model.generate(source, max_length=13, cache_implementation="static")
        expected = labels.masked_fill(labels == -100, PAD)[:, : output.shape[1] - 1]
        assert output[:, 1:].tolist() == expected.tolist()

    def test_padding_only(self, teacher, name, dtype):
        """A source and the begin of a target without a single key: zeros, and finite gradients."""
        source, labels = sentences("right")
        source[3] = PAD
        mask = torch.ones_like(labels)
        mask[:, 0] = 0
        contexts, model = [], self.student(teacher, name, dtype)
        for layer in model.model.decoder.stack.layers:
            for attention, rows in ((layer.encoder_attn, (3,)), (layer.self_attn, (slice(None), 0))):
                attention.out_proj.register_forward_pre_hook(
                    lambda _, args, rows=rows: contexts.append(args[0][rows].detach())
                )
        decoder_input_ids = model.prepare_decoder_input_ids_from_labels(labels)
        results = loss_and_gradients(
            model, input_ids=source, labels=labels, decoder_input_ids=decoder_input_ids, decoder_attention_mask=mask
        )
        assert len(contexts) == 4
        assert all(context.eq(0).all() for context in contexts)
        assert all(result.isfinite().all() for result in results.values())

    def test_dropout_of_attention_weights(self, teacher, name, dtype):
        source, labels = sentences("right")
        model = self.student(teacher, name, dtype).train()
        for module in model.modules():
            if isinstance(module, MultiHeadAttention):
                module.dropout = 0.5
        model.config.attention_dropout = 0.5
        if name in ("flex_attention", "flash_attention_3"):
            with pytest.raises(UserError, match="cannot drop attention weights"):
                model(source, labels=labels)
        else:
            assert model(source, labels=labels).loss != model(source, labels=labels).loss
