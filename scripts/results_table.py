"""Write the table of results into README.md from scripts/results/<recipe>/seed<N>/run.json.

python scripts/results_table.py          rewrite the table
python scripts/results_table.py --check  say whether it is up to date (exit status 1 if not)
"""

import json
import sys
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- results: made by scripts/results_table.py -->", "<!-- end of results -->"
SETS = ("test_2016_flickr", "test_2017_flickr", "test_2017_mscoco")


def records(recipe: Path) -> list[dict]:
    """The run.json of every seed of one recipe."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(recipe.glob("seed*/run.json"))]


def cell(runs: list[dict], metric: str) -> str:
    """ "35.1 / 29.0 / 25.2": the mean over seeds for each test set, in the order of `SETS`."""
    scores = [[run["evaluation"]["sets"][name]["scores"][metric]["score"] for run in runs] for name in SETS]
    return " / ".join(f"{mean(values):.1f}" for values in scores)


def table() -> str:
    """One row for each recipe with Multi30k results."""
    lines = [
        "| recipe | parameters | seeds | epochs | P1 | BLEU | chrF2 | training |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for recipe in sorted((ROOT / "scripts" / "results").iterdir()):
        runs = [run for run in records(recipe) if set(SETS) <= set(run["evaluation"]["sets"])]
        if not runs:
            continue
        training = [run["training"] for run in runs]
        lines.append(
            f"| [{recipe.name}](scripts/results/{recipe.name}) | {runs[0]['parameters'] / 1e6:.2f}M | {len(runs)} "
            f"| {training[0]['epochs']:.0f} | {cell(runs, 'p1')} | {cell(runs, 'bleu')} | {cell(runs, 'chrf')} "
            f"| {mean(run['seconds'] for run in training) / 60:.0f} min |"
        )
    return "\n".join(lines)


def main() -> int:
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    updated = f"{before}{BEGIN}\n{table()}\n{END}{after}"
    if "--check" in sys.argv[1:]:
        return int(updated != text)
    readme.write_text(updated, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
