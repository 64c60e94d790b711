"""Fixtures that several test modules use."""

import os
from pathlib import Path

import pytest
import torch

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
def tiny_model() -> VanillaTransformerForConditionalGeneration:
    """A random model of the size `test` in evaluation mode, vocabulary of 99 tokens, without dropout."""
    torch.manual_seed(0)
    config = VanillaTransformerConfig.preset("test", vocab_size=99, dropout=0.0)
    return VanillaTransformerForConditionalGeneration(config).eval()
