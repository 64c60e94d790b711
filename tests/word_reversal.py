"""A toy language pair for the tests of training: each word of the target is the source's word spelt backwards."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WORDS = ["dog", "cat", "house", "tree", "river", "stone", "bird", "light", "green", "blue", "small", "tall"]


def translate(sentence: str) -> str:
    return " ".join(word[::-1] for word in sentence.split())


def sentences(count: int, seed: int = 0) -> list[str]:
    """Different sentences of three to seven words."""
    rng, found = random.Random(seed), {}
    while len(found) < count:
        found[" ".join(rng.choices(WORDS, k=rng.randint(3, 7)))] = None
    return list(found)


def write_pairs(folder: Path, name: str, sources: Sequence[str], targets: Sequence[str]) -> list[str]:
    """Two aligned files; their paths, source first."""
    paths = [folder / f"{name}.en", folder / f"{name}.xx"]
    for path, lines in zip(paths, (sources, targets), strict=True):
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return [str(path) for path in paths]


def corpus(folder: Path, pairs: int = 60, validation: int = 6) -> dict[str, list[str]]:
    """Write training and validation text without overlap; the options that name them."""
    text = sentences(pairs + validation)
    splits = {"train_file": text[:pairs], "validation_file": text[pairs:]}
    return {
        option: write_pairs(folder, option.partition("_")[0], lines, [translate(line) for line in lines])
        for option, lines in splits.items()
        if lines
    }


OPTIONS = {
    "source_lang": "en",
    "target_lang": "xx",
    "preset": "test",
    "vocab_size": 60,
    "max_source_length": 32,
    "max_target_length": 32,
    "generation_max_length": 20,
    "generation_num_beams": 2,
    "max_tokens_per_batch": 120,
    "learning_rate": 0.01,
    "warmup_steps": 4,
    "num_train_epochs": 2,
    "logging_steps": 1,
    "num_sample_translations": 0,
    "use_cpu": True,
    "disable_tqdm": True,
}


def flags(output: Path, **options: Any) -> list[str]:
    """The command line of a small training; an option that is None is left out."""
    line = []
    for name, value in {**OPTIONS, "output_dir": output, **options}.items():
        if value is not None:
            values = value if isinstance(value, list) else [value]
            line += [f"--{name}", *(str(item) for item in values)]
    return line


def exact_matches(hypotheses: list[str], references: list[str]) -> dict[str, float]:
    """A score for the validation set, under the name that training looks for."""
    hits = sum(hypothesis == reference for hypothesis, reference in zip(hypotheses, references, strict=True))
    return {"bleu": 100 * hits / len(references)}
