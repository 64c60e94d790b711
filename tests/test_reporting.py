"""`reporting`: test sets, protocols, records."""

import gzip
import json

import pytest
import torch

from hf_vanilla_transformer import reporting
from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.evaluation import p1_bleu, paired_bootstrap, score
from hf_vanilla_transformer.int8 import quantize_linear_layers
from hf_vanilla_transformer.provenance import read_record, write_record
from hf_vanilla_transformer.reporting import (
    TestSet,
    compare,
    evaluate_model,
    keep_comparison,
    read_hypotheses,
    read_test_sets,
    score_test_set,
)

RAW = ["Ein Mann, der schläft.", "Zwei Hunde spielen im Schnee.", "Eine Frau fährt Fahrrad.", "Das ist ein Haus."]
TOKENS = [
    "ein mann , der schläft .",
    "zwei hunde spielen im schnee .",
    "eine frau fährt fahrrad .",
    "das ist ein haus .",
]


@pytest.fixture
def multi30k(tmp_path):
    """A Multi30k folder as upstream lays it out, of four sentences."""
    for kind, suffix, lines in (("raw", "", RAW), ("tok", ".lc.norm.tok", TOKENS)):
        folder = tmp_path / "multi30k" / "task1" / kind
        folder.mkdir(parents=True)
        for language in ("en", "de"):
            with gzip.open(folder / f"test_2016_flickr{suffix}.{language}.gz", "wt", encoding="utf-8") as stream:
                stream.write("".join(f"{line}\n" for line in lines))
    return tmp_path / "multi30k"


def read(folder, config_name=None):
    [test_set] = read_test_sets(
        dataset=str(folder), config_name=config_name, splits=["test_2016_flickr"], source_lang="en", target_lang="de"
    )
    return test_set


def test_multi30k_brings_the_references_of_both_protocols(multi30k):
    raw, tok = read(multi30k), read(multi30k, "tok")
    assert (raw.form, raw.references, raw.p1_references) == ("raw", RAW, TOKENS)
    assert (tok.form, tok.references, tok.p1_references) == ("tok", TOKENS, TOKENS)


def test_the_folder_may_be_written_from_home(multi30k, monkeypatch):
    monkeypatch.setenv("HOME", str(multi30k.parent))
    assert read("~/multi30k", "tok").p1_references == TOKENS


def test_raw_text_gets_sacrebleu_and_p1(multi30k):
    pytest.importorskip("sacremoses")
    hypotheses = [RAW[0], "Zwei Hunde spielen im Sand.", *RAW[2:]]
    scores = score_test_set(read(multi30k), hypotheses, "de")
    assert set(scores) == {"bleu", "chrf", "ter", "p1"}
    assert scores["bleu"]["score"] == score(hypotheses, RAW)["bleu"]["score"]
    assert scores["p1"]["score"] == p1_bleu(hypotheses, TOKENS, raw=True, language="de")["score"]
    assert scores["p1"]["signature"].startswith("P1|")


def test_bleu_counts_what_the_target_language_writes(tmp_path):
    test_set = TestSet("news", ["a man"], ["一个男人在街上骑着自行车。"])
    found = score_test_set(test_set, ["一个男人在街上骑自行车。"], "zh")["bleu"]
    assert "tok:zh" in found["signature"]
    for folder, text in (("a", "一个男人在街上骑自行车。"), ("b", "一个男人在街上骑着自行车。")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "news.hyp.zh").write_text(text + "\n", encoding="utf-8")
    assert compare(tmp_path / "a", tmp_path / "b", [test_set], "zh", samples=5)["news"].score_a == found["score"]


def test_tokenised_text_gets_p1_only(multi30k):
    scores = score_test_set(read(multi30k, "tok"), TOKENS, "de")
    assert set(scores) == {"p1"}
    assert scores["p1"]["score"] == pytest.approx(100)


def test_the_record_says_how_was_searched(tmp_path, monkeypatch, tiny_model):
    """The length penalty of the call, or else of the model, where `translate` finds it itself."""
    asked = []
    monkeypatch.setattr(reporting, "translate", lambda *inputs, **options: asked.append(options) or list(inputs[2]))

    def search(**options):
        record = evaluate_model(
            tiny_model, None, [TestSet("a", RAW, RAW)], folder=tmp_path, target_lang="de", **options
        )
        return record["generation"]

    average = {"num_beams": 4, "dtype": "float32", "length_penalty": 1.0, "length_penalty_type": "average"}
    assert search(num_beams=4, max_tokens_per_batch=99) == average
    assert asked[-1]["max_tokens_per_batch"] == 99
    wu = {**average, "length_penalty": 0.6, "length_penalty_type": "wu"}
    assert search(num_beams=4, length_penalty=0.6, length_penalty_type="wu") == wu
    assert [asked[-1][name] for name in ("num_beams", "length_penalty", "length_penalty_type")] == [4, 0.6, "wu"]
    tiny_model.generation_config.update(num_beams=4, length_penalty=0.6, length_penalty_type="wu")
    assert search() == wu
    assert [asked[-1][name] for name in ("num_beams", "length_penalty")] == [4, None]
    assert search(num_beams=1) == {"num_beams": 1, "dtype": "float32"}
    quantize_linear_layers(tiny_model)
    assert search(num_beams=1) == {"num_beams": 1, "dtype": "int8"}


def test_evaluating_again_keeps_what_was_found_before(tmp_path, monkeypatch, tiny_model):
    """Other sets with where they come from, comparisons while the translations are the same; of one model only."""
    written, folder, results = list(RAW), tmp_path / "model", tmp_path / "results"
    monkeypatch.setattr(reporting, "translate", lambda *inputs, **options: list(written))
    monkeypatch.setattr(reporting, "provenance", lambda **options: {"commit": str(len(written))})
    folder.mkdir()
    write_record({"seed": 1}, folder / "run.json")

    def evaluate(name, **options):
        test_sets = [TestSet(name, written, written)]
        return evaluate_model(tiny_model, None, test_sets, folder=folder, target_lang="de", results=results, **options)

    def kept():
        record = read_record(results / "run.json")["evaluation"]
        assert record["sets"] == read_record(folder / "evaluation.json")["sets"]
        return {name: found.get("provenance") for name, found in record["sets"].items()}, "against" in record

    evaluate("one")
    keep_comparison(results, tmp_path / "other", {})
    assert kept() == ({"one": None}, True)
    written.append("more")
    assert set(evaluate("two")["sets"]) == {"two"}
    before = {"commit": str(len(RAW))}
    assert kept() == ({"one": before, "two": None}, True)
    written[0] += " changed"
    evaluate("two")
    assert kept() == ({"one": before, "two": None}, False), "a comparison of other translations"
    evaluate("three", num_beams=2)
    assert kept() == ({"three": None}, False), "another search"
    with torch.no_grad():
        tiny_model.lm_head.weight[0] += 1
    evaluate("four", num_beams=2)
    assert kept() == ({"four": None}, False), "other weights"
    with pytest.raises(UserError, match=r"^num_beams: 0 is below 1$"):
        evaluate("five", num_beams=0)
    (results / "config.json").touch()
    with pytest.raises(UserError, match="results is the folder of a model: name another one for the results"):
        evaluate("five")


def test_files_are_named_after_the_source(tmp_path):
    for name in ("news.en.gz", "news.de.gz"):
        with gzip.open(tmp_path / name, "wt", encoding="utf-8") as stream:
            stream.write("one\ntwo\n")
    files = [str(tmp_path / "news.en.gz"), str(tmp_path / "news.de.gz")]
    [test_set] = read_test_sets(files=files, source_lang="en", target_lang="de")
    assert (test_set.name, test_set.form, test_set.p1_references) == ("news", "raw", None)


@pytest.mark.parametrize("config_name", ["raw", "tok"])
def test_compare_takes_hypotheses_in_the_form_that_they_have(multi30k, tmp_path, config_name):
    """Those of a model of raw text beside those of a model of tokens, whatever the test set is read as."""
    pytest.importorskip("sacremoses")
    test_set = read(multi30k, config_name)
    for form, lines in (("raw", RAW), ("tok", TOKENS)):
        folder = tmp_path / form
        folder.mkdir()
        (folder / f"{test_set.name}.hyp.de").write_text("".join(f"{line}\n" for line in lines))
        record = {"evaluation": {"sets": {test_set.name: {"text": reporting.FORMS[form]}}}}
        (folder / "run.json").write_text(json.dumps(record))
    verdict = compare(tmp_path / "raw", tmp_path / "tok", [test_set], "de", samples=10)[test_set.name]
    assert (verdict.score_a, verdict.score_b) == pytest.approx((100, 100))
    other = TestSet(test_set.name, RAW, RAW)
    with pytest.raises(UserError, match=r"^test_2016_flickr: lower-cased tokenised translations have no BLEU to comp"):
        compare(tmp_path / "raw", tmp_path / "tok", [other], "de", samples=10)


def test_hypotheses_of_another_test_set_are_not_compared(multi30k, tmp_path, monkeypatch, tiny_model):
    """Of the same name and length; but both forms of a Multi30k test set are the same."""
    monkeypatch.setattr(reporting, "translate", lambda *inputs, **options: list(inputs[2]))
    test_set = TestSet("test", RAW, RAW)
    for folder, results in ((tmp_path, None), (tmp_path / "model", tmp_path / "results")):
        evaluate_model(tiny_model, None, [test_set], folder=folder, target_lang="de", results=results)
    for folder in (tmp_path, tmp_path / "results"):
        assert read_hypotheses(folder, test_set, "de") == RAW
        with pytest.raises(UserError, match=r"test.hyp.de was scored with other references than those of this test$"):
            read_hypotheses(folder, TestSet("test", RAW, RAW[::-1]), "de")
    evaluate_model(tiny_model, None, [read(multi30k, "tok")], folder=tmp_path, target_lang="de")
    assert read_hypotheses(tmp_path, read(multi30k, "raw"), "de") == TOKENS


def test_a_damaged_record_is_named(tmp_path):
    (tmp_path / "test.hyp.de").write_text("a\n")
    (tmp_path / "evaluation.json").write_text("{")
    with pytest.raises(UserError, match=r"evaluation.json: is not valid JSON \(.*\): restore the file or train again"):
        read_hypotheses(tmp_path, TestSet("test", ["b"], ["a"]), "de")


def test_compare_pools_test_sets_and_uses_the_same_sentences(tmp_path):
    """But not the validation set."""
    sets = [TestSet("a", RAW, RAW), TestSet("b", RAW[:2], RAW[:2]), TestSet("validation", RAW[1:], RAW[1:])]
    bad = {"a": ["Ein Mann.", *RAW[1:]], "b": ["Ein Mann.", RAW[1]], "validation": ["Nein."] * 3}
    for system, hypotheses in (("good", {one.name: one.references for one in sets}), ("bad", bad)):
        (tmp_path / system).mkdir()
        for name, lines in hypotheses.items():
            (tmp_path / system / f"{name}.hyp.de").write_text("\n".join(lines) + "\n", encoding="utf-8")
    verdicts = compare(tmp_path / "bad", tmp_path / "good", sets, "de", samples=50)
    expected = {one.name: paired_bootstrap(bad[one.name], one.references, one.references, samples=50) for one in sets}
    references = [*RAW, *RAW[:2]]
    expected["all of them"] = paired_bootstrap([*bad["a"], *bad["b"]], references, references, samples=50)
    assert verdicts == expected
    assert verdicts["all of them"].difference > 0
    assert "all of them" not in compare(tmp_path / "bad", tmp_path / "good", sets[1:], "de", samples=50)


def test_hypotheses_that_are_missing_or_of_another_test_set(tmp_path):
    test_set = TestSet("a", RAW, RAW)
    with pytest.raises(UserError, match=r"a\.hyp\.de: cannot be read .* evaluate that model first"):
        read_hypotheses(tmp_path, test_set, "de")
    (tmp_path / "a.hyp.de").write_text("one line\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"a\.hyp\.de has 1 lines, the test set 4"):
        read_hypotheses(tmp_path, test_set, "de")
