"""The chunked loss against `torch.nn.functional.cross_entropy`: value and both gradients."""

import pytest
import torch
from torch import nn

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration, loss
from hf_vanilla_transformer.loss import IGNORED, label_smoothed_cross_entropy

V, D = 37, 16


@pytest.fixture(params=[2**25, 12 * V, 4 * V, 1], ids=["one chunk", "3 rows", "1 row", "less than a row"])
def chunks(request, monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_BYTES", request.param)


@pytest.fixture(params=[2**20, 2 * V, 1], ids=["one block", "2 rows", "less than a row"])
def blocks(request, monkeypatch):
    monkeypatch.setattr(loss, "BLOCK_ELEMENTS", request.param)


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 5, D, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(V, (2, 5), generator=generator)
    labels[0, 3:] = labels[1, 0] = IGNORED
    return hidden, weight, labels


def reference(hidden, weight, labels, label_smoothing, bias=None):
    logits = nn.functional.linear(hidden, weight, bias).flatten(0, 1).float()
    return nn.functional.cross_entropy(
        logits, labels.flatten(), ignore_index=-100, label_smoothing=label_smoothing, reduction="sum"
    )


def value_and_gradients(function, hidden, weight, labels, label_smoothing, scale=0.25):
    value = function(hidden, weight, labels, label_smoothing)
    return value.detach(), *torch.autograd.grad(value * scale, [hidden, weight])


@pytest.mark.parametrize(("most", "wanted"), [(2**25, [192]), (150 * V * 2, [128, 64]), (5 * V * 2, [5] * 26)])
def test_products_on_a_cpu_have_few_shapes(monkeypatch, most, wanted):
    """130 rows in bfloat16 become multiples of 64, in chunks of at most 512, 150 and 5 rows; the rest adds nothing."""
    rows, product = [], torch.mm

    def watched(one, other, **kwargs):
        rows.append(len(one))
        return product(one, other, **kwargs)

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 130, D, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(V, D, generator=generator).bfloat16().requires_grad_()
    labels = torch.randint(V, (1, 130), generator=generator)
    expected = value_and_gradients(reference, hidden, weight, labels, 0.1)
    monkeypatch.setattr(loss, "CHUNK_BYTES", most)
    monkeypatch.setattr(torch, "mm", watched)
    ours = value_and_gradients(label_smoothed_cross_entropy, hidden, weight, labels, 0.1)
    assert rows == [count for count in wanted for _ in range(2)]  # the logits, and the gradient of the hidden states
    for x, y in zip(ours, expected, strict=True):
        torch.testing.assert_close(x, y, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.6])
class TestAgainstTorch:
    def test_value_and_gradients(self, chunks, blocks, label_smoothing):
        ours = value_and_gradients(label_smoothed_cross_entropy, *inputs(), label_smoothing)
        expected = value_and_gradients(reference, *inputs(), label_smoothing)
        for x, y in zip(ours, expected, strict=True):
            assert x.dtype == torch.float32
            torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)

    def test_large_logits(self, label_smoothing):
        """The largest logit is taken off before the exponential: nothing overflows."""
        hidden, weight, labels = inputs()
        ours = value_and_gradients(label_smoothed_cross_entropy, hidden * 100, weight, labels, label_smoothing)
        expected = value_and_gradients(reference, hidden * 100, weight, labels, label_smoothing)
        for x, y in zip(ours, expected, strict=True):
            assert x.isfinite().all()
            torch.testing.assert_close(x, y, atol=1e-2, rtol=1e-5)

    def test_autocast(self, chunks, blocks, label_smoothing):
        with torch.autocast("cpu", torch.bfloat16):
            ours = value_and_gradients(label_smoothed_cross_entropy, *inputs(), label_smoothing)
        expected = value_and_gradients(reference, *inputs(), label_smoothing)
        assert [x.dtype for x in ours] == [torch.float32] * 3
        for x, y in zip(ours, expected, strict=True):
            torch.testing.assert_close(x, y, atol=0.05, rtol=0.02)

    def test_autocast_multiplies_in_half_precision(self, label_smoothing):
        with torch.autocast("cpu", torch.bfloat16):
            half = label_smoothed_cross_entropy(*inputs(), label_smoothing)
        assert half != label_smoothed_cross_entropy(*inputs(), label_smoothing)

    def test_bfloat16_weights(self, label_smoothing):
        value, *gradients = value_and_gradients(label_smoothed_cross_entropy, *inputs(torch.bfloat16), label_smoothing)
        expected = value_and_gradients(reference, *inputs(), label_smoothing)
        assert value.dtype == torch.float32
        for x, y in zip((value, *gradients), expected, strict=True):
            torch.testing.assert_close(x.float(), y, atol=0.05, rtol=0.05)
        assert {x.dtype for x in gradients} == {torch.bfloat16}

    def test_under_compile(self, label_smoothing):
        torch.compiler.reset()
        compiled = torch.compile(label_smoothed_cross_entropy, backend="eager", fullgraph=True)
        ours = value_and_gradients(compiled, *inputs(), label_smoothing)
        expected = value_and_gradients(label_smoothed_cross_entropy, *inputs(), label_smoothing)
        for x, y in zip(ours, expected, strict=True):
            torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)

    def test_no_target_at_all(self, label_smoothing):
        hidden, weight, labels = inputs()
        value, *gradients = value_and_gradients(
            label_smoothed_cross_entropy, hidden, weight, labels.fill_(IGNORED), label_smoothing
        )
        assert value == 0
        for gradient in gradients:
            assert gradient.eq(0).all()


@pytest.mark.parametrize("how", ["plain", "compiled", "only the bias is trained"])
def test_bias_of_the_projection(chunks, blocks, how):
    hidden, weight, labels = inputs()
    bias = torch.linspace(-3, 3, V).requires_grad_()
    wanted = [bias] if how.startswith("only") else [hidden, weight, bias]
    if how.startswith("only"):
        hidden.requires_grad_(False), weight.requires_grad_(False)
    function = label_smoothed_cross_entropy
    if how == "compiled":
        function = torch.compile(function, backend="eager", fullgraph=True)
    ours, expected = function(hidden, weight, labels, 0.1, bias), reference(hidden, weight, labels, 0.1, bias)
    torch.testing.assert_close(ours, expected)
    for x, y in zip(torch.autograd.grad(ours, wanted), torch.autograd.grad(expected, wanted), strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_only_one_gradient_is_wanted(frozen):
    hidden, weight, labels = inputs()
    wanted = weight if frozen == "hidden" else hidden
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    (ours,) = torch.autograd.grad(label_smoothed_cross_entropy(hidden, weight, labels, 0.1), [wanted])
    (expected,) = torch.autograd.grad(reference(hidden, weight, labels, 0.1), [wanted])
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_no_gradient_is_wanted():
    hidden, weight, labels = inputs()
    with torch.no_grad():
        value = label_smoothed_cross_entropy(hidden, weight, labels, 0.1)
    torch.testing.assert_close(value, reference(hidden, weight, labels, 0.1).detach())


def test_second_derivatives_are_refused():
    """The kept gradients are constants: what they depend on would be left out without a word."""
    hidden, weight, labels = inputs()
    value = label_smoothed_cross_entropy(hidden, weight, labels, 0.1)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(value, [hidden], create_graph=True)


def test_the_logits_never_exist_as_a_whole(monkeypatch):
    """No tensor of the computation has more elements than a chunk, once the inputs are smaller than that."""
    monkeypatch.setattr(loss, "CHUNK_BYTES", 4096)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(400, 2, generator=generator).requires_grad_()
    weight = torch.randn(400, 2, generator=generator).requires_grad_()
    largest = LargestTensor()
    with largest:
        label_smoothed_cross_entropy(hidden, weight, torch.arange(400), 0.1).backward()
    assert largest.elements <= 1024


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the size of the largest result of any operation."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for result in results if isinstance(results, (tuple, list)) else (results,):
            if isinstance(result, torch.Tensor):
                self.elements = max(self.elements, result.numel())
        return results


class TestInTheModel:
    SOURCE = torch.tensor([[5, 6, 7, 3], [8, 9, 3, 1], [10, 3, 1, 1], [11, 12, 13, 3]])
    LABELS = torch.tensor([[5, 6, 3, -100], [7, 3, -100, -100], [8, 9, 10, 3], [3, -100, -100, -100]])

    def model(self, **overrides):
        torch.manual_seed(0)
        config = VanillaTransformerConfig.preset("test", vocab_size=20, dropout=0.0, **overrides)
        return VanillaTransformerForConditionalGeneration(config)

    def gradients(self, model):
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        return gradients

    def test_micro_batches_add_up(self):
        """Divided by the tokens of the whole step, micro-batches have the gradient of the one big batch."""
        model, total = self.model(), self.LABELS.ne(-100).sum()
        whole = model(self.SOURCE, labels=self.LABELS).loss
        whole.backward()
        expected = self.gradients(model)
        parts = 0.0
        for rows in ([0], [1, 2], [3]):
            loss = model(self.SOURCE[rows], labels=self.LABELS[rows], num_items_in_batch=total).loss
            loss.backward()
            parts += loss.item()
        assert parts == pytest.approx(whole.item(), abs=1e-5)
        for name, gradient in self.gradients(model).items():
            torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-4)

    def test_padding_changes_nothing(self):
        model = self.model()
        narrow = model(self.SOURCE[3:], labels=self.LABELS[3:, :1]).loss
        source = nn.functional.pad(self.SOURCE[3:], (0, 3), value=1)
        wide = model(source, labels=nn.functional.pad(self.LABELS[3:, :1], (0, 5), value=-100)).loss
        torch.testing.assert_close(narrow, wide, atol=1e-6, rtol=1e-6)

    @pytest.mark.parametrize("number", [10, torch.tensor(10)])
    def test_number_of_items(self, number):
        model = self.model()
        default = model(self.SOURCE, labels=self.LABELS).loss * self.LABELS.ne(-100).sum()
        given = model(self.SOURCE, labels=self.LABELS, num_items_in_batch=number).loss * 10
        torch.testing.assert_close(default, given)

    def test_smoothed_in_training_and_plain_in_evaluation(self):
        model = self.model(label_smoothing=0.3)
        losses = {mode: model.train(mode)(self.SOURCE, labels=self.LABELS).loss for mode in (True, False)}
        logits = model(self.SOURCE, labels=self.LABELS).logits.transpose(1, 2)
        for mode, label_smoothing in ((True, 0.3), (False, 0.0)):
            expected = nn.functional.cross_entropy(logits, self.LABELS, label_smoothing=label_smoothing)
            torch.testing.assert_close(losses[mode], expected)

    def test_bias_of_the_output_projection(self):
        """In training mode the logits are never made; with the bias the loss still is that of the logits."""
        model = self.model(lm_head_bias=True, label_smoothing=0.0)
        nn.init.normal_(model.lm_head.bias)
        loss = model(self.SOURCE, labels=self.LABELS).loss
        logits = model.eval()(self.SOURCE, labels=self.LABELS).logits.transpose(1, 2)
        torch.testing.assert_close(loss, nn.functional.cross_entropy(logits, self.LABELS))

    def test_no_target_at_all(self):
        loss = self.model()(self.SOURCE, labels=torch.full_like(self.LABELS, -100)).loss
        assert loss == 0
        loss.backward()
