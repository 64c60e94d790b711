"""Processes of a distributed test on the CPU, under the names that transformers' common tests import.

transformers keeps its own version out of its source distribution; this one starts gloo processes on one machine.
"""

import importlib
import multiprocessing
import socket
from collections.abc import Callable
from functools import wraps

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

__all__ = [
    "_get_distributed_backend",
    "_get_distributed_device_type",
    "_get_rank_device",
    "_set_rank_device",
    "_start_rank_processes",
    "run_distributed",
]


def _get_distributed_backend() -> str:
    return "gloo"


def _get_distributed_device_type() -> str:
    return "cpu"


def _get_rank_device(rank: int) -> torch.device:
    return torch.device("cpu")


def _set_rank_device(rank: int):
    """A process on the CPU has no device to choose."""


def _start_rank_processes(function: Callable, args: tuple, nprocs: int):
    """Run `function(rank, *args)` in `nprocs` processes and wait for them.

    Raises:
        torch.multiprocessing.ProcessRaisedException: one of them failed.
    """
    multiprocessing.set_forkserver_preload(["common_model_tests"])  # imported once, not in every process
    mp.start_processes(_rank_main, (function, args), nprocs=nprocs, start_method="forkserver")


def _rank_main(rank: int, function: Callable, args: tuple):
    importlib.import_module("common_model_tests")  # which lets AutoModelForCausalLM build our model
    function(rank, *args)


def run_distributed(world_size: int) -> Callable:
    """Decorate `function(rank, *args)` to run in `world_size` processes that form a group."""

    def decorate(function: Callable) -> Callable:
        @wraps(function)
        def start(*args):
            with socket.socket() as free:
                free.bind(("localhost", 0))
                port = free.getsockname()[1]
            _start_rank_processes(_in_group, (function, world_size, port, args), world_size)

        return start

    return decorate


def _in_group(rank: int, function: Callable, world_size: int, port: int, args: tuple):
    address = f"tcp://localhost:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    try:
        function(rank, *args)
    finally:
        dist.destroy_process_group()
