"""The model as ONNX graphs, for runtimes without PyTorch: ONNX Runtime and whatever else reads the format.

transformers traces the graphs; what is ours is which graphs, and that they hold nothing of the machine they were made
on. A translation runs `encoder` once per batch, `prefill` on the start token, then `decode` once per further token:

| graph | inputs | outputs |
|---|---|---|
| `encoder` | `input_ids`, `attention_mask` (B, S) | `last_hidden_state` (B, S, D) |
| `prefill` | `decoder_input_ids` (B, 1), `attention_mask`, `encoder_outputs.last_hidden_state` | `logits`, cache |
| `decode` | those of `prefill`, cache | those of `prefill` |

`logits` are (B, 1, V). The cache is four tensors per layer, keys and values of each attention, all (B, H, length, K).
Their names begin with `past_key_values`, after `input.` and `output.` in `decode`.

Shapes: B batch, S source length, D d_model, H heads, K head size, V target vocabulary.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from .errors import UserError
from .modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration


def export_onnx(model: VanillaTransformerForConditionalGeneration, folder: str | Path) -> Path:
    """Write `encoder.onnx`, `prefill.onnx` and `decode.onnx` with their weights, the configuration and a manifest.

    `transformers.exporters.base.ExportedModel.from_pretrained(folder).runners` calls the graphs on ONNX Runtime. Batch
    size and lengths are free, up to the model's `max_position_embeddings`: a graph holds a table of positions of
    that size.

    Args:
        model: on the CPU.
        folder: made if it is not there.

    Returns:
        `folder`.

    Raises:
        UserError: a package of the extra `onnx` is not installed, or transformers is too old.
    """
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    if not hasattr(OnnxExporter, "save_program"):
        raise UserError(f"exporting to ONNX needs transformers 5.23 or newer: this is {transformers.__version__}")
    try:
        exporter = OnnxExporter()
    except ImportError as error:
        raise UserError(f"{error} Or: pip install 'hf-vanilla-transformer[onnx]'") from error
    settings = OnnxConfig(dynamic=True)
    with _one_hypothesis(model), _errors_only():
        # the third token is decoded after a cache of length two: a length of one would be taken for a constant
        exported = exporter.export_for_generation(model, _sample(model), settings, multi_token_decode=True)
        encoder = exporter.export(model.get_encoder(), _sample(model), settings)
    exported.components["encoder"] = encoder.components["model"]
    exported.generation_config = model.generation_config
    for component in exported.components.values():
        _forget_where_it_was_made(component.program)
    exported.save_pretrained(folder)
    return Path(folder)


def _sample(model: VanillaTransformerForConditionalGeneration) -> dict[str, Tensor]:
    """Two sentences, one of them padded: a dimension of size one would be taken for a constant."""
    input_ids = torch.full((2, 3), model.config.eos_token_id)
    input_ids[0, -1] = model.config.pad_token_id
    return {"input_ids": input_ids, "attention_mask": input_ids.ne(model.config.pad_token_id).long()}


@contextmanager
def _one_hypothesis(model: VanillaTransformerForConditionalGeneration) -> Iterator[None]:
    """Greedy search without dropout, whatever the model is set to: beams and dropout would become part of the graph."""
    kept, training = model.generation_config, model.training
    model.generation_config = deepcopy(kept)
    model.generation_config.update(
        num_beams=1, num_return_sequences=1, early_stopping=False, length_penalty=1.0, do_sample=False, use_cache=True
    )
    model.eval()
    try:
        yield
    finally:
        model.generation_config = kept
        model.train(training)


@contextmanager
def _errors_only() -> Iterator[None]:
    """Silence pages of warnings about operators that our model lacks, and about dimensions meant to be constant."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch._export")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _forget_where_it_was_made(program: Any) -> None:
    """The trace notes source files and lines at every node, with the folders of this machine."""
    for node in program.graph.all_nodes():
        node.metadata_props.clear()
