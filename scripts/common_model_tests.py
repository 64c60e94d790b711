"""Run transformers' own tests on our classes.

Fetches them from the package index, prints three tables in Markdown and writes the same to
scripts/results/common_model_tests.json. Exit status 1: something is not as the tables of tests/transformers_suite.py
say, or the index cannot be reached.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from hf_vanilla_transformer.provenance import provenance

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from transformers_suite import MODULES, CannotFetch, complaints, fetch, markdown, record, run  # noqa: E402


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            fetch(Path(folder))
        except CannotFetch as error:
            sys.exit(f"cannot fetch the tests of transformers: {error}")
        outcomes = run(Path(folder), MODULES)
    print(markdown(outcomes))
    result = json.dumps({**provenance(), **record(outcomes)}, indent=2)
    (ROOT / "scripts" / "results" / "common_model_tests.json").write_text(result + "\n", encoding="utf-8")
    lines = complaints(outcomes)
    print(*lines, sep="\n", file=sys.stderr)
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
