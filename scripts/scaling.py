"""How the cost of our training step and of our decoding grows.

    python scripts/scaling.py

Random tokens, sizes of `multi30k-tiny`, float32 and bfloat16. Every point of a curve is an engine in a process of its
own, and they take turns. A round has the time of some steps and the peak of resident memory above what model and
optimiser hold. Goes to scripts/results/scaling.json; scripts/results_table.py makes the tables, relative to the first
point of each curve.

- **sequence length**: of source and target, 4,096 tokens a batch on each side.
- **batch**: tokens on each side, sentences of 32.
- **vocabulary**: 4,096 tokens a batch, sentences of 32.
- **beams**: `generate` on 64 sources of 16 tokens, 32 tokens each.
"""

import argparse
import sys
import time
from collections.abc import Callable

import torch

from benchmark import PRECISIONS, ROOT, never_ending
from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from taking_turns import Engine, Engines, Measure, Round, argument_parser, measure_sections, peak_memory
from trainers import random_batch, training_step

RESULT = ROOT / "scripts" / "results" / "scaling.json"
TOKENS, LENGTH, VOCABULARY = 4096, 32, 10_000
REPETITIONS = 2  # of what is timed in a round


def timed_and_weighed(run: Callable[[], None], sentences: int) -> Measure:
    """Work: sentences."""

    def measure(number: int) -> Round:
        started = time.perf_counter()
        for _ in range(REPETITIONS):
            run()
        seconds = time.perf_counter() - started
        return {"work": REPETITIONS * sentences, "seconds": seconds, "bytes": peak_memory(run)}

    return measure


def step(options: argparse.Namespace, bf16: bool, tokens: int, length: int, vocabulary: int) -> Measure:
    """A training step."""
    config = VanillaTransformerConfig.preset(
        "multi30k-tiny", vocab_size=vocabulary, max_position_embeddings=max(1024, length)
    )
    run = training_step(VanillaTransformerForConditionalGeneration(config), bf16)
    run(random_batch(config, 1, 32))  # makes the optimiser's state
    batch = random_batch(config, tokens // length, length)
    return timed_and_weighed(lambda: run(batch), tokens // length)


def decoding(options: argparse.Namespace, bf16: bool, beams: int) -> Measure:
    """A search."""
    config = VanillaTransformerConfig.preset("multi30k-tiny", vocab_size=VOCABULARY, lm_head_bias=True)
    model = never_ending(VanillaTransformerForConditionalGeneration(config), LENGTH, beams).eval()
    model.to(torch.bfloat16 if bf16 else torch.float32)
    source = torch.randint(4, config.vocab_size, (64, 16))
    return timed_and_weighed(lambda: model.generate(source), len(source))


def curve(make: Callable[..., Measure], points: dict[int, tuple]) -> Engines:
    """An engine for each point and precision, such as "float32 32"."""
    return {
        f"{dtype} {point}": Engine(make, (bf16, *arguments))
        for dtype, bf16 in PRECISIONS.items()
        for point, arguments in points.items()
    }


SECTIONS: dict[str, Engines] = {
    "sequence length": curve(step, {2**n: (TOKENS, 2**n, VOCABULARY) for n in range(5, 12)}),
    "batch": curve(step, {2**n: (2**n, LENGTH, VOCABULARY) for n in range(8, 15)}),
    "vocabulary": curve(step, {1000 * 2**n: (TOKENS, LENGTH, 1000 * 2**n) for n in range(3, 8)}),
    "beams": curve(decoding, {beams: (beams,) for beams in (1, 2, 4, 5, 8, 16)}),
}


def main() -> int:
    options = argument_parser(__doc__, SECTIONS, RESULT).parse_args()
    measure_sections(options, SECTIONS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
