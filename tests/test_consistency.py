"""R-Drop and SimCut against the formulas of their papers, written out with PyTorch's own losses."""

import copy
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn
from torch.nn.functional import cross_entropy, kl_div

from hf_vanilla_transformer import consistency, training
from hf_vanilla_transformer import loss as plain_losses
from hf_vanilla_transformer.arguments import parse_arguments
from hf_vanilla_transformer.batching import PairCollator, TrainingPairs
from hf_vanilla_transformer.consistency import TwoPasses, consistency_loss, rdrop, simcut
from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.loss import IGNORED, label_smoothed_cross_entropy
from hf_vanilla_transformer.training import VanillaTransformerTrainer, train
from test_loss import LargestTensor
from tiny_models import BOS, EOS, LABELS, PAD, SEPARATE, SOURCE, V, random_model
from word_reversal import corpus, exact_matches, flags

D, ALPHA = 16, 1.7
METHODS = ["rdrop", "simcut"]

pytestmark = pytest.mark.usefixtures("one_thread")


def objective(method, alpha=ALPHA):
    return rdrop(alpha) if method == "rdrop" else simcut(alpha, 0.3)


def kl(p_logits, q_logits):
    """KL(p || q), summed; PyTorch's arguments are the other way round."""
    return kl_div(q_logits.log_softmax(-1), p_logits.log_softmax(-1), reduction="sum", log_target=True)


def formula(method, p, q, labels, label_smoothing, alpha=ALPHA):
    """The papers' losses of two sets of logits (N, V), R-Drop's halved, and the divergence in them."""
    first, second = (
        cross_entropy(logits, labels, label_smoothing=label_smoothing, ignore_index=IGNORED, reduction="sum")
        for logits in (p, q)
    )
    p, q = p[labels != IGNORED], q[labels != IGNORED]
    if method == "simcut":
        return first + alpha * kl(p, q), kl(p, q)
    divergence = (kl(p, q) + kl(q, p)) / 2
    return (first + second + alpha * divergence) / 2, divergence


# The loss


@pytest.fixture(params=[2**25, 48 * 37, 1], ids=["one chunk", "some tokens", "less than a token"])
def chunks(request, monkeypatch):
    """Three tokens of both passes in double precision, more in others; two in a block."""
    monkeypatch.setattr(plain_losses, "CHUNK_BYTES", request.param)
    monkeypatch.setattr(consistency, "BLOCK_ELEMENTS", request.param // 12)


def tensors(dtype=torch.float64):
    """Hidden states of both passes, projection, bias, labels."""
    generator = torch.Generator().manual_seed(0)
    passes = torch.randn(2, 5, 2, D, generator=generator).to(dtype)
    weight, bias = torch.randn(37, D, generator=generator).to(dtype), torch.linspace(-2, 2, 37).to(dtype)
    labels = torch.randint(37, (2, 5), generator=generator)
    labels[0, 3:] = labels[1, 0] = IGNORED
    return [tensor.requires_grad_() for tensor in (passes, weight, bias)], labels


def ours(method, label_smoothing, dtype=torch.float64, function=consistency_loss):
    (passes, weight, bias), labels = tensors(dtype)
    loss, divergence = function(passes, weight, labels, label_smoothing, objective(method), bias)
    assert not divergence.requires_grad
    return loss.detach(), divergence, *torch.autograd.grad(loss * 0.25, [passes, weight, bias])


def expected(method, label_smoothing):
    """In double precision, with PyTorch's losses and automatic gradients."""
    (passes, weight, bias), labels = tensors()
    p, q = nn.functional.linear(passes, weight, bias).flatten(0, 1).unbind(1)
    loss, divergence = formula(method, p, q, labels.flatten(), label_smoothing)
    return loss.detach(), divergence.detach(), *torch.autograd.grad(loss * 0.25, [passes, weight, bias])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
class TestAgainstTheFormula:
    def test_double_precision(self, chunks, method, label_smoothing):
        for x, y in zip(ours(method, label_smoothing), expected(method, label_smoothing), strict=True):
            torch.testing.assert_close(x, y, atol=1e-12, rtol=1e-10)

    def test_single_precision(self, chunks, method, label_smoothing):
        for x, y in zip(ours(method, label_smoothing, torch.float32), expected(method, label_smoothing), strict=True):
            assert x.dtype == torch.float32
            torch.testing.assert_close(x.double(), y, atol=1e-5, rtol=1e-4)

    def test_autocast(self, chunks, method, label_smoothing):
        with torch.autocast("cpu", torch.bfloat16):
            results = ours(method, label_smoothing, torch.float32)
        for x, y in zip(results, expected(method, label_smoothing), strict=True):
            assert x.dtype == torch.float32
            assert (x - y).norm() < 0.02 * y.norm()
        assert results[0] != ours(method, label_smoothing, torch.float32)[0]

    def test_bfloat16_weights(self, method, label_smoothing):
        loss, divergence, *gradients = ours(method, label_smoothing, torch.bfloat16)
        for x, y in zip((loss, divergence, *gradients), expected(method, label_smoothing), strict=True):
            assert (x - y).norm() < 0.03 * y.norm()
        assert {loss.dtype, divergence.dtype} == {torch.float32}
        assert {x.dtype for x in gradients} == {torch.bfloat16}

    def test_under_compile(self, method, label_smoothing):
        torch.compiler.reset()
        compiled = torch.compile(consistency_loss, backend="eager", fullgraph=True)
        results = ours(method, label_smoothing, torch.float32, compiled)
        for x, y in zip(results, expected(method, label_smoothing), strict=True):
            torch.testing.assert_close(x.double(), y, atol=1e-5, rtol=1e-4)

    def test_finite_differences(self, method, label_smoothing):
        """The hand-written gradient against the loss itself, in random directions."""
        inputs, labels = tensors()

        def loss(passes, weight, bias):
            return consistency_loss(passes, weight, labels, label_smoothing, objective(method), bias)[0]

        assert torch.autograd.gradcheck(loss, inputs, fast_mode=True)


@pytest.mark.parametrize("method", METHODS)
class TestTheLoss:
    def test_without_weight_it_is_the_cross_entropy(self, method):
        """Of both passes or of the clean one: `label_smoothed_cross_entropy`, gradients too."""
        (passes, weight, _), labels = tensors()
        loss, divergence = consistency_loss(passes, weight, labels, 0.1, objective(method, 0.0))
        first, second = (label_smoothed_cross_entropy(passes[..., side, :], weight, labels, 0.1) for side in (0, 1))
        plain = (first + second) / 2 if method == "rdrop" else first
        torch.testing.assert_close(loss, plain, check_dtype=False, atol=0, rtol=1e-6)
        for x, y in zip(*(torch.autograd.grad(value, [passes, weight]) for value in (loss, plain)), strict=True):
            torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-6)
        assert divergence > 0.1

    def test_equal_passes_do_not_diverge(self, method):
        (passes, weight, _), labels = tensors()
        with torch.no_grad():
            passes[..., 1, :] = passes[..., 0, :]
        loss, divergence = consistency_loss(passes, weight, labels, 0.1, objective(method))
        plain = label_smoothed_cross_entropy(passes[..., 0, :], weight, labels, 0.1)
        assert divergence == 0
        torch.testing.assert_close(loss, plain, check_dtype=False, atol=0, rtol=1e-6)

    def test_large_logits(self, chunks, method):
        (passes, weight, bias), labels = tensors(torch.float32)
        loss, divergence = consistency_loss(passes * 100, weight, labels, 0.1, objective(method), bias)
        gradients = torch.autograd.grad(loss, [passes, weight, bias])
        assert all(x.isfinite().all() for x in (loss, divergence, *gradients))
        p, q = nn.functional.linear(passes.double() * 100, weight.double(), bias.double()).flatten(0, 1).unbind(1)
        reference, _ = formula(method, p, q, labels.flatten(), 0.1)
        torch.testing.assert_close(loss.double(), reference, rtol=1e-5, atol=0)

    def test_no_target_at_all(self, method):
        inputs, labels = tensors()
        loss, divergence = consistency_loss(*inputs[:2], labels.fill_(IGNORED), 0.1, objective(method), inputs[2])
        assert loss == divergence == 0
        assert all(gradient.eq(0).all() for gradient in torch.autograd.grad(loss, inputs))

    @pytest.mark.parametrize("frozen", [(0,), (1, 2), (0, 1, 2)])
    def test_only_some_gradients_are_wanted(self, method, frozen):
        inputs, labels = tensors()
        for index in frozen:
            inputs[index].requires_grad_(False)
        loss, _ = consistency_loss(*inputs[:2], labels, 0.1, objective(method), inputs[2])
        torch.testing.assert_close(loss.detach(), expected(method, 0.1)[0])
        wanted = [index for index in range(3) if index not in frozen]
        assert loss.requires_grad == bool(wanted)
        for index in wanted:
            (gradient,) = torch.autograd.grad(loss * 0.25, inputs[index], retain_graph=True)
            torch.testing.assert_close(gradient, expected(method, 0.1)[2 + index])

    def test_the_logits_never_exist_as_a_whole(self, method, monkeypatch):
        monkeypatch.setattr(plain_losses, "CHUNK_BYTES", 4 * 2048)
        passes, weight = torch.randn(400, 2, 2, requires_grad=True), torch.randn(400, 2, requires_grad=True)
        with LargestTensor() as largest:
            consistency_loss(passes, weight, torch.arange(400), 0.1, objective(method))[0].backward()
        assert largest.elements <= 2048


# In a model


BATCH = {"input_ids": SOURCE, "attention_mask": SOURCE.ne(PAD).long(), "labels": LABELS}


def loss_of(model, wanted, batch=BATCH, number=None):
    """One step's loss, as the trainer makes it."""
    with wanted.applied(model, batch) as doubled:
        return model(**doubled, num_items_in_batch=number).loss


def training_model(**overrides):
    return random_model(**{"label_smoothing": 0.1, **overrides}).train()


def by_hand(method, model, batch=BATCH, alpha=ALPHA):
    """Without dropout: the formula on the logits of two forward passes, everything but the special tokens cut."""
    twin = copy.deepcopy(model).eval()
    decoder_input_ids = twin.prepare_decoder_input_ids_from_labels(batch["labels"])
    given = {"attention_mask": batch["attention_mask"], "labels": None}
    special = torch.tensor([PAD, BOS, EOS, twin.config.decoder_start_token_id])
    embeds = [
        half.embed_tokens(ids).masked_fill(~torch.isin(ids, special)[..., None], 0.0)
        for half, ids in ((twin.model.encoder, batch["input_ids"]), (twin.model.decoder, decoder_input_ids))
    ]
    clean = twin(batch["input_ids"], decoder_input_ids=decoder_input_ids, **given).logits
    cut = twin(inputs_embeds=embeds[0], decoder_inputs_embeds=embeds[1], **given).logits
    p, q = clean.flatten(0, 1), (cut if method == "simcut" else clean).flatten(0, 1)
    loss, divergence = formula(method, p, q, batch["labels"].flatten(), twin.config.label_smoothing, alpha)
    loss.backward()
    return loss.item(), divergence.item(), {name: weight.grad for name, weight in twin.named_parameters()}


def assert_same_gradients(model, gradients, atol=1e-5):
    for name, weight in model.named_parameters():
        torch.testing.assert_close(
            weight.grad, gradients[name], atol=atol, rtol=1e-4, msg=lambda text, name=name: name + text
        )


FORMS = {
    "joint vocabulary": {},
    "two vocabularies": SEPARATE,
    "untied, with a bias": {**SEPARATE, "tie_word_embeddings": False, "lm_head_bias": True},
    "a start of its own": {"decoder_start_token_id": 0},
    "pre-norm, learned positions": {"norm_position": "pre", "position_embedding_type": "learned"},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("form", FORMS)
def test_the_model_against_two_passes_by_hand(method, form):
    model, wanted = training_model(**FORMS[form]), TwoPasses(rdrop(ALPHA) if method == "rdrop" else simcut(ALPHA, 1.0))
    loss, divergence, gradients = by_hand(method, model)
    actual = loss_of(model, wanted, number=torch.tensor(40))
    actual.backward()
    assert actual.item() == pytest.approx(loss / 40, rel=1e-5)
    assert_same_gradients(model, {name: gradient / 40 for name, gradient in gradients.items()})
    assert wanted.totals().tolist() == pytest.approx([divergence, 9], abs=1e-4)
    assert wanted.totals().tolist() == [0, 0]
    assert (divergence > 0.01) == (method == "simcut")


def test_the_number_of_items_is_the_number_of_targets_where_none_is_given():
    model, wanted = training_model(), TwoPasses(simcut(ALPHA, 1.0))
    assert loss_of(model, wanted).item() == pytest.approx(by_hand("simcut", model)[0] / 9, rel=1e-5)
    nothing = {**BATCH, "labels": torch.full_like(LABELS, IGNORED)}
    assert loss_of(model, wanted, nothing) == 0


def test_logits_that_only_the_head_itself_can_make():
    """An adapter on the output projection: the loss is a function of its logits."""
    plain, adapted = training_model(), training_model()
    adapted.lm_head = nn.Sequential(adapted.lm_head)
    adapted.lm_head.weight, adapted.lm_head.bias = adapted.lm_head[0].weight, None
    losses = [loss_of(model, TwoPasses(simcut(ALPHA, 1.0))) for model in (plain, adapted)]
    torch.testing.assert_close(*losses)
    losses[0].backward(), losses[1].backward()
    for x, y in zip(plain.model.parameters(), adapted.model.parameters(), strict=True):
        torch.testing.assert_close(x.grad, y.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_the_model_is_left_as_it_was(method):
    model, wanted = training_model(), TwoPasses(objective(method))
    before = model(**BATCH).loss
    with pytest.raises(ZeroDivisionError), wanted.applied(model, BATCH):
        raise ZeroDivisionError
    loss_of(model, wanted)
    assert model(**BATCH).loss == before
    assert "_summed_loss" not in vars(model)


def test_dropout_differs_between_the_passes_and_makes_them_diverge():
    losses, divergences = [], []
    for dropout in (0.0, 0.3):
        wanted = TwoPasses(rdrop(ALPHA))
        losses.append(loss_of(training_model(dropout=dropout), wanted))
        divergences.append(wanted.totals()[0])
    assert divergences[0] == 0
    torch.testing.assert_close(losses[0], training_model()(**BATCH).loss)
    assert divergences[1] > 0.1


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
def test_gradient_checkpointing_changes_nothing():
    gradients = []
    for checkpointing in (False, True):
        model = training_model(dropout=0.2)
        if checkpointing:
            model.gradient_checkpointing_enable()
        torch.manual_seed(1)
        loss_of(model, TwoPasses(simcut(ALPHA, 0.5))).backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters()})
    assert_same_gradients(model, gradients[0], atol=1e-6)


@pytest.mark.slow
def test_a_compiled_model():
    """With everything cut and no dropout, nothing is random."""
    torch.compiler.reset()
    model, wanted = training_model(), TwoPasses(simcut(ALPHA, 1.0))
    loss, divergence, gradients = by_hand("simcut", model)
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        model.zero_grad()
        with wanted.applied(model, BATCH) as doubled:
            actual = compiled(**doubled, num_items_in_batch=torch.tensor(1)).loss
        actual.backward()
        assert actual.item() == pytest.approx(loss, rel=1e-5)
        assert wanted.totals()[0].item() == pytest.approx(divergence, rel=1e-4)
        assert_same_gradients(model, gradients, atol=1e-4)
    assert compiled(**BATCH).loss.item() == pytest.approx(model(**BATCH).loss.item(), rel=1e-5)


def embedded(model, wanted, batch):
    """Of encoder and decoder: ids, what is embedded in the second of two passes, the same without a cut, positions."""
    seen = []
    handles = [
        half.dropout.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
        for half in (model.model.encoder, model.model.decoder)
    ]
    loss_of(model, wanted, batch)
    for handle in handles:
        handle.remove()
    sides = []
    for half, ids, output in zip(
        (model.model.encoder, model.model.decoder),
        (batch["input_ids"], model.prepare_decoder_input_ids_from_labels(batch["labels"])),
        seen,
        strict=True,
    ):
        positions = half.embed_positions(torch.arange(ids.shape[1]), ids.shape[1])
        whole, real = half.embed_tokens(ids).detach() + positions, ids.ne(PAD)  # padding has positions of its own
        torch.testing.assert_close(output[::2][real], whole[real])
        sides.append((ids, output[1::2], whole, positions))
    return sides


@pytest.mark.parametrize("form", ["joint vocabulary", "two vocabularies", "a start of its own"])
def test_the_right_share_of_real_tokens_is_cut_to_their_positions(form):
    torch.manual_seed(0)
    model = training_model(**FORMS[form])
    length = 30
    source, labels = torch.randint(4, V, (200, length)), torch.randint(4, V, (200, length))
    for row in range(0, 200, 2):  # half of the rows are padded
        source[row, 20:], labels[row, 20:] = PAD, IGNORED
    source[::2, 19] = source[1::2, -1] = labels[::2, 19] = labels[1::2, -1] = EOS
    batch = {"input_ids": source, "attention_mask": source.ne(PAD).long(), "labels": labels}
    for ids, embeds, whole, positions in embedded(model, TwoPasses(simcut(ALPHA, 0.2)), batch):
        is_cut = (embeds == positions.expand_as(embeds)).all(-1)
        kept = ~is_cut & ids.ne(PAD)
        torch.testing.assert_close(embeds[kept], whole[kept], msg="a token is cut wholly or not at all")
        real = ~torch.isin(ids, torch.tensor([PAD, BOS, EOS, model.config.decoder_start_token_id]))
        assert not is_cut[~real].any()
        assert is_cut[real].float().mean().item() == pytest.approx(0.2, abs=0.02)
        by_place = is_cut.float().sum(0)[1:19] / real.float().sum(0)[1:19]
        assert by_place.max() < 0.35, "every place is as likely"


def test_every_step_draws_its_own_cut_from_the_global_generator():
    """Whose state a checkpoint keeps."""
    model, wanted = training_model(), TwoPasses(simcut(ALPHA, 0.5))
    wide = {name: tensor.repeat(20, 1) for name, tensor in BATCH.items()}

    def cuts():
        return torch.cat([embeds.flatten() for _, embeds, _, _ in embedded(model, wanted, wide)])

    torch.manual_seed(0)
    first, second = cuts(), cuts()
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(cuts(), first)


def test_one_embedding_module_for_both_sides_is_cut_once():
    model = training_model()
    model.set_input_embeddings(model.model.encoder.embed_tokens)
    assert model.model.decoder.embed_tokens is model.model.encoder.embed_tokens
    wide = {name: tensor.repeat(300, 1) for name, tensor in BATCH.items()}
    (ids, embeds, _, positions), _ = embedded(model, TwoPasses(simcut(ALPHA, 0.5)), wide)
    is_cut = (embeds == positions.expand_as(embeds)).all(-1)[~torch.isin(ids, torch.tensor([PAD, EOS]))]
    assert is_cut.float().mean().item() == pytest.approx(0.5, abs=0.04)


# In the trainer


def trainer_of(folder, model, rows, **options):
    args = parse_arguments(flags(folder / "out", train_file="unused", **{**NO_FILES, **options}))[3]
    args.label_smoothing_factor = 0.0  # as `train` does: the model smooths
    return VanillaTransformerTrainer(
        model=model,
        args=args,
        data_collator=PairCollator(PAD),
        train_dataset=TrainingPairs(rows),
        train_lengths=[max(len(row["input_ids"]), len(row["labels"])) for row in rows],
        eval_max_length=12,
    )


NO_FILES = {"eval_strategy": "no", "save_strategy": "no", "max_steps": 1, "max_tokens_per_batch": 1000}
SGD = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant"}


class Rows:
    """Token ids of unequal lengths, as the data set of a trainer."""

    def __init__(self, count=8):
        rng = np.random.default_rng(0)
        self.rows = [
            {name: [*rng.integers(4, V, rng.integers(2, 9)).tolist(), EOS] for name in ("input_ids", "labels")}
            for _ in range(count)
        ]

    def __len__(self):
        return len(self.rows)

    def __iter__(self):
        return iter(self.rows)

    def __getitem__(self, indices):
        return {name: [self.rows[index][name] for index in indices] for name in ("input_ids", "labels")}


@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("method", METHODS)
def test_a_step_does_not_depend_on_accumulation(tmp_path, method, accumulation):
    """One step of gradient descent over 8 pairs, against the formula on all of them."""
    options = {"rdrop_alpha": ALPHA} if method == "rdrop" else {"simcut_alpha": ALPHA, "simcut_p": 1.0}
    model, rows = training_model(), Rows()
    loss, divergence, gradients = by_hand(method, model, PairCollator(PAD)(rows.rows))
    tokens = sum(len(row["labels"]) for row in rows)
    targets = {name: weight.detach() - 0.1 * gradients[name] / tokens for name, weight in model.named_parameters()}
    trainer = trainer_of(tmp_path, model, rows, **options, **SGD, gradient_accumulation_steps=accumulation)
    assert len(trainer.get_train_dataloader()) == accumulation
    trainer.train()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.detach(), targets[name], atol=1e-6, rtol=1e-5)
    log = trainer.state.log_history[0]
    assert log["loss"] == pytest.approx(loss / tokens, rel=1e-5)
    assert log["consistency"] == pytest.approx(divergence / tokens, abs=1e-5)


def test_the_log_averages_over_its_steps(tmp_path):
    trainer = trainer_of(
        tmp_path, training_model(), Rows(24), simcut_alpha=0.5, max_tokens_per_batch=40, max_steps=6, logging_steps=3
    )
    seen, count = [], TwoPasses._summed_loss

    def spy(self, *args):
        before = float(self.divergence), int(self.tokens)
        loss = count(self, *args)
        seen.append((float(self.divergence) - before[0], int(self.tokens) - before[1]))
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TwoPasses, "_summed_loss", spy)
        trainer.train()
    entries = [entry["consistency"] for entry in trainer.state.log_history if "loss" in entry]
    for entry, steps in zip(entries, (seen[:3], seen[3:]), strict=True):
        divergences, tokens = zip(*steps, strict=True)
        assert len(set(tokens)) > 1
        assert entry == pytest.approx(sum(divergences) / sum(tokens), rel=1e-3)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_it_can_begin_later(tmp_path, accumulation):
    """Until then as if it had not been asked for; then twice as many rows go through the model."""
    options = {"max_steps": 3, "logging_steps": 1, "gradient_accumulation_steps": accumulation, **SGD}
    runs = {}
    for name, late in (("plain", {}), ("late", {"simcut_alpha": 0.5, "consistency_start": 2})):
        model, rows = training_model(), []
        embedding = model.model.encoder.embed_tokens
        embedding.register_forward_pre_hook(lambda module, args, rows=rows: rows.append(len(args[0])))
        trainer = trainer_of(tmp_path / name, model, Rows(), **options, **late)
        trainer.train()
        runs[name] = rows, [entry for entry in trainer.state.log_history if "loss" in entry]
    (plain_rows, plain_log), (late_rows, late_log) = runs["plain"], runs["late"]
    assert [entry["loss"] for entry in late_log[:2]] == [entry["loss"] for entry in plain_log[:2]]
    assert ["consistency" in entry for entry in late_log] == [False, False, True]
    cut = 2 * accumulation
    assert late_rows[:cut] == plain_rows[:cut]
    assert late_rows[cut:] == [2 * count for count in plain_rows[cut:]]


def test_without_the_options_nothing_changes(tmp_path):
    """No second pass, nothing in the log."""
    trainer = trainer_of(tmp_path, training_model(), Rows())
    assert trainer.two_passes is None
    plain = training_model()(**PairCollator(PAD)(Rows().rows)).loss.item()
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(plain, rel=1e-5)
    assert "consistency" not in trainer.state.log_history[0]


@pytest.mark.parametrize("method", METHODS)
def test_the_evaluation_loss_is_plain(tmp_path, method):
    model, batch = training_model(dropout=0.3), PairCollator(PAD)(Rows().rows)
    trainer = trainer_of(tmp_path, model, Rows(), **{f"{method}_alpha": ALPHA}, predict_with_generate=False)
    model.eval()
    with torch.no_grad():
        expected_loss = cross_entropy(model(**batch).logits.flatten(0, 1), batch["labels"].flatten())
        loss = trainer.compute_loss(model, batch)
    torch.testing.assert_close(loss, expected_loss)


def test_several_gpus_in_one_process_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(training.TrainingArguments, "n_gpu", 2)
    with pytest.raises(UserError, match="consistency training on several GPUs needs a process for each") as caught:
        trainer_of(tmp_path, training_model(), Rows(), rdrop_alpha=1)
    assert "\n" not in str(caught.value)


# The whole job


def run(folder, **options):
    folder.mkdir(exist_ok=True)
    return train(parse_arguments(flags(folder / "out", **{**corpus(folder), **options})), exact_matches)


def logged(output, key):
    record = json.loads((output / "run.json").read_text(encoding="utf-8"))
    return [entry[key] for entry in record["curve"] if key in entry]


LEARNING = {
    "rdrop": {"rdrop_alpha": 5, "config_overrides": "dropout=0.1"},
    "simcut": {"simcut_alpha": 3, "simcut_p": 0.2, "config_overrides": "dropout=0.1"},
}


@pytest.mark.parametrize("method", METHODS)
def test_a_training_draws_the_passes_together(tmp_path, method):
    """Beside a training that only watches the divergence, its weight as good as nothing."""
    options = {"num_train_epochs": 5, "eval_strategy": "no", "save_strategy": "no"}
    drawn = run(tmp_path / "drawn", **options, **LEARNING[method])
    watched = run(tmp_path / "watched", **options, **{**LEARNING[method], f"{method}_alpha": 1e-9})
    ends = [np.mean(logged(output, "consistency")[-5:]) for output in (drawn, watched)]
    assert ends[0] < 0.5 * ends[1]
    assert np.mean(logged(drawn, "loss")[-5:]) < np.mean(logged(drawn, "loss")[:5])
    recipe = json.loads((drawn / "run.json").read_text(encoding="utf-8"))["recipe"]
    assert recipe[f"{method}_alpha"] == LEARNING[method][f"{method}_alpha"]
    assert ("simcut_p" in recipe) == (method == "simcut")


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_is_the_same_run(tmp_path, method):
    """With dropout, subword dropout, a moving average and accumulation: bit by bit."""
    options = {
        **LEARNING[method],
        **{"subword_dropout": 0.2, "ema_decay": 0.7, "gradient_accumulation_steps": 2, "max_tokens_per_batch": 60},
        **{"eval_strategy": "no", "save_strategy": "steps", "save_steps": 4, "max_steps": 8, "save_total_limit": 5},
    }
    whole = run(tmp_path / "whole", **options)
    part = tmp_path / "part"
    part.mkdir()
    shutil.copytree(whole / "checkpoint-4", part / "out" / "checkpoint-4")
    resumed = run(part, **options, resume_from_checkpoint="true")
    assert logged(resumed, "consistency") == logged(whole, "consistency")
    for name in ("model.safetensors", "checkpoint-8/model.safetensors", "checkpoint-8/ema.safetensors"):
        weights, wanted = load_file(resumed / name), load_file(whole / name)
        assert all(np.array_equal(weights[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("method", METHODS)
def test_bf16_trains(tmp_path, method):
    output = run(tmp_path, **LEARNING[method], bf16=True, num_train_epochs=3, metric_for_best_model="loss")
    losses = logged(output, "loss")
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(tmp_path):
    """Two processes with one batch each see what one process sees with an accumulation of two; nothing is random."""
    options = {**corpus(tmp_path), "config_overrides": "dropout=0", "simcut_alpha": 3, "simcut_p": 1}
    options |= {"max_tokens_per_batch": 60, "max_steps": 6, "eval_strategy": "no"}
    one, two = tmp_path / "one", tmp_path / "two"
    train(parse_arguments(flags(one, **options, gradient_accumulation_steps=2)))
    package = Path(training.__file__).parents[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "hub")}
    environment["PYTHONPATH"] = os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", port]
    script = Path(__file__).parents[1] / "scripts" / "train.py"
    finished = subprocess.run(
        [*command, str(script), *flags(two, **options)], env=environment, capture_output=True, text=True, timeout=240
    )
    assert finished.returncode == 0, finished.stderr
    for key in ("loss", "consistency"):
        assert logged(two, key) == pytest.approx(logged(one, key), abs=1e-4)
    for name, weight in load_file(one / "model.safetensors").items():
        np.testing.assert_allclose(load_file(two / "model.safetensors")[name], weight, rtol=0, atol=2e-4)


MISTAKES = {
    "rdrop_alpha=-1.0 is below 0": {"rdrop_alpha": -1},
    "simcut_alpha=-2.0 is below 0": {"simcut_alpha": -2},
    "rdrop_alpha and simcut_alpha exclude each other: give one of them": {"rdrop_alpha": 5, "simcut_alpha": 3},
    r"simcut_p=0.0 is not in \(0, 1\]": {"simcut_alpha": 3, "simcut_p": 0},
    r"simcut_p=1.5 is not in \(0, 1\]": {"simcut_alpha": 3, "simcut_p": 1.5},
    "simcut_p has no effect without --simcut_alpha": {"simcut_p": 0.1},
    "rdrop_alpha has no effect on a model without dropout: give --config_overrides dropout=0.1": {
        "rdrop_alpha": 5,
        "config_overrides": "dropout=0",
    },
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes(tmp_path, message):
    with pytest.raises(UserError, match=message) as caught:
        run(tmp_path, **MISTAKES[message])
    assert "\n" not in str(caught.value)
