"""scripts/translation_errors.py on a data set of our own in the layout of Multi30k."""

import gzip
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "translation_errors.py"
PAIRS = [("a big dog .", "ein großer hund ."), ("a xylophone plays .", "ein xylophon spielt .")]
SETS = ("test_2016_flickr", "test_2017_flickr", "test_2017_mscoco")


@pytest.fixture
def folder(tmp_path):
    """The same two sentences in each test set; the training text has the words of the first one."""
    tokens = tmp_path / "data" / "task1" / "tok"
    tokens.mkdir(parents=True)
    for split, pairs in {"train": PAIRS[:1], **dict.fromkeys(SETS, PAIRS)}.items():
        for side, language in enumerate(("en", "de")):
            text = "".join(f"{pair[side]}\n" for pair in pairs)
            (tokens / f"{split}.lc.norm.tok.{language}.gz").write_bytes(gzip.compress(text.encode()))
    return tmp_path


def results(folder, name, hypotheses):
    path = folder / name / "seed1"
    path.mkdir(parents=True)
    for split in SETS:
        (path / f"{split}.hyp.de").write_text("".join(f"{line}\n" for line in hypotheses), encoding="utf-8")
    return path


def compare(folder, *systems):
    command = [sys.executable, SCRIPT, folder / "data", *systems, "--output", folder / "report.md"]
    return subprocess.run(command, capture_output=True, text=True)


def test_faults_are_counted_and_the_largest_differences_listed(folder):
    first = results(folder, "plain", ["ein ein hund .", "ein xylophone ."])
    second = results(folder, "better", ["ein großer hund .", "ein xylofant hund ein hund ein ."])
    result = compare(folder, first, second)
    assert result.returncode == 0, result.stderr
    report = (folder / "report.md").read_text(encoding="utf-8")
    assert "| sentences with | plain/seed1 | better/seed1 | references |" in report
    for row in (  # "xylophon" and "spielt" are not in the training text
        "| a word that is in neither the training text nor the source | 0 | 3 | 3 |",
        "| a word left in English | 3 | 0 | 0 |",
        "| a word twice in a row | 3 | 0 | 0 |",
        "| more than one and a half of it | 0 | 3 | 0 |",
        "| the reference, word for word | 0 | 3 | 6 |",
    ):
        assert row in report
    assert "3 sentences gain 20 points or more" in report
    better, worse = (report.split(f"## What became {which}")[1].splitlines()[4] for which in ("better", "worse"))
    assert "| ein ein hund . | ein großer hund . |" in better
    assert "| ein xylophone . | ein xylofant hund ein hund ein . |" in worse


def test_results_of_another_test_set_are_refused(folder):
    first = results(folder, "plain", ["ein hund .", "ein xylophon ."])
    second = results(folder, "short", ["ein hund ."])
    result = compare(folder, first, second)
    assert result.returncode == 2
    assert "has 1 lines, the test set 2" in result.stderr


def test_a_folder_without_hypotheses_is_one_line(folder):
    result = compare(folder, results(folder, "plain", ["a", "b"]), folder)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].endswith("evaluate that model first")
