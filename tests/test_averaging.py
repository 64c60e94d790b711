"""Averages of weights against the formula in numpy."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hf_vanilla_transformer.averaging import ExponentialMovingAverage, average_checkpoints
from hf_vanilla_transformer.errors import UserError


class TestCheckpoints:
    def folders(self, tmp_path, weights):
        for number, weight in enumerate(weights):
            (tmp_path / str(number)).mkdir()
            save_file({"w": weight, "b": weight[0].clone()}, tmp_path / str(number) / "model.safetensors")
        return [tmp_path / str(number) for number in range(len(weights))]

    def test_mean(self, tmp_path):
        weights = [torch.randn(3, 4) for _ in range(5)]
        average = average_checkpoints(self.folders(tmp_path, weights))
        expected = np.mean([weight.numpy().astype(np.float64) for weight in weights], axis=0)
        np.testing.assert_array_equal(average["w"], expected.astype(np.float32))
        np.testing.assert_array_equal(average["b"], expected[0].astype(np.float32))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_type_and_precision(self, tmp_path, dtype):
        """In half precision the sum would stall: a thousandth added to a thousand is lost there."""
        weights = [torch.full((2, 2), value, dtype=dtype) for value in (1000.0, 0.25, 0.25, 0.25)]
        average = average_checkpoints(self.folders(tmp_path, weights))["w"]
        assert average.dtype == dtype
        torch.testing.assert_close(average, torch.full((2, 2), 250.1875).to(dtype), atol=0, rtol=0)

    def test_one_checkpoint_is_itself(self, tmp_path):
        weight = torch.randn(3, 4)
        average = average_checkpoints([str(folder) for folder in self.folders(tmp_path, [weight])])
        torch.testing.assert_close(average["w"], weight, atol=0, rtol=0)

    def test_tied_weights_may_have_either_name(self, tmp_path):
        for name, number in (("source", 1.0), ("target", 3.0)):
            (tmp_path / name).mkdir()
            save_file({name: torch.full((2,), number)}, tmp_path / name / "model.safetensors")
        folders = [tmp_path / "source", tmp_path / "target"]
        average = average_checkpoints(folders, {"target": "source"})
        assert average.keys() == {"source"}
        torch.testing.assert_close(average["source"], torch.full((2,), 2.0))
        with pytest.raises(UserError, match="do not hold the same weights: source is in one of them only"):
            average_checkpoints(folders)


class TestExponentialMovingAverage:
    @pytest.fixture
    def model(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))
        model[1].weight.requires_grad_(False)
        return model

    def change(self, model):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))

    @pytest.mark.parametrize("decay", [0.3, 0.999])
    def test_formula(self, model, decay):
        average = ExponentialMovingAverage(model, decay)
        expected = {name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()}
        for step in range(1, 30):
            self.change(model)
            average.update(step)
            at = min(decay, (1 + step) / (10 + step))
            for name, parameter in model.named_parameters():
                expected[name] = at * expected[name] + (1 - at) * parameter.detach().numpy()
        assert sorted(average.shadow) == ["0.bias", "0.weight", "1.bias"]
        for name, shadow in average.shadow.items():
            np.testing.assert_allclose(shadow, expected[name], atol=1e-5)

    def test_the_model_is_not_touched_by_an_update(self, model):
        before = [parameter.clone() for parameter in model.parameters()]
        average = ExponentialMovingAverage(model, 0.5)
        average.update(1)
        for x, y in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(x, y, atol=0, rtol=0)

    def test_applied_for_a_while(self, model):
        average = ExponentialMovingAverage(model, 0.9)
        self.change(model)
        average.update(1)
        own = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        with pytest.raises(RuntimeError, match="in the middle"), average.applied():
            for name, parameter in average.parameters.items():
                torch.testing.assert_close(parameter.detach(), average.shadow[name])
                assert not torch.allclose(parameter, own[name])
            raise RuntimeError("in the middle")
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.detach(), own[name], atol=0, rtol=0)

    def test_copied_to_the_model(self, model):
        average = ExponentialMovingAverage(model, 0.9)
        self.change(model)
        average.update(1)
        average.copy_to_model()
        for name, parameter in average.parameters.items():
            torch.testing.assert_close(parameter.detach(), average.shadow[name])
            assert parameter.requires_grad

    def test_resumed(self, model, tmp_path):
        average = ExponentialMovingAverage(model, 0.9)
        self.change(model)
        average.update(1)
        average.save(tmp_path)
        self.change(model)
        resumed = ExponentialMovingAverage(model, 0.9)
        resumed.load(tmp_path)
        for either in (average, resumed):
            either.update(2)
        for name, shadow in average.shadow.items():
            torch.testing.assert_close(resumed.shadow[name], shadow, atol=0, rtol=0)
        assert set(load_file(tmp_path / "ema.safetensors")) == set(average.shadow)

    def test_half_precision_is_averaged_in_single(self, model):
        model.to(torch.bfloat16)
        average = ExponentialMovingAverage(model, 0.999)
        with torch.no_grad():
            model[0].bias.fill_(1.0)
        average.shadow["0.bias"].fill_(0.0)
        average.update(10**6)
        torch.testing.assert_close(average.shadow["0.bias"], torch.full((2,), 0.001), atol=1e-6, rtol=0)

    def test_tied_weights_count_once(self, tiny_model):
        average = ExponentialMovingAverage(tiny_model, 0.9)
        tied = [name for name in average.shadow if "embed_tokens" in name or "lm_head" in name]
        assert len(tied) == 1
