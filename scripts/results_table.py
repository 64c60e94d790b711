"""Write the tables of README.md and scripts/results/README.md from the files in scripts/results.

python scripts/results_table.py          rewrite the tables
python scripts/results_table.py --check  say whether they are up to date (exit status 1 if not)
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from statistics import mean, median, stdev

from hf_vanilla_transformer.card import markdown_table
from hf_vanilla_transformer.reporting import VALIDATION

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "scripts" / "results"
FINAL = ("multi30k_en_de_distilled", "multi30k_en_de_task1_distilled")  # which README.md compares
BASELINE = "multi30k_en_de_wu2021/seed1"  # with this
SETS = ("test_2016_flickr", "test_2017_flickr", "test_2017_mscoco")
AIMS = (  # what a recipe was meant to reach as the mean of three seeds: metric, then a score for each of SETS
    ("Transformer-Tiny again, task 1", "multi30k_en_de_wu2021", "p1", (40.5, 33.0, 29.5)),
    ("one model, task 1", "multi30k_en_de_task1_distilled", "p1", (42.0, 34.5, 31.0)),
    ("one model, all of Multi30k but images", "multi30k_en_de_distilled", "p1", (42.7, 36.1, 32.0)),
    ("one model of at most 25M parameters", "multi30k_en_de_distilled", "p1", (43.9, 37.3, 34.5)),
    ("raw text", "multi30k_en_de_back_translation_raw_finetuned", "bleu", (39.7,)),
    ("French", "multi30k_en_fr_muon_long", "p1", (62.6, 55.0, 46.0)),
)


def records(recipe: Path) -> list[dict]:
    """The run.json of every seed of one recipe."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(recipe.glob("seed*/run.json"))]


def cell(runs: list[dict], metric: str, sets: Sequence[str] = SETS) -> str:
    """ "35.1 / 29.0 / 25.2": the mean over seeds for each of the sets, in their order.

    With the standard deviation where there are several seeds; nothing for a set that was not translated, and for a
    metric that tokenised text does not have.
    """
    if any(name not in run["evaluation"]["sets"] for run in runs for name in sets):
        return ""
    scores = [[run["evaluation"]["sets"][name]["scores"] for run in runs] for name in sets]
    if metric not in scores[0][0]:
        return ""
    values = [[found[metric]["score"] for found in seeds] for seeds in scores]
    spreads = [f" ± {stdev(seeds):.1f}" if len(seeds) > 1 else "" for seeds in values]
    return " / ".join(f"{mean(seeds):.1f}{spread}" for seeds, spread in zip(values, spreads, strict=True))


def scores(runs: list[dict]) -> list[str]:
    """The cells of a row."""
    return [cell(runs, "p1", [VALIDATION]), *(cell(runs, metric) for metric in ("p1", "bleu", "chrf"))]


def results() -> str:
    """One row for each recipe with Multi30k results, and one below for what was evaluated as its ensemble."""
    head = ["recipe", "parameters", "seeds", "epochs", "P1, validation", "P1", "BLEU", "chrF2", "training"]
    rows = []
    for recipe in sorted(RESULTS.iterdir()):
        runs = [run for run in records(recipe) if set(SETS) <= set(run["evaluation"]["sets"])]
        if not runs:
            continue
        training = [run["training"] for run in runs]
        minutes = mean(one["seconds"] for one in training) / 60
        size = [f"{runs[0]['parameters'] / 1e6:.2f}M", str(len(runs)), f"{mean(one['epochs'] for one in training):.0f}"]
        rows.append([f"[{recipe.name}](scripts/results/{recipe.name})", *size, *scores(runs), f"{minutes:.0f} min"])
        ensemble = recipe / "ensemble" / "run.json"
        if ensemble.is_file():
            run = json.loads(ensemble.read_text(encoding="utf-8"))
            name = f"[{recipe.name}/ensemble](scripts/results/{recipe.name}/ensemble)"
            models = f"{name} of {run['evaluation']['generation']['models']} models"
            rows.append([models, "", "", "", *scores([run]), ""])
    return markdown_table(head, rows)


def aims() -> str:
    """What was aimed at, and the mean of what there is: a row for each aim."""
    rows = []
    for what, recipe, metric, wanted in AIMS:
        runs = records(RESULTS / recipe)
        found = [mean(run["evaluation"]["sets"][name]["scores"][metric]["score"] for run in runs) for name in SETS]
        pairs = list(zip(wanted, found, strict=False))
        short = " / ".join(f"{max(0.0, aim - score):.1f}" for aim, score in pairs)
        columns = [" / ".join(f"{value:.1f}" for value in column) for column in zip(*pairs, strict=True)]
        rows.append([what, recipe, str(len(runs)), metric, *columns, short])
    return markdown_table(["aim", "recipe", "seeds", "metric", "aimed at", "reached", "short of it by"], rows)


def comparisons(paths: list[Path], against: str | None = None) -> str:
    """One row for each run that was evaluated on several test sets with `--against`: all of them pooled.

    Args:
        paths: records of runs.
        against: leave out comparisons with others than this run.
    """
    rows = []
    for path in paths:
        run = json.loads(path.read_text(encoding="utf-8"))
        for other, verdicts in run["evaluation"].get("against", {}).items():
            found = verdicts.get("all of them")
            if found is None or against not in (None, other):
                continue
            p = f"{found['p_value']:.3f}" if found["p_value"] >= 0.001 else "< 0.001"
            interval = f"{found['low']:+.2f} to {found['high']:+.2f}"
            score = [found["metric"], f"{found['score_b']:.2f}", f"{found['difference']:+.2f}"]
            rows.append([f"{path.parts[-3]}/{path.parts[-2]}", other, *score, interval, p])
    head = ["run", "against", "metric", "score", "difference", "95% of resampled differences", "p"]
    return markdown_table(head, rows)


def result(name: str) -> dict:
    """What a script has measured."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def agreement(found: list[dict]) -> str:
    """One row for each reference: import and export side by side."""
    sides = {(row["reference"], row["direction"]): row for row in found}
    rows = []
    for name in dict.fromkeys(reference for reference, _ in sides):
        cells = [f"`{name}`"]
        for direction in ("import", "export"):
            row = sides[name, direction]
            cells += [f"{row['max_logit_difference']:.1e}", f"{row['equal_beams']} of {row['beams']}"]
        rows.append(cells)
    head = ["reference", "import: largest difference", "beams equal", "export: largest difference", "beams equal"]
    return markdown_table(head, rows)


def backends(found: list[dict]) -> str:
    """One row for each backend; what could not run has its reason below."""
    columns, rows = list(found[0]["differences"]), []
    notes: list[str] = []
    for row in found:
        cells = [_cell_or_note(row["differences"][column], notes) for column in columns]
        rows.append([f"`{row['backend']}`, {row['dtype']}", *cells])
    table = markdown_table(["backend", *columns], rows)
    return "\n".join([table, "", *(f"{number}. {note}" for number, note in enumerate(notes, start=1))])


def _cell_or_note(value: dict | str | float, notes: list[str]) -> str:
    if not isinstance(value, dict):
        return value if isinstance(value, str) else f"{value:.0e}"
    if value["reason"] not in notes:
        notes.append(value["reason"])
    return f"not run ({notes.index(value['reason']) + 1})"


def common_tests() -> str:
    """One row for each of transformers' test classes."""
    found = result("common_model_tests")["suites"].values()
    rows = [[str(suite[column]) for column in ("tests", "passed", "failed", "skipped")] for suite in found]
    return markdown_table(["tests of transformers", "passed", "failed", "skipped"], rows)


def defects() -> str:
    """The table of scripts/known_defects.py, without training anything."""
    command = [sys.executable, str(ROOT / "scripts" / "known_defects.py"), "--table"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def rates(engines: dict[str, list[dict]], name: str) -> list[float]:
    """Work a second of an engine of scripts/benchmark.py, round by round."""
    return [round["work"] / round["seconds"] for round in engines[name]]


def spread(values: list[float]) -> list[str]:
    """The median, and the least and the greatest, in two cells."""
    return [f"{median(values):.2f}", f"{min(values):.2f} to {max(values):.2f}"]


def circumstances(sections: dict[str, dict], *prefixes: str) -> str:
    """A line for each measurement: rounds, processor, commit and day of the sections that begin like this."""
    runs: dict[str, list[str]] = {}
    for name, section in sections.items():
        if name.startswith(prefixes):
            rounds = len(next(iter(section["engines"].values())))
            where = f"{section['hardware']['cpu']}, {section['threads']} threads"
            commit = section["commit"][:7] + "-dirty" * section["commit"].endswith("-dirty")
            runs.setdefault(f"{rounds} rounds on {where}, commit {commit}, {section['date'][:10]}", []).append(name)
    return "\n".join(f"- {run}: {'; '.join(names)}" for run, names in runs.items())


def times_marian(sections: dict[str, dict], *prefixes: str) -> dict[str, dict[str, list[float]]]:
    """Of the sections that begin like this, round by round: the rate of each engine as a multiple of MarianMT's.

    That is the median of the faster one, in float32 or bfloat16, of the same run.
    """
    found = {}
    for section in sections:
        if not section.startswith(prefixes):
            continue
        engines = sections[section]["engines"]
        peers = [name for name in engines if name.startswith("marian") and not name.endswith("int8")]
        peer = max(median(rates(engines, name)) for name in peers)
        found[section] = {name: [rate / peer for rate in rates(engines, name)] for name in engines}
    return found


def speed_in_short(sections: dict[str, dict]) -> str:
    """Medians: a row for each engine, a column for each kind of work."""
    ratios = times_marian(sections, "training", "translation")
    engines = dict.fromkeys(name for column in ratios.values() for name in column)
    rows = [
        [name, *(f"{median(column[name]):.2f}" if name in column else "" for column in ratios.values())]
        for name in engines
    ]
    return markdown_table(["× MarianMT", *ratios], rows)


def speed(sections: dict[str, dict]) -> str:
    """Of training and translation what `times_marian` says, and two processes beside one."""
    rows = []
    for section, ratios in times_marian(sections, "training", "translation").items():
        for name, rounds in sections[section]["engines"].items():
            padding = f"{median(round['padding'] for round in rounds):.0%}" if "padding" in rounds[0] else ""
            rows.append([section, name, *spread(ratios[name]), padding])
    tables = [markdown_table(["what", "engine", "× MarianMT, median", "least to greatest", "padding"], rows)]
    if "two processes" in sections:
        engines = sections["two processes"]["engines"]
        alone = median(rates(engines, "one process"))
        ratios = [rate / alone for rate in rates(engines, "two processes")]
        head = ["what", "× one process, median", "least to greatest"]
        tables.append(markdown_table(head, [["training in two processes", *spread(ratios)]]))
    return "\n\n".join([*tables, circumstances(sections, "training", "translation", "two processes")])


def lower_bound(sections: dict[str, dict]) -> str:
    """How many times as long as the machine needs for the matrix products of a training step it takes."""
    rows = []
    for section in sections:
        if not section.startswith("one step"):
            continue
        engines = sections[section]["engines"]
        machine = {name.split()[-1]: median(rates(engines, name)) for name in engines if name.startswith("matrix")}
        for dtype, products in machine.items():
            ours = median(rates(engines, f"ours {dtype}"))
            shape = section.removeprefix("one step, ")
            rows.append([f"`{shape}`", dtype, f"{products / ours:.1f}", f"{max(machine.values()) / ours:.1f}"])
    head = ["training step", "precision", "× its matrix products", "× the products in the faster precision"]
    return "\n\n".join([markdown_table(head, rows), circumstances(sections, "one step")])


def search_bound(sections: dict[str, dict]) -> str:
    """How many times as long as the machine needs for the matrix products of a search it takes."""
    rows, found = [], {}
    place = itemgetter("hardware", "threads")
    for section, measured in sections.items():
        if place(measured) != place(sections["machine"]):
            continue
        for name, rounds in measured["engines"].items():
            products = f"matrix products {name.split()[-1]}"
            if "operations" not in rounds[0] or products not in sections["machine"]["engines"]:
                continue
            rate = median(rates(sections["machine"]["engines"], products))
            multiples = [round["seconds"] * rate / round["operations"] for round in rounds]
            rows.append([section.removeprefix("translation, "), name, *spread(multiples)])
            found[section] = measured
    head = ["search", "engine", "× its matrix products, median", "least to greatest"]
    return "\n\n".join([markdown_table(head, rows), circumstances({"machine": sections["machine"], **found}, "")])


def memory(sections: dict[str, dict]) -> str:
    """What a training step takes, as a share of what the better of the two MarianMT takes; and how fast the step is."""
    speeds, rows = times_marian(sections, "large step"), []
    for section in sections:
        if not section.startswith("peak memory"):
            continue
        shape = section.removeprefix("peak memory, ")
        taken = {name: [r["bytes"] for r in rounds] for name, rounds in sections[section]["engines"].items()}
        peer = min(median(values) for name, values in taken.items() if name.startswith("marian"))
        speed = speeds.get(f"large step, {shape}", {})
        for name, values in taken.items():
            cells = spread(speed[name]) if speed else ["", ""]
            rows.append([f"`{shape}`", name, *spread([value / peer for value in values]), *cells])
    head = ["training step", "engine", "× MarianMT's memory, median", "least to greatest"]
    head += ["× MarianMT's speed, median", "least to greatest"]
    return "\n\n".join([markdown_table(head, rows), circumstances(sections, "peak memory", "large step")])


def beside_ctranslate2(records: dict[str, dict[str, dict]]) -> str:
    """How fast our fastest engine translates, as a share of the fastest CTranslate2; a row for each search."""
    rows = []
    for cpu, sections in records.items():
        for section, measured in sections.items():
            if not section.startswith("translation"):
                continue
            found = {name: median(rates(measured["engines"], name)) for name in measured["engines"]}
            by_rate = sorted(found, key=found.get)
            ours, theirs = ([name for name in by_rate if name.startswith(who)][-1] for who in ("ours", "ctranslate2"))
            what = section.removeprefix("translation, ")
            rows.append([cpu, what, ours, theirs, f"{found[ours] / found[theirs]:.2f}"])
    return markdown_table(["CPU", "translation", "our fastest", "CTranslate2's", "× CTranslate2"], rows)


def depth(sections: dict[str, dict]) -> str:
    """How many times as fast as the symmetric model one with a deep encoder and a shallow decoder translates."""
    rows = []
    for section in sections:
        if not section.startswith("depth"):
            continue
        _, preset, search = section.split(", ")
        engines = sections[section]["engines"]
        for dtype in dict.fromkeys(name.split()[1] for name in engines):
            symmetric = median(rates(engines, f"symmetric {dtype}"))
            ratios = [rate / symmetric for rate in rates(engines, f"shallow {dtype}")]
            rows.append([f"`{preset}`", search, dtype, *spread(ratios)])
    table = markdown_table(["preset", "search", "precision", "× symmetric, median", "least to greatest"], rows)
    return "\n\n".join([table, circumstances(sections, "depth")])


def certificates(exports: dict[str, dict]) -> str:
    """The exports to CTranslate2: a row for each type and search, on one test set."""
    rows = []
    for name, certificate in exports.items():
        size = certificate["ctranslate2"]["bytes"] / certificate["model"]["bytes"]
        (found,) = certificate["sets"].values()
        for search in found["searches"]:
            sides = search["scores"]["model"], search["scores"]["ctranslate2"]
            scores = [" / ".join(f"{side[metric]['score']:.2f}" for side in sides) for metric in ("bleu", "chrf")]
            beams = "greedy" if search["num_beams"] == 1 else f"{search['num_beams']} beams"
            identical, speed = f"{search['identical'] / found['n']:.1%}", f"{search['speed']['median']:.2f}"
            rows.append([name, beams, identical, *scores, speed, f"{size:.2f}"])
    head = ["weights", "search", "identical translations", "BLEU, model / export", "chrF2", "× speed", "× size"]
    return markdown_table(head, rows)


def scaling(sections: dict[str, dict]) -> str:
    """A table for each curve of scripts/scaling.py, relative to its first point."""
    tables = []
    for section, measured in sections.items():
        engines = measured["engines"]
        precisions, points = ([*dict.fromkeys(column)] for column in zip(*map(str.split, engines), strict=True))
        rows = []
        for quantity, what in (("seconds", "time"), ("bytes", "memory")):
            for dtype in precisions:
                values = [median(round[quantity] for round in engines[f"{dtype} {point}"]) for point in points]
                rows.append([f"{what}, {dtype}", *(f"{value / values[0]:.2f}" for value in values)])
        tables.append(markdown_table([section, *(f"{int(point):,}" for point in points)], rows))
    return "\n\n".join([*tables, circumstances(sections, "")])


def differences(one: list[float], other: list[float]) -> list[float]:
    """Of two curves, at each of their points."""
    return [abs(a - b) for a, b in zip(one, other, strict=True)]


def loss_curves(sections: dict[str, dict]) -> str:
    """One row for each way of scripts/loss_curves.py, and how far its curves are from those of the plain runs.

    The distance of two curves is the mean of their differences. Each run is held against all other plain ones.
    """
    ways: dict[str, list[str]] = {}
    for name in sections:
        ways.setdefault(name.rpartition(", ")[0], []).append(name)
    head = [
        "",
        "seeds",
        "training loss",
        "validation loss",
        "from plain: mean",
        "greatest",
        "without dropout: greatest",
    ]
    rows = []
    for way, names in ways.items():
        pairs = [(name, plain) for name in names for plain in ways["plain"] if name != plain]
        apart = [mean(differences(*(sections[name]["curve"] for name in pair))) for pair in pairs]
        still = [max(differences(*(sections[name]["without_dropout"] for name in pair))) for pair in pairs]
        training = [mean(sections[name]["curve"]) for name in names]
        validation = [sections[name]["validation_loss"] for name in names]
        losses = [f"{mean(values):.4f} ± {stdev(values):.4f}" for values in (training, validation)]
        rows.append([way, str(len(names)), *losses, f"{mean(apart):.4f}", f"{max(apart):.4f}", f"{max(still):.0e}"])
    return markdown_table(head, rows)


DOCUMENTS = {
    ROOT / "README.md": {
        "results": results,
        "final comparisons": lambda: comparisons(
            [p for name in FINAL for p in sorted(RESULTS.glob(f"{name}/*/run.json"))], BASELINE
        ),
        "speed in short": lambda: speed_in_short(result("benchmark")["sections"]),
        "agreement": lambda: agreement(result("agreement")["rows"]),
    },
    RESULTS / "README.md": {
        "aims": aims,
        "comparisons": lambda: comparisons(sorted(RESULTS.glob("*/*/run.json"))),
        "speed": lambda: speed(result("benchmark")["sections"]),
        "speed with AMX": lambda: speed(result("benchmark_amx")["sections"]),
        "lower bound": lambda: lower_bound(result("benchmark")["sections"]),
        "lower bound with AMX": lambda: lower_bound(result("benchmark_amx")["sections"]),
        "lower bound of a search": lambda: search_bound(result("benchmark")["sections"]),
        "depth": lambda: depth(result("benchmark")["sections"]),
        "memory": lambda: memory(result("benchmark")["sections"]),
        "loss curves": lambda: loss_curves(result("loss_curves")["sections"]),
        "scaling": lambda: scaling(result("scaling")["sections"]),
        "beside CTranslate2": lambda: beside_ctranslate2(
            {"AMD": result("benchmark")["sections"], "Intel with AMX": result("benchmark_amx")["sections"]}
        ),
        "certificates": lambda: certificates({name: result(f"ctranslate2/{name}") for name in ("float32", "int8")}),
        "backends": lambda: backends(result("attention_backends")["rows"]),
        "common tests": common_tests,
        "defects": defects,
    },
}


def updated(text: str, tables: dict[str, Callable[[], str]]) -> str:
    """The text with each of the tables made anew."""
    for name, table in tables.items():
        begin, end = f"<!-- {name}: made by scripts/results_table.py -->", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        after = rest.split(end)[1]
        text = f"{before}{begin}\n{table()}\n{end}{after}"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    stale = False
    for document, tables in DOCUMENTS.items():
        text = document.read_text(encoding="utf-8")
        new = updated(text, tables)
        stale |= new != text
        if not check:
            document.write_text(new, encoding="utf-8")
    return int(check and stale)


if __name__ == "__main__":
    sys.exit(main())
