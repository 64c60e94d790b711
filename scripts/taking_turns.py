"""How things are measured side by side: engines in processes of their own take turns, round by round.

What scripts/benchmark.py and scripts/scaling.py have in common.
"""

import argparse
import ctypes
import gc
import json
import logging
import multiprocessing
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stdout, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from hf_vanilla_transformer.provenance import provenance

Round = dict[str, float]  # "work" done in "seconds", or "bytes" taken; and facts about it
Measure = Callable[[int], Round]  # one round, from its number


class Engine(NamedTuple):
    """`make(options, *arguments)` prepares the engine in its process and returns what measures a round."""

    make: Callable[..., Measure]
    arguments: tuple = ()


Engines = dict[str, Engine]


def work(options: argparse.Namespace, engine: Engine, pipe: Connection) -> None:
    """A process: prepares itself, then measures a round whenever it gets the number of one, until the pipe closes.

    What an engine puts on the stack `options.closing` is closed at the end.
    """
    disable_progress_bar()
    set_verbosity_error()
    logging.disable(logging.ERROR)
    torch.set_num_threads(options.threads)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), ExitStack() as options.closing:  # trainers talk
        measure = engine.make(options, *engine.arguments)
        pipe.send("ready")
        with suppress(EOFError):
            while True:
                pipe.send(measure(pipe.recv()))


def start(options: argparse.Namespace, engine: Engine) -> Connection:
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    context.Process(target=work, args=(options, engine, other)).start()
    other.close()  # or a process that ends too early would be waited for without end
    pipe.recv()  # one after the other, so that a round is not measured while somebody prepares himself
    return pipe


def take_turns(options: argparse.Namespace, engines: Engines) -> dict[str, list[Round]]:
    """Every round of each engine but the first, which is for warming up."""
    found: dict[str, list[Round]] = {name: [] for name in engines}
    with ExitStack() as stack:
        pipes = {name: stack.enter_context(start(options, engine)) for name, engine in engines.items()}
        for number in range(options.rounds + 1):
            for name, pipe in pipes.items():
                pipe.send(number)
                found[name].append(pipe.recv())
    return {name: rounds[1:] for name, rounds in found.items()}


def in_fresh_processes(options: argparse.Namespace, engines: Engines) -> dict[str, list[Round]]:
    """Every round in a process of its own, without warming up."""
    found: dict[str, list[Round]] = {name: [] for name in engines}
    for number in range(options.rounds):
        for name, engine in engines.items():
            with start(options, engine) as pipe:
                pipe.send(number)
                found[name].append(pipe.recv())
    return found


def rate(round: Round) -> float:
    """What a round is compared by: work a second, or bytes."""
    return round["work"] / round["seconds"] if "seconds" in round else round["bytes"]


def measure_sections(options: argparse.Namespace, sections: dict[str, Engines]) -> None:
    """Measure what `options.only` names; what is finished goes into `options.result`, each section by itself."""
    for section in options.only:
        origin = provenance("ctranslate2", "joeynmt")  # now: the source tree may change while this runs
        run = in_fresh_processes if section.startswith("peak memory") else take_turns
        found = run(options, sections[section])
        for name, rounds in found.items():
            rates = [rate(round) for round in rounds]
            print(f"{section}: {name}: {median(rates):,.4g} ({min(rates):,.4g} to {max(rates):,.4g})", flush=True)
        merge(options.result, section, {**origin, "threads": options.threads, "engines": found})


def merge(result: Path, section: str, measured: dict) -> None:
    """Put one section into the record, with its own commit and date; the others stay."""
    record = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {"sections": {}}
    record["sections"][section] = measured
    result.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def best(settings: Sequence[Any], measure: Callable[[Any], Round]) -> Any:
    """That with which the most is done in a second, such as a batch size."""
    if len(settings) == 1:
        return settings[0]
    rates = {setting: rate(measure(setting)) for setting in settings}
    return max(rates, key=rates.get)


def peak_memory(run: Callable[[], None]) -> int:
    """How far resident memory rises while `run` runs (Linux)."""
    give_memory_back()  # or the allocator would hand out what an earlier step has left
    before = resident_memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    run()
    return resident_memory("VmHWM") - before


def give_memory_back() -> None:
    """To the operating system (Linux): what nobody refers to, and what the allocator keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def resident_memory(name: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def argument_parser(description: str, sections: dict[str, Engines], result: Path) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=sections, default=list(sections), metavar="SECTION")
    parser.add_argument("--result", type=Path, default=result, help="the file that the sections are merged into")
    return parser
