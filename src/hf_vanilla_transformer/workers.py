"""Translating with several processes on one CPU.

The operations of a small model are short, and sharing them among threads gains little. Processes with a thread each
translate different sentences at the same time instead. That pays for several beams of a small model and, without AMX,
for 8-bit weights; else one process with all threads is as fast or faster.
"""

import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from math import ceil
from multiprocessing import get_context
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .errors import UserError
from .translation import Hypothesis, check_lengths, translate, translate_nbest

SHARES = 4  # of the sentences for each process, so that all end at about the same time
LARGEST_SHARE = 1000  # sentences, so that the progress of a long text shows

_worker: dict[str, Any] = {}  # in a process: what it translates with


class Workers:
    """Processes that hold a model and translate with it until the `with` block ends.

    To start them takes some seconds. They share the threads of this process. A script that makes them needs
    `if __name__ == "__main__":` around what it does.

    Args:
        model: on a CPU.
        tokenizer: the model's.
        processes: how many.

    Raises:
        UserError: a model that is not on a CPU, or with hooks that cannot be pickled.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, processes: int):
        if model.device.type != "cpu":
            raise UserError(f"several processes are for CPUs, the model is on {model.device}")
        self.model, self.tokenizer, self.processes = model, tokenizer, processes
        threads = max(1, torch.get_num_threads() // processes)
        try:
            pickled = pickle.dumps((model, tokenizer))  # once; 8-bit weights cannot go through shared memory
        except (AttributeError, TypeError, pickle.PicklingError) as error:  # of hooks, such as transformers sets
            raise UserError(f"other processes cannot get this model ({error}): load it anew for them") from error
        self._pool = ProcessPoolExecutor(processes, get_context("spawn"), _start, (pickled, threads))

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def translate(self, sentences: Sequence[str], *, progress: bool = False, **search: Any) -> list[str]:
        """As `translation.translate`, whose other options `search` may hold; raises what it raises."""
        return self._share(translate, sentences, progress, search)

    def translate_nbest(
        self, sentences: Sequence[str], *, progress: bool = False, **search: Any
    ) -> list[list[Hypothesis]]:
        """As `translation.translate_nbest`, whose other options `search` may hold; raises what it raises."""
        return self._share(translate_nbest, sentences, progress, search)

    def _share(self, function: Callable, sentences: Sequence[str], progress: bool, search: dict[str, Any]) -> list:
        check_lengths(self.model, self.tokenizer, sentences)
        longest_first = sorted(range(len(sentences)), key=lambda row: -len(sentences[row]))
        size = max(1, min(LARGEST_SHARE, ceil(len(sentences) / (SHARES * self.processes))))
        shares = [longest_first[start : start + size] for start in range(0, len(sentences), size)]
        seeds = [None] * len(shares)
        if search.get("top_k") is not None:  # samples do not depend on which process draws them
            seeds = torch.randint(2**31, (len(shares),)).tolist()
        results = [None] * len(sentences)
        with tqdm(total=len(sentences), unit=" sentences", disable=not progress) as bar:
            rows_of = {
                self._pool.submit(_run, function, [sentences[row] for row in share], search, seed): share
                for share, seed in zip(shares, seeds, strict=True)
            }
            for future in as_completed(rows_of):
                for row, result in zip(rows_of[future], future.result(), strict=True):
                    results[row] = result
                bar.update(len(rows_of[future]))
        return results


def _start(pickled: bytes, threads: int) -> None:
    torch.set_num_threads(threads)
    _worker["model"], _worker["tokenizer"] = pickle.loads(pickled)


def _run(function: Callable, sentences: list[str], search: dict[str, Any], seed: int | None) -> list:
    if seed is not None:
        torch.manual_seed(seed)
    return function(**_worker, sentences=sentences, **search)
