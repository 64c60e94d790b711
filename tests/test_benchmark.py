"""scripts/benchmark.py and scripts/scaling.py: what they count, and the tables of results; figures are no test."""

import argparse
import importlib
import json
import operator
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration, packed

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module


def rounds(*rates: float, **facts: float) -> list[dict]:
    return [{"work": 2 * rate, "seconds": 2.0, **facts} for rate in rates]


PLACE = {"hardware": {"cpu": "A CPU"}, "threads": 2, "commit": "0123456789abcdef-dirty", "date": "2026-01-02T03:04:05"}
MEASURED = "rounds on A CPU, 2 threads, commit 0123456-dirty, 2026-01-02:"


def section(**engines: list[dict]) -> dict:
    return {**PLACE, "engines": {name.replace("_", " "): found for name, found in engines.items()}}


def test_speed_is_relative_to_the_best_marian(script):
    training = section(
        ours_float32=rounds(6, 9, 30, padding=0.014),
        marian_float32=rounds(1, 2, 3, padding=0.25),
        marian_bfloat16=rounds(3, 3, 4, padding=0.25),
        marian_int8=rounds(9, 9, 9, padding=0.25),  # not what a peer is measured by
    )
    processes = section(one_process=rounds(10, 20), two_processes=rounds(15, 30))
    sections = {"machine": section(memory_copy=rounds(9)), "training, x": training, "two processes": processes}
    lines = script("results_table").speed(sections).splitlines()
    assert lines[2:5] == [
        "| training, x | ours float32 | 3.00 | 2.00 to 10.00 | 1% |",
        "| training, x | marian float32 | 0.67 | 0.33 to 1.00 | 25% |",
        "| training, x | marian bfloat16 | 1.00 | 1.00 to 1.33 | 25% |",
    ]
    assert lines[-4:] == [
        "| training in two processes | 1.50 | 1.00 to 2.00 |",
        "",
        f"- 3 {MEASURED} training, x",
        f"- 2 {MEASURED} two processes",
    ]


def test_an_ensemble_has_a_row_below_its_recipe(script, tmp_path, monkeypatch):
    table = script("results_table")
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    run = {"parameters": 2_000_000, "training": {"epochs": 3.0, "seconds": 90}}
    for name, score, models in (("seed1", 30, {}), ("seed2", 32, {}), ("ensemble", 33, {"models": 2})):
        sets = {test_set: {"scores": {"p1": {"score": score}}} for test_set in table.SETS}
        if models:
            sets["validation"] = {"scores": {"p1": {"score": 50}}}
        path = tmp_path / "recipe" / name / "run.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({**run, "evaluation": {"sets": sets, "generation": models}}))
    recipe, ensemble = table.results().splitlines()[2:]
    assert recipe.startswith("| [recipe](scripts/results/recipe) | 2.00M | 2 | 3 |  | 31.0 ± 1.4 / ")
    assert ensemble.startswith(
        "| [recipe/ensemble](scripts/results/recipe/ensemble) of 2 models |  |  |  | 50.0 | 33.0 / 33.0 / 33.0 |"
    )
    assert recipe.count("|") == ensemble.count("|")


def test_our_fastest_engine_beside_their_fastest(script):
    rounds = {"ours float32": 3, "ours int8": 5, "marian int8": 99, "ctranslate2 float32": 8, "ctranslate2 int8": 10}
    engines = {name: [{"work": work, "seconds": 1.0}] for name, work in rounds.items()}
    records = {"AMD": {"machine": {"engines": {}}, "translation, 5 beams": {"engines": engines}}}
    assert script("results_table").beside_ctranslate2(records).splitlines()[2:] == [
        "| AMD | 5 beams | ours int8 | ctranslate2 int8 | 0.50 |"
    ]


def test_aims_are_held_against_the_mean_of_the_seeds(script, tmp_path, monkeypatch):
    table = script("results_table")
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    monkeypatch.setattr(table, "AIMS", (("the best", "recipe", "p1", (31.5, 30.0, 29.0)),))
    for seed, score in ((1, 30), (2, 32)):
        sets = {test_set: {"scores": {"p1": {"score": score}}} for test_set in table.SETS}
        path = tmp_path / "recipe" / f"seed{seed}" / "run.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"evaluation": {"sets": sets}}))
    row = "| the best | recipe | 2 | p1 | 31.5 / 30.0 / 29.0 | 31.0 / 31.0 / 31.0 | 0.5 / 0.0 / 0.0 |"
    assert table.aims().splitlines()[2:] == [row]


def test_comparisons_are_of_all_test_sets_together(script, tmp_path):
    pooled = {"metric": "p1", "score_b": 33.333, "difference": 1.5, "low": -0.25, "high": 3.0, "p_value": 0.0004}
    verdicts = {"floor/seed1": {"one": {}, "all of them": pooled}, "other/seed2": {"one": {}}}
    path = tmp_path / "better" / "seed1" / "run.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"evaluation": {"against": verdicts}}))
    lines = script("results_table").comparisons([path]).splitlines()
    assert lines[2:] == ["| better/seed1 | floor/seed1 | p1 | 33.33 | +1.50 | -0.25 to +3.00 | < 0.001 |"]


def test_the_lower_bound_is_that_of_the_machine(script):
    step = section(
        matrix_products_float32=rounds(100, 120, 110),
        matrix_products_bfloat16=rounds(220),
        ours_float32=rounds(55),
        ours_bfloat16=rounds(88),
    )
    lines = script("results_table").lower_bound({"one step, x": step}).splitlines()
    assert lines[2:4] == ["| `x` | float32 | 2.0 | 4.0 |", "| `x` | bfloat16 | 2.5 | 2.5 |"]
    assert lines[4:] == ["", f"- 3 {MEASURED} one step, x"]


def test_the_lower_bound_of_a_search_is_that_of_the_machine(script):
    machine = section(matrix_products_float32=rounds(100), matrix_products_bfloat16=rounds(220))
    search = section(ours_float32=rounds(1, operations=80), ours_int8=rounds(3, operations=80))
    tables = {"translation, 5 beams": section(ours_float32=rounds(1)), "translation, x": search, "machine": machine}
    lines = script("results_table").search_bound(tables).splitlines()
    assert lines[2:] == ["| x | ours float32 | 2.50 | 2.50 to 2.50 |", "", f"- 1 {MEASURED} machine; translation, x"]


def test_memory_is_a_share_of_the_better_marian(script):
    taken = {"ours float32": [1, 2, 3], "marian float32": [8, 8, 8], "marian bfloat16": [4, 4, 4]}
    step = {**PLACE, "engines": {name: [{"bytes": value} for value in values] for name, values in taken.items()}}
    speed = section(ours_float32=rounds(30, 50, 40), marian_float32=rounds(10), marian_bfloat16=rounds(20))
    lines = script("results_table").memory({"peak memory, x": step, "large step, x": speed}).splitlines()
    assert lines[2] == "| `x` | ours float32 | 0.50 | 0.25 to 0.75 | 2.00 | 1.50 to 2.50 |"
    assert lines[4:] == [
        "| `x` | marian bfloat16 | 1.00 | 1.00 to 1.00 | 1.00 | 1.00 to 1.00 |",
        "",
        f"- 3 {MEASURED} peak memory, x; large step, x",
    ]
    unmeasured = script("results_table").memory({"peak memory, x": step}).splitlines()
    assert unmeasured[2] == "| `x` | ours float32 | 0.50 | 0.25 to 0.75 |  |  |"


def test_a_shallow_decoder_is_relative_to_the_symmetric_model(script):
    measured = section(symmetric_float32=rounds(2), shallow_float32=rounds(3, 5))
    lines = script("results_table").depth({"machine": section(), "depth, deep, 5 beams": measured}).splitlines()
    assert lines[2] == "| `deep` | 5 beams | float32 | 2.00 | 1.50 to 2.50 |"
    assert lines[3:] == ["", f"- 1 {MEASURED} depth, deep, 5 beams"]


def test_certificates_have_a_row_for_each_search(script):
    def search(beams: int, identical: int) -> dict:
        scores = {
            side: {"bleu": {"score": bleu}, "chrf": {"score": 2 * bleu}}
            for side, bleu in (("model", 30.0), ("ctranslate2", 29.5))
        }
        return {"num_beams": beams, "identical": identical, "scores": scores, "speed": {"median": 1.5}}

    sets = {"a test set": {"n": 200, "searches": [search(1, 200), search(5, 199)]}}
    export = {"model": {"bytes": 800}, "ctranslate2": {"bytes": 200}, "sets": sets}
    lines = script("results_table").certificates({"int8": export}).splitlines()
    assert lines[2:] == [
        "| int8 | greedy | 100.0% | 30.00 / 29.50 | 60.00 / 59.00 | 1.50 | 0.25 |",
        "| int8 | 5 beams | 99.5% | 30.00 / 29.50 | 60.00 / 59.00 | 1.50 | 0.25 |",
    ]


@pytest.mark.parametrize("section", ["translation, 5 beams", "translation, 1 beam"])
def test_translation_needs_trained_models(script, section, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["benchmark.py", "--dataset_name", "nowhere", "--model", "x", "--only", section])
    with pytest.raises(SystemExit):
        script("benchmark").main()
    assert "translation needs --model and --marian" in capsys.readouterr().err


def test_scores_are_means_of_seeds_with_their_spread(script):
    """Tokenised text has P1 alone."""
    table = script("results_table")

    def run(p1: float) -> dict:
        return {"evaluation": {"sets": {name: {"scores": {"p1": {"score": p1}}} for name in table.SETS}}}

    assert table.cell([run(40.0)], "p1") == "40.0 / 40.0 / 40.0"
    assert table.cell([run(40.0), run(41.0), run(42.0)], "p1") == "41.0 ± 1.0 / 41.0 ± 1.0 / 41.0 ± 1.0"
    assert table.cell([run(40.0)], "bleu") == ""


def test_curves_are_relative_to_their_first_point(script):
    engines = {
        f"{dtype} {length}": [{"seconds": seconds * factor, "bytes": 7 * length}]
        for dtype, factor in (("float32", 1), ("bfloat16", 3))
        for length, seconds in ((32, 2.0), (2048, 5.0))
    }
    assert script("results_table").scaling({"sequence length": {**PLACE, "engines": engines}}).splitlines() == [
        "| sequence length | 32 | 2,048 |",
        "| --- | --- | --- |",
        "| time, float32 | 1.00 | 2.50 |",
        "| time, bfloat16 | 1.00 | 2.50 |",
        "| memory, float32 | 1.00 | 64.00 |",
        "| memory, bfloat16 | 1.00 | 64.00 |",
        "",
        f"- 1 {MEASURED} sequence length",
    ]


def test_a_section_is_merged_into_the_record(script, tmp_path):
    merge = script("taking_turns").merge
    for name, value in (("one", 1), ("two", 2), ("one", 3)):
        merge(tmp_path / "record.json", name, {"engines": value})
    record = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))
    assert record == {"sections": {"one": {"engines": 3}, "two": {"engines": 2}}}


def test_the_clock_leaves_out_the_first_step(script):
    clock = script("trainers").StepClock(lambda examples: examples)
    for tokens in (5, 3, 2):
        source, labels = torch.full((2, 4), 1), torch.full((2, 3), -100)
        source.flatten()[:tokens], labels.flatten()[:tokens] = 7, 7
        clock({"input_ids": source, "labels": labels})
        clock.on_step_end()
    clock({"input_ids": source, "labels": labels})  # read ahead, no step
    found = clock.round()
    assert found["work"] == 3 + 2
    assert found["steps"] == 2
    assert found["padding"] == pytest.approx(1 - 2 * (3 + 2) / (2 * 14))
    assert found["seconds"] == clock.ends[2] - clock.ends[0]


def test_the_best_batch_size_does_the_most_in_a_second(script):
    def measure(size: int) -> dict:
        return {"work": size, "seconds": {1: 2.0, 2: 1.0, 3: 2.0}[size]}

    assert script("taking_turns").best([1, 2, 3], measure) == 2


def test_operations_of_a_step_are_those_that_pytorch_counts(script):
    """Of MarianMT, which computes the same products; padded targets are projected there, so there are none."""
    trainers = script("trainers")
    config = trainers.VanillaTransformerConfig.preset("test", vocab_size=70)
    batch = trainers.random_batch(config, 3, 6)
    batch["labels"] = batch["labels"][:, :5]
    model = trainers.marian_like(config)
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        trainers.training_step(model, bf16=False)(batch)
    assert trainers.step_operations(config, batch) == counter.get_total_flops()


@torch.inference_mode()
def test_operations_of_a_search_are_those_that_pytorch_counts(script):
    """With one beam, and without padding."""
    benchmark = script("benchmark")
    config = VanillaTransformerConfig.preset("test", vocab_size=70, lm_head_bias=True)
    config._attn_implementation = "eager"
    model = benchmark.never_ending(VanillaTransformerForConditionalGeneration(config), 9, 1).eval()
    with FlopCounterMode(display=False) as counter:
        model.generate(torch.randint(4, 70, (3, 7)))
    assert benchmark.search_operations(config, [7] * 3, 9, 1) == counter.get_total_flops()
    with_beams, at_first = (benchmark.search_operations(config, [7], written, 3) for written in (9, 1))
    assert with_beams - at_first == 3 * (
        benchmark.search_operations(config, [7], 9, 1) - benchmark.search_operations(config, [7], 1, 1)
    )


def test_peak_memory_is_what_is_taken_at_once(script):
    size = 2**26

    def run() -> None:
        for _ in range(3):
            torch.ones(size, dtype=torch.uint8)

    taken = script("taking_turns").peak_memory(run)
    assert taken == pytest.approx(size, rel=0.1)


@pytest.mark.parametrize("engine", ["ours", "ours, gradient checkpointing", "marian"])
def test_a_large_step_counts_target_tokens(script, engine, monkeypatch):
    benchmark = script("benchmark")
    monkeypatch.setattr(benchmark, "LARGE", (8, 4))
    batches, original = [], benchmark.training_step

    def training_step(*args):
        step = original(*args)
        return lambda batch: (batches.append(batch), step(batch))

    monkeypatch.setattr(benchmark, "training_step", training_step)
    round = benchmark.step_speed(argparse.Namespace(), benchmark.TINY, engine, True)(1)
    timed = batches[-3:]
    assert round["work"] == sum(batch["labels"].numel() for batch in timed)
    assert len(batches) == 5  # one makes the optimiser's state, one warms up
    assert round["seconds"] > 0


@pytest.mark.parametrize("beams", [1, 3])
def test_models_with_random_weights_write_as_many_tokens_as_asked_for(script, beams, tmp_path):
    trainers, never_ending = script("trainers"), script("benchmark").never_ending
    config = trainers.VanillaTransformerConfig.preset("test", vocab_size=50, lm_head_bias=True)
    for model in (trainers.VanillaTransformerForConditionalGeneration(config), trainers.marian_like(config)):
        source = torch.randint(4, 50, (5, 7))
        written = never_ending(model, 9, beams).eval().generate(source)
        model.generation_config.save_pretrained(tmp_path)  # as an export does
        assert written.shape == (5, 10)
        assert not (written == config.eos_token_id).any()


def test_weights_of_marian_are_left_as_they_are(script, monkeypatch):
    monkeypatch.setattr(packed, "_faster_types", lambda: {torch.float32})
    trainers = script("trainers")
    model = trainers.marian_like(trainers.VanillaTransformerConfig.preset("test", vocab_size=50))
    layer = model.model.decoder.layers[0].fc1
    with packed.packed_linear_layers(model):
        assert isinstance(layer.forward, packed._Product)
    with packed.packed_linear_layers(script("benchmark").unpacked(model)):
        assert not isinstance(layer.forward, packed._Product)


def test_the_transformer_of_torch_sees_no_padding_and_no_later_words(script):
    trainers = script("trainers")
    config = trainers.VanillaTransformerConfig.preset("test", vocab_size=50)
    model = trainers.TorchTransformer(config).eval()
    batch = trainers.random_batch(config, 2, 6)
    source, labels = batch["input_ids"], batch["labels"]
    logits = model(source, labels)
    padded = torch.cat([source, torch.full((2, 3), config.pad_token_id)], dim=1)
    torch.testing.assert_close(model(padded, labels), logits)
    later = labels.clone()
    later[:, 3:] = 5
    changed = model(source, later)
    torch.testing.assert_close(changed[:, :4], logits[:, :4])
    assert not torch.allclose(changed[:, 4:], logits[:, 4:])


def test_an_engine_that_fails_ends_the_run(script):
    """It is not waited for."""
    turns = script("taking_turns")
    options = argparse.Namespace(threads=1, rounds=1)
    with pytest.raises(EOFError):
        turns.take_turns(options, {"fails": turns.Engine(operator.truediv, (0,))})


@pytest.mark.slow
def test_the_round_that_warms_up_is_not_kept(script):
    turns, benchmark = script("taking_turns"), script("benchmark")
    options = argparse.Namespace(threads=1, rounds=2)
    found = turns.take_turns(options, {"copy": turns.Engine(benchmark.memory_copy)})
    assert len(found["copy"]) == 2
    assert all(turns.rate(round) > 1e8 for round in found["copy"])


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["ours", "ours, plain Seq2SeqTrainer", "marian", "torch.nn.Transformer"])
def test_training_counts_target_tokens(script, trainer, shared_data, tmp_path):
    benchmark = script("benchmark")
    options = argparse.Namespace(dataset_name=str(shared_data / "multi30k"), folder=tmp_path, batch_tokens=1024)
    benchmark.prepare(options)
    found = benchmark.training(options, benchmark.TINY._replace(tokens=1024, parts=75), trainer, False)(1)
    assert 1000 < found["work"] < 400 * 20
    assert found["seconds"] > 0
    assert 0 < found["padding"] < 0.3  # in groups of the whole corpus


@pytest.mark.slow
def test_workers_translate_and_end(script, shared_data, tmp_path):
    """The processes of an engine end with it, or nobody would come back here."""
    turns, benchmark = script("taking_turns"), script("benchmark")
    options = argparse.Namespace(dataset_name=str(shared_data / "multi30k"), folder=tmp_path, threads=2, rounds=1)
    benchmark.prepare(options)
    engine = turns.Engine(benchmark.forced_translation, (benchmark.WORKERS, "float32", 1, benchmark.TINY))
    assert turns.take_turns(options, {"workers": engine})["workers"][0]["work"] == 200


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("benchmark", ["--only", "one step, multi30k-tiny"]),
        ("loss_curves", []),
    ],
)
def test_a_mistake_is_one_line(name, options, tmp_path):
    command = [sys.executable, str(SCRIPTS / f"{name}.py"), "--dataset_name", str(tmp_path / "nowhere"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert re.search(rf"^{name}\.py: .*nowhere", done.stderr, re.MULTILINE)
    assert "Traceback" not in done.stderr
