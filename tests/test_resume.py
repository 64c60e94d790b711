"""Runs that die and go on: killed between checkpoints, killed while saving, out of disk, one process against two."""

import errno
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, TrainerState

from hf_vanilla_transformer import training
from hf_vanilla_transformer.arguments import parse_arguments
from hf_vanilla_transformer.averaging import ExponentialMovingAverage
from hf_vanilla_transformer.batching import EpochLoader
from hf_vanilla_transformer.checkpoints import complete_checkpoints
from hf_vanilla_transformer.cli import main
from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.training import VanillaTransformerTrainer, train
from word_reversal import corpus, exact_matches, flags

PACKAGE = Path(training.__file__).parents[1]
SCRIPT = Path(__file__).parents[1] / "scripts" / "train.py"
STEPS = {f"{what}_{name}": value for what in ("save", "eval") for name, value in (("strategy", "steps"), ("steps", 3))}
RANDOM = {"config_overrides": "dropout=0.2", "subword_dropout": 0.2}

pytestmark = pytest.mark.usefixtures("one_thread")


# Processes: forked from a server that has imported everything once, so that each starts at once and can be killed


@pytest.fixture(scope="module")
def processes():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hf_vanilla_transformer.training", "word_reversal"])
    return context


def die_at(step):
    """SIGKILL at the start of the step after `step`."""
    training_step = VanillaTransformerTrainer.training_step

    def deadly(self, *args, **kwargs):
        if self.state.global_step == step:
            print(f"dies after logging step {self.state.log_history[-1]['step']}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return training_step(self, *args, **kwargs)

    VanillaTransformerTrainer.training_step = deadly


def die_while_saving(name):
    """SIGKILL in the middle of the file `name` of checkpoint-6."""
    save, save_state = torch.save, TrainerState.save_to_json

    def cut(path, write):
        write(path)
        if "checkpoint-6" in str(path) and Path(path).name == name:
            os.truncate(path, Path(path).stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save = lambda content, path: cut(path, lambda path: save(content, path))
    TrainerState.save_to_json = lambda self, path: cut(path, lambda path: save_state(self, path))


def limit_file_size(size):
    """From checkpoint-6 on, files cannot grow beyond `size` bytes: real failures of the real writers."""
    save_checkpoint = VanillaTransformerTrainer._save_checkpoint

    def limited(self, *args):
        if self.state.global_step == 6:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        save_checkpoint(self, *args)

    VanillaTransformerTrainer._save_checkpoint = limited


def in_process(argv, log, environment, accident):
    """What a child does: train, with an accident on the way; its exit code is that of the command line."""
    os.environ.update(environment)
    multiprocessing.set_start_method("fork", force=True)  # workers of a data loader must see their parent die
    torch.set_num_threads(1)
    with open(log, "w") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if accident:
        accident[0](*accident[1:])
    try:
        train(parse_arguments(argv), exact_matches)
    except UserError as error:
        print(f"one line: {error}", flush=True)
        os._exit(2)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(processes, output, world_size=1, accident=(), **options):
    """Train in one or more processes as torchrun would start them; exit codes and what was printed."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
    children, logs = [], []
    for rank in range(world_size):
        own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} if world_size > 1 else {}
        logs.append(output.with_name(f"{output.name}-{rank}.log"))
        children.append(processes.Process(target=in_process, args=(flags(output, **options), logs[-1], own, accident)))
        children[-1].start()
    for child in children:
        child.join(120)
        if child.is_alive():
            child.kill()
    return [child.exitcode for child in children], "\n".join(log.read_text() for log in logs)


def succeeds(processes, output, world_size=1, **options):
    codes, log = start(processes, output, world_size, **options)
    assert codes == [0] * world_size, log
    return output


def losses(output):
    curve = json.loads((output / "run.json").read_text())["curve"]
    return {entry["step"]: entry["loss"] for entry in curve if "loss" in entry}


def scores(output):
    """What each evaluation found, by step; not how long it took."""
    curve = json.loads((output / "run.json").read_text())["curve"]
    names = ("eval_loss", "eval_bleu", "eval_chrf")
    return {entry["step"]: {name: entry.get(name) for name in names} for entry in curve if "eval_loss" in entry}


def assert_bit_equal(one, other, names=("model.safetensors",)):
    for name in names:
        weights, expected = load_file(one / name), load_file(other / name)
        assert weights.keys() == expected.keys()
        different = [key for key in expected if not np.array_equal(weights[key], expected[key])]
        assert not different, f"{name}: {len(different)} of {len(expected)} tensors differ"


def assert_same_run(resumed, whole, last):
    """The same weights, also those of the last checkpoint, the same optimiser, the same curve."""
    assert_bit_equal(resumed, whole)
    assert_bit_equal(resumed / last, whole / last)
    states = [torch.load(folder / last / "optimizer.pt", weights_only=True)["state"] for folder in (resumed, whole)]
    assert states[0].keys() == states[1].keys()
    for key, state in states[0].items():
        assert all(torch.equal(value, states[1][key][name]) for name, value in state.items())
    assert losses(resumed) == losses(whole)
    assert scores(resumed) == scores(whole)


CASES = {
    "dropout and subword dropout": {**RANDOM, **STEPS},
    "moving average": {**RANDOM, **STEPS, "ema_decay": 0.7},
    "muon": {**RANDOM, **STEPS, "muon": True},
    "accumulation": {**RANDOM, **STEPS, "gradient_accumulation_steps": 2, "max_tokens_per_batch": 60},
    "workers": {**RANDOM, **STEPS, "dataloader_num_workers": 1},
    "end of an epoch": {**RANDOM, "save_strategy": "epoch", "eval_strategy": "epoch"},
    "evaluation after the checkpoint": {**RANDOM, **STEPS, "save_steps": 4, "eval_strategy": "epoch"},
    "two processes": {**RANDOM, **STEPS, "max_tokens_per_batch": 60},
    "two processes, moving average": {**RANDOM, **STEPS, "max_tokens_per_batch": 60, "ema_decay": 0.7},
}


SLOW = ["workers", "two processes, moving average"]


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.slow if case in SLOW else ()) for case in CASES])
def test_a_killed_run_goes_on_exactly(processes, tmp_path, case):
    """Three epochs of about eight steps; killed in the second one (the third, where checkpoints end epochs)."""
    world_size = 2 if case.startswith("two") else 1
    options = {**corpus(tmp_path), **CASES[case], "num_train_epochs": 3}
    whole = succeeds(processes, tmp_path / "whole", world_size, **options)
    steps = json.loads((whole / "run.json").read_text())["training"]["steps"]
    per_epoch = steps // 3
    every = per_epoch if options["save_strategy"] == "epoch" else options["save_steps"]
    checkpoint = 2 * per_epoch if options["save_strategy"] == "epoch" else (2 * per_epoch - 1) // every * every
    if case.startswith("evaluation"):
        assert per_epoch % every == 0, "the case is about a checkpoint that is the last step of an epoch"
        checkpoint = per_epoch
    else:
        assert options["save_strategy"] == "epoch" or per_epoch < checkpoint < 2 * per_epoch

    killed = tmp_path / "killed"
    codes, log = start(processes, killed, world_size, accident=(die_at, checkpoint + 2), **options)
    assert codes == [-signal.SIGKILL] * world_size, log
    assert f"dies after logging step {checkpoint + 2}" in log
    assert complete_checkpoints(killed, world_size)[-1].name == f"checkpoint-{checkpoint}"
    assert not (killed / "run.json").exists()

    succeeds(processes, killed, world_size, **options, resume_from_checkpoint="true")
    last = complete_checkpoints(whole, world_size)[-1].name
    if case.startswith("evaluation"):
        assert_bit_equal(killed / last, whole / last)
        assert losses(killed) == losses(whole)
    else:
        assert_same_run(killed, whole, last)
    assert json.loads((killed / "run.json").read_text())["training"]["resumed_from"] == f"checkpoint-{checkpoint}"
    if options.get("ema_decay"):
        assert_bit_equal(killed / last, whole / last, ["ema.safetensors"])


def test_batches_have_a_new_order_in_every_epoch(tmp_path, monkeypatch):
    """Or else the exactness above would say nothing about the order of the data."""
    orders, set_epoch = [], EpochLoader.set_epoch

    def spy(self, epoch):
        set_epoch(self, epoch)
        orders.append([[index for index, _ in batch] for batch in self.batch_sampler])

    monkeypatch.setattr(EpochLoader, "set_epoch", spy)
    train(parse_arguments(flags(tmp_path / "out", **corpus(tmp_path), num_train_epochs=3, eval_strategy="no")), None)
    assert len(orders) == 3
    assert all(sorted(index for batch in order for index in batch) == list(range(60)) for order in orders)
    assert len({str(order) for order in orders}) == 3


# Two processes


@pytest.mark.parametrize("launcher", ["accelerate", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_two_launched_processes_follow_the_curve_of_one(tmp_path, launcher):
    """Two processes with one batch each see what one process sees with an accumulation of two; without dropout.

    accelerate itself starts a single process for `--cpu`, whatever --num_processes says; `scripts/train.py` starts
    the others.
    """
    text = corpus(tmp_path)
    options = {**text, "config_overrides": "dropout=0", "max_tokens_per_batch": 60, "max_steps": 12, **STEPS}
    options |= {"eval_steps": 6, "metric_for_best_model": "loss"}
    one = tmp_path / "one"
    assert main(["train", *flags(one, **options, gradient_accumulation_steps=2)]) == 0
    two = tmp_path / "two"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "hub")}
    environment["PYTHONPATH"] = os.pathsep.join([str(PACKAGE), os.environ.get("PYTHONPATH", "")])
    port = str(free_port())
    commands = {
        "accelerate": ["accelerate.commands.launch", "--num_processes", "2", "--cpu", "--num_machines", "1"],
        "torchrun": ["torch.distributed.run", "--nproc_per_node", "2", "--master_port", port],
    }
    commands["accelerate"] += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", port]
    finished = subprocess.run(
        [sys.executable, "-m", *commands[launcher], str(SCRIPT), *flags(two, **options)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("the model is in") >= 1
    assert (two / "checkpoint-12" / "rng_state_1.pth").is_file()
    alone, together = losses(one), losses(two)
    assert list(alone) == list(together) == list(range(1, 13))
    assert list(together.values()) == pytest.approx(list(alone.values()), abs=1e-4)
    assert scores(two).keys() == scores(one).keys() == {6, 12}
    for step, expected in scores(one).items():
        assert expected["eval_chrf"] > 0
        assert [scores(two)[step][name] for name in ("eval_bleu", "eval_chrf")] == [
            expected[name] for name in ("eval_bleu", "eval_chrf")
        ]
        # two processes fill up their batches with repeated sentences
        assert scores(two)[step]["eval_loss"] == pytest.approx(expected["eval_loss"], abs=0.02)
    for name, weight in load_file(one / "model.safetensors").items():
        np.testing.assert_allclose(load_file(two / "model.safetensors")[name], weight, rtol=0, atol=2e-4)


def test_two_processes_report_a_mistake_and_end(processes, tmp_path):
    text = {**corpus(tmp_path), "train_file": [tmp_path / "missing.en", tmp_path / "missing.xx"]}
    codes, log = start(processes, tmp_path / "out", 2, **text)
    assert "one line:" in log
    assert "missing.en: no such file" in log
    assert 0 not in codes


# Checkpoints that are not whole


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    """A run with checkpoint-3 and checkpoint-6, and the options that made it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    options = {**corpus(folder), **RANDOM, **STEPS, "max_steps": 6}
    return train(parse_arguments(flags(folder / "out", **options)), exact_matches), options


FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "optimizer.pt",
    "rng_state.pth",
    "scheduler.pt",
    "tokenizer.json",
    "tokenizer_config.json",
    "trainer_state.json",
    "training_args.bin",
]
RESUMED = ["model.safetensors", "optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json"]


def test_these_are_the_files_of_a_checkpoint(two_checkpoints):
    output, _ = two_checkpoints
    assert sorted(path.name for path in (output / "checkpoint-6").iterdir()) == FILES


def truncate(file):
    os.truncate(file, file.stat().st_size - 2)


def halve(file):
    os.truncate(file, file.stat().st_size // 2)


def empty(file):
    os.truncate(file, 0)


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        *((damage, name) for damage in (truncate, halve, empty) for name in FILES),
        *((Path.unlink, name) for name in RESUMED),
    ],
)
def test_a_damaged_checkpoint_does_not_count(two_checkpoints, tmp_path, damage, name):
    output = shutil.copytree(two_checkpoints[0], tmp_path / "out")
    assert [path.name for path in complete_checkpoints(output)] == ["checkpoint-3", "checkpoint-6"]
    damage(output / "checkpoint-6" / name)
    assert [path.name for path in complete_checkpoints(output)] == ["checkpoint-3"]


def test_resuming_passes_over_a_damaged_checkpoint(two_checkpoints, tmp_path):
    """And ends where the whole run ended."""
    whole, options = two_checkpoints
    output = shutil.copytree(whole, tmp_path / "out")
    halve(output / "checkpoint-6" / "optimizer.pt")
    train(parse_arguments(flags(output, **options, resume_from_checkpoint="true")), exact_matches)
    assert json.loads((output / "run.json").read_text())["training"]["resumed_from"] == "checkpoint-3"
    assert_same_run(output, whole, "checkpoint-6")


def test_a_named_checkpoint_is_resumed(two_checkpoints, tmp_path):
    whole, options = two_checkpoints
    output = tmp_path / "elsewhere"
    resume = {"resume_from_checkpoint": whole / "checkpoint-3"}
    train(parse_arguments(flags(output, **options, **resume)), exact_matches)
    assert_bit_equal(output / "checkpoint-6", whole / "checkpoint-6")


def test_a_checkpoint_may_have_another_name(two_checkpoints, tmp_path):
    whole, options = two_checkpoints
    best = shutil.copytree(whole / "checkpoint-6", tmp_path / "best")
    train(parse_arguments(flags(tmp_path / "out", **options, resume_from_checkpoint=best)), exact_matches)
    assert json.loads((tmp_path / "out" / "run.json").read_text())["training"]["steps"] == 6


def test_a_finished_run_can_be_resumed_and_prolonged(two_checkpoints, tmp_path):
    whole, options = two_checkpoints
    output = shutil.copytree(whole, tmp_path / "out")
    train(parse_arguments(flags(output, **options, resume_from_checkpoint="true")), exact_matches)
    assert_bit_equal(output, whole)
    longer = {**options, "max_steps": 9, "resume_from_checkpoint": "true"}
    train(parse_arguments(flags(output, **longer)), exact_matches)
    assert list(losses(output)) == list(range(1, 10))


def test_a_run_that_lost_its_patience_stays_as_it_is(tmp_path):
    """Until it is given more."""

    scores = iter(range(100, 0, -1))

    def worse(hypotheses, references):
        return {"bleu": next(scores)}

    options = {**corpus(tmp_path), **RANDOM, **STEPS, "max_steps": 15, "early_stopping_patience": 1}
    whole = train(parse_arguments(flags(tmp_path / "whole", **options)), worse)
    assert list(losses(whole)) == list(range(1, 7))
    again = {**options, "resume_from_checkpoint": "true"}
    output = shutil.copytree(whole, tmp_path / "again")
    train(parse_arguments(flags(output, **again)), worse)
    assert_bit_equal(output, whole)
    train(parse_arguments(flags(output, **again | {"early_stopping_patience": 2})), worse)
    assert list(losses(output)) == list(range(1, 10))


def test_the_seconds_of_all_pieces_are_counted(two_checkpoints, tmp_path):
    whole, options = two_checkpoints
    output = shutil.copytree(whole, tmp_path / "out")
    path = output / "checkpoint-3" / "trainer_state.json"
    state = json.loads(path.read_text())
    assert 0 < state["log_history"][-1]["seconds"] < 1000
    state["log_history"][-1]["seconds"] = 1000.0  # so long did the first piece take
    path.write_text(json.dumps(state))
    shutil.rmtree(output / "checkpoint-6")
    train(parse_arguments(flags(output, **options, resume_from_checkpoint="true")), exact_matches)
    record = json.loads((output / "run.json").read_text())
    later = [entry["seconds"] for entry in record["curve"] if entry["step"] > 3]
    assert later == sorted(later)
    assert 1000 <= later[0] <= later[-1] <= record["training"]["seconds"] < 2000


@pytest.mark.parametrize("name", ["optimizer.pt", "rng_state.pth", "trainer_state.json"])
def test_a_kill_while_saving_keeps_the_checkpoint_before(processes, two_checkpoints, tmp_path, name):
    whole, options = two_checkpoints
    output = tmp_path / "out"
    codes, log = start(processes, output, accident=(die_while_saving, name), **options)
    assert codes == [-signal.SIGKILL], log
    assert (output / "checkpoint-6" / name).is_file()
    assert [path.name for path in complete_checkpoints(output)] == ["checkpoint-3"]
    AutoModelForSeq2SeqLM.from_pretrained(output / "checkpoint-3")
    succeeds(processes, output, **options, resume_from_checkpoint="true")
    assert_same_run(output, whole, "checkpoint-6")


# Saves that fail


def no_space(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def stage_model(monkeypatch):
    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", no_space)


def stage_average(monkeypatch):
    monkeypatch.setattr(ExponentialMovingAverage, "save", no_space)


def stage_optimizer(monkeypatch):
    monkeypatch.setattr(VanillaTransformerTrainer, "_save_optimizer_and_scheduler", no_space)


def stage_random_state(monkeypatch):
    monkeypatch.setattr(VanillaTransformerTrainer, "_save_rng_state", no_space)


def stage_trainer_state(monkeypatch):
    monkeypatch.setattr(TrainerState, "save_to_json", no_space)


STAGES = [stage_model, stage_average, stage_optimizer, stage_random_state, stage_trainer_state]


@pytest.mark.parametrize("stage", STAGES)
def test_a_full_disk_names_the_last_complete_checkpoint(tmp_path, stage):
    options = {**corpus(tmp_path), **STEPS, "max_steps": 6, "ema_decay": 0.5}
    output = tmp_path / "out"
    save_checkpoint = VanillaTransformerTrainer._save_checkpoint
    with pytest.MonkeyPatch.context() as monkeypatch:

        def full_from_the_second_on(self, *args):
            if self.state.global_step == 6:
                stage(monkeypatch)
            save_checkpoint(self, *args)

        monkeypatch.setattr(VanillaTransformerTrainer, "_save_checkpoint", full_from_the_second_on)
        expected = (
            r"^saving .*out/checkpoint-6 failed \(.*No space left.*\); .*checkpoint-3 is complete: resume from it$"
        )
        with pytest.raises(UserError, match=expected):
            train(parse_arguments(flags(output, **options)), exact_matches)
    assert [path.name for path in complete_checkpoints(output)] == ["checkpoint-3"]
    AutoModelForSeq2SeqLM.from_pretrained(output / "checkpoint-3")
    train(parse_arguments(flags(output, **options, resume_from_checkpoint=output / "checkpoint-3")), exact_matches)
    assert [path.name for path in complete_checkpoints(output)] == ["checkpoint-3", "checkpoint-6"]


@pytest.mark.parametrize("size", [100_000, 250_000])
def test_writers_that_really_fail(processes, two_checkpoints, tmp_path, size):
    """The weights do not fit into 100 kB, the optimiser's state not into 250: each writer has errors of its own."""
    whole, options = two_checkpoints
    sizes = {name: (whole / "checkpoint-6" / name).stat().st_size for name in ("model.safetensors", "optimizer.pt")}
    assert 100_000 < sizes["model.safetensors"] < 250_000 < sizes["optimizer.pt"]
    output = tmp_path / "out"
    codes, log = start(processes, output, accident=(limit_file_size, size), **options)
    assert codes == [2], log
    assert re.search(
        r"one line: saving .*out/checkpoint-6 failed \(.+\); .*checkpoint-3 is complete: resume from it$", log, re.M
    )
    assert [path.name for path in complete_checkpoints(output)] == ["checkpoint-3"]


def test_a_first_checkpoint_that_fails(tmp_path, monkeypatch):
    stage_optimizer(monkeypatch)
    with pytest.raises(UserError, match=r"checkpoint-3 failed .* no earlier checkpoint is complete$"):
        train(parse_arguments(flags(tmp_path / "out", **corpus(tmp_path), **STEPS)), exact_matches)


def test_a_result_that_cannot_be_saved_loses_nothing(tmp_path, monkeypatch):
    """The disk is full when all checkpoints are written; the run can be finished later without a further step."""
    options, output = {**corpus(tmp_path), **STEPS, "max_steps": 6}, tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "_finish_weights", lambda *args: stage_model(patch))
        with pytest.raises(
            UserError, match=r"saving .*out/model.safetensors failed .*checkpoint-6 is complete: resume"
        ):
            train(parse_arguments(flags(output, **options)), exact_matches)
    train(parse_arguments(flags(output, **options, resume_from_checkpoint="true")), exact_matches)
    assert json.loads((output / "run.json").read_text())["training"]["weights"] == "mean of the last 2 checkpoints"


# What can be resumed, and what goes with it


def fails(message, output, **options):
    with pytest.raises(UserError, match=message) as caught:
        train(parse_arguments(flags(output, **options)), exact_matches)
    assert "\n" not in str(caught.value)


def test_what_is_not_a_checkpoint_is_not_resumed(two_checkpoints, tmp_path):
    whole, options = two_checkpoints
    output = shutil.copytree(whole, tmp_path / "out")
    fails("out holds another run", output, **options)
    fails("out holds another run", output, **options, resume_from_checkpoint="False")
    fails(
        r"missing is not a complete checkpoint: expected a folder", output, **options, resume_from_checkpoint="missing"
    )
    fails("out is not a complete checkpoint", output, **options, resume_from_checkpoint=output)
    for number in (3, 6):
        halve(output / f"checkpoint-{number}" / "model.safetensors")
    fails("checkpoint-6 is not a complete", output, **options, resume_from_checkpoint=output / "checkpoint-6")
    fails("out holds no complete checkpoint to resume from", output, **options, resume_from_checkpoint="true")
    fails("new holds no complete checkpoint", tmp_path / "new", **options, resume_from_checkpoint="true")


def test_other_folders_are_not_taken_for_checkpoints(two_checkpoints, tmp_path):
    output = shutil.copytree(two_checkpoints[0], tmp_path / "out")
    for name in ("checkpoint-best", "checkpoint-7-old", "my-checkpoint-8"):
        shutil.copytree(output / "checkpoint-6", output / name)
    shutil.copytree(output / "checkpoint-6", output / "checkpoint-10")
    assert [path.name for path in complete_checkpoints(output)] == ["checkpoint-3", "checkpoint-6", "checkpoint-10"]


def test_a_checkpoint_of_two_processes_has_the_random_states_of_both(two_checkpoints, tmp_path):
    output = shutil.copytree(two_checkpoints[0], tmp_path / "out")
    assert complete_checkpoints(output, world_size=2) == []
    for folder in output.glob("checkpoint-*"):
        shutil.copy(folder / "rng_state.pth", folder / "rng_state_0.pth")
        shutil.copy(folder / "rng_state.pth", folder / "rng_state_1.pth")
    halve(output / "checkpoint-6" / "rng_state_1.pth")
    assert [path.name for path in complete_checkpoints(output, world_size=2)] == ["checkpoint-3"]


def test_tied_weights_may_be_stored_under_another_name(two_checkpoints, tmp_path, caplog):
    whole, options = two_checkpoints
    options = {**options, "max_steps": 9, "average_checkpoints": 3, "resume_from_checkpoint": "true"}
    for name in ("plain", "renamed"):
        output = shutil.copytree(whole, tmp_path / name)
        for file in output.glob("checkpoint-*/model.safetensors") if name == "renamed" else ():
            weights = load_file(file)
            weights["model.decoder.embed_tokens.weight"] = weights.pop("model.encoder.embed_tokens.weight")
            save_file(weights, file, metadata={"format": "pt"})
        train(parse_arguments(flags(output, **options)), exact_matches)
    assert "missing keys" not in caplog.text
    plain, renamed = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "renamed"))
    assert plain.keys() == renamed.keys()
    assert all(np.array_equal(plain[name], renamed[name]) for name in plain)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"config_overrides": "dropout=0.3"}, r"checkpoint-6 has dropout=0\.\d+, this run 0\.3: resume with the model"),
        ({"config_overrides": "encoder_attention_heads=2"}, "has encoder_attention_heads=4, this run 2"),
        ({"label_smoothing_factor": 0.3}, "this run 0.3: resume with the model that it began with"),
        ({"optim": "adafactor"}, "another one .*: resume with the --muon and the --optim that it began with"),
    ],
    ids=str,
)
def test_a_run_stays_what_it_is(two_checkpoints, tmp_path, other, message):
    whole, options = two_checkpoints
    options = {**options, "max_steps": 8, "resume_from_checkpoint": whole / "checkpoint-6", **other}
    fails(message, tmp_path / "out", **options)


def test_a_moving_average_cannot_begin_in_the_middle(two_checkpoints, tmp_path):
    whole, options = two_checkpoints
    output = shutil.copytree(whole, tmp_path / "out")
    message = "checkpoint-6 has no moving average: resume without --ema_decay"
    fails(message, output, **options, ema_decay=0.5, resume_from_checkpoint="true")


def test_the_patience_that_is_left_survives(tmp_path):
    """Best at step 1, patience three: a run resumed at step 2 stops at step 4, as the whole one does."""
    every_step = {
        f"{what}_{name}": value for what in ("save", "eval") for name, value in (("strategy", "steps"), ("steps", 1))
    }
    options = {**corpus(tmp_path), **every_step, "early_stopping_patience": 3}
    output = tmp_path / "out"

    def falling(values):
        scores = iter(values)
        return lambda hypotheses, references: {"bleu": next(scores)}

    train(parse_arguments(flags(output, **options)), falling([9, 8, 7, 6, 5, 4]))
    assert json.loads((output / "run.json").read_text())["training"]["steps"] == 4
    resume = {"resume_from_checkpoint": output / "checkpoint-2"}
    train(parse_arguments(flags(tmp_path / "again", **options, **resume)), falling([7, 6, 5, 4]))
    assert json.loads((tmp_path / "again" / "run.json").read_text())["training"]["steps"] == 4


def test_resuming_is_not_part_of_the_recipe(two_checkpoints, tmp_path):
    whole, options = two_checkpoints
    output = shutil.copytree(whole, tmp_path / "out")
    train(parse_arguments(flags(output, **options, resume_from_checkpoint="true")), exact_matches)
    recipes = [json.loads((folder / "run.json").read_text())["recipe"] for folder in (whole, output)]
    assert recipes[0] == recipes[1]
    assert "output_dir" not in recipes[0]


def test_the_flag_alone_means_the_newest_checkpoint(two_checkpoints, tmp_path):
    _, options = two_checkpoints
    argv = [*flags(tmp_path / "out", **options), "--resume_from_checkpoint"]
    assert str(parse_arguments(argv)[3].resume_from_checkpoint).lower() == "true"


def test_old_checkpoints_go_and_the_averaged_ones_stay(tmp_path):
    options = {**corpus(tmp_path), "save_strategy": "steps", "save_steps": 1, "max_steps": 6, "eval_strategy": "no"}
    for kept, expected in ((3, [4, 5, 6]), (0, [5, 6])):
        output = tmp_path / f"keep-{kept}"
        train(parse_arguments(flags(output, **options, average_checkpoints=kept)), exact_matches)
        assert [path.name for path in complete_checkpoints(output)] == [f"checkpoint-{step}" for step in expected]
