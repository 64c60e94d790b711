"""What an export to CTranslate2 costs and what it gains: measured on a test set, and written down beside it.

Importing this module needs the extra `ctranslate2`.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from .card import METRICS, ctranslate2_card, markdown_table
from .ctranslate2_export import CTranslate2Engine
from .errors import UserError
from .evaluation import score
from .modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .provenance import EVALUATION_RECORD, RUN_RECORD, provenance, read_record
from .reporting import FORMS, TestSet
from .translation import load_model, translate
from .version import __version__
from .weight_files import write_json

CERTIFICATE = "certificate.json"  # in a CTranslate2 folder
ROUNDS = 3


def certify(
    source: str | Path,
    folder: str | Path,
    test_sets: Sequence[TestSet],
    *,
    target_lang: str | None = None,
    device: str = "cpu",
    rounds: int = ROUNDS,
    progress: bool = False,
) -> dict[str, Any]:
    """Translate test sets with a model and with its export, greedily and with the model's own beams; compare.

    Both compute in this process, one after the other, with the same number of threads.

    Args:
        source: the model's folder; it computes in float32.
        folder: what `export_ctranslate2` made of it.
        test_sets: from `reporting.read_test_sets`.
        target_lang: as in `evaluation.score`.
        device: of both, such as "cpu" or "cuda".
        rounds: how often the speed is measured, besides one round of warm-up.
        progress: whether to show bars.

    Returns:
        what certificate.json holds:
        `model` and `ctranslate2`, each {"bytes": size of the weights on disk, "dtype": what it computes in};
        `device`, `threads`, `rounds`;
        `sets`: {name: {"n": sentences, "text": their form, "searches": a list of {"num_beams", "identical": how many
        translations are the same, "scores": {"model" or "ctranslate2": {metric: {"score", "signature"}}}, "speed":
        {"median", "least", "greatest"}: sentences a second of CTranslate2 by those of the model}}};
        `left_out`: why the model's own beams are not among the searches, or None;
        and what `provenance.provenance` says.

    Raises:
        UserError: a folder without the model or the export; no test set; fewer than one round; a sentence that is
            longer than the model can read.
    """
    if rounds < 1:
        raise UserError(f"rounds is {rounds}: the speed needs at least 1, better {ROUNDS}")
    if not test_sets:
        raise UserError("there is no test set to translate: a certificate needs one")
    sizes = _size(Path(source), "model*.safetensors"), _size(Path(folder), "model.bin")
    model, tokenizer = load_model(str(source), device=device, dtype="float32")
    threads = torch.get_num_threads()
    engine = CTranslate2Engine(folder, device=device, threads=threads)
    searches, left_out = _searches(model.generation_config)

    def compare(test_set: TestSet, beams: int) -> dict[str, Any]:
        def ours(progress: bool = False) -> list[str]:
            return translate(model, tokenizer, test_set.sources, num_beams=beams, progress=progress)

        def theirs() -> list[str]:
            return engine.translate(test_set.sources, num_beams=beams)

        agreement = _agreement(test_set, target_lang, ours(progress), theirs())  # translating here is the warm-up too
        ratios = [_seconds(ours) / _seconds(theirs) for _ in range(rounds)]
        return {"num_beams": beams, **agreement, "speed": _spread(ratios)}

    origin = provenance("ctranslate2", device=device)
    return {
        "model": {"bytes": sizes[0], "dtype": "float32"},
        "ctranslate2": {"bytes": sizes[1], "dtype": engine.translator.compute_type},
        "device": device,
        "threads": threads,
        "rounds": rounds,
        "sets": {
            test_set.name: {
                "n": len(test_set.sources),
                "text": FORMS[test_set.form],
                "searches": [compare(test_set, beams) for beams in searches],
            }
            for test_set in test_sets
        },
        "left_out": left_out,
        **origin,
        "versions": {**origin["versions"], "hf-vanilla-transformer": __version__},
    }


def _searches(generation: GenerationConfig) -> tuple[list[int], str | None]:
    """Numbers of beams, and why the model's own is not among them."""
    beams = generation.num_beams or 1
    if beams > 1 and getattr(generation, "length_penalty_type", None) == "wu":
        return [1], f"{beams} beams, the model's own search: CTranslate2 does not know its length_penalty_type 'wu'"
    return ([1] if beams == 1 else [1, beams]), None


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "greatest": max(values)}


def _agreement(
    test_set: TestSet, target_lang: str | None, ours: Sequence[str], theirs: Sequence[str]
) -> dict[str, Any]:
    metrics = ("bleu", "chrf") if test_set.form == "raw" else ("p1",)  # sacreBLEU would tokenise tokens again
    scores = {}
    for side, hypotheses in (("model", ours), ("ctranslate2", theirs)):
        found = score(hypotheses, test_set.references, metrics, target_lang)
        scores[side] = {name: {key: result[key] for key in ("score", "signature")} for name, result in found.items()}
    return {"identical": sum(a == b for a, b in zip(ours, theirs, strict=True)), "scores": scores}


def _size(folder: Path, pattern: str) -> int:
    """Bytes of the files of weights. Raises UserError if there are none."""
    files = list(folder.glob(pattern))
    if not files:
        raise UserError(f"{folder}: holds no {pattern}: name the folder of the model, then that of its export")
    return sum(path.stat().st_size for path in files)


def certificate_text(certificate: dict[str, Any]) -> str:
    """What `certify` found, in Markdown: two tables, and how the figures came about."""
    sizes = [certificate[side] for side in ("model", "ctranslate2")]
    shares = ["1.00", f"{sizes[1]['bytes'] / sizes[0]['bytes']:.2f}"]
    size_table = markdown_table(
        ["Engine", "Weights", "Bytes", "Share", "Computes in"],
        [
            [engine, f"`{file}`", f"{size['bytes']:,}", share, f"`{size['dtype']}`"]
            for engine, file, size, share in zip(
                ("transformers", "CTranslate2"), ("model.safetensors", "model.bin"), sizes, shares, strict=True
            )
        ],
    )
    return "\n\n".join([_search_table(certificate["sets"]), size_table, *_explanations(certificate)])


def _search_table(sets: dict[str, Any]) -> str:
    metrics = list(_signatures(sets))
    head = ["Test set", "Sentences", "Search", "Identical", *(METRICS[name][1] for name in metrics), "Speed"]
    rows = [
        [
            f"`{name}`",
            f"{found['n']:,}",
            "greedy" if search["num_beams"] == 1 else f"{search['num_beams']} beams",
            f"{search['identical']:,} ({search['identical'] / found['n']:.2%})",
            *(
                " / ".join(f"{scores[metric]['score']:.2f}" for scores in search["scores"].values())
                for metric in metrics
            ),
            "× {median:.2f} ({least:.2f} to {greatest:.2f})".format(**search["speed"]),
        ]
        for name, found in sets.items()
        for search in found["searches"]
    ]
    return markdown_table(head, rows)


def _signatures(sets: dict[str, Any]) -> dict[str, str]:
    """Metric and signature, which are the same everywhere."""
    first = next(iter(sets.values()))["searches"][0]["scores"]["model"]
    return {name: found["signature"] for name, found in first.items()}


def _explanations(certificate: dict[str, Any]) -> list[str]:
    hardware, versions = certificate["hardware"], certificate["versions"]
    signatures = ", ".join(f"{METRICS[k][1]} `{v}`" for k, v in _signatures(certificate["sets"]).items())
    packages = ("hf-vanilla-transformer", "ctranslate2", "torch", "transformers", "sacrebleu")
    place = hardware["cpu"] if certificate["device"] == "cpu" else hardware["gpu"]
    notes = [
        "Identical are translations that are the same to the letter. Of two scores, the first is that of the model "
        f"under transformers, the second that of this folder. Signatures: {signatures}.",
        "Speed is how many times as many sentences a second this folder translates: the median of "
        f"{certificate['rounds']} rounds (least to greatest) in which the two took turns after a round of warm-up, "
        f"within one process, where the threads of one may disturb the other; {certificate['threads']} threads, "
        f"`{certificate['device']}`, {place}.",
        f"Measured on {certificate['date']}, commit {_code(certificate['commit'])}, with "
        f"{', '.join(f'{name} {versions[name]}' for name in packages)}. The same as data: `{CERTIFICATE}`.",
    ]
    return [*notes, f"Not measured: {certificate['left_out']}."] if certificate["left_out"] else notes


def _code(commit: str | None) -> str:
    return f"`{commit}`" if commit else "not recorded"


def write_card(
    model: VanillaTransformerForConditionalGeneration,
    source: str | Path,
    folder: str | Path,
    *,
    compute_type: str,
    languages: dict[str, str] | None = None,
    certificate: dict[str, Any] | None = None,
) -> None:
    """Write README.md, and certificate.json where there is a certificate, into a CTranslate2 folder.

    Args:
        model: the model that was exported.
        source: its folder, whose name and records the card is filled from.
        folder: what `export_ctranslate2` made of it.
        compute_type: how the weights are stored there.
        languages: `source_lang` and `target_lang` where run.json does not say them, or wrongly.
        certificate: from `certify`; None says in the card that nothing was measured.

    Raises:
        UserError: a damaged run.json or evaluation.json.
    """
    source, folder = Path(source), Path(folder)
    run, evaluation = (read_record(source / name) for name in (RUN_RECORD, EVALUATION_RECORD))
    card = ctranslate2_card(
        model,
        {**run, **(languages or {})},
        evaluation,
        name=source.resolve().name,
        compute_type=compute_type,
        certificate=certificate_text(certificate) if certificate else None,
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
    if certificate:
        write_json(certificate, folder / CERTIFICATE)
