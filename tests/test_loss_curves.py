"""scripts/loss_curves.py: what plain means, that both ways lose the same without dropout, the record and its table."""

import importlib
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import word_reversal
from hf_vanilla_transformer import modeling_vanilla_transformer
from hf_vanilla_transformer.arguments import parse_arguments
from hf_vanilla_transformer.dropout import Dropout
from hf_vanilla_transformer.preparation import PreparedCorpus, prepare_corpus

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        yield importlib.import_module("loss_curves")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A toy corpus of some forty batches, and the options of a small training."""
    folder = tmp_path_factory.mktemp("corpus")
    options = {**word_reversal.corpus(folder, pairs=120), "learning_rate": 1e-3, "max_tokens_per_batch": 24}
    arguments = parse_arguments(word_reversal.flags(folder / "model", **options))
    prepare_corpus(*arguments[1:3], folder / "prepared")
    return PreparedCorpus.load(folder / "prepared"), arguments


@pytest.fixture(scope="module")
def sections(script, task):
    return {name: script.measure(*task, run) for name, run in script.RUNS.items() if run.seed < 3}


def test_the_record(script, task, sections):
    batches = script.batches_of(task[0].train, task[1][-1])
    assert len(batches) > 2 * script.WINDOW
    for section in sections.values():
        assert section["steps"] == len(batches)
        assert len(section["curve"]) == len(batches) // script.WINDOW
        assert len(section["without_dropout"]) == script.STEPS_WITHOUT_DROPOUT
        assert section["curve"][-1] < section["curve"][0] - 0.1  # it learns
        assert 0 < section["validation_loss"] < section["curve"][0]
    assert json.loads(json.dumps(sections)) == sections


def test_without_dropout_all_lose_the_same(script, sections):
    still = {name: section["without_dropout"] for name, section in sections.items()}
    apart = {
        pair: max(script.differences(still[pair[0]], still[pair[1]])) for pair in itertools.combinations(sections, 2)
    }
    assert apart["plain, seed 1", "plain, seed 2"] == 0
    assert apart["plain, seed 1", "fast float32, seed 1"] < script.LIMIT
    assert script.LIMIT < apart["plain, seed 1", "fast bfloat16, seed 1"] < 0.1
    assert script.agree(sections)
    assert not script.agree({**sections, "fast float32, seed 1": sections["fast bfloat16, seed 1"]})
    plain = sections["plain, seed 1"]["without_dropout"]
    diverged = {"without_dropout": [plain[0], *[float("nan")] * (len(plain) - 1)]}
    assert not script.agree({**sections, "fast float32, seed 1": diverged})


def test_with_dropout_the_seed_matters(sections):
    curves = [tuple(section["curve"]) for section in sections.values()]
    assert len(set(curves)) == len(curves)


def test_plain_is_plain(script, task, monkeypatch):
    """It has none of the dropout, the attention and the loss that it is compared with, and the fast runs have them."""

    def forbidden(*args, **kwargs):
        raise AssertionError("fast")

    def kinds(model):
        return {type(module) for module in model.modules() if isinstance(module, torch.nn.Dropout)}

    models = {plain: script.build_model(*task, script.Run(plain=plain, bf16=False, seed=1)) for plain in (True, False)}
    assert kinds(models[True]) == {torch.nn.Dropout}
    assert kinds(models[False]) == {Dropout}
    probabilities = [[m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)] for model in models.values()]
    assert probabilities[0] == probabilities[1]
    assert [model.config._attn_implementation for model in models.values()] == ["eager", "sdpa"]
    batch = script.batches_of(task[0].train, task[1][-1])[0]
    monkeypatch.setattr(modeling_vanilla_transformer, "label_smoothed_cross_entropy", forbidden)
    script.plain_loss(models[True].train(), batch)
    with pytest.raises(AssertionError, match="fast"):
        models[False].train()(**batch)


def test_plain_loss_is_the_formula(script, task):
    model = script.build_model(*task, script.RUNS["plain, seed 1"]).eval()
    batch = script.batches_of(task[0].train, task[1][-1])[3]
    labels = batch["labels"]
    logs = model(**batch).logits.log_softmax(dim=-1)
    nll = -logs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    smoothed = 0.9 * nll - 0.1 * logs.mean(dim=-1)
    torch.testing.assert_close(script.plain_loss(model, batch), smoothed[labels != -100].mean())


def test_windows(script, monkeypatch):
    monkeypatch.setattr(script, "WINDOW", 2)
    assert script.means([1.0, 2.0, 3.0, 5.0, 9.0]) == [1.5, 4.0]


def test_the_validation_loss_is_that_of_a_token(script, task):
    """However the sentences are batched."""
    run = script.RUNS["fast float32, seed 1"]
    model = script.build_model(*task, run)
    pairs, args = task[0].validation, task[1][-1]
    batches = script.batches_of(pairs, args)
    assert len({batch["labels"].shape for batch in batches}) > 1
    (whole,) = script.batches_of(pairs, SimpleNamespace(max_tokens_per_batch=10**6, seed=1))
    assert script.validation_loss(model, batches, run) == pytest.approx(model(**whole).loss.item(), rel=1e-5)


def test_the_table(script):
    def section(*curve, still, loss):
        return {"curve": list(curve), "without_dropout": [1.0, still], "validation_loss": loss}

    sections = {
        "plain, seed 1": section(5.0, 4.0, still=1.0, loss=3.0),
        "plain, seed 2": section(5.25, 4.0, still=1.0, loss=3.1),
        "fast float32, seed 1": section(5.0, 4.5, still=1.00002, loss=3.05),
        "fast float32, seed 2": section(5.25, 4.0, still=1.0, loss=3.05),
    }
    assert script.loss_curves(sections).splitlines() == [
        "|  | seeds | training loss | validation loss | from plain: mean | greatest | without dropout: greatest |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| plain | 2 | 4.5625 ± 0.0884 | 3.0500 ± 0.0707 | 0.1250 | 0.1250 | 0e+00 |",
        "| fast float32 | 2 | 4.6875 ± 0.0884 | 3.0500 ± 0.0000 | 0.1875 | 0.3750 | 2e-05 |",
    ]
