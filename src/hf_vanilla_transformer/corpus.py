"""Parallel text on its way in: read as a stream, checked, cleaned, and accounted for line by line.

Two aligned text files, one table (TSV, CSV, JSON lines, Parquet) or a data set (a saved folder, a Multi30k
folder, a Hub id) all become one stream of `Pair`; `clean_pairs` drops what would hurt and `CorpusReport` says
what and why. This module knows nothing of tokens: a limit in tokens is the caller's, who enters it through
`CorpusReport.drop("too long", pair)`.
"""

import csv
import gzip
import json
import re
import unicodedata
import zlib
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from glob import escape
from hashlib import blake2b
from itertools import chain, zip_longest
from math import sqrt
from pathlib import Path
from typing import IO, Any, NamedTuple

from .errors import UserError, on_one_line

FINAL_MARKS = ".!?…。！？"
REASONS = ("empty", "too long", "identical sides", "length ratio", "overlap", "duplicate")
LANGUAGE_CODE = re.compile(r"[A-Za-z0-9_-]+")
MULTI30K_SUFFIX = {"raw": "", "tok": ".lc.norm.tok"}


class Pair(NamedTuple):
    """One sentence and its translation; `line` is the line of the file or row of the data set, from 1."""

    source: str
    target: str
    line: int


# Reading text files


def text_lines(path: Path, stream: IO[bytes] | None = None) -> Iterator[str]:
    """Decoded lines with their line feeds. Nothing else ends a line: other separators would break the alignment.

    Args:
        path: of a file in UTF-8, compressed if its name ends in .gz.
        stream: read this instead; `path` is its name then.

    Raises:
        UserError: the file cannot be read.
    """
    number = 0
    opener = gzip.open if path.suffix.lower() == ".gz" else open
    try:
        with nullcontext(stream) if stream else opener(path, "rb") as lines:
            for number, raw in enumerate(lines, start=1):
                yield (raw.removeprefix(BOM_UTF8) if number == 1 else raw).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}:{number}: not valid UTF-8 ({error.reason}): save the file as UTF-8") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: broken gzip file after line {number}: fetch it or compress it again") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


def _lines(path: Path) -> Iterator[str]:
    lines = text_lines(path)
    first = next(lines, None)
    if first is None:
        raise UserError(f"{path} is empty: give a file with one sentence per line")
    return chain([first], lines)


def _one_line(text: str) -> str:
    return " ".join(text.splitlines()).strip()


def _aligned_pairs(source_path: Path, target_path: Path) -> Iterator[Pair]:
    sources, targets = _lines(source_path), _lines(target_path)
    for line, (source, target) in enumerate(zip_longest(sources, targets), start=1):
        if source is None or target is None:
            counts = [line - 1, line + sum(1 for _ in (targets if source is None else sources))]
            in_source, in_target = counts if source is None else reversed(counts)
            raise UserError(
                f"{source_path} has {in_source} lines but {target_path} has {in_target}: "
                "line n of one file must translate line n of the other"
            )
        yield Pair(_one_line(source), _one_line(target), line)


# Reading tables: a reader takes a path and the languages, and gives (line, row), a row mapping column to text

Row = tuple[int, dict[str, Any]]
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
BLANK = {"source": "", "target": ""}


def _named_cells(path: Path, line: int, header: list[str], cells: list[str]) -> dict[str, str]:
    if len(cells) != len(header):
        raise UserError(
            f"{path}:{line}: {len(cells)} columns where the header has {len(header)} ({', '.join(header)}): "
            "quote a text that holds the separator"
        )
    return dict(zip(header, cells, strict=True))


def _tsv_rows(path: Path, languages: set[str]) -> Iterator[Row]:
    header = None
    for line, text in enumerate(_lines(path), start=1):
        cells = text.rstrip("\r\n").split("\t")
        if line == 1 and (languages <= set(cells) or set(BLANK) <= set(cells)):
            header = cells
        elif line == 1 and {name.lower() for name in languages} <= {cell.strip().lower() for cell in cells}:
            raise UserError(
                f"{path}:1: the header writes {', '.join(sorted(languages))} in another way: {text.strip()!r}"
            )
        elif not text.strip():
            yield line, BLANK
        elif header:
            yield line, _named_cells(path, line, header, cells)
        elif len(cells) < 2:
            raise UserError(f"{path}:{line}: 1 column, needs 2: put a tab between source and target")
        else:
            yield line, {"source": cells[0], "target": cells[1]}


def _csv_rows(path: Path, languages: set[str]) -> Iterator[Row]:
    reader = csv.reader(_lines(path), strict=True)
    header, line = None, 1
    try:
        for cells in reader:
            if header is None:
                header = [cell.strip() for cell in cells]
            else:
                yield line, _named_cells(path, line, header, cells) if cells else BLANK
            line = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{path}:{line}: not a CSV row ({error}): check its quotes") from error


def _json_rows(path: Path, languages: set[str]) -> Iterator[Row]:
    for line, text in enumerate(_lines(path), start=1):
        try:
            row = json.loads(text) if text.strip() else BLANK
        except json.JSONDecodeError as error:
            raise UserError(f"{path}:{line}: not JSON ({error.msg}): put one JSON object on each line") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}:{line}: a JSON {type(row).__name__}: put one JSON object on each line")
        yield line, row


def _parquet_rows(path: Path, languages: set[str]) -> Iterator[Row]:
    def load():
        from datasets import load_dataset

        return load_dataset("parquet", data_files=escape(str(path)), split="train", streaming=True)

    return _data_set_rows(load, f"{path}: cannot be read as Parquet")


TABLES = {
    ".tsv": _tsv_rows,
    ".csv": _csv_rows,
    ".jsonl": _json_rows,
    ".json": _json_rows,
    ".parquet": _parquet_rows,
}


def _text(value: Any, column: str, where: str) -> str:
    if not isinstance(value, str | None):
        raise UserError(f"{where}: column '{column}' holds a {type(value).__name__}: it must hold text")
    try:
        (value or "").encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: column '{column}' holds half a surrogate pair: repair the text") from error
    return _one_line(value or "")


def _pairs_of_rows(rows: Iterable[Row], name: str, source_lang: str, target_lang: str) -> Iterator[Pair]:
    for line, row in rows:
        cells = row["translation"] if isinstance(row.get("translation"), dict) else row
        source, target = source_lang, target_lang
        if not {source, target} <= set(cells) and set(BLANK) <= set(cells):
            source, target = BLANK
        missing = [column for column in (source, target) if column not in cells]
        if missing:
            raise UserError(
                f"{name}:{line}: no column '{missing[0]}': there are {', '.join(map(str, cells)) or 'none'}; "
                "name the columns after the languages, or source and target"
            )
        where = f"{name}:{line}"
        yield Pair(_text(cells[source], source, where), _text(cells[target], target, where), line)


def _ending(path: Path) -> str:
    plain = path.with_suffix("") if path.suffix.lower() == ".gz" else path
    return plain.suffix.lower()


def _file_pairs(paths: list[Path], source_lang: str, target_lang: str) -> Iterator[Pair]:
    for path in paths:
        if not path.is_file():
            what = "a folder, not a file" if path.is_dir() else "no regular file"
            raise UserError(f"{path}: {what if path.exists() else 'no such file'}")
    if len(paths) == 2:
        for path in paths:
            if _ending(path) in TABLES:
                raise UserError(f"{path}: a table holds both sides: give it alone, or two plain text files")
        return _aligned_pairs(*paths)
    (path,) = paths
    if _ending(path) not in TABLES or path.name.lower().endswith(".parquet.gz"):
        raise UserError(
            f"{path}: unknown file ending '{path.suffix}': one file must be one of {' '.join(TABLES)} "
            "(all but .parquet also with .gz); plain text comes as two files"
        )
    rows = TABLES[_ending(path)](path, {source_lang, target_lang})
    return _pairs_of_rows(rows, str(path), source_lang, target_lang)


# Reading data sets


def _data_set_rows(load: Callable[[], Iterable[dict[str, Any]]], complaint: str) -> Iterator[Row]:
    """Rows of what `load` gives; the library's errors, on opening or on the way, become one short line."""
    from datasets.exceptions import DatasetsError

    try:
        yield from enumerate(load(), start=1)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{complaint} ({_cut(on_one_line(error), 200)})") from error


def _saved_data_set(folder: Path, config_name: str | None, split: str) -> Iterable[dict[str, Any]]:
    from datasets import DatasetDict, load_from_disk

    if config_name:
        raise UserError(f"{folder}: a saved data set has no configuration '{config_name}': leave it out")
    saved = load_from_disk(str(folder))
    splits = dict(saved) if isinstance(saved, DatasetDict) else {str(saved.split or "train"): saved}
    if split not in splits:
        raise UserError(f"{folder}: no split '{split}': there are {', '.join(splits)}")
    return splits[split]


def is_multi30k(dataset: str | None) -> bool:
    """Whether this is a Multi30k folder as upstream lays it out."""
    return dataset is not None and (Path(dataset).expanduser() / "task1").is_dir()


def _multi30k_files(folder: Path, config_name: str | None, split: str, languages: list[str]) -> list[Path]:
    config = config_name or "raw"
    if config not in MULTI30K_SUFFIX:
        raise UserError(f"{folder}: no configuration '{config}': there are {', '.join(MULTI30K_SUFFIX)}")
    texts, suffix = folder / "task1" / config, MULTI30K_SUFFIX[config] + "."
    found: dict[str, dict[str, Path]] = {}
    for path in sorted(texts.glob(f"*{suffix}*")):
        name, _, language = path.name.removesuffix(".gz").partition(suffix)
        found.setdefault("validation" if name == "val" else name, {})[language] = path
    if split not in found:
        raise UserError(f"{texts}: no split '{split}': there are {', '.join(found) or 'none'}")
    for language in languages:
        if language not in found[split]:
            raise UserError(
                f"{texts}: no language '{language}' in split '{split}': there are {', '.join(found[split])}"
            )
    return [found[split][language] for language in languages]


def _is_hub_id(dataset: str) -> bool:
    return not Path(dataset).exists() and HUB_ID.fullmatch(dataset) is not None


def _data_set_pairs(
    dataset: str, config_name: str | None, split: str, languages: list[str], streaming: bool
) -> Iterator[Pair]:
    folder = Path(dataset).expanduser()
    if not folder.is_dir() and not _is_hub_id(dataset):
        raise UserError(f"{dataset}: neither a folder nor the id of a Hub data set (one file is given as a file)")
    if is_multi30k(dataset):
        return _aligned_pairs(*_multi30k_files(folder, config_name, split, languages))

    def load() -> Iterable[dict[str, Any]]:
        if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
            return _saved_data_set(folder, config_name, split)
        from datasets import load_dataset

        path = str(folder) if folder.is_dir() else dataset
        return load_dataset(path, config_name, split=split, streaming=streaming)

    role = "the data set" if folder.is_dir() else "no folder here, and as a Hub data set it"
    rows = _data_set_rows(load, f"{dataset}: {role} cannot be loaded with split '{split}'")
    return _pairs_of_rows(rows, dataset, *languages)


def _at_least_one(pairs: Iterator[Pair], name: str) -> Iterator[Pair]:
    pair = None
    for pair in pairs:
        yield pair
    if pair is None:
        raise UserError(f"{name} is empty: it holds no sentence pair")


def source_description(
    files: Sequence[str | Path] = (), dataset: str | None = None, config_name: str | None = None
) -> str:
    """Where the text is from, for a model card: file names, or the data set's id and configuration."""
    if not dataset:
        return " and ".join(Path(file).name for file in files)
    name = dataset if _is_hub_id(dataset) else Path(dataset).expanduser().resolve().name
    return f"{name} ({config_name})" if config_name else name


def tagged(source: str, target_lang: str) -> str:
    """What a model of several directions reads: where to translate (Johnson et al. 2017), in a word of its own."""
    return f"2{target_lang} {source}"


def read_pairs(
    *,
    files: Sequence[str | Path] = (),
    dataset: str | None = None,
    config_name: str | None = None,
    split: str = "train",
    source_lang: str,
    target_lang: str,
    streaming: bool = False,
) -> Iterator[Pair]:
    """Stream sentence pairs, one at a time, from files or from a data set.

    Args:
        files: two aligned text files, source first, or one table: `.tsv` (with or without a header), `.csv`
            (with one), `.jsonl`/`.json` (one object per line) or `.parquet`; all but Parquet also as `.gz`.
            Columns are named after the languages, or `source` and `target`; a field `translation` may hold
            them, as in the translation data sets of the Hub.
        dataset: a folder written by `save_to_disk`, a folder of Multi30k as its authors lay it out, or
            whatever `datasets.load_dataset` takes: a Hub id, or a local folder of the same layout.
        config_name: the data set's configuration; for Multi30k `raw` (default) or `tok`.
        split: the data set's split; files have none. A saved folder without splits counts as `train`.
        source_lang, target_lang: language codes as the columns and Multi30k's files carry them.
        streaming: read a Hub data set over the network instead of downloading it first.

    Returns:
        an iterator over `Pair`: no byte-order mark, no surrounding white space, no line break inside a
        sentence. A blank line of a table is a pair with two empty sides, so that cleaning reports it.

    Raises:
        UserError: at the call for arguments and files that do not fit, while reading for what they hold.
    """
    if bool(files) == bool(dataset):
        raise UserError(f"give either files or a data set, {'not both' if files else 'one of them is needed'}")
    if dataset:
        pairs = _data_set_pairs(dataset, config_name, split, [source_lang, target_lang], streaming)
    elif len(files) > 2:
        raise UserError(f"{len(files)} files given: give two aligned text files, or one table")
    elif config_name:
        raise UserError(f"configuration '{config_name}' given with files: only a data set has configurations")
    else:
        pairs = _file_pairs([Path(file).expanduser() for file in files], source_lang, target_lang)
    return _at_least_one(pairs, source_description(files, dataset, config_name))


# Cleaning


def _hash(text: str) -> int:
    """Eight bytes in place of the sentence; unlike Python's own hash the same in every process."""
    return int.from_bytes(blake2b(text.encode("utf-8"), digest_size=8).digest(), "big")


def _folded_hash(text: str) -> int:
    return _hash(unicodedata.normalize("NFKC", text).casefold())


class HeldOut:
    """The evaluation sentences that training must not see; sources and targets apart, as hashes.

    `pair in held_out` is true when the pair's source is an evaluation source or its target an evaluation
    target, both compared after NFKC and case folding.
    """

    def __init__(self) -> None:
        self.sources: set[int] = set()
        self.targets: set[int] = set()

    @classmethod
    def of(cls, pairs: Iterable[Pair]) -> "HeldOut":
        held_out = cls()
        for pair in pairs:
            held_out.sources.add(_folded_hash(pair.source))
            held_out.targets.add(_folded_hash(pair.target))
        return held_out

    def __contains__(self, pair: Pair) -> bool:
        return _folded_hash(pair.source) in self.sources or _folded_hash(pair.target) in self.targets


@dataclass
class CleaningRules:
    """When a pair is dropped; empty sides, identical sides, overlap and repetition always are.

    Attributes:
        max_length_ratio: the longer side over the shorter one, both counted in words plus 2, so that short
            sentences are not judged by noise. Where either side is in a script without spaces between words
            (Chinese, Japanese, Thai, Lao, Khmer, Burmese, Tibetan), both are counted in characters plus 10.
            `inf` switches it off.
        max_characters: the longest side that can still be a sentence rather than garbage.
        align_final_marks: take off a final mark, such as a full stop, that only one side has.

    Raises:
        UserError: a value below 1.
    """

    max_length_ratio: float = 6.0
    max_characters: int = 5000
    align_final_marks: bool = False

    def __post_init__(self) -> None:
        for name in ("max_length_ratio", "max_characters"):
            if not getattr(self, name) >= 1:
                raise UserError(f"{name} is {getattr(self, name)}: it must be 1 or more")


# Thai to Tibetan, Burmese, Khmer, kana, and the blocks of Han characters
UNSPACED = re.compile(
    "[\u0e00-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)


def _length_ratio(pair: Pair) -> float:
    if UNSPACED.search(pair.source) or UNSPACED.search(pair.target):
        lengths = len(pair.source) + 10, len(pair.target) + 10
    else:
        lengths = len(pair.source.split()) + 2, len(pair.target.split()) + 2
    return max(lengths) / min(lengths)


def _fault(pair: Pair, rules: CleaningRules, held_out: HeldOut | None) -> str | None:
    if not pair.source or not pair.target:
        return "empty"
    if max(len(pair.source), len(pair.target)) > rules.max_characters:
        return "too long"
    if pair.source == pair.target:
        return "identical sides"
    if _length_ratio(pair) > rules.max_length_ratio:
        return "length ratio"
    if held_out is not None and pair in held_out:
        return "overlap"
    return None


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


@dataclass
class CorpusReport:
    """What came in, what stayed and what was dropped for which reason, with the first examples.

    Word and character counts are those of the pairs kept, also after later calls of `drop`.
    """

    name: str
    read: int = 0
    dropped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    examples: dict[str, list[Pair]] = field(default_factory=lambda: {reason: [] for reason in REASONS})
    words: dict[str, int] = field(default_factory=lambda: {"source": 0, "target": 0})
    characters: dict[str, int] = field(default_factory=lambda: {"source": 0, "target": 0})
    final_marks: int = 0
    warnings: list[str] = field(default_factory=list)

    @property
    def kept(self) -> int:
        return self.read - sum(self.dropped.values())

    def _weigh(self, pair: Pair, sign: int) -> None:
        for side, text in (("source", pair.source), ("target", pair.target)):
            self.words[side] += sign * len(text.split())
            self.characters[side] += sign * len(text)

    def add(self, pair: Pair) -> None:
        """Count a pair as read, and kept until `drop` says otherwise."""
        self.read += 1
        self._weigh(pair, 1)

    def align(self, pair: Pair, aligned: Pair) -> None:
        """Count a pair that was added before as kept without a final mark."""
        self.final_marks += 1
        self._weigh(pair, -1)
        self._weigh(aligned, 1)

    def drop(self, reason: str, pair: Pair) -> None:
        """Count a pair that was added before as dropped; `reason` is one of `REASONS`."""
        self.dropped[reason] += 1
        self._weigh(pair, -1)
        if len(self.examples[reason]) < 3:
            self.examples[reason].append(Pair(_cut(pair.source, 60), _cut(pair.target, 60), pair.line))

    def warn_of_losses(self) -> None:
        """Add a warning, once, when more than half of the pairs read were dropped."""
        sentence = f"{self.name}: more than half of the pairs were dropped; look at the examples first"
        if 2 * self.kept < self.read and sentence not in self.warnings:
            self.warnings.append(sentence)

    def require_pairs(self) -> None:
        """The last check: UserError when nothing is left, a warning when less than half is."""
        if self.kept == 0:
            counts = ", ".join(f"{reason} {count}" for reason, count in self.dropped.items() if count)
            raise UserError(f"{self.name}: no pair is left of {self.read} read ({counts or 'nothing was read'})")
        self.warn_of_losses()

    def means(self, totals: dict[str, int]) -> dict[str, float]:
        """`words` or `characters` per kept sentence, for each side; 0 when nothing is kept."""
        return {side: round(total / max(self.kept, 1), 2) for side, total in totals.items()}

    def as_dict(self) -> dict[str, Any]:
        """The same facts for JSON; every reason is there, also with 0."""
        return {
            "name": self.name,
            "read": self.read,
            "kept": self.kept,
            "dropped": dict(self.dropped),
            "examples": {reason: [pair._asdict() for pair in pairs] for reason, pairs in self.examples.items()},
            "words": dict(self.words),
            "mean_words": self.means(self.words),
            "mean_characters": self.means(self.characters),
            "final_marks": self.final_marks,
            "warnings": list(self.warnings),
        }

    def __str__(self) -> str:
        words, characters = self.means(self.words), self.means(self.characters)
        table = [f"{self.name}: {self.read:,} pairs read, {self.kept:,} kept ({self.kept / max(self.read, 1):.2%})"]
        table.append(f"  {'kept':<16}{'words':>12}{'per sentence':>14}{'characters per sentence':>25}")
        for side in ("source", "target"):
            table.append(f"  {side:<16}{self.words[side]:>12,}{words[side]:>14.1f}{characters[side]:>25.1f}")
        if self.final_marks:
            table.append(f"  {'final marks':<16}{self.final_marks:>12,}  taken off, because the other side had none")
        if any(self.dropped.values()):
            table.append(f"  {'dropped':<16}{'pairs':>12}  first examples")
        for reason, count in self.dropped.items():
            label = f"  {reason:<16}{count:>12,}  "
            for pair in self.examples[reason]:
                table.append(f"{label}line {pair.line}: {pair.source} ||| {pair.target}")
                label = " " * len(label)
        return "\n".join([*table, *(f"  warning: {warning}" for warning in self.warnings)])


def clean_pairs(
    pairs: Iterable[Pair], rules: CleaningRules, report: CorpusReport, held_out: HeldOut | None = None
) -> Iterator[Pair]:
    """Pass on the pairs that are fit for use, in order, and enter every pair into `report`.

    A pair is dropped for the first of `REASONS` that fits; of equal pairs the first one stays. What is
    remembered of each pair is a hash, not its text. A pair that `rules` change is judged as it came and as it becomes.
    """
    seen: set[int] = set()
    for original in pairs:
        pair = _without_lone_mark(original) if rules.align_final_marks else original
        report.add(original)
        reason = _fault(original, rules, held_out)
        if reason is None and pair is not original:
            reason = _fault(pair, rules, held_out)
        if reason is None:
            key = _hash(f"{pair.source}\n{pair.target}")
            reason = "duplicate" if key in seen else None
            seen.add(key)
        if reason is not None:
            report.drop(reason, original)
            continue
        if pair != original:
            report.align(original, pair)
        yield pair
    report.warn_of_losses()


def _without_lone_mark(pair: Pair) -> Pair:
    """The pair without the final mark that only one of its sides has; a side that is nothing else keeps it."""
    sides = pair.source, pair.target
    source, target = (side.rstrip(FINAL_MARKS).rstrip() for side in sides)
    if len({side.endswith(tuple(FINAL_MARKS)) for side in sides}) == 1 or not source or not target:
        return pair
    return pair._replace(source=source, target=target)


# Swapped columns


def warning_of_swapped_endings(files: Sequence[str | Path], source_lang: str, target_lang: str) -> str | None:
    """A warning when the endings of two files contradict the languages: `train.de train.en` for en to de."""
    if len(files) != 2:
        return None
    endings = []
    for file in files:
        parts = Path(file).name.lower().split(".")
        endings.append(next((part for part in reversed(parts) if part not in ("gz", "txt")), ""))
    source, target = source_lang.lower(), target_lang.lower()
    if source != target and (endings[0] == target or endings[1] == source):
        names = " ".join(Path(file).name for file in files)
        return f"{names}: the endings contradict {source_lang} to {target_lang}; the source file comes first"
    return None


def _trigrams(texts: Iterable[str]) -> Counter[str]:
    profile: Counter[str] = Counter()
    for text in texts:
        padded = f" {text.casefold()} "
        profile.update(padded[start : start + 3] for start in range(len(padded) - 2))
    return profile


def _cosine(one: Counter[str], other: Counter[str]) -> float:
    product = sum(count * other[trigram] for trigram, count in one.items())
    norms = sqrt(sum(count**2 for count in one.values()) * sum(count**2 for count in other.values()))
    return product / norms if norms else 0.0


def warning_of_swapped_sides(training: Iterable[Pair], validation: Iterable[Pair]) -> str | None:
    """A warning when each training side looks like the other side of the validation set; samples will do.

    Knows no language: it compares profiles of character trigrams by their cosine. Both training sides must be
    nearer to the opposite validation side than to their own, by 0.1 or more: two sides written with the same
    few symbols differ by chance alone.
    """
    training, validation = list(training), list(validation)
    sources, targets = (
        _trigrams(pair.source for pair in training),
        _trigrams(pair.target for pair in training),
    )
    own = _trigrams(pair.source for pair in validation)
    opposite = _trigrams(pair.target for pair in validation)
    source_gain = _cosine(sources, opposite) - _cosine(sources, own)
    target_gain = _cosine(targets, own) - _cosine(targets, opposite)
    if min(source_gain, target_gain) < 0.1:
        return None
    return "source and target look swapped: training source reads like validation target, and the reverse"
