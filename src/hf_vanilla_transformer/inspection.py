"""Look inside: pictures of what a model does and learns, and models with a part switched off."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .embeddings import LearnedPositions, SinusoidalPositions, sinusoid_table
from .errors import UserError
from .modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration

ABLATIONS = ("cross-attention", "positions")


@contextmanager
def without(model: VanillaTransformerForConditionalGeneration, part: str) -> Iterator[None]:
    """Inside the block the model lacks one part: its output is zero.

    Args:
        model: restored afterwards.
        part: "cross-attention", by which the decoder sees the source, or "positions", by which it knows order.

    Raises:
        UserError: another part.
    """
    if part not in ABLATIONS:
        raise UserError(f"cannot switch off {part!r}: choose one of {', '.join(ABLATIONS)}")
    if part == "positions":
        silenced = [m for m in model.modules() if isinstance(m, (SinusoidalPositions, LearnedPositions))]
    else:
        silenced = [layer.encoder_attn for layer in model.model.decoder.stack.layers]

    def zero(module: torch.nn.Module, args: tuple, output: Any) -> Any:
        if isinstance(output, tuple):
            return torch.zeros_like(output[0]), *output[1:]
        return torch.zeros_like(output)

    with ExitStack() as stack:
        for module in silenced:
            stack.callback(module.register_forward_hook(zero).remove)
        yield


@torch.inference_mode()
def cross_attention(
    model: VanillaTransformerForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, source: str
) -> tuple[list[str], list[str], Tensor]:
    """Translate one sentence greedily and say where each target token looked.

    Returns:
        source tokens (S), target tokens (T), and the weights (decoder layers, heads, T, S): row t belongs to the
        step that wrote target token t.
    """
    batch = tokenizer([source], return_tensors="pt").to(model.device)
    search = {"num_beams": 1, "early_stopping": False, "length_penalty": 1.0, "num_return_sequences": 1}
    written = model.generate(**batch, **search, return_dict_in_generate=False)
    backend = model.config._attn_implementation
    model.set_attn_implementation("eager")  # the backend that returns its weights
    try:
        output = model(**batch, decoder_input_ids=written[:, :-1], output_attentions=True)
    finally:
        model.set_attn_implementation(backend)
    weights = torch.stack(output.cross_attentions)[:, 0]
    target_backend = getattr(tokenizer, "target_backend", None)
    name = target_backend.id_to_token if target_backend else tokenizer.convert_ids_to_tokens
    return (
        tokenizer.convert_ids_to_tokens(batch["input_ids"][0].tolist()),
        [name(token) for token in written[0, 1:].tolist()],
        weights.float().cpu(),
    )


def _axes(width: float, height: float):
    """A figure to draw on, without a screen.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError('pictures need matplotlib: pip install "hf-vanilla-transformer[plot]"') from error
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def plot_cross_attention(source: Sequence[str], target: Sequence[str], weights: Tensor, path: Path) -> None:
    """Draw where each target token looked: weights (layers, heads, T, S), the mean over heads of the last layer."""
    figure, axes = _axes(1.5 + 0.42 * len(source), 1.2 + 0.36 * len(target))
    image = axes.imshow(weights[-1].mean(dim=0).numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(source)), source, rotation=60, ha="right")
    axes.set_yticks(range(len(target)), target)
    axes.set_xlabel("source")
    axes.set_ylabel("translation")
    axes.set_title("Encoder-decoder attention, last layer, mean over heads")
    figure.colorbar(image, ax=axes, label="weight")
    figure.savefig(path, dpi=120)


def plot_learning_curve(log_history: Sequence[dict[str, float]], path: Path) -> None:
    """Draw training and validation loss (nats per token) and, where there is one, the validation BLEU."""
    figure, axes = _axes(7, 4)
    series = {"loss": "training loss (label-smoothed)", "eval_loss": "validation loss"}
    for (key, label), colour in zip(series.items(), ("tab:gray", "tab:blue"), strict=True):
        points = [(entry["step"], entry[key]) for entry in log_history if key in entry]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, color=colour)
    axes.set_xlabel("optimiser step")
    axes.set_ylabel("nats per target token")
    axes.grid(alpha=0.3)
    axes.legend(loc="center right")
    bleu = [(entry["step"], entry["eval_bleu"]) for entry in log_history if "eval_bleu" in entry]
    if bleu:
        right = axes.twinx()
        right.plot(*zip(*bleu, strict=True), color="tab:green", marker="o", markersize=3, label="validation BLEU")
        right.set_ylabel("BLEU", color="tab:green")
        right.set_ylim(0, 100)
    figure.savefig(path, dpi=120)


def plot_learning_rate(log_history: Sequence[dict[str, float]], path: Path) -> None:
    """Draw the learning rate as it was logged: section 5.3, equation 3."""
    figure, axes = _axes(7, 3)
    points = [(entry["step"], entry["learning_rate"]) for entry in log_history if "learning_rate" in entry]
    if points:
        axes.plot(*zip(*points, strict=True), color="tab:red")
    axes.set_xlabel("optimiser step")
    axes.set_ylabel("learning rate")
    axes.set_title("Linear warm-up, then the inverse square root of the step")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def plot_positions(path: Path, num_positions: int = 64, d_model: int = 128) -> None:
    """Draw the sinusoids of section 3.5 as a (positions, dimensions) image."""
    figure, axes = _axes(7, 4)
    image = axes.imshow(sinusoid_table(num_positions, d_model).numpy(), cmap="RdBu", vmin=-1, vmax=1, aspect="auto")
    axes.set_xlabel("dimension")
    axes.set_ylabel("position")
    axes.set_title("Positional encoding")
    figure.colorbar(image, ax=axes)
    figure.savefig(path, dpi=120)
