"""torchao: weights as 8-bit integers, near float32, saved and loaded."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import TorchAoConfig

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from tiny_models import LABELS, SOURCE, TARGET, random_model

quantization = pytest.importorskip("torchao.quantization", reason="needs the extra `torchao`")
pytestmark = pytest.mark.slow  # the default environment does without: torchao prints warnings at every import
load = VanillaTransformerForConditionalGeneration.from_pretrained
UNTIED = {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False, "lm_head_bias": True}


@torch.no_grad()
def logits_of(model):
    return model(SOURCE, decoder_input_ids=TARGET).logits


def quantized_from(folder):
    return load(folder, quantization_config=TorchAoConfig(quantization.Int8WeightOnlyConfig()))


@pytest.mark.parametrize("overrides", [{}, UNTIED], ids=["tied", "untied"])
class TestInt8WeightOnly:
    def test_near_float32(self, tmp_path, overrides):
        """Each weight is off by at most half a step of its row; the output projection is left alone."""
        model = random_model(**overrides)
        model.save_pretrained(tmp_path)
        quantized = quantized_from(tmp_path)
        ours = dict(quantized.named_modules())
        linear = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
        for name in linear:
            weight, original = ours[name].weight, model.get_submodule(name).weight
            assert type(weight).__name__ == "Int8Tensor", name
            half_step = original.abs().amax(dim=1, keepdim=True) / 127 / 2
            assert ((weight.dequantize() - original).abs() <= half_step * 1.1).all()
        assert torch.equal(quantized.lm_head.weight, model.lm_head.weight)
        error = (logits_of(quantized) - logits_of(model)).pow(2).mean().sqrt() / logits_of(model).std()
        assert 0 < error < 0.05
        loss, expected = (m(SOURCE, labels=LABELS).loss for m in (quantized, model))
        torch.testing.assert_close(loss, expected, atol=0.05, rtol=0)
        quantized.train()(SOURCE, labels=LABELS)

    def test_saved_and_loaded(self, tmp_path, overrides):
        random_model(**overrides).save_pretrained(tmp_path / "float32")
        quantized = quantized_from(tmp_path / "float32")
        quantized.save_pretrained(tmp_path / "int8")
        loaded = load(tmp_path / "int8")
        assert torch.equal(logits_of(loaded), logits_of(quantized))
        options = {"max_length": 10, "num_beams": 3}
        assert torch.equal(loaded.generate(SOURCE, **options), quantized.generate(SOURCE, **options))
        tensors = load_file(tmp_path / "int8" / "model.safetensors").values()
        matrices = [tensor for tensor in tensors if tensor.dtype == torch.int8 and tensor.shape[-1] > 1]
        assert len(matrices) == 2 * 6 + 2 * 10


def test_an_output_projection_that_is_quantised_too(tmp_path):
    """On request; the loss of training mode then goes through the module as well."""
    model = random_model(**UNTIED, label_smoothing=0.0)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    assert type(model.lm_head.weight).__name__ == "Int8Tensor"
    expected = model(SOURCE, labels=LABELS).loss
    torch.testing.assert_close(model.train()(SOURCE, labels=LABELS).loss, expected)
