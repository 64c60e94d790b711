"""Fixtures that several test modules use."""

import os
import sys
from pathlib import Path

# Before torch is imported: the models are so small that a second thread would only wait for the first.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
from transformers import dynamic_module_utils

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with `multi30k/` and `tatoeba_en_de/`, which cannot be part of this repository."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("VANILLA_TRANSFORMER_DATA", default))
    if not folder.is_dir():
        pytest.skip(f"no real parallel text at {folder}: set VANILLA_TRANSFORMER_DATA to a folder with multi30k/")
    return folder


@pytest.fixture
def one_thread():
    """Tiny models are faster so, because threads only wait for each other; bit-equal sums need equally many."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def remote_code(monkeypatch, tmp_path):
    """Code that comes with a model goes to a folder of this test, and no later test finds what it left in memory."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    forget_remote_code()
    yield
    forget_remote_code()


def forget_remote_code():
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
        del sys.modules[name]


@pytest.fixture
def tiny_model() -> VanillaTransformerForConditionalGeneration:
    """A random model of the size `test` in evaluation mode, vocabulary of 99 tokens, without dropout."""
    torch.manual_seed(0)
    config = VanillaTransformerConfig.preset("test", vocab_size=99, dropout=0.0)
    return VanillaTransformerForConditionalGeneration(config).eval()


@pytest.fixture(scope="session")
def run_record() -> dict:
    """What a training leaves in run.json; copy it before a change."""
    return {
        "command": ["vanilla-transformer", "train", "--train-source", "my train.en"],
        "commit": "0123abc",
        "date": "2026-01-02",
        "versions": {"transformers": "5.23.0", "torch": "2.13.0", "sacrebleu": None},
        "seed": 7,
        "hardware": {"cpu": "Some CPU", "cores": 2, "gpu": None},
        "source_lang": "en",
        "target_lang": "de",
        "data": {
            "description": "Captions of {{ photographs }}.",
            "dataset": "someone/captions",
            "report": {"read": 29000, "kept": 28900, "dropped": {"empty": 60, "too long": 40, "duplicate": 0}},
        },
        "recipe": {"learning_rate": 0.0005},
        "parameters": 1,
        "training": {
            "seconds": 3725.4,
            "steps": 12000,
            "epochs": 20.04,
            "target_tokens": 9876543,
            "weights": "last step",
            "resumed_from": None,
        },
        "curve": [],
    }


@pytest.fixture(scope="session")
def evaluation_record() -> dict:
    """What an evaluation leaves in evaluation.json; copy it before a change."""
    return {
        "sets": {
            "test_2016_flickr": {
                "n": 1000,
                "text": "raw detokenised",
                "scores": {
                    "bleu": {"score": 41.234, "signature": "nrefs:1|case:mixed|tok:13a"},
                    "chrf": {"score": 63.5, "signature": "nrefs:1|case:mixed|nc:6|nw:0"},
                    "p1": {"score": 40.004, "signature": "P1|lc"},
                },
            },
        },
        "generation": {"num_beams": 5},
    }
