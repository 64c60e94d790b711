"""What each famous mistake of `tests/known_defects.py` costs: train with it, translate, score.

python scripts/known_defects.py          train and score what the record lacks, then print the table
python scripts/known_defects.py --table  print the table of the record

The record is scripts/results/known_defects/run.json. Every run has the same corpus, and that of a mistake
the seed and the settings of the run without it that it is held against. Mistakes of evaluation are made with the model
that was trained without any.
"""

import argparse
import json
import math
import shlex
import shutil
import sys
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import torch  # noqa: E402

from hf_vanilla_transformer.arguments import parse_arguments  # noqa: E402
from hf_vanilla_transformer.card import markdown_table  # noqa: E402
from hf_vanilla_transformer.embedded_corpus import EmbeddedCorpus, make_corpus, write_corpus  # noqa: E402
from hf_vanilla_transformer.evaluation import score  # noqa: E402
from hf_vanilla_transformer.provenance import RUN_RECORD, provenance  # noqa: E402
from hf_vanilla_transformer.training import train  # noqa: E402
from hf_vanilla_transformer.translation import load_model, translate  # noqa: E402
from known_defects import DEFECTS, MICRO_BATCHES, Defect, teacher_forced  # noqa: E402

RECORD = ROOT / "scripts" / "results" / "known_defects" / "run.json"
CORPUS = {"train": 20000, "validation": 200, "test": 500}
SEED = 1
SETTINGS = shlex.split("""
    --source_lang en --target_lang de --tokenizer_type bpe --vocab_size 1500 --attn_implementation eager
    --preset multi30k-tiny --max_tokens_per_batch 1024 --learning_rate 4e-3 --warmup_steps 300 --num_train_epochs 5
    --config_overrides dropout=0.1,norm_position=pre,d_model=64,encoder_layers=2,decoder_layers=2
    --average_checkpoints 1 --max_source_length 64 --max_target_length 64 --generation_max_length 64
    --generation_num_beams 4 --predict_with_generate false --logging_steps 100 --disable_tqdm true --use_cpu true
""")
CLEAN, CLEAN_IN_MICRO_BATCHES = "no defect", "no defect, in two micro-batches"
BASELINES = {
    CLEAN: (),
    "no defect, another seed": ("--seed", "2"),
    "no defect, a third seed": ("--seed", "3"),
    CLEAN_IN_MICRO_BATCHES: MICRO_BATCHES,
}


def baseline_of(defect: Defect) -> str:
    """The run that differs from this one in the defect alone."""
    return CLEAN_IN_MICRO_BATCHES if defect.settings == MICRO_BATCHES else CLEAN


def model_folder(name: str, folder: Path) -> Path:
    return folder / name.replace(" ", "-")


def trained(name: str, settings: tuple[str, ...], corpus: EmbeddedCorpus, folder: Path) -> Path:
    """The folder of a model, trained now or kept from before."""
    output = model_folder(name, folder)
    if (output / RUN_RECORD).exists():
        return output
    shutil.rmtree(output, ignore_errors=True)
    text = folder / "corpus"
    write_corpus(text, corpus)
    files = {split: [str(text / f"{split}.{side}") for side in ("en", "de")] for split in ("train", "valid", "test")}
    flags = ["--train_file", *files["train"], "--validation_file", *files["valid"], "--test_file", *files["test"]]
    return train(
        parse_arguments([*SETTINGS, "--seed", str(SEED), *settings, *flags, "--output_dir", str(output)]), None
    )


def measure(name: str, corpus: EmbeddedCorpus, folder: Path) -> dict:
    """Train, translate and score with one defect, or with none; what the record says of it."""
    defect = DEFECTS.get(name)
    settings = defect.settings if defect else BASELINES[name]
    sources, references = (list(side) for side in zip(*corpus.test, strict=True))
    clean = trained(CLEAN, (), corpus, folder)
    with defect.inject() if defect else nullcontext():
        evaluated = defect and defect.kind == "evaluation"
        output = clean if evaluated else trained(name, settings, corpus, folder)
        model, tokenizer = load_model(str(output), device="cpu")
        model.set_attn_implementation("eager")
        search = dict(defect.search) if defect else {}
        model.generation_config.use_cache = search.pop("use_cache", True)
        torch.manual_seed(SEED)
        hypotheses = translate(model, tokenizer, sources, **search)
        forced = teacher_forced(model, tokenizer, sources, references)
    run = json.loads((output / RUN_RECORD).read_text(encoding="utf-8"))
    curve = run["curve"]
    if output != clean:
        shutil.rmtree(output)
    return {
        "settings": settings,
        "steps": run["training"]["steps"],
        "training_losses": [entry["loss"] for entry in curve if "loss" in entry],
        "validation_losses": [entry["eval_loss"] for entry in curve if "eval_loss" in entry],
        "bleu": score(hypotheses, references, ("bleu",))["bleu"],
        "teacher_forced_bleu": score(forced, references, ("bleu",))["bleu"]["score"],
        "examples": list(zip(sources[:3], references[:3], hypotheses[:3], strict=True)),
    }


def looks_healthy(run: dict) -> str:
    """What a reader of the log would say of the validation loss, in nats per word.

    Healthy is a loss that falls at every evaluation (by one in twenty it may rise) to less than a half. Below 0.1 it
    says that every word is as good as certain, which no translation is.
    """
    losses = run["validation_losses"]
    falls = all(later <= 1.05 * earlier for earlier, later in pairwise(losses))
    healthy = all(map(math.isfinite, losses)) and falls and losses[-1] < losses[0] / 2
    verdict = "too good" if losses[-1] < 0.1 else "yes" if healthy else "no"
    return f"{verdict} ({losses[0]:.2f} → {losses[-1]:.2f})"


def table(runs: dict[str, dict]) -> str:
    """Markdown: the baselines, then the defects, worst first, and how much of a difference is chance."""
    rows = []
    for name in BASELINES:
        if name in runs:
            run = runs[name]
            scores = [f"{run['bleu']['score']:.1f}", "", f"{run['teacher_forced_bleu']:.1f}"]
            rows.append([name, "", "", *scores, looks_healthy(run)])
    for name in sorted(DEFECTS.keys() & runs, key=lambda name: runs[name]["bleu"]["score"]):
        defect, run, without = DEFECTS[name], runs[name], runs[baseline_of(DEFECTS[name])]
        scores = (run["bleu"]["score"], without["bleu"]["score"], run["teacher_forced_bleu"])
        what = [f"**{name}**: {defect.what}", defect.seen_in, defect.check]
        rows.append([*what, *(f"{score:.1f}" for score in scores), looks_healthy(run)])
    clean = [runs[name]["bleu"]["score"] for name in BASELINES if name in runs]
    inflated = max(run["teacher_forced_bleu"] - run["bleu"]["score"] for run in runs.values())
    note = (
        f"Without a defect, BLEU is {min(clean):.1f} to {max(clean):.1f}: a smaller difference says nothing. "
        f"Teacher-forced BLEU is up to {inflated:.1f} points too high."
    )
    head = [
        "defect",
        "seen in",
        "what catches it",
        "BLEU with it",
        "without",
        "teacher-forced BLEU",
        "loss looks healthy?",
    ]
    return "\n\n".join([markdown_table(head, rows), note])


def load_record() -> dict:
    """The record so far, or an empty one.

    Raises:
        SystemExit: it was made with other settings.
    """
    recipe = {"seed": SEED, "settings": SETTINGS, "corpus": CORPUS}
    if not RECORD.exists():
        return {**provenance(), **recipe, "runs": {}}
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    if {key: record[key] for key in recipe} != recipe:
        sys.exit(f"{RECORD.relative_to(ROOT)} was made with other settings: remove it to start anew")
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument("--folder", type=Path, default=Path("runs/known_defects"), help="where models are trained")
    options = parser.parse_args()
    record = load_record()
    if not options.table:
        corpus = make_corpus(**CORPUS)
        if CLEAN not in record["runs"]:  # a model of an earlier record may have had other settings
            shutil.rmtree(model_folder(CLEAN, options.folder), ignore_errors=True)
        for name in [*BASELINES, *DEFECTS]:
            if name not in record["runs"]:
                print(f"=== {name}", flush=True)
                record["runs"][name] = run = measure(name, corpus, options.folder)
                print(
                    f"=== BLEU {run['bleu']['score']:.1f}, teacher-forced {run['teacher_forced_bleu']:.1f}", flush=True
                )
                RECORD.parent.mkdir(parents=True, exist_ok=True)
                RECORD.write_text(json.dumps(record, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(table(record["runs"]))


if __name__ == "__main__":
    main()
