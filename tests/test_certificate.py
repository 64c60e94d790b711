"""The certificate of an export to CTranslate2: its figures against other ways to get them, and what is written."""

import contextlib
import copy
import io
import json
import re
import shutil

import pytest
import sacrebleu
import torch

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.reporting import TestSet
from hf_vanilla_transformer.tokenization_vanilla_transformer import joint_tokenizer, learn_backend
from hf_vanilla_transformer.translation import load_model, translate, translate_nbest

pytest.importorskip("ctranslate2", reason="needs the extra ctranslate2")

from hf_vanilla_transformer import certificate as module
from hf_vanilla_transformer.certificate import certificate_text, certify, write_card
from hf_vanilla_transformer.ctranslate2_export import CTranslate2Engine, export_ctranslate2

ENGLISH = ["a small dog runs", "the red house stands", "two old men sleep here", "", "a woman reads the long book"]
GERMAN = ["ein kleiner Hund rennt", "das rote Haus steht", "zwei alte Männer schlafen", "", "eine Frau liest hier"]
NEWS = TestSet("news", ENGLISH, GERMAN)


def make_pair(folder, seed=0, eos_bias=0.0, **search):
    """A random model of three beams in `folder`/mine and its export in `folder`/fast."""
    torch.manual_seed(seed)
    tokenizer = joint_tokenizer(learn_backend((ENGLISH + GERMAN) * 3, vocab_size=70))
    config = VanillaTransformerConfig.preset("test", vocab_size=70, dropout=0.0, lm_head_bias=True)
    model = VanillaTransformerForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        model.lm_head.bias[config.eos_token_id] += eos_bias
    model.generation_config.update(**{"num_beams": 3, "early_stopping": True, "max_length": 24, **search})
    for part in (model, tokenizer):
        part.save_pretrained(folder / "mine")
    return folder / "mine", export_ctranslate2(model, tokenizer, folder / "fast")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def certified(pair):
    return certify(*pair, [NEWS, TestSet("two", ENGLISH[:2], GERMAN[:2])], rounds=1)


class TestFigures:
    def test_of_a_faithful_export(self, certified):
        assert list(certified["sets"]) == ["news", "two"]
        for name, n in (("news", 5), ("two", 2)):
            found = certified["sets"][name]
            assert (found["n"], found["text"]) == (n, "raw detokenised")
            assert [search["num_beams"] for search in found["searches"]] == [1, 3]
            assert [search["identical"] for search in found["searches"]] == [n, n]
        assert certified["left_out"] is None

    def test_scores_are_those_of_the_two_engines(self, tmp_path):
        """The export is that of another model, so that a certificate that mixes up its sides does not pass."""
        mine, _ = make_pair(tmp_path / "a")
        _, fast = make_pair(tmp_path / "b", seed=1)
        searches = certify(mine, fast, [NEWS], rounds=1)["sets"]["news"]["searches"]
        model, tokenizer = load_model(str(mine), device="cpu")
        engine = CTranslate2Engine(fast)
        for search in searches:
            beams = search["num_beams"]
            ours = translate(model, tokenizer, ENGLISH, num_beams=beams)
            theirs = [found[0].text for found in engine.translate_nbest(ENGLISH, num_beams=beams)]
            assert (
                search["identical"] == len([1 for a, b in zip(ours, theirs, strict=True) if a == b]) == 1
            )  # the empty
            for side, lines in (("model", ours), ("ctranslate2", theirs)):
                scores = search["scores"][side]
                assert scores["bleu"]["score"] == pytest.approx(sacrebleu.corpus_bleu(lines, [GERMAN]).score)
                assert scores["chrf"]["score"] == pytest.approx(sacrebleu.corpus_chrf(lines, [GERMAN]).score)
                assert scores["bleu"]["signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
            assert search["scores"]["model"]["chrf"]["score"] != search["scores"]["ctranslate2"]["chrf"]["score"]

    def test_sizes_types_and_origin(self, pair, certified):
        mine, fast = pair
        size = (mine / "model.safetensors").stat().st_size
        assert certified["model"] == {"bytes": size, "dtype": "float32"}
        assert certified["ctranslate2"] == {"bytes": (fast / "model.bin").stat().st_size, "dtype": "float32"}
        assert {"ctranslate2", "hf-vanilla-transformer", "torch", "transformers"} <= certified["versions"].keys()
        assert {"commit", "date", "command", "hardware"} <= certified.keys()
        assert (certified["device"], certified["threads"]) == ("cpu", torch.get_num_threads())

    def test_a_model_that_was_saved_in_bfloat16_computes_in_float32(self, tmp_path):
        mine, fast = make_pair(tmp_path)
        VanillaTransformerForConditionalGeneration.from_pretrained(mine).bfloat16().save_pretrained(tmp_path / "half")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(mine / name, tmp_path / "half" / name)
        certificate = certify(tmp_path / "half", fast, [NEWS], rounds=1)
        assert certificate["model"]["dtype"] == "float32"
        assert certificate["model"]["bytes"] < 0.6 * (mine / "model.safetensors").stat().st_size

    def test_speed_is_the_median_of_interleaved_rounds_after_a_warm_up(self, pair, monkeypatch):
        clock, calls = [0.0], []
        ours, theirs = iter([99, 6, 10, 8]), iter([1, 2, 2, 2])

        class Engine(CTranslate2Engine):
            def translate_nbest(self, *args, **options):
                calls.append("theirs")
                clock[0] += next(theirs)
                return super().translate_nbest(*args, **options)

        def slow_translate(*args, **options):
            calls.append("ours")
            clock[0] += next(ours)
            return translate(*args, **options)

        monkeypatch.setattr(module, "CTranslate2Engine", Engine)
        monkeypatch.setattr(module, "translate", slow_translate)
        monkeypatch.setattr(module.time, "perf_counter", lambda: clock[0])
        monkeypatch.setattr(module, "_searches", lambda generation: ([1], None))
        [search] = certify(*pair, [NEWS])["sets"]["news"]["searches"]
        assert search["speed"] == {"median": 4.0, "least": 3.0, "greatest": 5.0}
        assert calls == ["ours", "theirs"] * 4

    def test_a_model_that_searches_greedily(self, tmp_path):
        certificate = certify(*make_pair(tmp_path, num_beams=1, early_stopping=False), [NEWS], rounds=1)
        assert [search["num_beams"] for search in certificate["sets"]["news"]["searches"]] == [1]
        assert certificate["left_out"] is None

    def test_the_length_penalty_of_the_paper(self, tmp_path):
        certificate = certify(*make_pair(tmp_path, length_penalty_type="wu"), [NEWS], rounds=1)
        assert [search["num_beams"] for search in certificate["sets"]["news"]["searches"]] == [1]
        line = "Not measured: 3 beams, the model's own search: CTranslate2 does not know its length_penalty_type 'wu'."
        assert certificate_text(certificate).endswith(line)

    def test_tokenised_text_is_scored_as_it_is(self, pair):
        lower = [line.lower() for line in GERMAN]
        certificate = certify(*pair, [TestSet("tok", ENGLISH, lower, form="tok")], rounds=1)
        assert certificate["sets"]["tok"]["text"] == "lower-cased tokenised"
        assert list(certificate["sets"]["tok"]["searches"][0]["scores"]["model"]) == ["p1"]
        assert "| Identical | BLEU (P1: lower-cased, tokenised) | Speed |" in certificate_text(certificate)


@pytest.mark.parametrize("beams", [1, 3])
def test_an_empty_translation_takes_a_place_among_the_beams(beams, tmp_path):
    """CTranslate2 would rather not stop at once, and then ends a search later than transformers."""
    mine, fast = make_pair(tmp_path, seed=1, eos_bias=4.0)
    sentences = [f"{word} {other}" for word in " ".join(ENGLISH).split() for other in ("dog", "house")]
    model, tokenizer = load_model(str(mine), device="cpu")
    ours = translate_nbest(model, tokenizer, sentences, nbest=beams, num_beams=beams)
    theirs = CTranslate2Engine(fast).translate_nbest(sentences, nbest=beams, num_beams=beams)
    assert [[found.text for found in row] for row in theirs] == [[found.text for found in row] for row in ours]
    assert 0 < sum(row[0].text == "" for row in ours) < len(sentences)


class TestErrors:
    def test_no_rounds(self, pair):
        with pytest.raises(UserError, match=r"^rounds is 0: the speed needs at least 1, better 3$"):
            certify(*pair, [NEWS], rounds=0)

    def test_no_test_set(self, pair):
        with pytest.raises(UserError, match=r"^there is no test set to translate: a certificate needs one$"):
            certify(*pair, [])

    def test_no_weights(self, pair, tmp_path):
        with pytest.raises(
            UserError, match=r"holds no model\*\.safetensors: name the folder of the model, then that of"
        ):
            certify(tmp_path, pair[1], [NEWS])
        with pytest.raises(UserError, match=r"holds no model\.bin: name the folder of the model, then that of its exp"):
            certify(*pair[:1], tmp_path, [NEWS])

    def test_damaged_records(self, pair, tmp_path):
        mine, fast = (shutil.copytree(folder, tmp_path / folder.name) for folder in pair)
        (mine / "run.json").write_text("{")
        with pytest.raises(UserError, match=r"run\.json: is not valid JSON"):
            write_card(load_model(str(mine), device="cpu")[0], mine, fast, compute_type="float32")


class TestWords:
    @pytest.fixture
    def certificate(self, certified):
        certificate = copy.deepcopy(certified)
        greedy, beams = certificate["sets"]["news"]["searches"]
        certificate["sets"]["news"]["n"] = 2000
        greedy.update(identical=2000, speed={"median": 2.5, "least": 2.0, "greatest": 3.125})
        beams.update(identical=1999, speed={"median": 1.5, "least": 1.25, "greatest": 1.75})
        for side, bleu, chrf in (("model", 41.234, 63.5), ("ctranslate2", 41.2, 63.0)):
            beams["scores"][side]["bleu"]["score"], beams["scores"][side]["chrf"]["score"] = bleu, chrf
        certificate["model"]["bytes"], certificate["ctranslate2"]["bytes"] = 4_000_000, 1_020_000
        certificate.update(date="2026-01-02", commit="0123abc", threads=7, rounds=3)
        del certificate["sets"]["two"]
        return certificate

    def test_tables(self, certificate):
        lines = certificate_text(certificate).splitlines()
        assert lines[0] == "| Test set | Sentences | Search | Identical | BLEU | chrF2 | Speed |"
        assert lines[2].startswith("| `news` | 2,000 | greedy | 2,000 (100.00%) | ")
        assert lines[2].endswith(" | × 2.50 (2.00 to 3.12) |")
        assert lines[3] == (
            "| `news` | 2,000 | 3 beams | 1,999 (99.95%) | 41.23 / 41.20 | 63.50 / 63.00 | × 1.50 (1.25 to 1.75) |"
        )
        assert "| transformers | `model.safetensors` | 4,000,000 | 1.00 | `float32` |" in lines
        assert "| CTranslate2 | `model.bin` | 1,020,000 | 0.26 | `float32` |" in lines

    def test_explanations(self, certificate):
        text = certificate_text(certificate)
        bleu = certificate["sets"]["news"]["searches"][0]["scores"]["model"]["bleu"]["signature"]
        versions = certificate["versions"]
        assert f"BLEU `{bleu}`, chrF2 `nrefs:1|case:mixed|eff:yes" in text
        assert "the median of 3 rounds (least to greatest)" in text
        assert "within one process" in text
        assert f"7 threads, `cpu`, {certificate['hardware']['cpu']}." in text
        assert "Measured on 2026-01-02, commit `0123abc`, with hf-vanilla-transformer 0.1.0, ctranslate2 " in text
        assert f"torch {versions['torch']}" in text
        certificate["commit"] = None  # an installed package
        assert "commit not recorded, with" in certificate_text(certificate)
        certificate.update(device="cuda", hardware={**certificate["hardware"], "gpu": "Some GPU"})
        assert "`cuda`, Some GPU." in certificate_text(certificate)
        assert "None" not in text


class TestFolder:
    @pytest.fixture
    def folders(self, pair, tmp_path):
        return [shutil.copytree(folder, tmp_path / folder.name) for folder in pair]

    def write(self, folders, **options):
        mine, fast = folders
        write_card(load_model(str(mine), device="cpu")[0], mine, fast, compute_type="float32", **options)
        return (fast / "README.md").read_text(encoding="utf-8")

    def test_a_trained_model(self, folders, certified, run_record, evaluation_record):
        mine, fast = folders
        (mine / "run.json").write_text(json.dumps(run_record))
        (mine / "evaluation.json").write_text(json.dumps(evaluation_record))
        card = self.write(folders, certificate=certified)
        assert certificate_text(certified) in card
        assert "\n# mine\n" in card
        assert "| Steps | 12,000 |" in card
        assert "| BLEU | 41.23 |" in card
        assert json.loads((fast / "certificate.json").read_text(encoding="utf-8")) == certified

    def test_an_imported_model(self, folders, certified):
        card = self.write(folders, certificate=certified, languages={"source_lang": "en", "target_lang": "de"})
        assert certificate_text(certified) in card
        assert "translates `en` into `de`" in card
        assert "## Training" not in card

    def test_without_a_certificate(self, folders):
        assert "Not measured: whether this folder translates as the model does" in self.write(folders)
        assert not (folders[1] / "certificate.json").exists()

    def test_usage_runs_as_it_stands(self, folders):
        mine, fast = folders
        [code] = re.findall(r"```python\n(.*?)```", self.write(folders), flags=re.DOTALL)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code.replace("FOLDER", str(fast)), {})
        model, tokenizer = load_model(str(mine), device="cpu")
        assert printed.getvalue().splitlines() == translate(model, tokenizer, ["Put a sentence here."])
