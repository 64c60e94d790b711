"""scripts/multi30k_captions.py: what it takes, what it refuses."""

import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "multi30k_captions.py"

pytest.importorskip("sacremoses")


def extract(folder, output, *flags, **environment):
    command = [sys.executable, SCRIPT, folder, "de", output, *flags]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


@pytest.fixture
def descriptions(tmp_path):
    """Two descriptions of each of three images, one of them twice and one empty."""
    folder = tmp_path / "task2" / "raw"
    folder.mkdir(parents=True)
    texts = {"train.1": ["Ein Hund.", "Zwei Männer, müde", "Ein Kind."], "train.2": ["ein Hund .", "", "„Hallo“!"]}
    for name, lines in {**texts, "val.1": ["Nie gesehen."]}.items():
        (folder / f"{name}.de.gz").write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode()))
    return tmp_path


def test_training_captions_in_lower_case_tokens_and_each_once(descriptions, tmp_path):
    result = extract(descriptions, tmp_path / "captions.de")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "captions.de").read_text(encoding="utf-8").splitlines() == [
        "ein hund .",
        "zwei männer , müde",
        "ein kind .",
        "&quot; hallo &quot; !",
    ]
    assert "4 captions" in result.stdout


def test_the_same_captions_as_written(descriptions, tmp_path):
    result = extract(descriptions, tmp_path / "captions.de", "--raw")
    assert result.returncode == 0, result.stderr
    lines = (tmp_path / "captions.de").read_text(encoding="utf-8").splitlines()
    assert lines == ["Ein Hund.", "Zwei Männer, müde", "Ein Kind.", "„Hallo“!"]


def test_a_folder_without_captions_is_one_line(tmp_path):
    result = extract(tmp_path, tmp_path / "captions.de")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].endswith("has no task2/raw/train.*.de.gz")
    assert not (tmp_path / "captions.de").exists()


def test_without_sacremoses_it_says_what_to_install(descriptions, tmp_path):
    (tmp_path / "sacremoses.py").write_text("raise ImportError")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    result = extract(descriptions, tmp_path / "captions.de", PYTHONPATH=path)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].endswith('pip install "hf-vanilla-transformer[moses]"')
