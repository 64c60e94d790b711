"""Parallel text: what was written must come back, what hurts must go, and every mistake must be named."""

import csv
import gzip
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import unicodedata
from itertools import islice

import pytest

from hf_vanilla_transformer.corpus import (
    REASONS,
    CleaningRules,
    CorpusReport,
    HeldOut,
    Pair,
    clean_pairs,
    read_pairs,
    source_description,
    warning_of_swapped_endings,
    warning_of_swapped_sides,
)
from hf_vanilla_transformer.errors import UserError

ENGLISH = ["A dog runs.", 'Two men, one "red" car.', "Snow falls — slowly."]
GERMAN = ["Ein Hund läuft.", "Zwei Männer, ein „rotes“ Auto.", "Schnee fällt – langsam."]
PAIRS = [Pair(english, german, line) for line, (english, german) in enumerate(zip(ENGLISH, GERMAN, strict=True), 1)]
COLUMNS = {"en": ENGLISH, "de": GERMAN}
TRANSLATIONS = [{"translation": {"de": pair.target, "en": pair.source}} for pair in PAIRS]


def read(*files, **data_set):
    return list(read_pairs(files=files, source_lang="en", target_lang="de", **data_set))


def fails(message, *files, **data_set):
    with pytest.raises(UserError, match=message) as caught:
        read(*files, **data_set)
    assert "\n" not in str(caught.value)


def write(path, text):
    data = text if isinstance(text, bytes) else text.encode("utf-8")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    """The library, with its cache in the test's folder and the network refused at once."""
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return datasets


# Two text files


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_two_files_come_back_in_order_with_line_numbers(tmp_path, ending):
    source = write(tmp_path / f"train.en{ending}", "\n".join(ENGLISH) + "\n")
    target = write(tmp_path / f"train.de{ending}", "\n".join(GERMAN))
    assert read(source, str(target)) == PAIRS


def test_mark_line_ends_and_white_space_are_removed_but_only_line_feeds_end_a_line(tmp_path):
    source = write(tmp_path / "a.en", b"\xef\xbb\xbf  one \r\ntwo\xe2\x80\xa8parts\r\n\nfour\n")
    target = write(tmp_path / "a.de", "eins\t\nzwei\xa0Teile\n   \nvier\n")
    assert read(source, target) == [
        Pair("one", "eins", 1),
        Pair("two parts", "zwei\xa0Teile", 2),
        Pair("", "", 3),
        Pair("four", "vier", 4),
    ]


def test_files_are_streamed(tmp_path):
    source = write(tmp_path / "a.en", b"good\n" * 50_000 + b"\xff\n")
    target = write(tmp_path / "a.de", "gut\n" * 50_001)
    pairs = read_pairs(files=[source, target], source_lang="en", target_lang="de")
    assert len(list(islice(pairs, 1000))) == 1000
    with pytest.raises(UserError, match=r"a\.en:50001: not valid UTF-8 \(invalid start byte\)"):
        list(pairs)


@pytest.mark.parametrize(("english", "german"), [(2, 5), (5, 2), (4, 5), (5, 4)])
def test_different_line_counts_name_both_files_and_both_counts(tmp_path, english, german):
    source, target = write(tmp_path / "a.en", "x\n" * english), write(tmp_path / "a.de", "y\n" * german)
    fails(rf"a\.en has {english} lines but \S*a\.de has {german}: line n of one", source, target)


def test_mistakes_with_files(tmp_path):
    good, table = write(tmp_path / "a.en", "x\n"), write(tmp_path / "a.tsv", "x\ty\n")
    fails("either files or a data set, one of them is needed")
    fails("either files or a data set, not both", good, good, dataset="some/thing")
    fails("3 files given: give two", good, good, good)
    fails("configuration 'tok' given with files", good, good, config_name="tok")
    fails(r"nowhere\.de: no such file", good, tmp_path / "nowhere.de")
    fails("a folder, not a file", good, tmp_path)
    fails(r"a\.tsv: a table holds both sides: give it alone", table, good)
    fails(
        r"a\.en: unknown file ending '\.en': one file must be one of \.tsv \.csv \.jsonl \.json \.parquet",
        good,
    )
    fails(r"a\.parquet\.gz: unknown file ending '\.gz'", write(tmp_path / "a.parquet.gz", "x"))


def test_arguments_are_checked_at_the_call(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        read_pairs(files=[tmp_path / "a", tmp_path / "b"], source_lang="en", target_lang="de")


def test_mistakes_inside_files(tmp_path):
    good = write(tmp_path / "good.de", "x\n" * 9)
    fails(r"empty\.en is empty", write(tmp_path / "empty.en", ""), good)
    fails(r"empty\.en\.gz is empty", write(tmp_path / "empty.en.gz", ""), good)
    fails(
        r"latin\.en:2: not valid UTF-8",
        write(tmp_path / "latin.en", "ok\nM\xe4nner\n".encode("latin-1")),
        good,
    )
    whole = gzip.compress("\n".join(hashlib.md5(bytes([n])).hexdigest() for n in range(250)).encode())
    for name, data in {
        "cut": whole[:-200],
        "plain": b"not packed\n",
        "bent": whole[:60] + b"\0" * 40 + whole[100:],
    }.items():
        path = tmp_path / f"{name}.en.gz"
        path.write_bytes(data)
        fails(rf"{name}\.en\.gz: broken gzip file after line \d+", path, good)


def test_unreadable_file_is_named(tmp_path, monkeypatch):
    path = write(tmp_path / "a.en", "x\n")
    monkeypatch.setattr("builtins.open", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    fails(r"a\.en: cannot be read \(Permission denied\)", path, path)


# One table


def table_text(ending):
    rows = [(pair.source, pair.target) for pair in PAIRS]
    if ending == ".tsv":
        return "".join(f"{source}\t{target}\n" for source, target in rows)
    if ending == ".jsonl":
        return "".join(json.dumps({"de": target, "en": source}) + "\n" for source, target in rows)
    if ending == ".json":
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in TRANSLATIONS)
    raise AssertionError(ending)


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("ending", [".tsv", ".jsonl", ".json"])
def test_tables_without_header_line(tmp_path, ending, packed):
    assert read(write(tmp_path / f"a{ending}{packed}", table_text(ending))) == PAIRS


@pytest.mark.parametrize("header", [("id", "de", "en"), ("id", "target", "source")])
@pytest.mark.parametrize("ending", [".tsv", ".csv"])
def test_header_names_the_columns(tmp_path, ending, header):
    path = tmp_path / f"a{ending}"
    with open(path, "w", encoding="utf-8-sig", newline="") as stream:
        if ending == ".csv":
            rows = csv.writer(stream)
            rows.writerow(header)
            rows.writerows((pair.line, pair.target, pair.source) for pair in PAIRS)
        else:
            stream.write("\t".join(header) + "\r\n")
            stream.writelines(f"{pair.line}\t{pair.target}\t{pair.source}\r\n" for pair in PAIRS)
    assert read(path) == [pair._replace(line=pair.line + 1) for pair in PAIRS]


def test_tsv_without_header_uses_the_first_two_columns(tmp_path):
    path = write(tmp_path / "a.tsv", 'English\tGerman\tlicence\nHi "you.\tHallo.\tCC-BY\nen\tde\n')
    assert read(path) == [Pair("English", "German", 1), Pair('Hi "you.', "Hallo.", 2), Pair("en", "de", 3)]


def test_a_pipe_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe.en")
    fails(r"pipe\.en: no regular file", tmp_path / "pipe.en", write(tmp_path / "a.de", "x\n"))


def test_a_tsv_header_in_other_letters_is_no_pair(tmp_path):
    path = write(tmp_path / "a.tsv", "DE\tEN\neins\tone\n")
    fails(r"a\.tsv:1: the header writes de, en in another way: 'DE\\tEN'", path)


def test_csv_lines_are_counted_through_quoted_line_breaks(tmp_path):
    path = write(tmp_path / "a.csv", 'en,de\n"one\nmore","eins"\n\ntwo,zwei\n')
    assert read(path) == [Pair("one more", "eins", 2), Pair("", "", 4), Pair("two", "zwei", 5)]


def test_blank_lines_of_a_table_are_reported_not_swallowed(tmp_path):
    tsv = write(tmp_path / "a.tsv", "one\teins\n\ntwo\tzwei\n")
    jsonl = write(tmp_path / "a.jsonl", '{"en": "one", "de": "eins"}\n\n{"en": null, "de": "zwei"}\n')
    assert read(tsv) == [Pair("one", "eins", 1), Pair("", "", 2), Pair("two", "zwei", 3)]
    assert read(jsonl) == [Pair("one", "eins", 1), Pair("", "", 2), Pair("", "zwei", 3)]


def test_language_columns_win_over_source_and_target(tmp_path):
    row = {"source": "web", "target": "train", "en": "one", "de": "eins"}
    assert read(write(tmp_path / "a.jsonl", json.dumps(row))) == [Pair("one", "eins", 1)]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.tsv", "one\teins\ntwo\n", r"a\.tsv:2: 1 column, needs 2"),
        ("a.tsv", "en\tde\none\n", r"a\.tsv:2: 1 columns where the header has 2 \(en, de\)"),
        ("a.csv", "en,de\none,eins\ntwo,or so,zwei\n", r"a\.csv:3: 3 columns where the header has 2"),
        (
            "a.csv",
            'en,de\none,eins\n"two,zwei\nthree,drei\n',
            r"a\.csv:3: not a CSV row \(.*\): check its quotes",
        ),
        ("a.csv", "en,fr\none,un\n", r"a\.csv:2: no column 'de': there are en, fr;"),
        ("a.csv", "en,de\n", r"a\.csv is empty: it holds no sentence pair"),
        ("a.jsonl", '{"en": "x", "de": "y"}\n{"en": }\n', r"a\.jsonl:2: not JSON \(Expecting value\)"),
        ("a.json", '["one", "eins"]\n', r"a\.json:1: a JSON list: put one JSON object on each line"),
        (
            "a.json",
            '{"translation": {"en": "x", "fr": "y"}}\n',
            r"a\.json:1: no column 'de': there are en, fr",
        ),
        ("a.json", '{"translation": {}}\n', r"a\.json:1: no column 'en': there are none"),
        ("a.json", '{"en": "x", "de": ["y"]}\n', r"a\.json:1: column 'de' holds a list: it must hold text"),
        ("a.json", '{"en": "\\ud83d", "de": "y"}\n', r"a\.json:1: column 'en' holds half a surrogate pair"),
        ("a.tsv.gz", b"one\teins\ntwo\tz\xfc\n", r"a\.tsv\.gz:2: not valid UTF-8"),
        ("a.jsonl", "", r"a\.jsonl is empty"),
    ],
)
def test_mistakes_inside_tables(tmp_path, name, text, message):
    fails(message, write(tmp_path / name, text))


@pytest.mark.parametrize("name", ["a.parquet", "odd [1] name (2).parquet"])
def test_parquet_with_either_schema(tmp_path, datasets, name):
    datasets.Dataset.from_dict(COLUMNS).to_parquet(tmp_path / name)
    assert read(tmp_path / name) == PAIRS
    datasets.Dataset.from_list(TRANSLATIONS).to_parquet(tmp_path / name)
    assert read(tmp_path / name) == PAIRS


def test_mistakes_with_parquet(tmp_path, datasets):
    fails(r"a\.parquet: cannot be read as Parquet \(.+\)", write(tmp_path / "a.parquet", "no such thing"))
    datasets.Dataset.from_dict({"en": ENGLISH, "fr": GERMAN}).to_parquet(tmp_path / "b.parquet")
    fails(r"b\.parquet:1: no column 'de': there are en, fr", tmp_path / "b.parquet")
    datasets.Dataset.from_dict({"en": [], "de": []}).to_parquet(tmp_path / "c.parquet")
    fails(r"c\.parquet is empty: it holds no sentence pair", tmp_path / "c.parquet")


# Data sets


def test_saved_folders(tmp_path, datasets):
    data = datasets.Dataset.from_dict(COLUMNS)
    data.save_to_disk(tmp_path / "one")
    validation = datasets.Dataset.from_list(TRANSLATIONS[:1])
    datasets.DatasetDict(train=data, validation=validation).save_to_disk(tmp_path / "many")
    assert read(dataset=str(tmp_path / "one")) == PAIRS
    assert read(dataset=str(tmp_path / "many")) == PAIRS
    assert read(dataset=str(tmp_path / "many"), split="validation") == PAIRS[:1]
    fails("one: no split 'validation': there are train$", dataset=str(tmp_path / "one"), split="validation")
    fails("many: no split 'test': there are train, validation", dataset=str(tmp_path / "many"), split="test")
    fails("a saved data set has no configuration 'raw'", dataset=str(tmp_path / "one"), config_name="raw")


def test_saved_folder_of_a_named_split_is_that_split(tmp_path, datasets):
    datasets.Dataset.from_dict(COLUMNS, split="test").save_to_disk(tmp_path / "one")
    assert read(dataset=str(tmp_path / "one"), split="test") == PAIRS
    fails("no split 'train': there are test", dataset=str(tmp_path / "one"))


@pytest.fixture
def hub_layout(tmp_path, datasets):
    """A folder laid out as translation data of the Hub: configurations, splits, a field `translation`."""
    folder = tmp_path / "wmt-like"
    card = "---\nconfigs:\n"
    for config in ("de-en", "cs-en"):
        card += f"- config_name: {config}\n  data_files:\n"
        for split, rows in (("train", TRANSLATIONS), ("validation", TRANSLATIONS[1:])):
            datasets.Dataset.from_list(rows).to_parquet(folder / config / f"{split}.parquet")
            card += f"  - split: {split}\n    path: {config}/{split}.parquet\n"
    write(folder / "README.md", card + "---\n")
    return str(folder)


@pytest.mark.parametrize("streaming", [False, True])
def test_data_set_in_the_layout_of_the_hub(hub_layout, streaming):
    assert read(dataset=hub_layout, config_name="de-en", streaming=streaming) == PAIRS
    validation = read(dataset=hub_layout, config_name="de-en", split="validation", streaming=streaming)
    assert validation == [pair._replace(line=pair.line - 1) for pair in PAIRS[1:]]


def test_data_set_with_a_column_per_language(tmp_path, datasets):
    write(tmp_path / "plain" / "train.jsonl", table_text(".jsonl"))
    assert read(dataset=str(tmp_path / "plain")) == PAIRS


def test_home_folder_is_understood(tmp_path, datasets, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    write(tmp_path / "plain" / "train.jsonl", table_text(".jsonl"))
    assert read(dataset="~/plain") == PAIRS
    assert read("~/plain/train.jsonl") == PAIRS


def test_arguments_reach_load_dataset(datasets, monkeypatch):
    calls = []

    def load_dataset(*args, **options):
        calls.append((args, options))
        return TRANSLATIONS

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read(dataset="owner/name", config_name="de-en", split="test", streaming=True) == PAIRS
    assert calls == [(("owner/name", "de-en"), {"split": "test", "streaming": True})]


def test_mistakes_with_data_sets(tmp_path, hub_layout, monkeypatch):
    fails(
        r"wmt-like: the data set cannot be loaded with split 'dev' \(.*dev.*train.*\)",
        dataset=hub_layout,
        config_name="de-en",
        split="dev",
    )
    fails(r"cannot be loaded with split 'train' \(.*de-en.*\)", dataset=hub_layout, config_name="fr-en")
    fails(r"cannot be loaded with split 'train' \(Config name is missing.*\)", dataset=hub_layout)
    fails(
        r"nobody/nothing: no folder here, and as a Hub data set it cannot be loaded with split 'train' "
        r"\(Couldn't reach 'nobody/nothing' on the Hub .*\)$",
        dataset="nobody/nothing",
    )
    fails(r"\./nowhere: neither a folder nor the id of a Hub data set", dataset="./nowhere")
    fails(r"a\.tsv: neither a folder nor the id", dataset=str(write(tmp_path / "a.tsv", "x\ty\n")))
    monkeypatch.chdir(tmp_path)
    fails(r"^a\.tsv: neither a folder nor the id", dataset="a.tsv")
    (tmp_path / "hollow").mkdir()
    fails("hollow: the data set cannot be loaded", dataset=str(tmp_path / "hollow"))


@pytest.mark.parametrize("error", [RuntimeError, OSError, ValueError, "DatasetGenerationError"])
def test_failures_on_the_way_become_one_line(datasets, monkeypatch, error):
    def rows():
        yield TRANSLATIONS[0]
        raise (getattr(datasets.exceptions, error) if isinstance(error, str) else error)("it broke")

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows())
    fails(r"owner/name: .* split 'train' \(it broke\)$", dataset="owner/name")


def test_cause_from_the_library_is_cut_to_one_short_line(datasets, monkeypatch):
    def load_dataset(*_, **__):
        raise ValueError("first\n  second " + "x" * 1000)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    fails(r"\(first second x{186}…\)$", dataset="owner/name")


@pytest.mark.parametrize("packed", ["", ".gz"])
def test_multi30k_folder(tmp_path, packed):
    for config, suffix in (("raw", ""), ("tok", ".lc.norm.tok")):
        for split in ("train", "val", "test_2017_mscoco"):
            for language in ("en", "de") if split.startswith("test") else ("en", "de", "fr", "cs"):
                name = f"{split}{suffix}.{language}{packed}"
                write(tmp_path / "task1" / config / name, f"{config} {split} {language}\n")
    folder = str(tmp_path)
    assert read(dataset=folder) == [Pair("raw train en", "raw train de", 1)]
    assert read(dataset=folder, config_name="tok", split="validation") == [Pair("tok val en", "tok val de", 1)]
    assert read(dataset=folder, split="test_2017_mscoco")[0].source == "raw test_2017_mscoco en"
    backwards = read_pairs(dataset=folder, source_lang="cs", target_lang="fr")
    assert list(backwards) == [Pair("raw train cs", "raw train fr", 1)]
    fails("raw: no split 'val': there are test_2017_mscoco, train, validation", dataset=folder, split="val")
    fails("no configuration 'bpe': there are raw, tok", dataset=folder, config_name="bpe")
    with pytest.raises(UserError, match="no language 'cs' in split 'test_2017_mscoco': there are de, en"):
        read_pairs(dataset=folder, split="test_2017_mscoco", source_lang="en", target_lang="cs")


@pytest.mark.parametrize("config", ["raw", "tok"])
def test_real_multi30k(shared_data, config):
    sizes = {"train": 29_000, "validation": 1_014, "test_2016_flickr": 1_000, "test_2017_flickr": 1_000}
    for split, size in {**sizes, "test_2017_mscoco": 461}.items():
        pairs = read(dataset=str(shared_data / "multi30k"), config_name=config, split=split)
        assert [pair.line for pair in pairs] == list(range(1, size + 1))
        assert all(pair.source and pair.target for pair in pairs)


def test_real_text_survives_cleaning_and_only_known_overlap_goes(shared_data):
    def tatoeba(part):
        folder = shared_data / "tatoeba_en_de"
        pairs = read_pairs(
            files=[folder / f"{part}.{side}.gz" for side in ("en", "de")], source_lang="en", target_lang="de"
        )
        return list(islice(pairs, 20_000))

    report = CorpusReport("tatoeba")
    held_out = HeldOut.of([*tatoeba("valid"), *tatoeba("test")])
    assert list(clean_pairs(tatoeba("train"), CleaningRules(), report, held_out)) == tatoeba("train")
    report = CorpusReport("valid against itself")
    assert not list(clean_pairs(tatoeba("valid"), CleaningRules(), report, held_out))
    assert report.dropped["overlap"] == 2_000


# Cleaning


def cleaned(pairs, rules=None, held_out=None):
    report = CorpusReport("train")
    return list(clean_pairs(pairs, rules or CleaningRules(), report, held_out)), report


@pytest.mark.parametrize("letter", ["ก", "ກ", "ཀ", "က", "ក", "あ", "㐀", "我", "\uf900", "\U00020000"])
def test_scripts_without_spaces_are_counted_in_characters(letter):
    """Forty letters beside twenty words: by words the ratio would be 22 to 3."""
    pair = Pair(letter * 40, "word " * 19 + "word", 1)
    assert cleaned([pair])[1].kept == 1
    assert cleaned([pair._replace(source="x" * 40)])[1].dropped["length ratio"] == 1


def test_every_reason_is_found_and_the_rest_passes_in_order():
    good, late = Pair("A dog runs.", "Ein Hund läuft.", 1), Pair("A cat.", "Eine Katze.", 9)
    held_out = HeldOut.of([Pair("Held out.", "Zurückgehalten.", 1)])
    faults = {
        "empty": Pair("", "Nichts.", 2),
        "too long": Pair("x" * 5001, "kurz", 3),
        "identical sides": Pair("Berlin", "Berlin", 4),
        "length ratio": Pair("Yes.", "ja " * 17, 5),
        "overlap": Pair("New.", "Zurückgehalten.", 6),
        "duplicate": good._replace(line=7),
    }
    kept, report = cleaned([good, *faults.values(), late], held_out=held_out)
    assert kept == [good, late]
    assert report.dropped == dict.fromkeys(REASONS, 1)
    assert {reason: [pair.line for pair in pairs] for reason, pairs in report.examples.items()} == {
        reason: [pair.line] for reason, pair in faults.items()
    }
    assert (report.read, report.kept) == (8, 2)


def test_both_sides_are_looked_at():
    turned = [Pair("Nothing.", "", 1), Pair("short", "x" * 5001, 2), Pair("ja " * 17, "Yes.", 3)]
    assert cleaned(turned)[0] == []
    assert cleaned([Pair("x" * 5000, "y" * 5000, 1)])[1].kept == 1
    assert cleaned([Pair("x" * 11, "y", 1)], CleaningRules(max_characters=10))[1].dropped["too long"] == 1


def test_length_ratio_spares_short_sentences_and_counts_characters_where_words_have_no_spaces():
    def dropped(source, target, ratio=6.0):
        return cleaned([Pair(source, target, 1)], CleaningRules(ratio))[1].dropped["length ratio"] == 1

    assert not dropped("Danke.", "Thank you very much indeed.")
    assert not dropped("w", "w " * 16) and dropped("w", "v " * 17)
    assert not dropped("w", "v " * 99, float("inf"))
    chinese, english = (
        "我昨天在图书馆里读了一本关于古代历史的书。",
        "Yesterday I read a book about ancient history in the library.",
    )
    for source, target in (
        (chinese, english),
        (english, chinese),
        ("ฉันไม่รู้ว่าเขาจะมาเมื่อไหร่", "I do not know at all when he is going to come back here."),
    ):
        assert not dropped(source, target) and dropped(source, target * 20)
    assert dropped("好", "a" * 57) and not dropped("好", "a" * 56)


def test_pairs_are_judged_as_they_become_when_final_marks_are_aligned():
    pairs = ["a dog|ein hund", "a dog .|ein hund", "so it goes .|so it goes", "the cat .|die katze", "a cow .|eine kuh"]
    pairs = [Pair(*text.split("|"), line) for line, text in enumerate(pairs, start=1)]
    report, held_out = CorpusReport("text"), HeldOut.of([Pair("the cat", "ein tier", 1)])
    rules = CleaningRules(align_final_marks=True)
    kept = list(clean_pairs(pairs, rules, report, held_out))
    assert kept == [Pair("a dog", "ein hund", 1), Pair("a cow", "eine kuh", 5)]
    dropped = {reason: count for reason, count in report.dropped.items() if count}
    assert dropped == {"duplicate": 1, "identical sides": 1, "overlap": 1}
    assert (report.kept, report.final_marks, report.words["source"]) == (2, 1, 4)
    assert report.examples["duplicate"] == [pairs[1]]


def test_an_evaluation_sentence_is_dropped_as_it_came():
    report, held_out = CorpusReport("text"), HeldOut.of([Pair("the cat .", "ein tier", 1)])
    rules = CleaningRules(align_final_marks=True)
    assert not list(clean_pairs([Pair("the cat .", "die katze", 1)], rules, report, held_out))
    assert report.dropped["overlap"] == 1


def test_a_drop_for_another_reason_does_not_make_a_later_copy_a_duplicate():
    pair = Pair("Berlin", "Berlin", 1)
    assert cleaned([pair, pair])[1].dropped["identical sides"] == 2
    pairs = [Pair("one two", "drei", 1), Pair("one", "two drei", 2), Pair("one two", "drei.", 3)]
    assert cleaned(pairs)[0] == pairs


def test_held_out_compares_each_side_with_its_own_after_folding():
    held_out = HeldOut.of([Pair("The ﬁsh swims.", "Der Fisch SCHWIMMT in der Straße.", 1)])
    assert Pair("THE FISH SWIMS.", "anders", 9) in held_out
    assert Pair("other", "der fisch schwimmt in der STRASSE.", 9) in held_out
    assert Pair("The fish swims!", "anders", 9) not in held_out
    assert Pair("der fisch schwimmt in der strasse.", "the fish swims.", 9) not in held_out
    assert Pair("x", "y", 1) not in HeldOut()


def test_overlap_agrees_with_plain_sets_of_folded_strings():
    generator = random.Random(3)

    def sentence():
        return " ".join(generator.choice(["Ä", "ä", "ß", "SS", "ﬁ", "fi", "①", "1"]) for _ in range(2))

    training, evaluation = ([Pair(sentence(), sentence(), n) for n in range(60)] for _ in range(2))
    sources, targets = ({unicodedata.normalize("NFKC", p[side]).casefold() for p in evaluation[:8]} for side in (0, 1))
    expected = [
        unicodedata.normalize("NFKC", p.source).casefold() in sources
        or unicodedata.normalize("NFKC", p.target).casefold() in targets
        for p in training
    ]
    held_out = HeldOut.of(evaluation[:8])
    assert [pair in held_out for pair in training] == expected
    assert 0 < sum(expected) < 60


def test_the_memory_of_pairs_is_the_same_in_every_process():
    code = (
        "from hf_vanilla_transformer.corpus import HeldOut, Pair;"
        "h = HeldOut.of([Pair('a', 'b', 1)]); print(h.sources, h.targets)"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    (printed,) = runs
    assert all(0 <= int(number) < 2**64 for number in re.findall(r"\d+", printed))


@pytest.mark.parametrize(
    "rules", [{"max_length_ratio": 0.5}, {"max_length_ratio": float("nan")}, {"max_characters": 0}]
)
def test_impossible_rules(rules):
    ((name, value),) = rules.items()
    with pytest.raises(UserError, match=f"{name} is {value}: it must be 1 or more"):
        CleaningRules(**rules)


# The report


def test_counts_are_those_of_the_pairs_kept_also_after_a_later_drop():
    kept, report = cleaned([Pair("one two three", "eins zwei", 1), Pair("four", "vier fünf", 2), Pair("", "weg", 3)])
    assert report.words == {"source": 4, "target": 4}
    assert report.characters == {"source": 17, "target": 18}
    assert report.means(report.words) == {"source": 2.0, "target": 2.0}
    report.drop("too long", kept[0])
    assert (report.read, report.kept) == (3, 1)
    assert report.words == {"source": 1, "target": 2}
    assert report.dropped["too long"] == 1


def test_examples_are_the_first_three_and_short():
    _, report = cleaned([Pair("", f"{line}" * 80, line) for line in range(1, 6)])
    assert report.dropped["empty"] == 5
    assert report.examples["empty"] == [Pair("", f"{line}" * 59 + "…", line) for line in (1, 2, 3)]


def test_printed_report():
    pairs = [Pair(f"{n} sheep are here", f"{n} Schafe sind hier", n) for n in range(1, 1200)]
    _, report = cleaned([*pairs, Pair("", "leer", 1200), pairs[4]._replace(line=1201), pairs[5]._replace(line=1202)])
    report.warnings.append("look here")
    assert str(report).splitlines() == [
        "train: 1,202 pairs read, 1,199 kept (99.75%)",
        "  kept                   words  per sentence  characters per sentence",
        "  source                 4,796           4.0                     18.1",
        "  target                 4,796           4.0                     20.1",
        "  dropped                pairs  first examples",
        "  empty                      1  line 1200:  ||| leer",
        "  duplicate                  2  line 1201: 5 sheep are here ||| 5 Schafe sind hier",
        "                                line 1202: 6 sheep are here ||| 6 Schafe sind hier",
        "  warning: look here",
    ]


def test_report_of_nothing_prints():
    assert str(CorpusReport("train")).startswith("train: 0 pairs read, 0 kept (0.00%)")


def test_report_as_json():
    _, report = cleaned([Pair("a b", "c", 1), Pair("x", "x", 2)])
    facts = json.loads(json.dumps(report.as_dict()))
    assert facts == {
        "name": "train",
        "read": 2,
        "kept": 1,
        "dropped": {**dict.fromkeys(REASONS, 0), "identical sides": 1},
        "examples": {
            **{r: [] for r in REASONS},
            "identical sides": [{"source": "x", "target": "x", "line": 2}],
        },
        "words": {"source": 2, "target": 1},
        "mean_words": {"source": 2.0, "target": 1.0},
        "mean_characters": {"source": 3.0, "target": 1.0},
        "final_marks": 0,
        "warnings": [],
    }


def test_heavy_losses_are_warned_of_once_and_nothing_left_is_an_error():
    half = [Pair("a", "b", 1), Pair("a", "b", 2)]
    kept, report = cleaned(half)
    report.require_pairs()
    assert report.warnings == []
    kept, report = cleaned([*half, Pair("a", "b", 3)])
    assert len(report.warnings) == 1
    report.require_pairs()
    (warning,) = report.warnings
    assert warning.startswith("train: more than half of the pairs were dropped")
    report.drop("too long", kept[0])
    with pytest.raises(UserError, match=r"train: no pair is left of 3 read \(too long 1, duplicate 2\)"):
        report.require_pairs()
    with pytest.raises(UserError, match=r"no pair is left of 0 read \(nothing was read\)"):
        CorpusReport("train").require_pairs()


def test_a_later_drop_can_bring_the_warning():
    pairs = [Pair("a", "b", 1), Pair("c", "d", 2), Pair("e", "f", 3)]
    kept, report = cleaned(pairs)
    for pair in kept[:2]:
        report.drop("too long", pair)
    assert report.warnings == []
    report.require_pairs()
    assert len(report.warnings) == 1


# Swapped columns


@pytest.mark.parametrize(
    ("files", "warned"),
    [
        (("train.de", "train.en"), True),
        (("d/train.lc.norm.tok.de.gz", "train.lc.norm.tok.en.gz"), True),
        (("train.DE.txt", "train.txt"), True),
        (("source.txt", "train.en.txt.gz"), True),
        (("train.en", "train.de"), False),
        (("corpus.de-en.en", "corpus.de-en.de"), False),
        (("train.de.en/a.src", "train.de.en/a.trg"), False),
        (("train.tsv",), False),
        ((), False),
    ],
)
def test_endings_that_contradict_the_languages(files, warned):
    warning = warning_of_swapped_endings(files, "en", "de")
    assert (warning is not None) is warned
    if warned:
        assert "the endings contradict en to de" in warning and "d/" not in warning
    assert warning_of_swapped_endings(("a.en", "b.en"), "en", "en") is None


def test_swapped_text_is_noticed_without_knowing_the_languages(shared_data):
    def sample(split, source, target):
        pairs = read_pairs(dataset=str(shared_data / "multi30k"), split=split, source_lang=source, target_lang=target)
        return list(islice(pairs, 300))

    for source, target in (("en", "de"), ("fr", "en"), ("cs", "de")):
        validation = sample("validation", source, target)
        assert warning_of_swapped_sides(sample("train", source, target), validation) is None
        assert "source and target look swapped" in warning_of_swapped_sides(sample("train", target, source), validation)


def test_swapped_needs_both_sides_and_more_than_chance():
    english, german = (
        "the dog and the cat were there with them",
        "der Hund und die Katze waren mit ihnen dort",
    )
    validation = [Pair(english, german, 1)]
    assert warning_of_swapped_sides([Pair(german, english, 1)], validation) is not None
    assert warning_of_swapped_sides([Pair(english, german, 1)], validation) is None
    assert warning_of_swapped_sides([Pair(german, german, 1)], validation) is None
    assert warning_of_swapped_sides([Pair(english, english, 1)], validation) is None
    assert warning_of_swapped_sides([], validation) is None
    for seed in range(20):
        generator = random.Random(seed)
        samples = [[generator.choice("abcdef") for _ in range(8)] for _ in range(40)]
        toy = [Pair(" ".join(sample), " ".join(reversed(sample)), 1) for sample in samples]
        assert warning_of_swapped_sides(toy[:20], toy[20:]) is None


# The description


def test_source_description(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert source_description(["/data/x/train.en.gz", "y/train.de.gz"], None, None) == "train.en.gz and train.de.gz"
    assert source_description(["x/all.tsv"]) == "all.tsv"
    assert source_description(dataset="wmt/wmt14", config_name="de-en") == "wmt/wmt14 (de-en)"
    assert source_description(dataset=str(tmp_path / "mine")) == "mine"
    assert source_description(dataset="./mine/", config_name="tok") == "mine (tok)"
    assert source_description(dataset=".") == tmp_path.name


def test_importing_the_module_does_not_import_datasets():
    code = "import sys, hf_vanilla_transformer.corpus; print('datasets' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == "False"
