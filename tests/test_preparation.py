"""From text to token ids on disk: what is kept, what is reported, and that nothing old is used again."""

import json
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, DatasetDict
from transformers import AutoTokenizer

from hf_vanilla_transformer import VanillaTransformerConfig, preparation
from hf_vanilla_transformer.arguments import parse_arguments
from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.preparation import PreparedCorpus, is_prepared, prepare_corpus, token_lengths
from hf_vanilla_transformer.tokenization_vanilla_transformer import SeparateVocabularyTokenizer, load_tokenizer
from word_reversal import corpus, flags, sentences, translate, write_pairs

TEXT = sentences(30)


def prepare(folder, tokenizer_name=None, **options):
    _, data, tokenizer, _ = parse_arguments(flags(folder, **options))
    prepare_corpus(data, tokenizer, folder / "prepared", tokenizer_name)
    return PreparedCorpus.load(folder / "prepared")


def pairs_file(folder, sources, targets=None, name="train"):
    folder.mkdir(parents=True, exist_ok=True)
    return write_pairs(folder, name, sources, targets or [translate(source) for source in sources])


def fails(message, folder, **options):
    with pytest.raises(UserError, match=message) as caught:
        prepare(folder, **options)
    assert "\n" not in str(caught.value)


def test_text_is_prepared_when_all_is_written(tmp_path):
    """A process that waits for the first one asks whether that has failed."""
    assert not is_prepared(tmp_path / "prepared")
    prepare(tmp_path, train_file=pairs_file(tmp_path, TEXT))
    assert is_prepared(tmp_path / "prepared")
    fails("no such file", tmp_path, train_file=["missing.en", "missing.xx"])
    assert not is_prepared(tmp_path / "prepared")


def test_every_pair_comes_back_as_text_and_as_the_tokenizer_encodes_it(tmp_path):
    prepared = prepare(tmp_path, train_file=pairs_file(tmp_path, TEXT))
    assert prepared.train["source"][:] == TEXT
    assert prepared.train["target"][:] == [translate(source) for source in TEXT]
    assert prepared.validation is None
    eos = prepared.tokenizer.eos_token_id
    for row in prepared.train:
        assert row["input_ids"] == prepared.tokenizer(row["source"])["input_ids"]
        assert row["labels"] == prepared.tokenizer(text_target=row["target"])["input_ids"]
        assert row["input_ids"].count(eos) == row["labels"].count(eos) == 1
        assert row["input_ids"][-1] == row["labels"][-1] == eos
        assert prepared.tokenizer.decode(row["labels"], skip_special_tokens=True) == row["target"]


def test_texts_are_memory_mapped_files_and_the_scratch_files_are_gone(tmp_path):
    prepared = prepare(tmp_path, **corpus(tmp_path))
    folder = tmp_path / "prepared"
    for split in (prepared.train, prepared.validation):
        assert split.cache_files
        assert all(folder in type(folder)(file["filename"]).parents for file in split.cache_files)
    assert {path.name for path in folder.iterdir()} == {"tokenizer", "train", "validation", "report.json"}


def test_text_of_any_length_is_never_a_list_in_memory(tmp_path, monkeypatch):
    """The training text goes through an Arrow file row by row."""
    monkeypatch.setattr(Dataset, "from_list", None)
    monkeypatch.setattr(Dataset, "from_dict", None)
    assert len(prepare(tmp_path, train_file=pairs_file(tmp_path, TEXT)).train) == len(TEXT)


def test_token_lengths_count_the_end_of_sentence():
    pairs = Dataset.from_dict({"input_ids": [[5, 6, 3], [3]], "labels": [[7, 3], [7, 8, 9, 3]]})
    sources, targets = token_lengths(pairs)
    assert sources.tolist() == [3, 1]
    assert targets.tolist() == [2, 4]


def test_the_report_accounts_for_every_line(tmp_path, capsys):
    kept = TEXT[:20]
    dropped = {
        "empty": ["", "dog"],
        "identical sides": ["tat tat", "tat tat"],
        "length ratio": ["no " * 17 + "no", "god"],
        "overlap": [TEXT[20], "something else"],
        "duplicate": [kept[3], translate(kept[3])],
    }
    lines = [[source, translate(source)] for source in kept] + list(dropped.values())
    prepared = prepare(
        tmp_path,
        train_file=pairs_file(tmp_path, *zip(*lines, strict=True)),
        validation_file=pairs_file(tmp_path, [TEXT[20]], name="val"),
    )
    report = prepared.report
    assert report["read"] == 25
    assert report["kept"] == 20 == len(prepared.train)
    assert report["dropped"] == {reason: int(reason in dropped) for reason in report["dropped"]}
    for line, (reason, (source, target)) in enumerate(dropped.items(), start=21):
        assert report["examples"][reason] == [{"source": source, "target": target, "line": line}]
    assert report["words"]["source"] == sum(len(source.split()) for source in kept)
    assert report == json.loads((tmp_path / "prepared" / "report.json").read_text())
    assert "25 pairs read, 20 kept" in capsys.readouterr().out


def test_what_evaluation_holds_is_not_trained_on(tmp_path):
    """Sources or targets of validation and of test sets, whatever their case."""
    prepared = prepare(
        tmp_path,
        train_file=pairs_file(tmp_path, TEXT),
        validation_file=pairs_file(tmp_path, [TEXT[0].upper()], ["anything"], name="val"),
        test_file=pairs_file(tmp_path, ["anything"], [translate(TEXT[1])], name="test"),
    )
    assert prepared.train["source"][:] == TEXT[2:]
    assert [example["line"] for example in prepared.report["examples"]["overlap"]] == [1, 2]
    assert prepared.validation["target"][:] == ["anything"]


def test_test_splits_of_a_data_set_are_kept_out_of_training(tmp_path):
    def split(lines):
        return Dataset.from_dict({"en": lines, "xx": [translate(line) for line in lines]})

    saved = DatasetDict(train=split(TEXT), validation=split(TEXT[:2]), one=split(TEXT[2:5]), two=split(TEXT[5:6]))
    saved.save_to_disk(tmp_path / "data")
    data = tmp_path / "data"
    assert prepare(tmp_path, dataset_name=data, test_splits=["one", "two"]).train["source"][:] == TEXT[6:]
    assert prepare(tmp_path, dataset_name=data, train_split="one").train["source"][:] == TEXT[2:5]
    besides = pairs_file(tmp_path, TEXT[6:9], name="besides")
    prepared = prepare(tmp_path, dataset_name=data, test_splits=["one", "two"], test_file=besides)
    assert prepared.train["source"][:] == TEXT[9:]


def test_validation_pairs_that_are_not_evaluated_are_not_trained_on_either(tmp_path):
    files = {"train_file": pairs_file(tmp_path, TEXT), "validation_file": pairs_file(tmp_path, TEXT[:5], name="val")}
    prepared = prepare(tmp_path, **files, max_eval_samples=2)
    assert sorted(prepared.validation["source"]) == sorted(TEXT[:2])
    assert prepared.train["source"][:] == TEXT[5:]


def test_a_language_code_may_have_a_hyphen(tmp_path):
    table = tmp_path / "pairs.tsv"
    rows = "".join(f"{line}\t{translate(line)}\n" for line in TEXT)
    table.write_text(f"pt-BR\ten\n{rows}", encoding="utf-8")
    prepared = prepare(tmp_path, train_file=[table], source_lang="en", target_lang="pt-BR")
    assert prepared.train["target"][:] == TEXT
    fails("directions: 'en-pt-BR' is not two languages", tmp_path, train_file=[table], directions=["en-pt-BR"])


def test_several_directions_are_learnt_at_once(tmp_path):
    """Each source says where to; nothing of the evaluation is trained on, whatever side it is on."""
    columns = {"en": TEXT, "xx": [translate(line) for line in TEXT], "yy": [line.upper() for line in TEXT]}
    held = {language: lines[:2] for language, lines in columns.items() if language != "yy"}
    saved = DatasetDict(train=Dataset.from_dict(columns), validation=Dataset.from_dict(held))
    saved.save_to_disk(tmp_path / "data")
    options = {"directions": ["en-xx", "xx-en", "yy-xx"], "max_source_length": 99, "max_target_length": 99}
    prepared = prepare(tmp_path, dataset_name=tmp_path / "data", **options)
    rows = [*zip(prepared.train["source"], prepared.train["target"], strict=True)]
    expected = [
        (f"2{target} {columns[source][line]}", columns[target][line])
        for source, target in (("en", "xx"), ("xx", "en"), ("yy", "xx"))
        for line in range(2, len(TEXT))
    ]
    assert rows == expected
    assert prepared.report["dropped"]["overlap"] == 6
    assert sorted(prepared.validation["source"]) == sorted(f"2xx {line}" for line in TEXT[:2])
    assert not prepared.report["warnings"]


def test_directions_that_cannot_be(tmp_path):
    fails("directions: 'en' is not two languages", tmp_path, **corpus(tmp_path), directions=["en"])
    fails(
        "directions: en-xx, which source_lang and .* is not among them",
        tmp_path,
        **corpus(tmp_path),
        directions=["a-b"],
    )
    fails("directions: two text files have one", tmp_path, **corpus(tmp_path), directions=["en-xx", "xx-en"])


def test_back_translations_are_cleaned_and_marked(tmp_path):
    """They come after the training text and say what they are; held-out sentences are found behind the mark too."""
    real, synthetic, held_out = TEXT[:10], [*TEXT[10:20], TEXT[25]], TEXT[25:]
    prepared = prepare(
        tmp_path,
        train_file=pairs_file(tmp_path, real),
        validation_file=pairs_file(tmp_path, held_out, name="valid"),
        synthetic_file=pairs_file(tmp_path, synthetic, name="synthetic"),
    )
    assert prepared.train["source"][:] == [*real, *(f"2bt {source}" for source in TEXT[10:20])]
    assert prepared.train["target"][:] == [translate(source) for source in TEXT[:20]]
    assert prepared.validation["source"][:] == sorted(held_out, key=len, reverse=True)
    assert (prepared.report["read"], prepared.report["dropped"]["overlap"]) == (10, 0)
    back = prepared.report["back_translations"]
    assert (back["read"], back["kept"], back["dropped"]["overlap"]) == (11, 10, 1)
    assert back["examples"]["overlap"][0]["line"] == 11


def test_a_final_mark_that_only_one_side_has_is_taken_off(tmp_path):
    pairs = {
        "a b .": "b a .",  # both
        "a c": "c a ...",
        "a d?": "d a",
        "a e": "e a",  # neither
        "a f.": "f a!",
        ".": "g",  # nothing else on one side
    }
    files = {"train_file": pairs_file(tmp_path, list(pairs), list(pairs.values()))}
    synthetic = {"synthetic_file": pairs_file(tmp_path, ["h i"], ["i h 。"], name="synthetic")}
    prepared = prepare(tmp_path, **files, **synthetic, align_final_marks=True)
    assert prepared.train["source"][:] == ["a b .", "a c", "a d", "a e", "a f.", ".", "2bt h i"]
    assert prepared.train["target"][:] == ["b a .", "c a", "d a", "e a", "f a!", "g", "i h"]
    assert prepared.report["final_marks"] == 2
    assert prepared.report["words"] == {"source": 12, "target": 12}
    assert prepared.report["back_translations"]["final_marks"] == 1
    assert prepare(tmp_path / "as it is", **files).train["target"][:] == list(pairs.values())


def test_back_translations_are_limited_and_too_long_ones_dropped_like_real_pairs(tmp_path):
    long = " ".join(TEXT)
    prepared = prepare(
        tmp_path,
        train_file=pairs_file(tmp_path, [long, *TEXT[:9]]),
        synthetic_file=pairs_file(tmp_path, [*TEXT[10:12], f"{long} {long}", *TEXT[12:20]], name="synthetic"),
        max_train_samples=5,
        max_source_length=60,
        max_target_length=9999,
    )
    assert prepared.train["source"][:] == [*TEXT[:4], *(f"2bt {source}" for source in TEXT[10:14])]
    back = prepared.report["back_translations"]
    for part, line, words in ((prepared.report, 1, TEXT[:4]), (back, 3, TEXT[10:14])):
        assert (part["read"], part["kept"], part["dropped"]["too long"]) == (5, 4, 1)
        assert part["examples"]["too long"][0]["line"] == line
        assert part["words"]["source"] == sum(len(sentence.split()) for sentence in words)


def test_a_missing_file_of_back_translations_costs_no_cleaning(tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "clean_pairs", None)
    files = {
        "train_file": pairs_file(tmp_path, TEXT),
        "synthetic_file": [str(tmp_path / "no.en"), str(tmp_path / "no.xx")],
    }
    fails("no.en", tmp_path, **files)


def test_back_translations_of_several_directions_are_refused(tmp_path):
    files = {"synthetic_file": pairs_file(tmp_path, TEXT, name="synthetic"), "dataset_name": str(tmp_path)}
    fails("directions and synthetic_file exclude each other", tmp_path, **files, directions=["en-xx", "xx-en"])


def test_swapped_back_translations_are_reported(tmp_path):
    source, target = pairs_file(tmp_path, TEXT[10:20], name="synthetic")
    train = pairs_file(tmp_path, TEXT[:10])
    report = prepare(tmp_path, train_file=train, synthetic_file=[target, source]).report
    assert "synthetic" in report["warnings"][0]


@pytest.mark.parametrize("side", ["source", "target"])
def test_pairs_that_are_too_long_in_tokens_are_dropped_with_their_line(tmp_path, side):
    options = {"train_file": pairs_file(tmp_path, TEXT), "tokenizer_type": "word-level", "vocab_size": 100}
    options[f"max_{side}_length"] = 5  # four words and EOS
    prepared = prepare(tmp_path, **options)
    too_long = [line for line, source in enumerate(TEXT, start=1) if len(source.split()) > 4]
    assert 0 < len(too_long) < len(TEXT)
    assert prepared.report["dropped"]["too long"] == len(too_long)
    assert [example["line"] for example in prepared.report["examples"]["too long"]] == too_long[:3]
    assert prepared.train["line"][:] == [line for line in range(1, 31) if line not in too_long]
    assert prepared.report["kept"] == len(prepared.train)
    assert prepared.report["words"]["source"] == sum(len(line.split()) for line in prepared.train["source"])


def test_nothing_left_is_an_error_that_counts_the_reasons(tmp_path):
    train = pairs_file(tmp_path, TEXT)
    fails(r"no pair is left of 30 read \(too long 30\)", tmp_path, train_file=train, max_source_length=2)
    fails(r"no pair is left of 30 read \(overlap 30\)", tmp_path, train_file=train, validation_file=train)


def test_validation_is_never_cleaned_but_must_be_whole(tmp_path):
    train = pairs_file(tmp_path, TEXT)
    unusual = ["dog " * 40, "same"]
    validation = pairs_file(tmp_path, unusual, ["god", "same"], name="val")
    prepared = prepare(tmp_path, train_file=train, validation_file=validation, max_source_length=10)
    assert prepared.validation["source"][:] == [line.strip() for line in unusual]
    broken = pairs_file(tmp_path, ["dog", ""], ["god", "tac"], name="broken")
    fails("validation set, line 2: one side is empty", tmp_path, train_file=train, validation_file=broken)


def test_sample_limits_take_the_first_lines(tmp_path):
    files = corpus(tmp_path)
    prepared = prepare(tmp_path, **files, max_train_samples=7, max_eval_samples=3)
    assert len(prepared.train) == prepared.report["read"] == 7
    assert sorted(prepared.validation["line"]) == [1, 2, 3]
    lengths = [len(source) for source in prepared.validation["source"]]
    assert lengths == sorted(lengths, reverse=True)


def test_swapped_files_are_reported(tmp_path):
    files = corpus(tmp_path)
    assert prepare(tmp_path, **files).report["warnings"] == []
    swapped = prepare(tmp_path, **{**files, "train_file": files["train_file"][::-1]}).report["warnings"]
    assert len(swapped) == 2
    assert "train.xx train.en: the endings contradict en to xx" in swapped[0]
    assert "source and target look swapped" in swapped[1]


def test_a_second_preparation_replaces_the_first(tmp_path):
    first = prepare(tmp_path, **corpus(tmp_path))
    changed = [f"{line} again" for line in TEXT]
    train = pairs_file(tmp_path, changed)
    second = prepare(tmp_path, train_file=train)
    assert second.train["source"][:] == changed
    assert second.validation is None
    assert "again" in second.tokenizer.decode(second.train[0]["input_ids"])
    assert second.report["read"] == 30 != first.report["read"]


def test_no_cache_survives_a_change_of_the_text_in_the_same_file(tmp_path, monkeypatch):
    """Same path, same number of lines, same sizes: only the words differ; the first data set is still open."""
    train = pairs_file(tmp_path, ["dog cat", "cat dog"])
    first = prepare(tmp_path, train_file=train)
    pairs_file(tmp_path, ["dog pig", "pig dog"])
    second = prepare(tmp_path, train_file=train)
    assert second.train["source"][:] == ["dog pig", "pig dog"]
    assert second.tokenizer.decode(second.train[0]["input_ids"], skip_special_tokens=True) == "dog pig"
    assert first.train["source"][:] == ["dog cat", "cat dog"]


def test_other_peoples_files_are_not_deleted(tmp_path):
    """`--output_dir .` beside a folder of the user's that happens to have the same name."""
    train = pairs_file(tmp_path / "prepared", TEXT)
    fails("prepared holds train.en, which is not of a training", tmp_path, train_file=train)
    assert (tmp_path / "prepared" / "train.en").is_file()


def test_separate_vocabularies(tmp_path):
    """Joint by default; separate ones know the words of their own side only."""
    train = pairs_file(tmp_path, TEXT)
    options = {"train_file": train, "tokenizer_type": "word-level", "vocab_size": 100}
    joint = prepare(tmp_path / "joint", **options).tokenizer
    assert {"▁dog", "▁god"} <= set(joint.get_vocab())
    separate = prepare(tmp_path / "separate", **options, separate_vocabularies=True)
    assert isinstance(separate.tokenizer, SeparateVocabularyTokenizer)
    assert "▁dog" in separate.tokenizer.backend_tokenizer.get_vocab()
    assert "▁god" not in separate.tokenizer.backend_tokenizer.get_vocab()
    assert "▁god" in separate.tokenizer.target_backend.get_vocab()
    row = separate.train[0]
    assert separate.tokenizer.decode(row["labels"], skip_special_tokens=True) == row["target"]


def test_tokenizer_options_reach_the_tokenizer(tmp_path):
    train = pairs_file(tmp_path, ["Dog ﬁsh", "CAT"], ["goD", "TAC"])
    lower = prepare(tmp_path, train_file=train, lowercase=True, normalization="nfkc")
    assert lower.tokenizer.decode(lower.train[0]["input_ids"], skip_special_tokens=True) == "dog fish"
    small = prepare(tmp_path, train_file=pairs_file(tmp_path, TEXT), vocab_size=45).tokenizer
    assert len(small) == 45


def test_the_tokenizer_of_another_model_is_taken_as_it_is(tmp_path):
    first = prepare(tmp_path / "one", train_file=pairs_file(tmp_path, TEXT))
    other = pairs_file(tmp_path, ["house house", "stone stone"])
    second = prepare(tmp_path / "two", tokenizer_name=str(tmp_path / "one/prepared/tokenizer"), train_file=other)
    assert second.tokenizer.get_vocab() == first.tokenizer.get_vocab()


def test_mistakes_in_tokenizer_options_are_one_line(tmp_path):
    train = pairs_file(tmp_path, TEXT)
    fails("tokenizer_type='bpee' is not one of bpe, unigram", tmp_path, train_file=train, tokenizer_type="bpee")
    fails("normalization='nfx' is not one of nfc, nfkc, none", tmp_path, train_file=train, normalization="nfx")
    missing = str(tmp_path / "missing")
    fails(f"model_name_or_path {missing}: .", tmp_path, train_file=train, tokenizer_name=missing)


@pytest.mark.parametrize("tokenizer_type", ["bpe", "unigram", "byte-level", "word-level"])
def test_a_joint_tokenizer_loads_without_our_code_and_fits_the_configuration(tmp_path, tokenizer_type):
    prepared = prepare(tmp_path, train_file=pairs_file(tmp_path, TEXT), tokenizer_type=tokenizer_type, vocab_size=300)
    folder = tmp_path / "prepared" / "tokenizer"
    plain = AutoTokenizer.from_pretrained(folder)
    assert type(plain).__module__.startswith("transformers.")
    assert plain(TEXT)["input_ids"] == prepared.train["input_ids"][:] == load_tokenizer(folder)(TEXT)["input_ids"]
    config = VanillaTransformerConfig.preset("test", vocab_size=len(plain))
    for role in ("unk", "pad", "bos", "eos"):
        assert getattr(plain, f"{role}_token_id") == getattr(config, f"{role}_token_id")
    assert max(map(max, prepared.train["input_ids"])) < config.vocab_size
    assert np.mean([len(ids) for ids in prepared.train["input_ids"]]) > 2


def test_a_line_that_is_missing_at_the_end_of_a_long_file_is_one_line(tmp_path):
    """The count is known only at the end, deep inside the library that writes the Arrow file."""
    source, target = pairs_file(tmp_path, sentences(300) * 4)
    lines = Path(target).read_text(encoding="utf-8").splitlines(keepends=True)
    Path(target).write_text("".join(lines[:-1]), encoding="utf-8")
    fails(r"has 1200 lines but .* has 1199", tmp_path, train_file=[source, target])


def test_options_of_reading_reach_the_reader(tmp_path, monkeypatch):
    asked, read = set(), preparation.read_pairs

    def spy(**options):
        asked.add((options["config_name"], options["streaming"]))
        return read(**{**options, "config_name": None, "streaming": False})

    monkeypatch.setattr(preparation, "read_pairs", spy)
    split = Dataset.from_dict({"en": TEXT, "xx": [translate(line) for line in TEXT]})
    DatasetDict(train=split, validation=split.select([0]), test=split.select([1])).save_to_disk(tmp_path / "data")
    options = {"dataset_config_name": "tok", "streaming": True, "test_splits": ["test"]}
    prepare(tmp_path, dataset_name=tmp_path / "data", **options)
    assert asked == {("tok", True)}


def test_the_length_ratio_is_that_of_the_options(tmp_path):
    train = pairs_file(tmp_path, [*TEXT, "no " * 7], [*map(translate, TEXT), "on"])
    for ratio, dropped in ((6, 0), (2, 1)):
        report = prepare(tmp_path / str(ratio), train_file=train, max_length_ratio=ratio).report
        assert report["dropped"]["length ratio"] == dropped


def test_too_long_pairs_of_several_directions_are_counted_without_their_mark(tmp_path):
    rows = Dataset.from_dict({"en": TEXT, "xx": [translate(line) for line in TEXT]})
    DatasetDict(train=rows).save_to_disk(tmp_path / "data")
    options = {"directions": ["en-xx", "xx-en"], "validation_split": "", "tokenizer_type": "word-level"}
    prepared = prepare(tmp_path, dataset_name=tmp_path / "data", **options, vocab_size=100, max_source_length=6)
    assert 0 < prepared.report["dropped"]["too long"] < 60
    assert prepared.report["words"]["source"] == sum(len(text.split()) - 1 for text in prepared.train["source"])
