"""The training captions of Multi30k task 2 in the form of task1/tok, each once: text to translate back.

python scripts/multi30k_captions.py <multi30k folder> de captions.de
python scripts/multi30k_captions.py <multi30k folder> de captions.raw.de --raw    # line by line the same, as written

Captions that are also sentences of a validation or test set stay in: training drops pairs with them, and says so.
"""

import argparse
import gzip
from pathlib import Path

from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.evaluation import p1_tokens


def captions(folder: Path, language: str) -> dict[str, str]:
    """The descriptions of the training images as written, by their lower-cased tokens, in the order of the files."""
    lines = []
    for path in sorted((folder / "task2" / "raw").glob(f"train.*.{language}.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            lines += [line.strip() for line in file]
    lines = [line for line in lines if line]
    found: dict[str, str] = {}
    for tokens, line in zip(p1_tokens(lines, language) if lines else [], lines, strict=True):
        found.setdefault(tokens, line)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="Multi30k as its authors lay it out")
    parser.add_argument("language", choices=("de", "en"))
    parser.add_argument("output", type=Path)
    parser.add_argument("--raw", action="store_true", help="the captions as they were written")
    options = parser.parse_args()
    try:
        found = captions(options.folder, options.language)
    except UserError as error:  # a package that is missing
        parser.error(str(error))
    if not found:
        parser.error(f"{options.folder} has no task2/raw/train.*.{options.language}.gz")
    lines = found.values() if options.raw else found
    options.output.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(f"{options.output}: {len(found):,} captions")


if __name__ == "__main__":
    main()
