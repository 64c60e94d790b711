"""Batches: every pair once, budget, equal work for every rank, the same order whatever the number of ranks."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from datasets import Dataset

from hf_vanilla_transformer.batching import EpochLoader, PairCollator, TokenBatchSampler, TrainingPairs, pad
from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.tokenization_vanilla_transformer import SubwordDropout, joint_tokenizer, learn_backend

BUDGET = 512


def corpus_lengths(size=3000):
    """Sentence lengths as a corpus has them: most between 5 and 40 tokens, a few long ones."""
    lengths = np.random.default_rng(0).lognormal(2.8, 0.5, size).astype(int) + 2
    return np.minimum(lengths, 150)


LENGTHS = corpus_lengths()


def epoch_of(epoch=0, seed=1, lengths=LENGTHS, max_tokens=BUDGET, **shares):
    sampler = TokenBatchSampler(lengths, max_tokens, seed, **shares)
    sampler.set_epoch(epoch)
    batches = list(sampler)
    assert len(batches) == len(sampler)
    assert {at for batch in batches for _, at in batch} == {epoch}
    return [[index for index, _ in batch] for batch in batches]


class TestTokenBatchSampler:
    @pytest.mark.parametrize(("world_size", "accumulation"), [(1, 1), (2, 1), (1, 4), (3, 2), (8, 1)])
    @pytest.mark.parametrize("epoch", [0, 1])
    def test_every_pair_once_over_all_ranks(self, world_size, accumulation, epoch):
        ranks = [
            epoch_of(epoch, rank=rank, world_size=world_size, accumulation=accumulation) for rank in range(world_size)
        ]
        seen = Counter(index for batches in ranks for batch in batches for index in batch)
        assert seen == Counter(range(len(LENGTHS)))
        assert len({len(batches) for batches in ranks}) == 1
        assert len(ranks[0]) % accumulation == 0
        assert all(batch for batches in ranks for batch in batches)

    @pytest.mark.parametrize("shares", [{}, {"rank": 1, "world_size": 2, "accumulation": 3}], ids=["one", "six"])
    def test_the_budget_is_held(self, shares):
        for epoch in range(3):
            assert max(len(batch) * LENGTHS[batch].max() for batch in epoch_of(epoch, **shares)) <= BUDGET

    def test_a_pair_over_the_budget_is_a_batch_of_its_own(self):
        lengths = [5, 5, 5, 40, 60, 5]
        batches = epoch_of(lengths=lengths, max_tokens=20)
        assert sorted(map(len, batches)) == [1, 1, 4]
        assert {3, 4} == {batch[0] for batch in batches if len(batch) == 1}

    def test_the_budget_is_used_and_little_of_it_is_padding(self):
        batches = epoch_of()
        room = sum(len(batch) * LENGTHS[batch].max() for batch in batches)
        assert 1 - LENGTHS.sum() / room < 0.04
        assert len(batches) <= 1.08 * LENGTHS.sum() / BUDGET

    def test_the_same_number_in_every_epoch(self):
        sampler = TokenBatchSampler(LENGTHS, BUDGET, 0)
        lengths = set()
        for epoch in range(5):
            sampler.set_epoch(epoch)
            lengths |= {len(sampler), len(list(sampler))}
        assert len(lengths) == 1

    def test_epochs_differ_in_order_and_in_company(self):
        first, second = epoch_of(0), epoch_of(1)
        assert first != second
        assert {frozenset(batch) for batch in first} != {frozenset(batch) for batch in second}
        neighbours = [[int(LENGTHS[batch].max()) for batch in batches] for batches in (first, second)]
        assert neighbours[0] != neighbours[1]

    def test_batches_are_not_sorted_by_length(self):
        longest = [LENGTHS[batch].max() for batch in epoch_of()]
        correlation = np.corrcoef(longest, np.arange(len(longest)))[0, 1]
        assert abs(correlation) < 0.3

    def test_deterministic(self):
        assert epoch_of(3, seed=7) == epoch_of(3, seed=7)
        assert epoch_of(3, seed=7) != epoch_of(3, seed=8)

    def test_an_epoch_does_not_depend_on_the_ones_before(self):
        """What resuming needs."""
        sampler = TokenBatchSampler(LENGTHS, BUDGET, 1)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            last = [[index for index, _ in batch] for batch in sampler]
        assert last == epoch_of(2)

    @pytest.mark.parametrize("total", [2, 4, 6])
    def test_optimiser_steps_do_not_depend_on_the_number_of_ranks(self, total):
        def steps(world_size):
            accumulation = total // world_size
            shares = {"world_size": world_size, "accumulation": accumulation}
            ranks = [epoch_of(4, rank=rank, **shares) for rank in range(world_size)]
            for start in range(0, len(ranks[0]), accumulation):
                yield {tuple(batch) for batches in ranks for batch in batches[start : start + accumulation]}

        expected = list(steps(1))
        for world_size in (2, total):
            assert list(steps(world_size)) == expected

    def test_too_few_pairs(self):
        with pytest.raises(
            UserError,
            match=r"3 training pairs do not fill one optimiser step of 4 batches: use more data, fewer processes or",
        ):
            TokenBatchSampler([5, 5, 5], BUDGET, 0, world_size=2, accumulation=2)

    def test_long_pairs_that_cannot_be_divided_further(self):
        with pytest.raises(UserError, match=r"5 batches of a single pair do not fill optimiser steps of 4"):
            TokenBatchSampler([BUDGET] * 5, BUDGET, 0, accumulation=4)

    def test_just_enough_pairs(self):
        assert sorted(epoch_of(lengths=[5, 5, 5, 5], accumulation=4)) == [[0], [1], [2], [3]]


class TestPairCollator:
    def test_batch(self):
        batch = PairCollator(pad_token_id=1)(
            [{"input_ids": [5, 6, 7, 3], "labels": [8, 3]}, {"input_ids": [9, 3], "labels": [4, 5, 3]}]
        )
        assert {name: tensor.tolist() for name, tensor in batch.items()} == {
            "input_ids": [[5, 6, 7, 3], [9, 3, 1, 1]],
            "attention_mask": [[1, 1, 1, 1], [1, 1, 0, 0]],
            "labels": [[8, 3, -100], [4, 5, 3]],
        }
        assert {tensor.dtype for tensor in batch.values()} == {torch.int64}

    def test_other_padding(self):
        assert pad([[1], [2, 3]], 9).tolist() == [[1, 9], [2, 3]]


TEXT = ["a little girl climbing into a wooden playhouse", "two young white males are outside near many bushes"] * 3


class TestTrainingPairs:
    @pytest.fixture
    def tokenizer(self):
        return joint_tokenizer(learn_backend(TEXT, vocab_size=120))

    @pytest.fixture
    def pairs(self, tokenizer):
        targets = TEXT[::-1]
        return Dataset.from_dict(
            {
                "source": TEXT,
                "target": targets,
                "input_ids": tokenizer(TEXT).input_ids,
                "labels": tokenizer(targets).input_ids,
            }
        )

    def test_without_dropout(self, pairs):
        data = TrainingPairs(pairs)
        assert len(data) == 6
        assert data[(2, 0)] == {"input_ids": pairs[2]["input_ids"], "labels": pairs[2]["labels"]}
        assert data.__getitems__([(4, 9), (0, 9)]) == [data[(4, 0)], data[(0, 0)]]

    def test_dropout_depends_on_seed_epoch_and_place_alone(self, pairs, tokenizer):
        def draw(key, seed=0):
            dropout = SubwordDropout(tokenizer.backend_tokenizer, 0.4)
            return TrainingPairs(pairs, seed, dropout, dropout)[key]

        random.seed(1)
        expected = draw((2, 5))
        random.seed(2)
        assert draw((2, 5)) == expected
        assert draw((2, 6)) != expected
        assert draw((2, 5), seed=1) != expected
        assert draw((4, 5)) != expected  # the same sentence at another place
        assert pairs[2]["source"] == pairs[4]["source"]

    def test_a_batch_draws_what_single_pairs_draw(self, pairs, tokenizer):
        dropout = SubwordDropout(tokenizer.backend_tokenizer, 0.4)
        data = TrainingPairs(pairs, 0, dropout, dropout)
        keys = [(3, 1), (0, 1), (5, 1)]
        assert data.__getitems__(keys) == [data[key] for key in keys]

    def test_dropout_makes_no_sentence_longer_than_the_model_reads(self, pairs, tokenizer):
        dropout, key = SubwordDropout(tokenizer.backend_tokenizer, 0.9), (0, 0)
        whole, free = TrainingPairs(pairs, 0)[key], TrainingPairs(pairs, 0, dropout, dropout)[key]
        assert len(whole["input_ids"]) < len(free["input_ids"])
        assert TrainingPairs(pairs, 0, dropout, dropout, longest=len(whole["input_ids"]))[key] == whole
        enough = max(map(len, free.values()))
        assert TrainingPairs(pairs, 0, dropout, dropout, longest=enough)[key] == free

    def test_dropout_keeps_the_text(self, pairs, tokenizer):
        dropout = SubwordDropout(tokenizer.backend_tokenizer, 0.4)
        example = TrainingPairs(pairs, 0, dropout, dropout)[(1, 0)]
        assert tokenizer.decode(example["input_ids"], skip_special_tokens=True) == pairs[1]["source"]
        assert tokenizer.decode(example["labels"], skip_special_tokens=True) == pairs[1]["target"]

    @pytest.mark.parametrize("side", ["input_ids", "labels"])
    def test_dropout_of_one_side(self, pairs, tokenizer, side):
        dropout = SubwordDropout(tokenizer.backend_tokenizer, 0.4)
        data = TrainingPairs(pairs, 0, *((dropout, None) if side == "input_ids" else (None, dropout)))
        other = {"input_ids": "labels", "labels": "input_ids"}[side]
        examples = [data[(index, 0)] for index in range(6)]
        assert [example[other] for example in examples] == [row[other] for row in pairs]
        assert [example[side] for example in examples] != [row[side] for row in pairs]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loader_tells_the_sampler_its_epoch(num_workers):
    """New batches in a new epoch, also where worker processes draw them."""
    lengths = [3 + index % 5 for index in range(40)]
    ids = [[index] * length for index, length in enumerate(lengths)]
    data = Dataset.from_dict({"input_ids": ids, "labels": ids})
    sampler = TokenBatchSampler(lengths, 20, seed=0)
    loader = EpochLoader(
        TrainingPairs(data), batch_sampler=sampler, collate_fn=PairCollator(1), num_workers=num_workers
    )
    epochs = []
    for epoch in (0, 1, 0):
        loader.set_epoch(epoch)
        epochs.append([batch["input_ids"][:, 0].tolist() for batch in loader])
        assert epochs[-1] == epoch_of(epoch, seed=0, lengths=lengths, max_tokens=20)
    assert epochs[0] == epochs[2] != epochs[1]
