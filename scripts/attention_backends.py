"""How far every attention backend is from `eager` in 32 bits, on this machine.

python scripts/attention_backends.py    print the table and write scripts/results/attention_backends.json; exit status 1
                                        if a difference is larger than the type of number explains

A small model learns to copy a few sentences of different lengths. Then, with the source padded on either side:

| column | largest difference of |
|---|---|
| log-probabilities | those of every token in training mode |
| gradients | those of all parameters, relative to the largest of them |
| greedy | the logits of each step of transformers' search; "other words" if the sentences are not the same |
| beam | the scores of all four beams of each sentence; "other words" if the best of them are not the same |
| empty source | log-probabilities of a sentence whose source is padding only; its attention is zero everywhere |
"""

import argparse
import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.errors import on_one_line
from hf_vanilla_transformer.provenance import provenance
from results_table import backends

RESULT = Path(__file__).resolve().parent / "results" / "attention_backends.json"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LIMITS = {"float32": 1e-4, "bfloat16": 0.5}
VARIANTS = [
    ("sdpa", torch.float32),
    ("flex_attention", torch.float32),
    ("eager", torch.bfloat16),
    ("sdpa", torch.bfloat16),
    ("flex_attention", torch.bfloat16),
    ("flash_attention_2", torch.bfloat16),
    ("flash_attention_3", torch.bfloat16),
]
VOCABULARY, PAD, EOS, LENGTH = 20, 1, 3, 12


def sentences(side: str) -> tuple[Tensor, Tensor]:
    """Source and labels, (16, LENGTH) each; the source is padded on this side, the labels on the right."""
    generator = torch.Generator().manual_seed(1)
    source, labels = torch.full((16, LENGTH), PAD), torch.full((16, LENGTH), -100)
    for row, length in enumerate(torch.randint(1, LENGTH, (16,), generator=generator).tolist()):
        words = torch.cat([torch.randint(4, VOCABULARY, (length,), generator=generator), torch.tensor([EOS])])
        labels[row, : len(words)] = words
        source[row, : len(words)] = words
        if side == "left":
            source[row] = source[row].roll(LENGTH - len(words))
    return source.to(DEVICE), labels.to(DEVICE)


def trained_model(steps: int = 200) -> VanillaTransformerForConditionalGeneration:
    """A copier, so that 16 bits rarely change what it says."""
    torch.manual_seed(0)
    config = VanillaTransformerConfig.preset(
        "test", vocab_size=VOCABULARY, d_model=128, dropout=0.0, label_smoothing=0.0, attn_implementation="eager"
    )
    model = VanillaTransformerForConditionalGeneration(config).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98))
    source, labels = sentences("right")
    for _ in range(steps):
        optimizer.zero_grad()
        model(source, labels=labels).loss.backward()
        optimizer.step()
    return model.eval()


def log_probabilities(model: VanillaTransformerForConditionalGeneration, source: Tensor, labels: Tensor) -> Tensor:
    """(N, VOCABULARY) for the N tokens of the labels."""
    inputs = model.prepare_decoder_input_ids_from_labels(labels)
    logits = model(source, decoder_input_ids=inputs, use_cache=False).logits
    return logits.float().log_softmax(dim=-1)[labels != -100]


def training(model: VanillaTransformerForConditionalGeneration, side: str) -> Tensor:
    with torch.no_grad():
        return log_probabilities(model.train(), *sentences(side))


def gradients(model: VanillaTransformerForConditionalGeneration, side: str) -> Tensor:
    """Relative to the largest, for labels that the model does not expect."""
    source, labels = sentences(side)
    model.train().zero_grad()
    model(source, labels=labels.where(labels < 4, labels.flip(0).clamp(min=4))).loss.backward()
    flat = torch.cat([parameter.grad.flatten().float() for parameter in model.parameters()])
    return flat / flat.abs().max()


def greedy(model: VanillaTransformerForConditionalGeneration, side: str) -> tuple[list, Tensor]:
    output = model.eval().generate(
        sentences(side)[0], max_length=LENGTH + 1, return_dict_in_generate=True, output_logits=True
    )
    return output.sequences.tolist(), torch.stack(output.logits)


def beam(model: VanillaTransformerForConditionalGeneration, side: str) -> tuple[list, Tensor]:
    search = {"max_length": LENGTH + 1, "num_beams": 4, "num_return_sequences": 4, "return_dict_in_generate": True}
    output = model.eval().generate(sentences(side)[0], **search)
    if output.sequences_scores is None:  # transformers searched, which tells them only with those of every step
        output = model.generate(sentences(side)[0], **search, output_scores=True)
    return output.sequences[::4].tolist(), output.sequences_scores


@torch.no_grad()
def empty_source(model: VanillaTransformerForConditionalGeneration, side: str) -> Tensor:
    """Row 0 sees nothing: attention over its source must be zero before the output projection."""
    source, labels = sentences(side)
    source[0] = PAD
    largest: list[Tensor] = []
    hooks = []
    for module in (*model.model.encoder.stack.layers, *model.model.decoder.stack.layers):
        attention = getattr(module, "encoder_attn", module.self_attn)
        hooks.append(
            attention.out_proj.register_forward_pre_hook(lambda _, args: largest.append(args[0][0].abs().max()))
        )
    result = log_probabilities(model.eval(), source, labels)[: int((labels[0] != -100).sum())]
    for hook in hooks:
        hook.remove()
    if any(largest):
        sys.exit(f"a sentence without a source attends to something: {max(largest).item():.1e}")
    return result


COLUMNS: list[tuple[str, Callable, str]] = [
    *((f"log-probabilities, {side}", training, side) for side in ("right", "left")),
    *((f"gradients, {side}", gradients, side) for side in ("right", "left")),
    *((f"greedy, {side}", greedy, side) for side in ("right", "left")),
    *((f"beam, {side}", beam, side) for side in ("right", "left")),
    ("empty source", empty_source, "right"),
]


def difference(ours: Any, expected: Any) -> float | str:
    """The largest absolute difference, or a word if there is nothing to compare."""
    if isinstance(expected, tuple):
        if ours[0] != expected[0]:
            return "other words"
        ours, expected = ours[1], expected[1]
    return (ours.float() - expected.float()).abs().max().item()


def measured(teacher: VanillaTransformerForConditionalGeneration, name: str, dtype: torch.dtype) -> dict[str, Any]:
    """One row: for each column the difference, or {"reason": why it cannot run here}."""
    model = copy.deepcopy(teacher).to(dtype)
    try:
        model.set_attn_implementation(name)
    except (ImportError, ValueError) as error:
        return {column: {"reason": str(error)} for column, _, _ in COLUMNS}
    row = {}
    for column, measure, side in COLUMNS:
        torch.compiler.reset()  # or torch gives flex_attention up after eight shapes and runs its uncompiled form
        try:
            row[column] = difference(measure(model, side), measure(teacher, side))
        except (NotImplementedError, RuntimeError, ValueError) as error:
            row[column] = {"reason": on_one_line(error)}
    return row


def kept(row: dict[str, Any]) -> bool:
    """Whether whatever ran is as close to `eager` as its type allows."""
    return all(
        isinstance(value, dict) or (not isinstance(value, str) and value <= LIMITS[row["dtype"]])
        for value in row["differences"].values()
    )


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    teacher, rows = trained_model(), []
    for name, dtype in VARIANTS:
        differences = measured(teacher, name, dtype)
        rows.append({"backend": name, "dtype": str(dtype).removeprefix("torch."), "differences": differences})
    print(backends(rows))
    record = {**provenance(), "device": DEVICE.type, "rows": rows}
    RESULT.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return int(not all(map(kept, rows)))


if __name__ == "__main__":
    sys.exit(main())
