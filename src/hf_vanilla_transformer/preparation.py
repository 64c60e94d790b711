"""From parallel text to tokenised pairs on disk: read, clean, report, learn the tokenizer, encode.

Text is read as a stream and kept in memory-mapped Arrow files, so a corpus need not fit in memory.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, disable_progress_bars, load_from_disk
from datasets.exceptions import DatasetGenerationError
from transformers import PreTrainedTokenizerBase

from .arguments import DataArguments, TokenizerArguments
from .corpus import (
    CleaningRules,
    CorpusReport,
    HeldOut,
    Pair,
    clean_pairs,
    read_pairs,
    tagged,
    warning_of_swapped_endings,
    warning_of_swapped_sides,
)
from .errors import UserError, on_one_line
from .tokenization_vanilla_transformer import (
    SeparateVocabularyTokenizer,
    joint_tokenizer,
    learn_backend,
    load_tokenizer,
)

# Before each source that was translated back, so that the model can tell it from a real one (Caswell et al. 2019).
BACK_TRANSLATED = "2bt"
REPORT = "report.json"  # written last
WRITTEN = {"cache", "source.json", "target.json", "tokenizer", "train", "validation", REPORT}


@dataclass
class PreparedCorpus:
    """What training needs.

    Attributes:
        train, validation: `datasets.Dataset` with `source`, `target` (text), `input_ids`, `labels` (token ids, EOS
            included); `validation` is None where there is none.
        tokenizer: with which they were made.
        report: the cleaning report of the training text, ready for JSON, with that of `back_translations` in it.
    """

    train: Dataset
    validation: Dataset | None
    tokenizer: PreTrainedTokenizerBase
    report: dict[str, Any]

    @classmethod
    def load(cls, folder: Path) -> "PreparedCorpus":
        """Read what `prepare_corpus` left in `folder`."""
        validation = folder / "validation"
        return cls(
            train=load_from_disk(folder / "train"),
            validation=load_from_disk(validation) if validation.exists() else None,
            tokenizer=load_tokenizer(folder / "tokenizer"),
            report=json.loads((folder / REPORT).read_text(encoding="utf-8")),
        )


def is_prepared(folder: Path) -> bool:
    """Whether `prepare_corpus` has come to its end there."""
    return (folder / REPORT).is_file()


def prepare_corpus(
    data: DataArguments,
    options: TokenizerArguments,
    folder: Path,
    tokenizer_name: str | None = None,
    warnings: Sequence[str] = (),
) -> None:
    """Do all that comes before training and leave it in `folder`, replacing what is there; print the report.

    Args:
        data: where the text is.
        options: what tokenizer to learn.
        folder: for the results; see `PreparedCorpus.load`.
        tokenizer_name: take the tokenizer of this model instead of learning one.
        warnings: for the report, besides those about the text.

    Raises:
        UserError: from reading the text, or if nothing is left of it.
    """
    disable_progress_bars()
    foreign = {path.name for path in folder.glob("*")} - WRITTEN
    if foreign:
        raise UserError(f"{folder} holds {min(foreign)}, which is not of a training: choose another --output_dir")
    shutil.rmtree(folder, ignore_errors=True)
    validation = _validation_pairs(data)
    evaluation = [*validation, *_test_pairs(data)]
    validation = _longest_first(validation[: data.max_eval_samples])
    if data.directions:  # what is a source of one direction is a target of another
        evaluation += [pair._replace(source=pair.target, target=pair.source) for pair in evaluation]
        validation = [pair._replace(source=tagged(pair.source, data.target_lang)) for pair in validation]
    held_out = HeldOut.of(evaluation)
    report = CorpusReport("training text")
    synthetic = CorpusReport("back-translations") if data.synthetic_file else None
    texts = _as_dataset(_clean_training_pairs(data, report, synthetic, held_out), folder / "cache" / "text")
    for part in filter(None, (report, synthetic)):
        part.require_pairs()
    _warn_of_swapped_sides(data, report, texts, validation)
    report.warnings.extend(warnings)
    try:
        tokenizer = load_tokenizer(tokenizer_name) if tokenizer_name else _learn_tokenizer(texts, options, folder)
    except (ValueError, OSError) as error:
        origin = f"model_name_or_path {tokenizer_name}: " if tokenizer_name else ""
        raise UserError(origin + on_one_line(error)) from error
    tokenizer.save_pretrained(folder / "tokenizer")
    train = _encode(texts, tokenizer, folder / "cache" / "train.arrow")
    train = _drop_too_long(train, data, report, synthetic)
    for part in filter(None, (report, synthetic)):
        part.require_pairs()
        print(part, flush=True)
    train.save_to_disk(folder / "train")
    if validation:
        _encode(Dataset.from_list([pair._asdict() for pair in validation]), tokenizer, None).save_to_disk(
            folder / "validation"
        )
    facts = report.as_dict() | ({"back_translations": synthetic.as_dict()} if synthetic else {})
    shutil.rmtree(folder / "cache")
    (folder / REPORT).write_text(json.dumps(facts, ensure_ascii=False, indent=1), encoding="utf-8")


def _read(data: DataArguments, files: list[str], split: str, direction: str | None = None) -> Iterator[Pair]:
    source_lang, target_lang = direction.split("-") if direction else (data.source_lang, data.target_lang)
    return read_pairs(
        files=files,
        dataset=None if files else data.dataset_name,
        config_name=None if files else data.dataset_config_name,
        split=split,
        source_lang=source_lang,
        target_lang=target_lang,
        streaming=data.streaming,
    )


def _validation_pairs(data: DataArguments) -> list[Pair]:
    """The validation set; empty where there is none."""
    if not data.validation_file and (data.train_file or not data.validation_split):
        return []
    try:
        pairs = list(_read(data, data.validation_file, data.validation_split))
    except UserError as error:
        hint = "" if data.validation_file else '; --validation_split "" trains without validation'
        raise UserError(f"validation set: {error}{hint}") from error
    for pair in pairs:
        if not pair.source or not pair.target:
            raise UserError(f"validation set, line {pair.line}: one side is empty; every line needs both")
    return pairs


def _longest_first(pairs: list[Pair]) -> list[Pair]:
    """So that an evaluation pads little."""
    return sorted(pairs, key=lambda pair: -len(pair.source))


def _test_pairs(data: DataArguments) -> Iterator[Pair]:
    if data.test_file:
        yield from _read(data, data.test_file, "test")
    if data.dataset_name:
        for split in data.test_splits:
            yield from _read(data, [], split)


def _clean_training_pairs(
    data: DataArguments, report: CorpusReport, synthetic: CorpusReport | None, held_out: HeldOut
) -> Iterator[Pair]:
    """The real pairs, then those that were translated back, which `synthetic` counts."""
    rules = CleaningRules(max_length_ratio=data.max_length_ratio, align_final_marks=data.align_final_marks)
    # a file that is missing is found before the real text is cleaned
    back_translations = _read(data, data.synthetic_file, "synthetic") if synthetic else iter(())
    for direction in data.directions or [None]:
        pairs = islice(_read(data, data.train_file, data.train_split, direction), data.max_train_samples)
        for pair in clean_pairs(pairs, rules, report, held_out):
            yield pair._replace(source=tagged(pair.source, direction.partition("-")[2])) if direction else pair
    if synthetic:
        back_translations = islice(back_translations, data.max_train_samples)
        for pair in clean_pairs(back_translations, rules, synthetic, held_out):
            yield pair._replace(source=f"{BACK_TRANSLATED} {pair.source}")


def _as_dataset(pairs: Iterator[Pair], cache: Path) -> Dataset:
    """Write pairs to an Arrow file as they come. The fingerprint is the path's: `cache` is new in every run."""
    columns = Pair._fields
    first = next(pairs, None)
    if first is None:
        return Dataset.from_dict({column: [] for column in columns})

    def rows() -> Iterator[dict[str, Any]]:
        yield first._asdict()
        for pair in pairs:
            yield pair._asdict()

    try:
        return Dataset.from_generator(rows, cache_dir=str(cache), fingerprint="text")
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise


def _warn_of_swapped_sides(data: DataArguments, report: CorpusReport, texts: Dataset, validation: list[Pair]) -> None:
    sample = [Pair(row["source"], row["target"], row["line"]) for row in texts.select(range(min(2000, len(texts))))]
    warnings = [
        warning_of_swapped_endings(files, data.source_lang, data.target_lang)
        for files in (data.train_file, data.synthetic_file)
    ]
    if validation and not data.directions:
        warnings.append(warning_of_swapped_sides(sample, validation[:2000]))
    report.warnings.extend(warning for warning in warnings if warning)


def _learn_tokenizer(texts: Dataset, options: TokenizerArguments, folder: Path) -> PreTrainedTokenizerBase:
    settings = {
        "tokenizer_type": options.tokenizer_type,
        "vocab_size": options.vocab_size,
        "lowercase": options.lowercase,
        "normalization": options.normalization,
    }

    def side(column: str) -> Iterator[str]:
        for batch in texts.iter(1000):
            yield from batch[column]

    if not options.separate_vocabularies:
        both = (text for column in ("source", "target") for text in side(column))
        return joint_tokenizer(learn_backend(both, **settings))
    files = []
    for column in ("source", "target"):
        files.append(str(folder / f"{column}.json"))
        learn_backend(side(column), **settings).save(files[-1])
    return SeparateVocabularyTokenizer(*files)


def _encode(texts: Dataset, tokenizer: PreTrainedTokenizerBase, cache_file: Path | None) -> Dataset:
    def encode(batch: dict[str, list]) -> dict[str, list]:
        return {
            "input_ids": tokenizer(batch["source"], return_attention_mask=False)["input_ids"],
            "labels": tokenizer(text_target=batch["target"], return_attention_mask=False)["input_ids"],
        }

    return texts.map(
        encode, batched=True, cache_file_name=str(cache_file) if cache_file else None, new_fingerprint="encoded"
    )


def token_lengths(pairs: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of each source and of each target, EOS included."""
    return tuple(
        np.concatenate([[len(ids) for ids in batch[column]] for batch in pairs.iter(10000)])
        for column in ("input_ids", "labels")
    )


def _drop_too_long(
    pairs: Dataset, data: DataArguments, report: CorpusReport, synthetic: CorpusReport | None
) -> Dataset:
    sources, targets = token_lengths(pairs)
    fits = (sources <= data.max_source_length) & (targets <= data.max_target_length)
    too_long, real = np.flatnonzero(~fits), report.kept  # back-translations come after the real pairs
    for index, row in zip(too_long, pairs.select(too_long), strict=True):
        source = row["source"]
        if index >= real or data.directions:
            source = source.partition(" ")[2]  # cleaning counted it without the word that was put before it
        (report if index < real else synthetic).drop("too long", Pair(source, row["target"], row["line"]))
    return pairs.select(np.flatnonzero(fits))
