"""What a better system of Multi30k translates better than another one, and what it still gets wrong.

python scripts/translation_errors.py <multi30k folder> scripts/results/A/seed1 scripts/results/B/seed1 --output B.md

Counts faults that need no reader in the hypotheses of all three test sets, and lists the sentences whose chrF2 differs
most. The text of Multi30k itself is not written down: sentences are named by test set and line.
"""

import argparse
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from sacrebleu.metrics import CHRF

from hf_vanilla_transformer.card import markdown_table
from hf_vanilla_transformer.corpus import read_pairs
from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.evaluation import p1_tokens
from hf_vanilla_transformer.reporting import TestSet, form_of_hypotheses, read_hypotheses, read_test_sets
from results_table import SETS

FAR = 20  # points of chrF between two translations of a sentence that a reader would call different in quality
EXAMPLES = 8


class Sentence(NamedTuple):
    """Tokens of P1, separated by spaces."""

    place: str
    source: str
    reference: str
    hypothesis: str


def sentences(test_sets: Sequence[TestSet], results: Path) -> list[Sentence]:
    """The test sets with the hypotheses in `results`."""
    found = []
    for test_set in test_sets:
        hypotheses = read_hypotheses(results, test_set, "de")
        if form_of_hypotheses(results, test_set) == "raw":
            hypotheses = p1_tokens(hypotheses, "de")
        rows = zip(test_set.sources, test_set.references, hypotheses, strict=True)
        found += [Sentence(f"{test_set.name}:{line}", *row) for line, row in enumerate(rows, start=1)]
    return found


def repeats(sentence: Sentence) -> bool:
    """A word twice in a row."""
    words = sentence.hypothesis.split()
    return any(one == two and one.isalpha() for one, two in pairwise(words))


def faults(vocabulary: set[str]) -> dict[str, Callable[[Sentence], bool]]:
    """What is counted, with the words of the German training text as what is German."""

    def unknown(sentence: Sentence) -> set[str]:
        return {word for word in sentence.hypothesis.split() if word.isalpha() and word not in vocabulary}

    return {
        "a word that is in neither the training text nor the source": lambda sentence: bool(
            unknown(sentence) - set(sentence.source.split())
        ),
        "a word left in English": lambda sentence: bool(unknown(sentence) & set(sentence.source.split())),
        "a word twice in a row": repeats,
        "less than two thirds of the reference's length": lambda sentence: (
            3 * len(sentence.hypothesis.split()) < 2 * len(sentence.reference.split())
        ),
        "more than one and a half of it": lambda sentence: (
            2 * len(sentence.hypothesis.split()) > 3 * len(sentence.reference.split())
        ),
    }


def report(first: list[Sentence], second: list[Sentence], names: Sequence[str], vocabulary: set[str]) -> str:
    """Markdown."""
    chrf = CHRF()
    systems = first, second, [sentence._replace(hypothesis=sentence.reference) for sentence in first]
    scores = [
        [chrf.sentence_score(sentence.hypothesis, [sentence.reference]).score for sentence in system]
        for system in systems
    ]
    gains = [two - one for one, two in zip(*scores[:2], strict=True)]
    lines = [f"# {names[1]} beside {names[0]}", ""]
    lines += [f"{len(gains):,} sentences, chrF2 of each. Made by `scripts/translation_errors.py`.", ""]
    counted = faults(vocabulary)
    counted["the reference, word for word"] = lambda sentence: sentence.hypothesis == sentence.reference
    rows = [[name, *(str(sum(map(is_fault, system))) for system in systems)] for name, is_fault in counted.items()]
    for limit in (30, 50):
        rows.append([f"chrF2 below {limit}", *(str(sum(score < limit for score in system)) for system in scores)])
    lines.append(markdown_table(["sentences with", *names, "references"], rows))
    better, worse = (sum(sign * gain >= FAR for gain in gains) for sign in (1, -1))
    lines += ["", f"{better} sentences gain {FAR} points or more, {worse} lose as many.", ""]
    order = sorted(range(len(gains)), key=gains.__getitem__)
    worst = sorted(range(len(gains)), key=scores[1].__getitem__)
    for title, chosen in (
        ("What became better", order[::-1]),
        ("What became worse", order),
        ("What is still wrong: the lowest chrF2", worst),
    ):
        rows = []
        for index in chosen[:EXAMPLES]:
            texts = (system[index].hypothesis for system in (first, second))
            before, after, _ = (system[index] for system in scores)
            rows.append([first[index].place, *texts, f"{before:.0f} → {after:.0f}"])
        lines += [f"## {title}", "", markdown_table(["sentence", *names, "chrF2"], rows), ""]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="Multi30k as its authors lay it out")
    parser.add_argument("first", type=Path, help="results of one system, English to German on task1/tok")
    parser.add_argument("second", type=Path, help="results of the other, better one")
    parser.add_argument("--output", type=Path, required=True, help="a Markdown file")
    options = parser.parse_args()
    languages = {"dataset": options.folder, "config_name": "tok", "source_lang": "en", "target_lang": "de"}
    try:
        test_sets = read_test_sets(splits=SETS, **languages)
        vocabulary = {word for pair in read_pairs(split="train", **languages) for word in pair.target.split()}
        systems = [sentences(test_sets, results) for results in (options.first, options.second)]
    except UserError as error:
        parser.error(str(error))
    names = [f"{results.parent.name}/{results.name}" for results in (options.first, options.second)]
    options.output.write_text(report(*systems, names, vocabulary), encoding="utf-8")


if __name__ == "__main__":
    main()
