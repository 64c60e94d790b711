"""scripts/benchmark.py: taking turns, and the table; the figures themselves are no test."""

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def benchmark():
    path = Path(__file__).resolve().parents[1] / "scripts" / "benchmark.py"
    specification = importlib.util.spec_from_file_location("benchmark_script", path)
    module = sys.modules["benchmark_script"] = importlib.util.module_from_spec(specification)  # spawn finds it by name
    specification.loader.exec_module(module)
    return module


def test_the_table_names_the_ratio_to_the_best_marian(benchmark):
    training = {"ours float32": [6.0, 9.0, 30.0], "marian float32": [1.0, 2.0, 3.0], "marian bfloat16": [3.0, 3.0, 4.0]}
    lines = benchmark.table({"training": training, "machine": {"float32": [5e9]}}).splitlines()
    assert lines[2:] == [
        "| training | ours float32 | 9 | 6 to 30 | 3.00 |",
        "| training | marian float32 | 2 | 1 to 3 | 0.67 |",
        "| training | marian bfloat16 | 3 | 3 to 4 | 1.00 |",
        "| machine | float32 | 5e+09 | 5e+09 to 5e+09 |  |",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "work"), [("ours float32", 1000), ("marian float32", 1000)])
def test_training_counts_target_tokens(benchmark, engine, work, shared_data, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(benchmark.__file__).parent)
    monkeypatch.setattr(benchmark, "STEPS", 2)
    options = argparse.Namespace(dataset_name=str(shared_data / "multi30k"), folder=tmp_path)
    make, arguments = benchmark.ENGINES["training"][engine]
    tokens, seconds = make(options, *arguments)()
    assert tokens > work
    assert seconds > 0


@pytest.mark.slow
def test_an_engine_that_fails_ends_the_run(tmp_path):
    """It is not waited for."""
    script = Path(__file__).resolve().parents[1] / "scripts" / "benchmark.py"
    missing = ["--dataset_name", str(tmp_path / "nowhere"), "--model", "x", "--marian", "y"]
    done = subprocess.run([sys.executable, script, *missing, "--only", "training"], capture_output=True, timeout=120)
    assert done.returncode == 1
    assert b"nowhere" in done.stderr
