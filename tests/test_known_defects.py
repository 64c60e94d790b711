"""Famous mistakes, injected into our model and training one at a time: each is caught by an oracle of its own.

The daily suite guards against the same mistakes elsewhere; that the tests named in `Defect.guards` do fail is tested
here too, slowly.
"""

import importlib.util
import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from torch import nn

from bare_trainer import FirstStep, bare_trainer, loss_by_hand
from hf_vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    modeling_vanilla_transformer,
)
from hf_vanilla_transformer.batching import PairCollator
from hf_vanilla_transformer.tokenization_vanilla_transformer import SubwordDropout, joint_tokenizer, learn_backend
from hf_vanilla_transformer.translation import load_model
from known_defects import DEFECTS, HIDDEN_WORD, PAD, attention_with_a_weak_mask

TESTS = Path(__file__).parent
EOS = 3
SOURCE = torch.tensor([[5, 6, 7, 8, EOS], [9, 10, EOS, PAD, PAD]])
TARGET = torch.tensor([[2, 11, 12, 13], [2, 14, 15, 16]])
PAIRS = [([5, 6, 7, EOS], [11, 12, EOS]), ([8, EOS], [13, 14, 15, 16, 17, EOS]), ([9, 10, 11, 12, EOS], [5, EOS])]
CLOSE = {"atol": 1e-5, "rtol": 1e-4}


def a_model(**overrides):
    """Random, without dropout; biases and gains are not the 0 and 1 that would hide a mix-up."""
    torch.manual_seed(0)
    config = VanillaTransformerConfig.preset("test", **{"vocab_size": 20, "dropout": 0.0, **overrides})
    model = VanillaTransformerForConditionalGeneration(config).eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def rows():
    return Dataset.from_dict({"input_ids": [s for s, _ in PAIRS], "labels": [t for _, t in PAIRS]})


def attention_is_torchs(folder):
    model = a_model()
    ours = model.model.decoder.stack.layers[0].self_attn
    theirs = nn.MultiheadAttention(32, 4, batch_first=True)
    projections = (ours.q_proj, ours.k_proj, ours.v_proj)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([projection.weight for projection in projections]))
        theirs.in_proj_bias.copy_(torch.cat([projection.bias for projection in projections]))
        theirs.out_proj.weight.copy_(ours.out_proj.weight)
        theirs.out_proj.bias.copy_(ours.out_proj.bias)
    states = torch.randn(2, 5, 32) * 3
    allowed = torch.ones(5, 5, dtype=torch.bool).tril()
    expected, _ = theirs(states, states, states, attn_mask=~allowed)
    actual, _ = ours(states, mask=allowed[None, None], attend=model._attention_function())
    torch.testing.assert_close(actual, expected, **CLOSE)


def later_words_change_nothing(folder):
    model, changed = a_model(), TARGET.clone()
    changed[:, 2:] = 17
    before, after = (model(SOURCE, decoder_input_ids=ids).logits[:, :2] for ids in (TARGET, changed))
    torch.testing.assert_close(before, after, **CLOSE)


def padding_changes_nothing(folder):
    model = a_model()
    alone = model(SOURCE[1:, :3], decoder_input_ids=TARGET[1:]).logits
    in_a_batch = model(SOURCE, decoder_input_ids=TARGET).logits[1:]
    torch.testing.assert_close(in_a_batch, alone, **CLOSE)


def the_first_layer_gets_section_3_4(folder):
    """Embeddings times sqrt(d_model), plus equation PE(pos, 2i)."""
    model = a_model()
    first = model.model.encoder(SOURCE[:1], output_hidden_states=True).hidden_states[0][0]
    exponents = torch.arange(0, 32, 2) / 32
    angles = torch.arange(5)[:, None] / 10000**exponents
    sinusoids = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
    weight = model.get_parameter("model.decoder.embed_tokens.weight")
    torch.testing.assert_close(first, weight[SOURCE[0]] * 32**0.5 + sinusoids, **CLOSE)


def every_earlier_word_counts(folder):
    """The last state has a gradient with respect to each earlier word, whatever its id."""
    model = a_model(share_encoder_decoder_embeddings=False, tie_word_embeddings=False)
    words = torch.tensor([[2, 11, HIDDEN_WORD, 12]])
    state = model.model(SOURCE[:1], decoder_input_ids=words).last_hidden_state[0, -1]
    (state * torch.randn(32)).sum().backward()
    gradients = model.get_parameter("model.decoder.embed_tokens.weight").grad[words[0]]
    assert (gradients.abs().amax(dim=1) > 1e-6).all(), gradients.abs().amax(dim=1)


def the_decoder_is_shown_earlier_words_only(folder):
    model, labels = a_model(), torch.tensor([[11, 12, 13, EOS]])
    expected = model(SOURCE[:1], decoder_input_ids=torch.tensor([[2, 11, 12, 13]])).logits
    torch.testing.assert_close(model(SOURCE[:1], labels=labels).logits, expected, **CLOSE)


def the_loss_is_the_mean_over_words(folder):
    model = a_model()
    torch.testing.assert_close(model(**PairCollator(PAD)(list(rows()))).loss, loss_by_hand(model, rows()), **CLOSE)


def every_target_ends(folder):
    for row in PairCollator(PAD)(list(rows()))["labels"]:
        assert row[row != -100][-1] == EOS


def accumulation_changes_nothing(folder):
    """Three micro-batches of one pair each have the gradient of one batch of three."""
    model, first = a_model(label_smoothing=0.1), FirstStep()
    loss_by_hand(model, rows(), label_smoothing=0.1).backward()
    expected = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    options = {"gradient_accumulation_steps": 3, "max_tokens_per_batch": 1, "max_steps": 1}
    bare_trainer(folder, model, rows(), [first], **options, eval_strategy="no", save_strategy="no").train()
    for name, gradient in expected.items():
        torch.testing.assert_close(first.gradients[name], gradient, **CLOSE)


def saved(folder, **overrides):
    """A model and a tokenizer on disk; the model as it is in memory, and the folder."""
    tokenizer = joint_tokenizer(learn_backend(["the old man sees the young woman"] * 9, vocab_size=40))
    SubwordDropout(tokenizer.backend_tokenizer, 0.3)  # as a training with subword dropout makes one
    model = a_model(vocab_size=40, **overrides)
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    return model, str(folder)


def a_loaded_model_is_deterministic(folder):
    model, _ = load_model(saved(folder, dropout=0.3)[1], device="cpu")
    once, again = (model(SOURCE, decoder_input_ids=TARGET).logits for _ in range(2))
    torch.testing.assert_close(once, again, atol=0, rtol=0)


def a_loaded_model_computes_what_was_saved(folder):
    model, name = saved(folder)
    loaded, _ = load_model(name, device="cpu")
    before, after = (m(SOURCE, decoder_input_ids=TARGET).logits for m in (model, loaded))
    torch.testing.assert_close(after, before, **CLOSE)


def a_loaded_tokenizer_splits_in_one_way(folder):
    _, tokenizer = load_model(saved(folder)[1], device="cpu")
    assert len({tuple(tokenizer("the old man").input_ids) for _ in range(50)}) == 1


def what_is_scored_was_generated(folder):
    model = a_model()
    trainer = bare_trainer(folder, model, rows(), eval_dataset=rows(), max_tokens_per_batch=10)
    predicted = trainer.predict(rows(), num_beams=1, max_length=12).predictions
    for (source, _), row in zip(PAIRS, predicted, strict=True):
        generated = model.generate(torch.tensor([source]), num_beams=1, max_length=12)[0].tolist()
        assert [i for i in row.tolist() if i not in (PAD, -100)] == [i for i in generated if i != PAD]


CHECKS = {
    "attention is torch's": attention_is_torchs,
    "later words change nothing": later_words_change_nothing,
    "padding changes nothing": padding_changes_nothing,
    "the first layer gets section 3.4": the_first_layer_gets_section_3_4,
    "every earlier word counts": every_earlier_word_counts,
    "the decoder is shown earlier words only": the_decoder_is_shown_earlier_words_only,
    "the loss is the mean over words": the_loss_is_the_mean_over_words,
    "every target ends": every_target_ends,
    "accumulation changes nothing": accumulation_changes_nothing,
    "a loaded model is deterministic": a_loaded_model_is_deterministic,
    "a loaded model computes what was saved": a_loaded_model_computes_what_was_saved,
    "a loaded tokenizer splits in one way": a_loaded_tokenizer_splits_in_one_way,
    "what is scored was generated": what_is_scored_was_generated,
}


@pytest.mark.parametrize("check", CHECKS)
def test_we_do_not_have_the_defect(tmp_path, check):
    CHECKS[check](tmp_path)


@pytest.mark.parametrize("name", DEFECTS)
def test_the_defect_is_caught(tmp_path, name):
    with DEFECTS[name].inject(), pytest.raises(AssertionError):
        CHECKS[DEFECTS[name].check](tmp_path)


@pytest.mark.parametrize("fill", [1e-9, -1e-9])
def test_other_fillings_of_a_weak_mask_are_caught(tmp_path, monkeypatch, fill):
    weak = partial(attention_with_a_weak_mask, fill=fill)
    monkeypatch.setattr(modeling_vanilla_transformer, "scaled_dot_product_attention", weak)
    with pytest.raises(AssertionError):
        CHECKS[DEFECTS["weak mask"].check](tmp_path)


def test_nothing_is_left_behind(tmp_path):
    """A check that failed because of an earlier injection would prove nothing."""
    for defect in DEFECTS.values():
        with defect.inject():
            pass
    for number, check in enumerate(CHECKS.values()):
        check(tmp_path / str(number))


def test_every_check_catches_something():
    assert {defect.check for defect in DEFECTS.values()} == set(CHECKS)


@pytest.fixture(scope="module")
def costs():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("costs", TESTS.parent / "scripts" / "known_defects.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_trains_translates_and_scores_with_a_defect(costs, tmp_path, monkeypatch):
    """A model that is shown its answers reads them off, and has never learned to translate."""
    small = ["--num_train_epochs", "2", "--warmup_steps", "3", "--generation_max_length", "12", "--preset", "test"]
    monkeypatch.setattr(costs, "SETTINGS", [*costs.SETTINGS, *small])
    corpus = costs.make_corpus(train=300, validation=20, test=20)
    names = ("no defect", "labels not shifted", "teacher-forced BLEU")
    runs = {name: costs.measure(name, corpus, tmp_path) for name in names}
    assert runs["labels not shifted"]["teacher_forced_bleu"] > 90
    assert runs["labels not shifted"]["bleu"]["score"] < 5
    assert runs["no defect"]["teacher_forced_bleu"] < 20
    assert runs["teacher-forced BLEU"] == runs["no defect"]
    assert runs["no defect"]["steps"] == runs["labels not shifted"]["steps"]
    *rows, _, note = costs.table(runs).splitlines()
    assert len(rows) == 2 + len(names)
    bleu = runs["no defect"]["bleu"]["score"]
    assert f"BLEU is {bleu:.1f} to {bleu:.1f}" in note
    assert f"up to {runs['labels not shifted']['teacher_forced_bleu']:.1f} points too high" in note
    assert all(row.count("|") == rows[0].count("|") for row in rows)


def test_the_record_has_every_defect_and_the_settings_of_the_script(costs):
    runs = costs.load_record()["runs"]
    assert set(runs) == set(costs.BASELINES) | set(DEFECTS)
    for name, defect in DEFECTS.items():
        assert tuple(runs[name]["settings"]) == defect.settings


def test_the_script_adds_nothing_to_a_record_of_other_settings(costs, tmp_path, monkeypatch):
    monkeypatch.setattr(costs, "ROOT", tmp_path)
    monkeypatch.setattr(costs, "RECORD", tmp_path / "run.json")
    record = costs.load_record()
    (tmp_path / "run.json").write_text(json.dumps(record), encoding="utf-8")
    assert costs.load_record() == record
    monkeypatch.setattr(costs, "SEED", 7)
    with pytest.raises(SystemExit, match=r"run\.json was made with other settings: remove it to start anew"):
        costs.load_record()


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([4.0, 1.0, 1.04], "yes (4.00 → 1.04)"),
        ([4.0, 1.0, 1.2], "no (4.00 → 1.20)"),
        ([4.0, 3.0, 2.5], "no (4.00 → 2.50)"),
        ([4.0, float("nan"), 1.0], "no (4.00 → 1.00)"),
        ([0.06, 0.08], "too good (0.06 → 0.08)"),
    ],
    ids=["falls", "rises", "hardly falls", "not a number", "nothing to learn"],
)
def test_what_a_healthy_loss_is(costs, losses, expected):
    assert costs.looks_healthy({"validation_losses": losses}) == expected


GUARDS = [(name, guard) for name, defect in DEFECTS.items() for guard in defect.guards]


@pytest.mark.parametrize("guard", sorted({guard for _, guard in GUARDS}))
def test_the_named_tests_exist(guard):
    file, *names = guard.split("::")
    text = (TESTS / file).read_text(encoding="utf-8")
    assert all(re.search(rf"^ *(class|def) {name}\b", text, re.MULTILINE) for name in names)


def test_every_defect_has_a_guard():
    assert {name for name, _ in GUARDS} == set(DEFECTS)


RUN_WITH = """
import sys
sys.path.insert(0, sys.argv[1])
import pytest
from known_defects import DEFECTS
with DEFECTS[sys.argv[2]].inject():
    sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", sys.argv[3]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "guard"), GUARDS)
def test_the_daily_suite_fails_with_the_defect(name, guard):
    words = [sys.executable, "-c", RUN_WITH, str(TESTS), name, str(TESTS / guard)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, cwd=TESTS.parent)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout[-2000:] + done.stderr[-2000:]
