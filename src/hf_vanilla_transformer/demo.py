"""The first minute: the main job from text to a Hub folder, on the embedded corpus, offline."""

import shlex
import shutil
import time
from pathlib import Path

from transformers import AutoModelForSeq2SeqLM

from .arguments import parse_arguments
from .embedded_corpus import REORDERED_EXAMPLE, EmbeddedCorpus, make_corpus, write_corpus
from .errors import UserError, require_folder_path
from .evaluation import score
from .inspection import (
    ABLATIONS,
    cross_attention,
    plot_cross_attention,
    plot_learning_curve,
    plot_learning_rate,
    plot_positions,
    without,
)
from .provenance import RUN_RECORD, read_record
from .publishing import export_folder
from .reporting import evaluate_model, read_test_sets
from .tokenization_vanilla_transformer import load_tokenizer
from .training import train
from .translation import load_model, translate

SETTINGS = shlex.split("""
    --source_lang en --target_lang de --tokenizer_type word-level --vocab_size 4000
    --preset multi30k-tiny --config_overrides dropout=0.1,norm_position=pre
    --max_tokens_per_batch 2048 --learning_rate 2e-3 --warmup_steps 300 --num_train_epochs 7 --logging_steps 50
    --average_checkpoints 3 --max_source_length 64 --max_target_length 64
    --generation_max_length 64 --generation_num_beams 4 --num_sample_translations 2 --seed 1
""")


def run_demo(folder: Path, train_pairs: int = 20000, settings: list[str] = SETTINGS) -> dict[str, float]:
    """Make a corpus, train, score, look inside, save the Hub folder and load it back.

    Args:
        folder: gets `corpus/`, `training/`, `model/` (the Hub folder) and `pictures/`; what an earlier demo left
            there is replaced.
        train_pairs: sentence pairs to train on.
        settings: flags of `train`.

    Returns:
        BLEU on the held-out test sentences: of the "model", and with each of `inspection.ABLATIONS` switched off.

    Raises:
        UserError: something of one of these names is there that no demo has left.
    """
    started = time.time()
    require_folder_path(folder)
    places, mark = [folder / name for name in ("corpus", "training", "model", "pictures")], folder / ".demo"
    for place in places:
        if place.exists() and not mark.exists():
            raise UserError(f"{place} is not of an earlier demo: choose another --output_dir")
        shutil.rmtree(place, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    mark.touch()

    _say("A corpus: English and German sentences of a small grammar")
    corpus = make_corpus(train=train_pairs, validation=200, test=500)
    write_corpus(folder / "corpus", corpus)
    print(f"for example: {corpus.train[0][0]}\n             {corpus.train[0][1]}")

    _say("Report on the data, tokenizer, training")
    texts = {
        name: [str(folder / "corpus" / f"{name}.{side}") for side in ("en", "de")]
        for name in ("train", "valid", "test")
    }
    flags = ["--train_file", *texts["train"], "--validation_file", *texts["valid"], "--test_file", *texts["test"]]
    trained = train(
        parse_arguments([*settings, *flags, "--output_dir", str(folder / "training")]),
        lambda hypotheses, references: {"bleu": score(hypotheses, references, ("bleu",))["bleu"]["score"]},
    )

    _say("Score on held-out sentences: words in constructions in which training never shows them")
    model, tokenizer = load_model(str(trained))
    test_sets = read_test_sets(files=texts["test"], source_lang="en", target_lang="de")
    record = evaluate_model(model, tokenizer, test_sets, folder=trained, target_lang="de")
    scores = {"model": record["sets"]["test"]["scores"]["bleu"]["score"]}
    for part in ABLATIONS:
        scores[part] = _score_without(part, model, tokenizer, corpus)
    print(f"BLEU {scores['model']:.1f}; {record['sets']['test']['scores']['bleu']['signature']}")
    for part in ABLATIONS:
        print(f"BLEU {scores[part]:.1f} with its {part} switched off")

    _say("A few translations")
    sources = [REORDERED_EXAMPLE, *(english for english, _ in corpus.test[:4])]
    for source, translation in zip(sources, translate(model, tokenizer, sources), strict=True):
        print(f"  {source}\n  {translation}\n")

    _say("Pictures")
    for picture in _draw(model, tokenizer, trained, folder / "pictures"):
        print(picture)

    _say("The folder for the Hub, loaded back with AutoModelForSeq2SeqLM")
    hub_folder = export_folder(trained, folder / "model", repo_id="user/vanilla-transformer-demo", license="apache-2.0")
    again = AutoModelForSeq2SeqLM.from_pretrained(hub_folder).eval()
    same = translate(again, load_tokenizer(hub_folder), sources) == translate(model, tokenizer, sources)
    print(f"{hub_folder}: translates {'the same' if same else 'DIFFERENTLY'}; its README.md is the model card")
    print(
        f"\nDone in {(time.time() - started) / 60:.1f} minutes. Your own text: see README.md, 'Train on your own text'."
    )
    return scores


def _say(title: str) -> None:
    print(f"\n=== {title}", flush=True)


def _score_without(part: str, model, tokenizer, corpus: EmbeddedCorpus) -> float:
    """BLEU with one part switched off."""
    sources, references = zip(*corpus.test, strict=True)
    with without(model, part):
        hypotheses = translate(model, tokenizer, sources)
    return score(hypotheses, list(references), ("bleu",))["bleu"]["score"]


def _draw(model, tokenizer, trained: Path, folder: Path) -> list[Path]:
    folder.mkdir(parents=True)
    curve = read_record(trained / RUN_RECORD)["curve"]
    plot_learning_curve(curve, folder / "learning_curve.png")
    plot_learning_rate(curve, folder / "learning_rate.png")
    plot_positions(folder / "positions.png")
    plot_cross_attention(*cross_attention(model, tokenizer, REORDERED_EXAMPLE), folder / "cross_attention.png")
    return sorted(folder.iterdir())
