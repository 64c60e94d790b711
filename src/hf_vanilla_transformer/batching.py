"""Batches of about equally many tokens: section 5.1 of "Attention Is All You Need".

"Sentence pairs were batched together by approximate sequence length. Each training batch contained a set of sentence
pairs containing approximately 25000 source tokens and 25000 target tokens."

Shapes: B batch, S source length, T target length.
"""

import random
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from .errors import UserError
from .loss import IGNORED
from .tokenization_vanilla_transformer import SubwordDropout


def pad(sequences: Sequence[Sequence[int]], value: int) -> Tensor:
    """Token ids of different lengths -> (B, longest), filled up on the right."""
    lengths = [len(sequence) for sequence in sequences]
    padded = np.full((len(sequences), max(lengths)), value, dtype=np.int64)
    for row, sequence in enumerate(sequences):
        padded[row, : lengths[row]] = sequence
    return torch.from_numpy(padded)


class PairCollator:
    """Examples with `input_ids` and `labels` (lists of token ids) -> one batch of tensors.

    The batch has `input_ids` and `attention_mask` (B, S) and `labels` (B, T), with -100 where there is no target.
    The model makes the decoder's input from the labels.
    """

    def __init__(self, pad_token_id: int):
        self.pad_token_id = pad_token_id

    def __call__(self, examples: list[dict]) -> dict[str, Tensor]:
        input_ids = pad([example["input_ids"] for example in examples], self.pad_token_id)
        return {
            "input_ids": input_ids,
            "attention_mask": input_ids.ne(self.pad_token_id).long(),
            "labels": pad([example["labels"] for example in examples], IGNORED),
        }


class TokenBatchSampler(Sampler):
    """Batches by token budget and length, the same number in every epoch, each rank its own share.

    A batch of n pairs whose longest side has m tokens costs n * m, at most `max_tokens`. Pairs of the same length
    change places between epochs; where one batch ends and the next begins does not, so the number of steps is
    constant. Batches come in a new order each epoch. The order depends on seed and epoch alone, not on the number of
    ranks: two ranks with one batch each see in one step what one rank sees with an accumulation of two.

    Yields lists of (index, epoch): the epoch lets a data set draw fresh randomness, see `TrainingPairs`.

    Args:
        lengths: tokens of the longer side of each pair.
        max_tokens: the budget of one batch; a pair that is longer makes a batch of its own.
        seed: what the order depends on, besides the epoch.
        rank, world_size: which share this process gets.
        accumulation: batches of one rank in an optimiser step; every step is a full one.

    Raises:
        UserError: too few pairs for one step.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        max_tokens: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        accumulation: int = 1,
    ):
        self.lengths = np.asarray(lengths)
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self.bounds = self._bounds(max_tokens, world_size * accumulation)

    def _bounds(self, max_tokens: int, step: int) -> list[tuple[int, int]]:
        """Where batches begin and end among the pairs sorted by length; as many as fill whole optimiser steps."""
        if len(self.lengths) < step:
            raise UserError(
                f"{len(self.lengths)} training pairs do not fill one optimiser step of {step} batches: "
                "use more data, fewer processes or less gradient accumulation"
            )
        bounds, start = [], 0
        for end, length in enumerate(np.sort(self.lengths)):
            if end > start and (end + 1 - start) * length > max_tokens:
                bounds.append((start, end))
                start = end
        bounds.append((start, len(self.lengths)))
        while len(bounds) % step:
            largest = max(range(len(bounds)), key=lambda batch: bounds[batch][1] - bounds[batch][0])
            start, end = bounds[largest]
            if end - start == 1:
                raise UserError(
                    f"{len(bounds)} batches of a single pair do not fill optimiser steps of {step} batches: use larger "
                    "batches, fewer processes or less gradient accumulation"
                )
            middle = (start + end) // 2
            bounds[largest : largest + 1] = [(start, middle), (middle, end)]
        return bounds

    def set_epoch(self, epoch: int):
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.bounds) // self.world_size

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        rng = np.random.default_rng((self.seed, self.epoch))
        order = rng.permutation(len(self.lengths))
        order = order[np.argsort(self.lengths[order], kind="stable")]
        batches = rng.permutation(len(self.bounds))
        for batch in batches[self.rank :: self.world_size]:
            start, end = self.bounds[batch]
            yield [(int(index), self.epoch) for index in order[start:end]]


class TrainingPairs(Dataset):
    """Tokenised pairs under the keys of `TokenBatchSampler`, segmented anew in each epoch if that is wished.

    Args:
        pairs: a `datasets.Dataset` with `input_ids` and `labels`, and with `source` and `target` where there is
            subword dropout.
        seed: what the segmentation depends on, besides the epoch and the pair's place in the data.
        source_dropout, target_dropout: subword dropout of each side, or None.
        longest: tokens that the model can read; a side that subword dropout makes longer keeps the tokenizer's
            segmentation.
    """

    def __init__(
        self,
        pairs,
        seed: int = 0,
        source_dropout: SubwordDropout | None = None,
        target_dropout: SubwordDropout | None = None,
        longest: int | None = None,
    ):
        self.pairs = pairs
        self.seed = seed
        sides = (("input_ids", "source", source_dropout), ("labels", "target", target_dropout))
        self.dropped = [side for side in sides if side[2] is not None]
        self.longest = longest

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, key: tuple[int, int]) -> dict:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[dict]:
        """All examples of a batch in one read; the name is PyTorch's."""
        columns = self.pairs[[index for index, _ in keys]]
        examples = [
            {"input_ids": input_ids, "labels": labels}
            for input_ids, labels in zip(columns["input_ids"], columns["labels"], strict=True)
        ]
        for row, (index, epoch) in enumerate(keys if self.dropped else ()):
            rng = random.Random(f"{self.seed} {epoch} {index}")
            for name, text, dropout in self.dropped:
                ids = dropout.encode(columns[text][row], rng)
                if self.longest is None or len(ids) <= self.longest:
                    examples[row][name] = ids
        return examples


class EpochLoader(DataLoader):
    """A `DataLoader` that tells its batch sampler which epoch it is.

    The Trainer calls `set_epoch` on the loader; accelerate's own wrappers forward it to the sampler in some cases
    only. The sampler already gives each rank its share, so the loader needs no wrapper.
    """

    def set_epoch(self, epoch: int):
        self.batch_sampler.set_epoch(epoch)
