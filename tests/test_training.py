"""Training against oracles: PyTorch's own cross-entropy, the paper's equations, recurrences and means by hand."""

import copy
import importlib
import json
import os
import re
import subprocess
import sys
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
import yaml
from datasets import Dataset, DatasetDict
from safetensors.numpy import load_file
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    GenerationConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)

from bare_trainer import FirstStep, bare_trainer, loss_by_hand
from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration, training
from hf_vanilla_transformer.arguments import parse_arguments
from hf_vanilla_transformer.averaging import ExponentialMovingAverage, average_checkpoints
from hf_vanilla_transformer.batching import TokenBatchSampler
from hf_vanilla_transformer.cli import main
from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.tokenization_vanilla_transformer import SubwordDropout, load_tokenizer
from hf_vanilla_transformer.training import train
from word_reversal import corpus, exact_matches, flags, sentences, translate, write_pairs

VOCABULARY = 40

pytestmark = pytest.mark.usefixtures("one_thread")


def run(folder, score=exact_matches, **options):
    """A small training on the toy corpus; its output folder."""
    folder.mkdir(exist_ok=True)
    text = {} if "dataset_name" in options else corpus(folder)
    return train(parse_arguments(flags(folder / "out", **{**text, **options})), score)


def record_of(output):
    return json.loads((output / "run.json").read_text(encoding="utf-8"))


def logged(output, key):
    """The values of the curve that have `key`, by step."""
    return {entry["step"]: entry[key] for entry in record_of(output)["curve"] if key in entry}


def fails(message, folder, **options):
    with pytest.raises(UserError, match=message) as caught:
        run(folder, **options)
    assert "\n" not in str(caught.value)


def toy_model(**overrides):
    torch.manual_seed(0)
    settings = {"vocab_size": VOCABULARY, "dropout": 0.0, "label_smoothing": 0.0, **overrides}
    return VanillaTransformerForConditionalGeneration(VanillaTransformerConfig.preset("test", **settings))


def toy_ids(count=8, seed=0):
    """Random pairs of unequal lengths, EOS at the end, as a data set of token ids."""
    rng = np.random.default_rng(seed)
    sides = {
        name: [[*rng.integers(4, VOCABULARY, rng.integers(2, 9)).tolist(), 3] for _ in range(count)]
        for name in ("input_ids", "labels")
    }
    return Dataset.from_dict(sides)


def reference_gradients(model, rows, label_smoothing):
    twin = copy.deepcopy(model).train()
    loss = loss_by_hand(twin, rows, label_smoothing)
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in twin.named_parameters()}


def assert_same_gradients(actual, expected):
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=0, atol=1e-6, msg=lambda text, name=name: name + text)


# The main job


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Two epochs with every default of the paper's optimiser; a tokenizer of each side's words."""
    return run(tmp_path_factory.mktemp("finished"), learning_rate=None, warmup_steps=5, seed=7)


def test_two_text_files_become_a_folder_that_transformers_loads(finished):
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(finished), AutoTokenizer.from_pretrained(finished)
    assert isinstance(model, VanillaTransformerForConditionalGeneration)
    assert model.config.vocab_size == len(tokenizer)
    batch = tokenizer(["dog cat house", "tree"], padding=True, return_tensors="pt")
    output = model.generate(**batch)
    assert output.shape[0] == 2
    assert all(isinstance(text, str) for text in tokenizer.batch_decode(output, skip_special_tokens=True))


def test_only_what_is_needed_is_left(finished):
    assert not (finished / "prepared").exists()
    names = {path.name for path in finished.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "run.json", "tokenizer.json"} <= names
    assert not list(finished.glob("*.pt*"))


def test_the_record_is_complete(finished):
    record = record_of(finished)
    assert record["command"]
    assert record["versions"]["torch"] == torch.__version__
    assert record["versions"]["transformers"] == transformers.__version__
    assert {"python", "tokenizers", "datasets", "accelerate", "safetensors"} <= record["versions"].keys()
    assert record["hardware"]["cpu"] and record["hardware"]["cores"] >= 1
    assert "gpu" in record["hardware"]
    assert record["seed"] == 7
    assert (record["source_lang"], record["target_lang"]) == ("en", "xx")
    assert record["data"]["description"] == "train.en and train.xx"
    assert record["data"]["report"]["read"] == record["data"]["report"]["kept"] == 60
    assert record["training"]["steps"] == 16
    assert record["training"]["epochs"] == 2
    assert record["training"]["weights"] == "mean of the last 2 checkpoints"
    assert record["training"]["resumed_from"] is None
    assert record["training"]["seconds"] > 0
    assert record["parameters"] == AutoModelForSeq2SeqLM.from_pretrained(finished).num_parameters()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT.*", record["date"])


def test_the_record_tells_back_translations_from_real_text(tmp_path):
    (tmp_path / "more").mkdir()
    lines = sentences(20, seed=1)
    files = write_pairs(tmp_path / "more", "back", lines, [translate(line) for line in lines])
    data = record_of(run(tmp_path, synthetic_file=files, max_steps=1, eval_strategy="no"))["data"]
    assert data["description"] == "train.en and train.xx, and back-translations: back.en and back.xx"
    assert (data["report"]["read"], data["report"]["back_translations"]["read"]) == (60, 20)


def test_the_record_says_what_the_text_is_and_was(tmp_path):
    first = run(tmp_path / "one", max_steps=1, data_description="Made up.")
    second = run(tmp_path / "two", max_steps=1, model_name_or_path=first, preset=None)
    third = run(tmp_path / "three", max_steps=1, model_name_or_path=second, preset=None)
    files = "train.en and train.xx"
    assert record_of(first)["data"]["before"] == []
    assert record_of(third)["data"]["before"] == [f"{files}. Made up.", files]


def test_truncation_knows_the_length_of_the_model(finished):
    tokenizer = AutoTokenizer.from_pretrained(finished)
    limit = AutoConfig.from_pretrained(finished).max_position_embeddings
    assert len(tokenizer("a " * 2 * limit, truncation=True)["input_ids"]) == limit


def test_the_record_counts_target_tokens(finished):
    tokenizer = AutoTokenizer.from_pretrained(finished)
    targets = tokenizer(text_target=[translate(line) for line in sentences(66)[:60]])["input_ids"]
    assert record_of(finished)["training"]["target_tokens"] == 2 * sum(len(ids) for ids in targets)


def test_no_speed_is_made_of_a_batch_size_that_there_is_not(tmp_path):
    curve = record_of(run(tmp_path, max_steps=2))["curve"]
    assert "train_runtime" in curve[-1]
    assert not any("train_samples_per_second" in entry for entry in curve)


def test_the_record_names_the_commit(finished):
    folder = Path(training.__file__).parent
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True)
    commit = record_of(finished)["commit"]
    assert commit is None if found.returncode else commit.removesuffix("-dirty") == found.stdout.strip()


def test_the_curve_has_every_step_and_every_evaluation(finished):
    assert list(logged(finished, "loss")) == list(range(1, 17))
    for key in ("eval_loss", "eval_bleu"):
        assert list(logged(finished, key)) == [8, 16]
    assert all(np.isfinite(loss) for loss in logged(finished, "loss").values())


def test_the_recipe_in_the_record_starts_the_same_training(finished, tmp_path):
    """What was given comes back, also what training itself changes on the way, such as the label smoothing.

    Only folders do not: a record is published.
    """
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(record_of(finished)["recipe"]))
    again = parse_arguments([str(recipe), "--output_dir", str(tmp_path)])
    names = {option: [Path(path).name for path in paths] for option, paths in corpus(finished.parent).items()}
    first = parse_arguments(flags(tmp_path, **names, learning_rate=None, warmup_steps=5, seed=7, disable_tqdm=True))
    for group, expected in zip(again, first, strict=True):
        assert vars(group).keys() == vars(expected).keys()
        for name in expected.__dataclass_fields__:
            if not name.startswith(("logging_dir", "accelerator_config")):
                assert getattr(group, name) == getattr(expected, name), name


def test_generation_settings_are_complete_from_the_first_checkpoint_on(finished):
    """transformers' own defaults (20 tokens, one beam) never get in, also after evaluations."""
    folders = [finished, *sorted(finished.glob("checkpoint-*"))]
    assert len(folders) == 3
    for folder in folders:
        settings = json.loads((folder / "generation_config.json").read_text())
        settings.pop("transformers_version")
        settings.pop("_from_model_config", None)
        assert settings == {
            "bos_token_id": 2,
            "eos_token_id": 3,
            "pad_token_id": 1,
            "decoder_start_token_id": 2,
            "max_length": 20,
            "num_beams": 2,
            "early_stopping": True,
            "length_penalty": 1.0,
            "length_penalty_type": "average",
        }


def test_generation_settings_follow_the_flags(tmp_path):
    options = {"generation_max_length": 31, "generation_num_beams": 3, "length_penalty": 0.6, "max_steps": 2}
    options["length_penalty_type"] = "wu"
    output = run(tmp_path, **options, save_steps=1, eval_steps=1, save_strategy="steps", eval_strategy="steps")
    for folder in (output, output / "checkpoint-1", output / "checkpoint-2"):
        settings = GenerationConfig.from_pretrained(folder)
        assert (settings.max_length, settings.num_beams, settings.length_penalty) == (31, 3, 0.6)
        assert settings.length_penalty_type == "wu"
    greedy = run(tmp_path / "greedy", generation_num_beams=1, max_steps=1, eval_strategy="no")
    assert "early_stopping" not in json.loads((greedy / "generation_config.json").read_text())


def test_the_toy_language_is_learned(tmp_path):
    output = run(tmp_path, num_train_epochs=12, eval_strategy="no", save_strategy="no", dropout=None)
    losses = list(logged(output, "loss").values())
    assert np.mean(losses[-8:]) < 0.7 * np.mean(losses[:8])


# Loss and gradients


@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_gradients_do_not_depend_on_accumulation(tmp_path, accumulation, label_smoothing):
    """One step over 8 pairs, whole or in micro-batches with unequal numbers of tokens, against torch's own loss."""
    rows, first = toy_ids(), FirstStep()
    model = toy_model(label_smoothing=label_smoothing)
    loss, expected = reference_gradients(model, rows, label_smoothing)
    options = {"gradient_accumulation_steps": accumulation, "max_tokens_per_batch": 1000, "max_steps": 1}
    trainer = bare_trainer(tmp_path, model, rows, [first], **options, eval_strategy="no", save_strategy="no")
    batches = list(trainer.get_train_dataloader())
    assert len(batches) == accumulation
    assert accumulation == 1 or len({int(batch["labels"].ne(-100).sum()) for batch in batches}) > 1
    trainer.train()
    assert_same_gradients(first.gradients, expected)
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_every_epoch_has_the_same_number_of_full_steps(tmp_path, accumulation):
    lengths = [max(len(row["input_ids"]), len(row["labels"])) for row in toy_ids(50)]
    sampler = TokenBatchSampler(lengths, 40, seed=1, accumulation=accumulation)
    assert len(sampler) % accumulation == 0
    for epoch in range(5):
        sampler.set_epoch(epoch)
        assert len(list(sampler)) == len(sampler)
    options = {"num_train_epochs": 3, "gradient_accumulation_steps": accumulation, "max_tokens_per_batch": 40}
    trainer = bare_trainer(tmp_path, toy_model(), toy_ids(50), **options, eval_strategy="no", save_strategy="no")
    trainer.train()
    steps = len(trainer.get_train_dataloader()) // accumulation
    assert steps > 2
    assert trainer.state.global_step == trainer.state.max_steps == 3 * steps
    assert trainer.state.epoch == 3


def test_label_smoothing_reaches_the_model_and_is_applied_once(tmp_path):
    """With a learning rate of zero the saved model is the first one: its smoothed loss is what was logged."""
    output = run(
        tmp_path,
        learning_rate=0,
        label_smoothing_factor=0.3,
        config_overrides="dropout=0",
        max_tokens_per_batch=10000,
        max_steps=1,
        eval_strategy="no",
    )
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(output), AutoTokenizer.from_pretrained(output)
    assert model.config.label_smoothing == 0.3
    rows = [
        {"input_ids": tokenizer(line)["input_ids"], "labels": tokenizer(text_target=translate(line))["input_ids"]}
        for line in sentences(66)[:60]
    ]
    assert logged(output, "loss")[1] == pytest.approx(loss_by_hand(model, rows, 0.3).item(), abs=1e-4)
    assert abs(loss_by_hand(model, rows, 0.3).item() - loss_by_hand(model, rows, 0.0).item()) > 0.01
    assert record_of(output)["recipe"]["label_smoothing_factor"] == 0.3


@pytest.mark.parametrize("batch", [4, 64])
def test_the_evaluation_loss_is_that_of_all_target_tokens_and_not_smoothed(tmp_path, batch):
    """Also where its batches are not of one size: the sentences are in order of their length."""
    options = {"label_smoothing_factor": 0.3, "max_steps": 8, "average_checkpoints": 0}
    output = run(tmp_path, per_device_eval_batch_size=batch, **options)
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(output), AutoTokenizer.from_pretrained(output)
    rows = [
        {"input_ids": tokenizer(line)["input_ids"], "labels": tokenizer(text_target=translate(line))["input_ids"]}
        for line in sentences(66)[60:]
    ]
    assert logged(output, "eval_loss")[8] == pytest.approx(loss_by_hand(model.eval(), rows, 0.0).item(), abs=1e-5)


# The plain Seq2SeqTrainer


def plain_trainer(folder, rows, model, callbacks=(), batch=8, **options):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    settings = {"max_steps": 1, "logging_steps": 1, "use_cpu": True, "disable_tqdm": True, "max_grad_norm": 0.0}
    return Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(
            output_dir=str(folder / "plain"), per_device_train_batch_size=batch, **{**settings, **options}
        ),
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=tokenizer,
        callbacks=list(callbacks),
    )


@pytest.fixture(scope="module")
def tokenizer_folder(finished, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    AutoTokenizer.from_pretrained(finished).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_the_plain_trainer_gives_the_gradients_of_a_loop_by_hand(tokenizer_folder, accumulation, label_smoothing):
    """Smoothed by the Trainer or not at all, in one batch of eight or in four of two."""
    rows, first, model = toy_ids(), FirstStep(), toy_model(label_smoothing=0.0)
    loss, expected = reference_gradients(model, rows, label_smoothing)
    trainer = plain_trainer(
        tokenizer_folder,
        rows,
        model,
        [first],
        batch=8 // accumulation,
        gradient_accumulation_steps=accumulation,
        label_smoothing_factor=label_smoothing,
        save_strategy="no",
    )
    trainer.train()
    assert_same_gradients(first.gradients, expected)
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss, abs=1e-5)


def test_smoothing_in_the_model_and_in_the_plain_trainer_do_not_add_up(tokenizer_folder):
    rows, first, model = toy_ids(), FirstStep(), toy_model(label_smoothing=0.1)
    _, expected = reference_gradients(model, rows, 0.1)
    trainer = plain_trainer(tokenizer_folder, rows, model, [first], label_smoothing_factor=0.1, save_strategy="no")
    trainer.train()
    assert_same_gradients(first.gradients, expected)


@pytest.mark.parametrize("predict_with_generate", [True, False])
def test_the_plain_trainer_trains_evaluates_and_predicts(tokenizer_folder, predict_with_generate):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    lines = sentences(40)
    rows = Dataset.from_dict(
        {
            "input_ids": tokenizer(lines)["input_ids"],
            "labels": tokenizer(text_target=[translate(line) for line in lines])["input_ids"],
        }
    )
    trainer = plain_trainer(
        tokenizer_folder,
        rows,
        toy_model(vocab_size=len(tokenizer)),
        max_steps=30,
        learning_rate=5e-3,
        predict_with_generate=predict_with_generate,
        generation_max_length=24,
        eval_strategy="steps",
        eval_steps=15,
        save_strategy="no",
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert np.mean(losses[-5:]) < 0.85 * np.mean(losses[:5])
    first, last = (entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry)
    assert last < first
    predictions = trainer.predict(rows.select(range(5))).predictions
    if predict_with_generate:
        assert predictions.shape[0] == 5
        assert predictions.ndim == 2
        assert np.all(predictions[:, 0] == 2)


# Optimiser and schedule


def test_the_learning_rate_is_equation_3(finished):
    """d_model^-0.5 * min(step^-0.5, step * warmup^-1.5), at each of the 16 steps."""
    for step, rate in logged(finished, "learning_rate").items():
        assert rate == pytest.approx(32**-0.5 * min(step**-0.5, step * 5**-1.5), rel=1e-9), step


def test_adam_has_the_papers_settings(finished):
    state = torch.load(finished / "checkpoint-16" / "optimizer.pt", weights_only=True)
    for group in state["param_groups"]:
        assert tuple(group["betas"]) == (0.9, 0.98)
        assert group["eps"] == 1e-9
        assert group["weight_decay"] == 0


def test_other_schedules_are_transformers_own(tmp_path):
    output = run(
        tmp_path, lr_scheduler_type="linear", learning_rate=0.5, warmup_steps=0, max_steps=4, eval_strategy="no"
    )
    assert list(logged(output, "learning_rate").values()) == pytest.approx([0.5, 0.375, 0.25, 0.125])


def test_options_of_the_papers_schedule_reach_it(tmp_path):
    options = {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 2, "max_steps": 4}
    rates = [
        list(logged(run(tmp_path / name, **options, **more), "learning_rate").values())
        for name, more in (("plain", {}), ("flat", {"lr_scheduler_kwargs": '{"timescale": 100000}'}))
    ]
    assert rates[0][:2] == rates[1][:2]
    assert rates[1][-1] > rates[0][-1]


def test_the_papers_learning_rate_needs_a_warm_up(tmp_path):
    fails(
        "warmup_steps=0.1: the paper's learning rate needs a number of steps",
        tmp_path,
        learning_rate=None,
        warmup_steps=0.1,
    )


# Averages


def test_the_result_is_the_mean_of_the_checkpoints_files(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 8, "eval_strategy": "no"}
    output = run(tmp_path, **options, average_checkpoints=3)
    files = [load_file(output / f"checkpoint-{step}" / "model.safetensors") for step in (4, 6, 8)]
    result = load_file(output / "model.safetensors")
    assert result.keys() == files[0].keys()
    for name, weight in result.items():
        mean = np.mean([file[name].astype(np.float64) for file in files], axis=0)
        np.testing.assert_array_equal(weight, mean.astype(np.float32))
    assert any(np.abs(result[name] - files[-1][name]).max() > 1e-4 for name in result)
    assert record_of(output)["training"]["weights"] == "mean of the last 3 checkpoints"
    model = AutoModelForSeq2SeqLM.from_pretrained(output)
    assert model.lm_head.weight is model.model.decoder.embed_tokens.weight is model.model.encoder.embed_tokens.weight


def test_fewer_checkpoints_than_were_to_be_averaged_are_said(tmp_path, capsys):
    run(tmp_path, average_checkpoints=5, save_total_limit=1)
    assert "weights of the result: last step\n" in capsys.readouterr().out


def test_checkpoints_of_a_longer_run_before_are_not_averaged(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "no", "average_checkpoints": 3}
    output = run(tmp_path, **options, max_steps=8)
    run(tmp_path, **options, max_steps=6, resume_from_checkpoint=output / "checkpoint-4", save_total_limit=9)
    files = [load_file(output / f"checkpoint-{step}" / "model.safetensors") for step in (4, 6)]
    assert record_of(output)["training"]["weights"] == "mean of the last 2 checkpoints"
    for name, weight in load_file(output / "model.safetensors").items():
        mean = np.mean([file[name].astype(np.float64) for file in files], axis=0)
        np.testing.assert_array_equal(weight, mean.astype(np.float32))


@pytest.mark.parametrize("wanted", [0, 1])
def test_without_averaging_the_result_is_the_last_step(tmp_path, wanted):
    output = run(tmp_path, average_checkpoints=wanted, eval_strategy="no")
    last, result = (load_file(path / "model.safetensors") for path in (output / "checkpoint-16", output))
    assert all(np.array_equal(last[name], result[name]) for name in last)
    assert record_of(output)["training"]["weights"] == "last step"


def test_the_mean_is_summed_in_double_precision_and_keeps_the_dtype(tmp_path):
    from safetensors.torch import save_file

    for number, value in enumerate((1e8, 1.0, -1e8)):
        (tmp_path / str(number)).mkdir()
        weights = {"single": torch.tensor([value]), "half": torch.tensor([number], dtype=torch.bfloat16)}
        save_file(weights, tmp_path / str(number) / "model.safetensors")
    mean = average_checkpoints([tmp_path / str(number) for number in range(3)])
    assert mean["single"].item() == pytest.approx(1 / 3)
    assert mean["single"].dtype == torch.float32
    assert mean["half"].item() == 1
    assert mean["half"].dtype == torch.bfloat16


class Weights(TrainerCallback):
    """Keeps the weights after each step."""

    def __init__(self):
        self.steps = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.steps.append({name: weight.detach().clone().double() for name, weight in model.named_parameters()})


def test_the_moving_average_follows_its_recurrence(tmp_path):
    weights, model = Weights(), toy_model()
    average = {name: weight.detach().clone().double() for name, weight in model.named_parameters()}
    options = {"ema_decay": 0.4, "max_steps": 7, "max_tokens_per_batch": 40, "gradient_accumulation_steps": 2}
    trainer = bare_trainer(tmp_path, model, toy_ids(40), [weights], **options, eval_strategy="no", save_strategy="no")
    trainer.train()
    assert len(weights.steps) == 7
    decays = [min(0.4, (1 + step) / (10 + step)) for step in range(1, 8)]
    assert decays[0] < 0.4 == decays[-1]
    for decay, step in zip(decays, weights.steps, strict=True):
        average = {name: decay * average[name] + (1 - decay) * step[name] for name in average}
    for name, expected in average.items():
        torch.testing.assert_close(trainer.ema.shadow[name].double(), expected, rtol=0, atol=1e-6)


def assert_result_is(output, file):
    """The model that transformers loads has the weights of `file`, whichever name a tied weight has there."""
    expected = load_file(file)
    named = dict(AutoModelForSeq2SeqLM.from_pretrained(output).named_parameters(remove_duplicate=False))
    assert len(expected) == len({weight.data_ptr() for weight in named.values()})
    assert all(np.array_equal(named[name].detach().numpy(), weight) for name, weight in expected.items())


def test_the_moving_average_is_the_result(tmp_path):
    output = run(tmp_path, ema_decay=0.5, max_steps=6, save_strategy="steps", save_steps=6, eval_strategy="no")
    assert_result_is(output, output / "checkpoint-6" / "ema.safetensors")
    result, own = (load_file(folder / "model.safetensors") for folder in (output, output / "checkpoint-6"))
    assert any(not np.array_equal(result[name], own[name]) for name in result)
    assert record_of(output)["training"]["weights"] == "exponential moving average, decay 0.5"


def test_an_evaluation_sees_the_moving_average_and_leaves_the_weights_as_they_were(tmp_path):
    model, rows = toy_model(), toy_ids(40)
    trainer = bare_trainer(
        tmp_path,
        model,
        rows,
        ema_decay=0.9,
        max_steps=5,
        eval_dataset=toy_ids(6),
        eval_strategy="no",
        save_strategy="no",
    )
    trainer.train()
    before = copy.deepcopy(model.state_dict())
    loss = trainer.evaluate()["eval_loss"]
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    twin = toy_model().eval()
    own = loss_by_hand(model.eval(), toy_ids(6), 0.0).item()
    twin.load_state_dict(trainer.ema.shadow, strict=False)
    assert loss == pytest.approx(loss_by_hand(twin, toy_ids(6), 0.0).item(), abs=1e-5)
    assert abs(loss - own) > 1e-3


def test_the_weights_come_back_when_an_evaluation_fails():
    model = toy_model()
    average = ExponentialMovingAverage(model, 0.9)
    before = copy.deepcopy(model.state_dict())
    for weight in average.shadow.values():
        weight.zero_()
    with pytest.raises(KeyboardInterrupt), average.applied():
        assert not model.lm_head.weight.any()
        raise KeyboardInterrupt
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("ema_decay", [0.0, 0.6])
def test_the_best_checkpoint_is_the_result_where_that_is_wished(tmp_path, ema_decay):
    """The score says that the second evaluation of four was the best one."""
    scores = iter([1, 4, 3, 2])
    output = run(
        tmp_path,
        score=lambda hypotheses, references: {"bleu": next(scores)},
        load_best_model_at_end=True,
        ema_decay=ema_decay,
        max_steps=8,
        **{f"{what}_{key}": value for what in ("eval", "save") for key, value in (("strategy", "steps"), ("steps", 2))},
    )
    assert_result_is(output, output / "checkpoint-4" / ("ema.safetensors" if ema_decay else "model.safetensors"))
    assert record_of(output)["training"]["weights"].endswith("best checkpoint by bleu")


@pytest.mark.parametrize("ema_decay", [0.0, 0.6])
def test_there_is_no_best_checkpoint_without_a_score(tmp_path, ema_decay):
    output = run(
        tmp_path,
        score=lambda hypotheses, references: {"bleu": float("nan")},
        load_best_model_at_end=True,
        ema_decay=ema_decay,
        max_steps=4,
        **{f"{what}_{key}": value for what in ("eval", "save") for key, value in (("strategy", "steps"), ("steps", 2))},
    )
    weights = "exponential moving average, decay 0.6" if ema_decay else "mean of the last 2 checkpoints"
    assert record_of(output)["training"]["weights"] == weights


# Evaluation


def test_evaluations_use_their_own_beams(tmp_path, monkeypatch):
    seen = []
    generate = VanillaTransformerForConditionalGeneration.generate

    def spy(self, *args, **kwargs):
        config, given = self.generation_config, kwargs
        seen.append(
            tuple(given.get(key, getattr(config, key)) for key in ("num_beams", "max_length", "length_penalty"))
        )
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(VanillaTransformerForConditionalGeneration, "generate", spy)
    longest = max(len(translate(line).replace(" ", "")) for line in sentences(66)[60:])
    run(tmp_path / "greedy", max_steps=8, length_penalty=0.6)
    assert {(beams, penalty) for beams, _, penalty in seen} == {(1, 1.0)}
    assert all(length <= 20 for _, length, _ in seen)
    seen.clear()
    options = {"eval_num_beams": 4, "generation_max_length": 500, "length_penalty": 0.6}
    output = run(tmp_path / "beams", max_steps=8, **options)
    assert {(beams, penalty) for beams, _, penalty in seen} == {(4, 0.6)}
    assert all(length <= 2 * 2 * longest + 4 for _, length, _ in seen), "an untrained model would fill any room"
    assert GenerationConfig.from_pretrained(output).num_beams == 2


def test_the_score_gets_every_sentence_without_special_tokens(tmp_path):
    calls = []

    def score(hypotheses, references):
        calls.append((hypotheses, references))
        return {"bleu": len(calls)}

    output = run(tmp_path, score=score)
    assert logged(output, "eval_bleu") == {8: 1, 16: 2}
    for hypotheses, references in calls:
        assert len(hypotheses) == 6
        assert sorted(references) == sorted(translate(line) for line in sentences(66)[60:])
        assert not any("<" in hypothesis for hypothesis in hypotheses)


def test_what_is_scored_is_what_the_saved_model_translates(tmp_path):
    """Sentence by sentence, although batches of five were sorted by length and padded."""
    folder = tmp_path / "text"
    folder.mkdir()
    lines = sentences(12)
    text = write_pairs(folder, "train", lines, [translate(line) for line in lines])
    other = write_pairs(folder, "other", ["bird bird"], [translate("bird bird")])
    first = run(tmp_path / "one", train_file=text, validation_file=None, num_train_epochs=30)
    calls = []

    def score(hypotheses, references):
        calls.append((hypotheses, references))
        return exact_matches(hypotheses, references)

    options = {"train_file": other, "validation_file": text, "model_name_or_path": first, "max_steps": 1}
    output = run(tmp_path / "two", score=score, **options, learning_rate=0, per_device_eval_batch_size=5)
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(output).eval(), AutoTokenizer.from_pretrained(output)
    ((hypotheses, references),) = calls
    assert len(set(hypotheses)) > 6
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        source = tokenizer(translate(reference), return_tensors="pt")
        ids = model.generate(**source, num_beams=1, early_stopping=False, length_penalty=None, max_length=20)[0]
        assert hypothesis == tokenizer.decode(ids, skip_special_tokens=True)


def test_lower_case_models_are_scored_against_lower_case(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    validation = write_pairs(folder, "val", ["A dog"], ["Ein HUND"])
    calls = []

    def score(hypotheses, references):
        calls.append(references)
        return {"bleu": 0.0}

    run(tmp_path / "lower", score=score, validation_file=validation, lowercase=True, max_steps=8)
    run(tmp_path / "cased", score=score, validation_file=validation, max_steps=8)
    assert calls == [["ein hund"], ["Ein HUND"]]


def test_sample_translations_are_shown(tmp_path, capsys):
    run(tmp_path, num_sample_translations=2, max_steps=8)
    shown = capsys.readouterr().out
    samples = re.findall(r"  source     (.*)\n  reference  (.*)\n  model      .*\n", shown)
    assert len(samples) == 2
    assert all(source in sentences(66)[60:] and translate(source) == reference for source, reference in samples)


def test_evaluations_do_not_change_the_training(tmp_path):
    """With dropout: neither the weights nor the random numbers move."""
    often = run(tmp_path / "often", eval_strategy="steps", eval_steps=3)
    never = run(tmp_path / "never", eval_strategy="no")
    assert logged(often, "loss") == logged(never, "loss")
    one, other = (load_file(output / "model.safetensors") for output in (often, never))
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_without_translations_the_loss_decides(tmp_path):
    for name, options in (("flag", {"predict_with_generate": False}), ("scorer", {"score": None})):
        output = run(tmp_path / name, **options, max_steps=8)
        assert list(logged(output, "eval_loss")) == [8]
        assert not logged(output, "eval_bleu")
    best = {"load_best_model_at_end": True, "metric_for_best_model": "bleu"}
    fails("metric_for_best_model=bleu needs translations", tmp_path / "best", predict_with_generate=False, **best)


# Early stopping


def test_early_stopping_on_the_score(tmp_path):
    scores = iter([1, 3, 2, 3, 9, 9])
    output = run(
        tmp_path,
        score=lambda hypotheses, references: {"bleu": next(scores)},
        early_stopping_patience=2,
        eval_strategy="steps",
        eval_steps=1,
    )
    assert list(logged(output, "eval_bleu")) == [1, 2, 3, 4]
    assert record_of(output)["training"]["steps"] == 4
    assert (output / "model.safetensors").is_file()


def test_early_stopping_on_the_loss(tmp_path):
    """A learning rate of zero: no evaluation is better than the first. Less is better, whatever the score says."""
    scores = iter(range(100))
    options = {"early_stopping_patience": 3, "eval_strategy": "steps", "eval_steps": 1, "learning_rate": 0}
    score = {"score": lambda hypotheses, references: {"bleu": next(scores)}}
    output = run(tmp_path / "loss", **score, **options, metric_for_best_model="loss")
    assert record_of(output)["training"]["steps"] == 4
    output = run(tmp_path / "bleu", **score, **options)
    assert record_of(output)["training"]["steps"] == 16


def test_early_stopping_does_not_stop_a_loss_that_falls(tmp_path):
    options = {"early_stopping_patience": 1, "learning_rate": 0.001, "metric_for_best_model": "loss"}
    assert record_of(run(tmp_path, **options))["training"]["steps"] == 16


# Precision


def test_bf16_trains_on_the_cpu(tmp_path):
    options = {"max_steps": 6, "eval_strategy": "no", "config_overrides": "dropout=0", "learning_rate": 0.001}
    half, single = run(tmp_path / "half", bf16=True, **options), run(tmp_path / "single", **options)
    losses = [list(logged(output, "loss").values()) for output in (half, single)]
    assert np.isfinite(losses[0]).all()
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert losses[0] != losses[1]
    assert AutoModelForSeq2SeqLM.from_pretrained(half).dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_trains_on_the_gpu(tmp_path, precision):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    options = {"max_steps": 20, "config_overrides": "dropout=0", "learning_rate": 0.001, "use_cpu": False}
    half, single = run(tmp_path / "half", **{precision: True}, **options), run(tmp_path / "single", **options)
    losses = [list(logged(output, "loss").values()) for output in (half, single)]
    assert np.isfinite(losses[0]).all()
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


# Where the text comes from, and which tokenizer is learned


def tables(folder):
    """The same pairs in every form that training reads."""
    lines = sentences(30)
    rows = [{"en": line, "xx": translate(line)} for line in lines]
    (folder / "train.tsv").write_text("".join(f"{row['en']}\t{row['xx']}\n" for row in rows))
    (folder / "train.jsonl").write_text("".join(json.dumps({"translation": row}) + "\n" for row in rows))
    DatasetDict(train=Dataset.from_list(rows[5:]), validation=Dataset.from_list(rows[:5])).save_to_disk(
        folder / "saved"
    )


@pytest.mark.parametrize(
    ("source", "pairs", "evaluated"),
    [
        ({"train_file": "train.tsv", "validation_file": None}, 30, False),
        ({"train_file": "train.jsonl", "validation_file": None}, 30, False),
        ({"dataset_name": "saved"}, 25, True),
    ],
)
def test_other_forms_of_text(tmp_path, source, pairs, evaluated):
    tables(tmp_path)
    options = {name: value and tmp_path / value for name, value in source.items()}
    output = run(tmp_path, **options, max_steps=2, eval_strategy="steps", eval_steps=2)
    record = record_of(output)
    assert record["data"]["report"]["kept"] == pairs
    assert record["data"]["description"] == next(iter(source.values()))
    assert record["data"]["dataset"] is None, "not on the Hub"
    assert bool(logged(output, "eval_loss")) == evaluated
    assert record["training"]["steps"] == 2


@pytest.mark.parametrize(
    "options",
    [
        {"tokenizer_type": "bpe", "subword_dropout": 0.2},
        {"tokenizer_type": "unigram"},
        {"tokenizer_type": "byte-level", "vocab_size": 300, "subword_dropout": 0.2},
        {"tokenizer_type": "word-level"},
        {"separate_vocabularies": True},
        {"separate_vocabularies": True, "subword_dropout": 0.2, "lowercase": True, "normalization": "nfkc"},
        {"config_overrides": "share_encoder_decoder_embeddings=false,tie_word_embeddings=false,norm_position=pre"},
        {"config_overrides": '{"position_embedding_type": "learned"}', "attn_implementation": "eager"},
        {"preset": "multi30k-tiny"},
        {"dataloader_num_workers": 1},
    ],
    ids=lambda options: " ".join(f"{name}={value}" for name, value in options.items()),
)
def test_variants_train_and_load(tmp_path, options):
    output = run(tmp_path, **options, max_steps=3, eval_strategy="steps", eval_steps=3)
    assert list(logged(output, "loss")) == [1, 2, 3]
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(output), load_tokenizer(output)
    loaded = model.generate(**tokenizer(["dog cat"], return_tensors="pt"), max_length=8)
    assert isinstance(tokenizer.batch_decode(loaded, skip_special_tokens=True)[0], str)
    separate = "separate_vocabularies" in options
    assert (model.config.encoder_vocab_size is not None) == separate
    sides = (tokenizer.target_vocab_size, len(tokenizer)) if separate else (len(tokenizer), None)
    assert (model.config.vocab_size, model.config.encoder_vocab_size) == sides


def test_subword_dropout_segments_each_side_anew_in_each_epoch(tmp_path, monkeypatch):
    """With its own vocabulary: not one unknown token; and a saved tokenizer that knows nothing of it."""
    seen, encode = {}, SubwordDropout.encode

    def spy(self, text, rng):
        ids = encode(self, text, rng)
        seen.setdefault(text, []).append(ids)
        return ids

    monkeypatch.setattr(SubwordDropout, "encode", spy)
    options = {"separate_vocabularies": True, "subword_dropout": 0.3, "num_train_epochs": 2}
    output = run(tmp_path, **options, eval_strategy="no")
    assert len(seen) == 120
    assert all(len(segmentations) == 2 for segmentations in seen.values())
    assert sum(first != second for first, second in seen.values()) > 100
    assert not any(0 in ids for segmentations in seen.values() for ids in segmentations)
    tokenizer = load_tokenizer(output)
    assert tokenizer("dog cat house")["input_ids"] == tokenizer("dog cat house")["input_ids"]
    for name in ("source_tokenizer.json", "target_tokenizer.json"):
        assert '"dropout":null' in (output / name).read_text().replace(" ", "")


def test_the_order_of_the_data_has_a_seed_of_its_own(tmp_path):
    options = {"config_overrides": "dropout=0", "eval_strategy": "no", "seed": 5}
    curves = [logged(run(tmp_path / f"{seed}", data_seed=seed, **options), "loss") for seed in (5, 6, None)]
    assert curves[0] == curves[2] != curves[1]


def test_training_goes_on_from_another_model(tmp_path):
    """Weights, tokenizer and sizes are taken; what the flags say about dropout and smoothing is new."""
    first = run(tmp_path / "one", max_steps=8)
    options = {"learning_rate": 0, "config_overrides": "dropout=0.25", "label_smoothing_factor": 0.2}
    second = run(tmp_path / "two", model_name_or_path=first, preset=None, max_steps=1, **options)
    one, two = (load_file(output / "model.safetensors") for output in (first, second))
    assert all(np.array_equal(one[name], two[name]) for name in one)
    config = json.loads((second / "config.json").read_text())
    assert (config["dropout"], config["label_smoothing"]) == (0.25, 0.2)
    assert (first / "tokenizer.json").read_text() == (second / "tokenizer.json").read_text()


def test_a_model_that_is_not_found_is_named_with_its_option(tmp_path, monkeypatch):
    """transformers speaks of the network where the Hub is asked for what is no folder."""

    def out_of_reach(name):
        raise OSError("We couldn't connect\nto the Hub")

    monkeypatch.setattr(training.AutoConfig, "from_pretrained", out_of_reach)
    message = "^model_name_or_path user/nothing: We couldn't connect to the Hub$"
    fails(message, tmp_path, model_name_or_path="user/nothing", preset=None)


def test_the_sizes_of_another_model_are_not_changed(tmp_path):
    """Layers of random weights, or weights that are thrown away, would pass for what was asked for."""
    first = run(tmp_path / "one", max_steps=1)
    for override, problem in (
        ("encoder_layers=3", "missing keys: model.encoder.stack.layers.2"),
        ("encoder_layers=1", "unexpected keys: model.encoder.stack.layers.1"),
        ("encoder_ffn_dim=48", "mismatched keys: .*model.encoder"),
    ):
        options = {"model_name_or_path": first, "preset": None, "config_overrides": override}
        fails(f"one/out: the weights do not fit the configuration: {problem}", tmp_path / "two", **options)


def test_the_tokenizer_of_another_model_is_taken_as_it_is(tmp_path, capsys):
    """Also for what the references of an evaluation are like."""
    lines = [" ".join(words) for words in permutations(("Dog", "cat", "BIRD", "House"))]
    text = write_pairs(tmp_path, "text", lines, lines[::-1])
    other = write_pairs(tmp_path, "other", ["Dog cat", "House"], ["Cat DOG", "HOUSE"])
    files, seen = {"train_file": text, "validation_file": other, "max_steps": 1}, []
    first = run(tmp_path / "one", lowercase=True, **files)

    def score(hypotheses, references):
        seen.extend(references)
        return exact_matches(hypotheses, references)

    second = run(tmp_path / "two", score=score, model_name_or_path=first, vocab_size=77, **files)
    assert sorted(seen) == ["cat dog", "house"]
    assert f"no effect: preset, vocab_size: size and tokenizer are those of {first}" in capsys.readouterr().out
    assert not {"preset", "vocab_size"} & set(record_of(second)["recipe"])


def test_options_of_a_data_set_without_one_have_no_effect_and_say_so(tmp_path, capsys):
    """A recipe may give them while the text comes from files."""
    options = {"dataset_config_name": "tok", "test_splits": ["one"], "max_steps": 1}
    record = record_of(run(tmp_path, **options))
    assert "no effect: dataset_config_name, test_splits: there is no --dataset_name" in capsys.readouterr().out
    assert record["data"]["config"] is None
    assert not set(options) - {"max_steps"} & set(record["recipe"])


def test_a_model_of_several_directions_goes_on_with_one_of_them(tmp_path):
    """From two text files too; its sources stay marked, which an evaluation then knows from the record."""
    lines = [*map(str, range(20))]
    table = tmp_path / "both.tsv"
    table.write_text("".join(f"{line} {line}\t{line} here\n" for line in lines), encoding="utf-8")
    several = {"train_file": [table], "validation_file": None, "directions": ["en-xx", "xx-en"]}
    first = run(tmp_path / "one", max_steps=1, **several)
    fails(f"the sources of {first} begin with .* give --directions en-xx", tmp_path / "two", model_name_or_path=first)
    second = run(tmp_path / "three", max_steps=1, model_name_or_path=first, directions=["en-xx"])
    assert record_of(second)["recipe"]["directions"] == ["en-xx"]
    one = "directions: two text files have one"
    fails(one, tmp_path / "four", model_name_or_path=first, directions=["en-xx", "xx-en"])


def test_subword_dropout_needs_merges_of_the_other_model_too(tmp_path, monkeypatch):
    first = run(tmp_path / "one", max_steps=1, tokenizer_type="unigram")
    options = {"model_name_or_path": first, "subword_dropout": 0.1}
    fails("subword dropout needs merges: use a bpe or byte-level tokenizer, not Unigram", tmp_path / "two", **options)
    monkeypatch.setattr(training, "backends", lambda tokenizer: [])
    fails("subword_dropout needs a tokenizer.json, which a .* has not", tmp_path / "three", **options)


def test_options_that_are_dictionaries_are_recorded(tmp_path):
    options = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": '{"min_lr": 1e-5}', "max_steps": 2}
    recipe = record_of(run(tmp_path, **options))["recipe"]
    assert recipe["lr_scheduler_kwargs"] == {"min_lr": 1e-5}
    assert [name for name, value in recipe.items() if isinstance(value, dict)] == ["lr_scheduler_kwargs"]


def test_one_seed_decides_a_run(tmp_path):
    def weights(name, seed):
        return load_file(run(tmp_path / name, seed=seed, max_steps=4, eval_strategy="no") / "model.safetensors")

    one, same, other = weights("one", 1), weights("same", 1), weights("other", 2)
    assert all(np.array_equal(one[name], same[name]) for name in one)
    assert any(not np.array_equal(one[name], other[name]) for name in one)


# Mistakes


def recipe(folder, text):
    path = folder / "recipe.yaml"
    path.write_text(text)
    return str(path)


MISTAKES = {
    "line counts": ({"short": True}, "train.en has 60 lines but .*train.xx has 59"),
    "missing file": ({"train_file": ["missing.en", "missing.xx"]}, "missing.en: no such file"),
    "no text": ({"train_file": None}, "the training text: give either --train_file or --dataset_name"),
    "no language": ({"target_lang": None}, "give both languages"),
    "heads": (
        {"config_overrides": "encoder_attention_heads=5"},
        "d_model=32 does not divide into encoder_attention_heads=5",
    ),
    "misspelt field": ({"config_overrides": "dropuot=0.1"}, "unknown field 'dropuot': .*'dropout'"),
    "unknown field": ({"config_overrides": "colour=red"}, "unknown field 'colour'"),
    "wrong type": ({"config_overrides": "d_model=eight"}, "d_model.*eight"),
    "no value": ({"config_overrides": "dropout"}, "'dropout' is not of the form name=value"),
    "two smoothings": ({"config_overrides": "label_smoothing=0.2"}, "set with --label_smoothing_factor"),
    "small vocabulary": ({"config_overrides": "vocab_size=10"}, "does not fit the model: .* tokens, but vocab_size=10"),
    "preset": ({"preset": "huge"}, "preset='huge' is not one of paper-base"),
    "attention": ({"attn_implementation": "fast"}, 'attn_implementation="fast"'),
    "too long": (
        {"max_source_length": 65},
        "does not fit in max_position_embeddings=64: give --max_source_length 64",
    ),
    "too long target": ({"max_target_length": 99}, "max_target_length=99 does not fit"),
    "tokenizer": ({"tokenizer_type": "bpee"}, "tokenizer_type='bpee' is not one of bpe"),
    "dropout type": ({"tokenizer_type": "unigram", "subword_dropout": 0.1}, "needs a bpe or byte-level tokenizer"),
    "dropout range": ({"subword_dropout": 1}, r"subword_dropout=1.0 is not in \[0, 1\)"),
    "ema range": ({"ema_decay": 1}, r"ema_decay=1.0 is not in \[0, 1\)"),
    "metric": ({"metric_for_best_model": "blue"}, "metric_for_best_model=blue is not one of bleu, chrf, loss"),
    "stop without text": (
        {"validation_file": None, "early_stopping_patience": 1},
        "early stopping needs a validation set: give --validation_file",
    ),
    "stop without evaluation": (
        {"eval_strategy": "no", "early_stopping_patience": 1},
        "early stopping needs evaluations",
    ),
    "long validation": (
        {
            "config_overrides": "position_embedding_type=learned,max_position_embeddings=7",
            "max_source_length": 7,
            "max_target_length": 7,
        },
        "a sentence of the validation set has .* tokens, but the learned positions end at max_position_embeddings=7",
    ),
    "small unigram vocabulary": (
        {"tokenizer_type": "unigram", "vocab_size": 5},
        "unigram tokenizer with vocab_size=5: The vocabulary is not large enough",
    ),
    "learning rate": ({"learning_rate": -1}, "learning_rate=-1.0 is below 0"),
    "optimizer": ({"adam_beta1": 2}, "Invalid beta parameter at index 0: 2.0"),
    "accumulation of nothing": ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0 is below 1"),
    "tracker": ({"report_to": "nope"}, "nope is not supported, only"),
    "not installed": ({"deepspeed": "x.json"}, "deepspeed"),
    "no room to write": ({"generation_max_length": 1}, "generation_max_length=1 is below 2"),
    "accumulation": ({"gradient_accumulation_steps": 99}, "60 training pairs do not fill one optimiser step of 99"),
    "unknown flag": ({"no_such_flag": 1}, "no_such_flag"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_status_2(tmp_path, capfd, mistake):
    """Warnings of libraries may come before it; no traceback, and nothing is written over."""
    options, message = MISTAKES[mistake]
    options, text = dict(options), corpus(tmp_path)
    if options.pop("short", False):
        Path(text["train_file"][1]).write_text("".join(f"{line}\n" for line in sentences(59)))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert main(["train", *flags(tmp_path / "out", **{**text, **options})]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert "Traceback (most recent call last):" not in lines
    assert [number for number, line in enumerate(lines) if line.startswith("vanilla-transformer")] == [len(lines) - 1]
    assert re.search(f"vanilla-transformer train: .*{message}", lines[-1])
    assert {path: path.read_bytes() for path in before} == before
    assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_token_per_batch: 5", "unknown key 'max_token_per_batch': did you mean 'max_tokens_per_batch'"),
        ("zzz: 5", "unknown key 'zzz': see vanilla-transformer train --help"),
        ("- 1", "expected a mapping"),
        ("a: [", "not YAML"),
    ],
)
def test_a_mistake_in_a_recipe_is_one_line(tmp_path, capfd, text, message):
    path = recipe(tmp_path, text)
    assert main(["train", path, *flags(tmp_path / "out", **corpus(tmp_path))]) == 2
    error = capfd.readouterr().err
    assert error.startswith(f"vanilla-transformer train: recipe {path}: ")
    assert re.search(message, error)
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_missing_recipe_is_one_line(tmp_path, capfd):
    assert main(["train", str(tmp_path / "none.yaml")]) == 2
    assert re.fullmatch(
        r"vanilla-transformer train: recipe .*none.yaml: cannot be read \(.*\)\n", capfd.readouterr().err
    )


def test_the_script_is_the_console_command(tmp_path):
    """`scripts/train.py` in a process of its own: status 2 and one line, library warnings aside."""
    root = Path(training.__file__).parents[1]
    script = Path(__file__).parents[1] / "scripts" / "train.py"
    path = recipe(tmp_path, "max_token_per_batch: 5")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    finished = subprocess.run([sys.executable, str(script), path], env=environment, capture_output=True, text=True)
    assert finished.returncode == 2
    *others, last = finished.stderr.splitlines()
    assert last.startswith(f"vanilla-transformer train: recipe {path}: unknown key 'max_token_per_batch'")
    assert not any("Traceback" in line or line.startswith("vanilla-transformer") for line in others)
    assert finished.stdout == ""


def test_flags_win_over_the_recipe(tmp_path):
    path = recipe(tmp_path, "source_lang: en\nvocab_size: 77\ntrain_file: [a, b]\nconfig_overrides: {dropout: 0.2}\n")
    model, data, tokenizer, _ = parse_arguments([path, "--target_lang", "xx", "--vocab_size", "88"])
    assert (data.source_lang, data.train_file, tokenizer.vocab_size) == ("en", ["a", "b"], 88)
    assert json.loads(model.config_overrides) == {"dropout": 0.2}


def test_another_run_is_never_written_over(tmp_path):
    output = run(tmp_path, max_steps=8)
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    fails(r"out holds another run \(.*\): choose another --output_dir, or go on with --resume", tmp_path, max_steps=1)
    (output / "run.json").unlink()
    (output / "model.safetensors").unlink()
    fails(r"out holds another run \(checkpoint-8\)", tmp_path, max_steps=1)
    assert all(path.read_bytes() == content for path, content in before.items() if path.exists())
    for marker in ("run.json", "model.safetensors"):
        folder = tmp_path / marker
        (folder / "out").mkdir(parents=True)
        (folder / "out" / marker).touch()
        fails(rf"holds another run \({marker}\)", folder, max_steps=1)


def test_learned_positions_bound_what_is_generated(tmp_path):
    """The evaluation writes as far as positions go, and so does the saved generation_config."""
    output = run(tmp_path, config_overrides="position_embedding_type=learned", max_steps=2, eval_strategy="steps",
                 eval_steps=1, generation_max_length=500)  # fmt: skip
    model = AutoModelForSeq2SeqLM.from_pretrained(output)
    assert model.generation_config.max_length == model.config.max_position_embeddings


def test_scores_of_replaced_weights_are_removed(tmp_path):
    output = run(tmp_path, max_steps=4, save_strategy="steps", save_steps=2)
    (output / "evaluation.json").write_text("{}")
    train(parse_arguments(flags(output, **corpus(tmp_path), max_steps=6, resume_from_checkpoint="true")), None)
    assert not (output / "evaluation.json").exists()


def test_resuming_with_another_tokenizer_is_refused(tmp_path):
    output = run(tmp_path, max_steps=4, save_strategy="steps", save_steps=2)
    other = {**corpus(tmp_path), "lowercase": True, "normalization": "nfkc", "max_steps": 6}
    with pytest.raises(UserError, match=r"the text or the tokenizer is not that of .*checkpoint-4: resume with"):
        train(parse_arguments(flags(output, **other, resume_from_checkpoint="true")), None)


def test_the_recorded_recipe_holds_what_was_asked_for_and_nothing_else(tmp_path):
    asked = record_of(run(tmp_path, max_steps=2, lr_scheduler_type="cosine"))["recipe"]
    assert asked["lr_scheduler_type"] == "cosine"
    assert not {"greater_is_better", "do_eval", "save_total_limit", "output_dir"} & asked.keys()
    assert asked["max_steps"] == 2


def test_a_warm_up_that_never_ends_is_announced(tmp_path, capsys):
    run(tmp_path, max_steps=2, warmup_steps=50)
    printed = capsys.readouterr().out
    assert "2 steps" in printed
    assert "warning: the warm-up never ends" in printed


def test_the_announced_steps_are_those_that_are_done(tmp_path, capsys):
    output = run(tmp_path, num_train_epochs=1.1)
    steps = record_of(output)["training"]["steps"]
    assert f" {steps} steps " in capsys.readouterr().out


def test_the_floor_trains_on_the_same_recipe(tmp_path):
    """`scripts/train_marian.py`: one step of the stock model and Trainer, loadable and recorded."""
    script = Path(__file__).resolve().parents[1] / "scripts" / "train_marian.py"
    command = [sys.executable, str(script), *flags(tmp_path / "marian", **corpus(tmp_path), max_steps=2)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "marian")
    assert model.config.model_type == "marian"
    assert record_of(tmp_path / "marian")["training"]["steps"] == 2
    again = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "marian holds another run" in again.stderr


@pytest.mark.parametrize(
    "option",
    [
        {"muon": True},
        {"lr_scheduler_type": "cosine"},
        {"synthetic_file": ["a", "b"]},
        {"early_stopping_patience": 1},
        {"rdrop_alpha": 1},
        {"subword_dropout": 0.1},
    ],
)
def test_the_floor_refuses_recipes_that_it_cannot_follow(tmp_path, monkeypatch, option):
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[1] / "scripts")
    floor = importlib.import_module("train_marian")
    with pytest.raises(UserError, match=r"^the floor (is trained with AdamW|has no .*: take another recipe)"):
        floor.main(flags(tmp_path / "marian", **corpus(tmp_path), **option))
