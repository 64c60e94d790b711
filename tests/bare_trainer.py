"""The trainer by itself, and what it should compute: for tests that look at one step or one loss."""

import torch
from torch.nn.functional import cross_entropy
from transformers import TrainerCallback

from hf_vanilla_transformer.arguments import parse_arguments
from hf_vanilla_transformer.batching import PairCollator, TrainingPairs
from hf_vanilla_transformer.training import VanillaTransformerTrainer
from word_reversal import flags


def bare_trainer(folder, model, rows, callbacks=(), eval_dataset=None, **options):
    """`VanillaTransformerTrainer` without the function around it; rows of `input_ids` and `labels`."""
    args = parse_arguments(flags(folder / "out", train_file="unused", label_smoothing_factor=0, **options))[3]
    return VanillaTransformerTrainer(
        model=model,
        args=args,
        data_collator=PairCollator(1),
        train_dataset=TrainingPairs(rows),
        eval_dataset=eval_dataset,
        callbacks=list(callbacks),
        train_lengths=[max(len(row["input_ids"]), len(row["labels"])) for row in rows],
        eval_max_length=12,
    )


def loss_by_hand(model, rows, label_smoothing=0.0):
    """Mean over target tokens of PyTorch's cross-entropy, one pair at a time: nothing is padded, nothing is masked."""
    total, tokens = 0.0, 0
    for row in rows:
        shown = torch.tensor([[2, *row["labels"][:-1]]])
        logits = model(input_ids=torch.tensor([row["input_ids"]]), decoder_input_ids=shown).logits[0]
        labels = torch.tensor(row["labels"])
        total = total + cross_entropy(logits, labels, label_smoothing=label_smoothing, reduction="sum")
        tokens += len(labels)
    return total / tokens


class FirstStep(TrainerCallback):
    """Keeps the gradients of the first optimiser step."""

    def __init__(self):
        self.gradients = {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step == 0:
            self.gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
