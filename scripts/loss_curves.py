"""Whether what makes training fast on CPUs changes what is learnt: loss curves of an epoch, fast against plain.

    python scripts/loss_curves.py --dataset_name <multi30k folder>

| run | attention | dropout | loss | precision |
|---|---|---|---|---|
| plain | `eager`, the formula | `torch.nn.Dropout` | `cross_entropy` of all logits at once | float32 |
| fast | `sdpa`, as `cpu_attention` does it | sixteen random bits | in chunks, never all logits | float32 or bfloat16 |

Everything else is the same: the recipe multi30k_en_de_tiny, initial weights, batches and their order, AdamW, learning
rates, gradients clipped at norm 1. What dropout leaves out cannot be the same, because it is drawn differently: each
way has runs with several seeds of dropout, and the plain ones show how far chance alone takes curves apart. Curves are
the mean training loss of every 20 steps. Before its epoch every run takes 30 steps without dropout, from the same
weights: there nothing is left to chance, and the losses must agree step by step.

Goes to scripts/results/loss_curves.json, run by run (--only), and scripts/results_table.py makes the table. The exit
status is 1 if float32 without dropout does not agree.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import get_inverse_sqrt_schedule

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.arguments import Arguments, TrainingArguments, parse_arguments, parse_overrides
from hf_vanilla_transformer.batching import PairCollator, TokenBatchSampler, TrainingPairs
from hf_vanilla_transformer.dropout import Dropout
from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.loss import IGNORED
from hf_vanilla_transformer.preparation import PreparedCorpus, prepare_corpus, token_lengths
from hf_vanilla_transformer.provenance import provenance
from results_table import differences, loss_curves
from taking_turns import merge

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "scripts" / "recipes" / "multi30k_en_de_tiny.yaml"
RESULT = ROOT / "scripts" / "results" / "loss_curves.json"
WINDOW = 20  # steps
STEPS_WITHOUT_DROPOUT = 30
LIMIT = 1e-4  # of the difference in float32 without dropout
CLIPPING = 1.0

Batch = dict[str, Tensor]


class Run(NamedTuple):
    """How one of the models is trained; `seed` is that of dropout."""

    plain: bool
    bf16: bool
    seed: int


WAYS = {"plain": (True, False), "fast float32": (False, False), "fast bfloat16": (False, True)}
RUNS = {f"{way}, seed {seed}": Run(*how, seed) for way, how in WAYS.items() for seed in (1, 2, 3)}


def measure(corpus: PreparedCorpus, arguments: Arguments, run: Run) -> dict[str, Any]:
    """Train a model for the steps without dropout, and another for an epoch; losses are nats a token.

    Returns:
        `steps` of the epoch, its `curve`, the `validation_loss` after it; the losses of the steps `without_dropout`.
    """
    args = arguments[-1]
    batches = batches_of(corpus.train, args)
    still = build_model(corpus, arguments, run, dropout=0.0)
    without_dropout = train(still, batches[:STEPS_WITHOUT_DROPOUT], args, run)
    model = build_model(corpus, arguments, run)
    losses = train(model, batches, args, run)
    return {
        "steps": len(losses),
        "window": WINDOW,
        "curve": means(losses),
        "validation_loss": round(validation_loss(model, batches_of(corpus.validation, args), run), 6),
        "without_dropout": [round(loss, 6) for loss in without_dropout],
    }


def batches_of(pairs: Dataset, args: TrainingArguments) -> list[Batch]:
    """An epoch, in the order of our trainer."""
    pairs = pairs.select_columns(["input_ids", "labels"])
    examples, collate = TrainingPairs(pairs), PairCollator(VanillaTransformerConfig.pad_token_id)
    sampler = TokenBatchSampler(np.maximum(*token_lengths(pairs)), args.max_tokens_per_batch, args.seed)
    return [collate(examples.__getitems__(keys)) for keys in sampler]


def build_model(
    corpus: PreparedCorpus, arguments: Arguments, run: Run, **overrides: Any
) -> VanillaTransformerForConditionalGeneration:
    """That of the recipe, with the same weights in every run."""
    model_args, _, _, args = arguments
    fields = {"vocab_size": len(corpus.tokenizer), "label_smoothing": args.label_smoothing_factor}
    fields |= {**parse_overrides(model_args.config_overrides), **overrides}
    torch.manual_seed(args.seed)
    model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig.preset(model_args.preset, **fields))
    if run.plain:
        make_plain(model)
    return model


def make_plain(model: VanillaTransformerForConditionalGeneration) -> None:
    """Attention by the formula, and PyTorch's own dropout in the place of each of ours."""
    model.set_attn_implementation("eager")
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, Dropout):
                setattr(module, name, nn.Dropout(child.p))


def plain_loss(model: VanillaTransformerForConditionalGeneration, batch: Batch) -> Tensor:
    """Of a target token, from all logits at once."""
    labels = batch["labels"]
    targets = model.prepare_decoder_input_ids_from_labels(labels)
    hidden = model.model(batch["input_ids"], batch["attention_mask"], targets).last_hidden_state
    total = nn.functional.cross_entropy(
        model.lm_head(hidden).float().flatten(0, 1),
        labels.flatten(),
        ignore_index=IGNORED,
        label_smoothing=model.config.label_smoothing,
        reduction="sum",
    )
    return total / labels.ne(IGNORED).sum()


def train(
    model: VanillaTransformerForConditionalGeneration, batches: list[Batch], args: TrainingArguments, run: Run
) -> list[float]:
    """The loss of a target token in each step, label smoothing and dropout included."""
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        weight_decay=args.weight_decay,
        fused=True,
    )
    optimizer.param_groups[0]["initial_lr"] = args.learning_rate
    schedule = get_inverse_sqrt_schedule(optimizer, int(args.warmup_steps), last_epoch=0)  # from step 1, as our trainer
    torch.manual_seed(run.seed)
    model.train()
    losses = []
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=run.bf16):
            loss = plain_loss(model, batch) if run.plain else model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def validation_loss(model: VanillaTransformerForConditionalGeneration, batches: list[Batch], run: Run) -> float:
    """The cross-entropy of a target token, without dropout and label smoothing."""
    model.eval()
    total = tokens = 0
    for batch in batches:
        count = int(batch["labels"].ne(IGNORED).sum())
        with torch.autocast("cpu", torch.bfloat16, enabled=run.bf16):
            total += model(**batch).loss.item() * count
        tokens += count
    return total / tokens


def means(losses: Sequence[float]) -> list[float]:
    """Of each window; what does not fill one at the end is left out."""
    starts = range(0, len(losses) - WINDOW + 1, WINDOW)
    return [round(mean(losses[start : start + WINDOW]), 6) for start in starts]


def agree(sections: dict[str, dict]) -> bool:
    """Whether float32 loses the same, fast or plain, in every step without dropout."""
    fast, plain = (sections[name]["without_dropout"] for name in ("fast float32, seed 1", "plain, seed 1"))
    return all(apart <= LIMIT for apart in differences(fast, plain))  # which nan is not


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset_name", required=True, help="a Multi30k folder")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="RUN", help="; ".join(RUNS))
    parser.add_argument("--result", type=Path, default=RESULT, help="the file that the runs are merged into")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    origin = provenance()  # now: the source tree may change while this runs, and the result changes it
    arguments = parse_arguments([str(RECIPE), "--dataset_name", options.dataset_name])
    with tempfile.TemporaryDirectory() as folder:
        prepare_corpus(*arguments[1:3], Path(folder) / "prepared")
        corpus = PreparedCorpus.load(Path(folder) / "prepared")
        for name in options.only:
            found = measure(corpus, arguments, RUNS[name])
            merge(options.result, name, {**origin, "threads": options.threads, **found})
    sections = json.loads(options.result.read_text(encoding="utf-8"))["sections"]
    if RUNS.keys() - sections.keys():
        return 0
    print(loss_curves(sections))
    return int(not agree(sections))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"loss_curves.py: {error}")
