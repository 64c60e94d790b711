"""The model card: every figure in it, what it says where nothing is known, and what the Hub reads from it."""

import copy
import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.card import (
    CARD_TEMPLATE,
    METRICS,
    NO_LICENSE,
    NOT_CERTIFIED,
    NOT_EVALUATED,
    RUN_VALUES,
    ctranslate2_card,
    fill_template,
    model_card,
)
from hf_vanilla_transformer.corpus import CorpusReport
from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.evaluation import score
from hf_vanilla_transformer.provenance import provenance


def make_model(**fields):
    model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig.preset("test", **fields))
    model.generation_config.update(max_length=12, num_beams=2)
    return model


@pytest.fixture(scope="module")
def model():
    return make_model(vocab_size=1000)


@pytest.fixture
def run(run_record):
    return copy.deepcopy(run_record)


@pytest.fixture
def evaluation(evaluation_record):
    return copy.deepcopy(evaluation_record)


@pytest.fixture
def card(model):
    """The function, with arguments that do not matter filled in."""
    return lambda run, evaluation, model=model, **options: model_card(
        model, run, evaluation, repo_id="user/tiny-en-de", **options
    )


class TestWhole:
    def test_template_is_the_file_at_the_top_of_the_repository(self):
        top = Path(__file__).parents[1] / "model_card.md"
        assert CARD_TEMPLATE.read_text() == top.read_text()

    def test_has_no_holes(self, card, run, evaluation):
        text = card(run, evaluation)
        assert re.findall(r"\{\{.*?\}\}", text) == ["{{ photographs }}"]  # the user's own words, left alone
        assert not re.search(r"None|nan|\|\s*\|\s*$", text.replace("| | |\n", ""), flags=re.MULTILINE)

    def test_takes_what_our_records_hold(self, card, run, evaluation):
        run.update(provenance())
        run["data"]["report"] = CorpusReport("training text", read=5).as_dict()
        text = card(run, evaluation)
        assert "Of 5 sentence pairs that were read, 5 were kept and none dropped." in text
        assert f"| Date | {run['date']} |" in text

    @pytest.mark.parametrize(
        "line",
        [
            "| Parameters | {parameters:,} |",
            "| Layers | 2 in the encoder, 2 in the decoder |",
            "| Width | 32, feed-forward 64 / 64 |",
            "| Attention heads | 4 in the encoder, 4 in the decoder |",
            "| Layer norm | after each sublayer (post-norm) |",
            "| Positions | sinusoidal |",
            "| Vocabulary | 1,000 tokens shared by both languages |",
            "| Embeddings | one matrix for source, target and output |",
            "| Weights | float32 |",
            "`generate` searches as `generation_config.json` says: `num_beams=2`, `max_length=12`.",
            "Trained on: Captions of {{{{ photographs }}}}.",
            "| Published weights | last step |",
            "On the Hub: [`someone/captions`](https://huggingface.co/datasets/someone/captions).",
            "Of 29,000 sentence pairs that were read, 28,900 were kept and 100 dropped:",
            "| too long | 40 |",
            "| Time | 1 h 2 min |",
            "| Steps | 12,000 |",
            "| Epochs | 20.04 |",
            "| Target tokens seen | 9,876,543 |",
            "| Hardware | no GPU; Some CPU, 2 cores |",
            "vanilla-transformer train --train-source 'my train.en'",
            "| Commit | `0123abc` |",
            "| Seed | 7 |",
            "| Date | 2026-01-02 |",
            "| Versions | torch 2.13.0, transformers 5.23.0 |",
            '  "learning_rate": 0.0005',
        ],
    )
    def test_says(self, card, model, run, evaluation, line):
        parameters = sum(parameter.numel() for parameter in model.parameters())
        lines = card(run, evaluation).splitlines()
        assert line.format(parameters=parameters) in lines

    def test_back_translations_are_counted_apart(self, card, run, evaluation):
        run["data"]["report"]["back_translations"] = {**run["data"]["report"], "kept": 1234}
        text = card(run, evaluation)
        assert "1,234 pairs have back-translated sources. Of " in text

    def test_what_it_was_trained_on_before(self, card, run, evaluation):
        run["data"].update(description="last.", before=["first.", "second."])
        expected = "Trained on: last.\n\nBefore that, on: second.\n\nBefore that, on: first.\n\n"
        assert expected in card(run, evaluation)

    def test_several_directions(self, card, run, evaluation):
        assert "The other direction needs a model of its own" in card(run, evaluation)
        run["recipe"]["directions"] = ["en-de", "de-en"]
        text = card(run, evaluation)
        assert "`en-de`, `de-en`. A source begins with a word that names the language to translate into" in text
        assert text.count('["2de Put your en sentence here."]') == 2
        assert "model of its own" not in text

    def test_other_architectures_are_described_as_they_are(self, card, run, evaluation):
        model = make_model(
            vocab_size=20,
            encoder_vocab_size=30,
            share_encoder_decoder_embeddings=False,
            norm_position="pre",
            position_embedding_type="learned",
        )
        text = card(run, evaluation, model)
        assert "| Layer norm | before each sublayer (pre-norm) |" in text
        assert "| Positions | learned |" in text
        assert "| Vocabulary | 30 source tokens and 20 target tokens |" in text
        assert "| Embeddings | one matrix for the source, one for target and output |" in text
        assert "Source and translation can have at most 64 tokens each." in text

    def test_untied_embeddings(self, card, run, evaluation):
        model = make_model(vocab_size=20, share_encoder_decoder_embeddings=False, tie_word_embeddings=False)
        assert "| Embeddings | one matrix each for source, target and output |" in card(run, evaluation, model)

    def test_licence(self, card, run, evaluation):
        assert "No licence has been stated for the weights" in card(run, evaluation)
        assert "The weights are under the licence `mit`." in card(run, evaluation, license="mit")


class TestMetadata:
    def test_is_what_the_hub_reads(self, card, run, evaluation):
        data = ModelCard(card(run, evaluation, license="cc-by-4.0")).data
        assert data.language == ["en", "de"]
        assert data.model_name == "tiny-en-de"
        assert data.license == "cc-by-4.0"
        assert (data.library_name, data.pipeline_tag) == ("transformers", "translation")
        assert data.datasets == ["someone/captions"]
        assert data.metrics == ["bleu", "chrf"]
        scores = {result.metric_name: result.metric_value for result in data.eval_results}
        assert scores == {"BLEU": 41.234, "chrF2": 63.5, "BLEU (P1: lower-cased, tokenised)": 40.004}
        assert {result.dataset_name for result in data.eval_results} == {"test_2016_flickr"}
        assert {result.dataset_type for result in data.eval_results} == {"test_2016_flickr"}
        assert data.eval_results[0].metric_args == {"signature": "nrefs:1|case:mixed|tok:13a"}

    def test_without_scores_licence_and_dataset(self, card, run):
        run["data"]["dataset"] = None
        data = ModelCard(card(run, {})).data
        assert data.eval_results is None
        assert not {"license", "datasets", "metrics", "model-index"} & data.to_dict().keys()

    @pytest.mark.parametrize("dataset", ["./local/folder", "/data/mine", "a/b/c"])
    def test_dataset_that_is_not_on_the_hub(self, card, run, dataset):
        run["data"]["dataset"] = dataset
        text = card(run, {})
        assert "huggingface.co/datasets" not in text
        assert ModelCard(text).data.datasets is None


class TestResults:
    def test_table(self, card, run, evaluation):
        evaluation["sets"]["tokenised"] = {
            "n": 5,
            "text": "lower-cased tokenised",
            "scores": {"p1": {"score": 39.0, "signature": "P1|none"}},
        }
        rows = [line for line in card(run, evaluation).splitlines() if line.startswith(("| `test", "| `tok"))]
        assert rows == [
            r"| `test_2016_flickr` | 1,000 | raw detokenised | BLEU | 41.23 | `nrefs:1\|case:mixed\|tok:13a` |",
            r"| `test_2016_flickr` | 1,000 | raw detokenised | chrF2 | 63.50 | `nrefs:1\|case:mixed\|nc:6\|nw:0` |",
            r"| `test_2016_flickr` | 1,000 | raw detokenised | BLEU (P1: lower-cased, tokenised) | 40.00 | `P1\|lc` |",
            r"| `tokenised` | 5 | lower-cased tokenised | BLEU (P1: lower-cased, tokenised) | 39.00 | `P1\|none` |",
        ]

    def test_settings_of_the_search(self, card, run, evaluation):
        assert "wrote its translations, with `num_beams=5`." in card(run, evaluation)

    def test_length_penalty_of_the_paper(self, card, run, evaluation):
        model = make_model(vocab_size=50)
        model.generation_config.update(length_penalty=0.6, length_penalty_type="wu")
        settings = "`num_beams=2`, `length_penalty=0.6`, `length_penalty_type=wu`, `max_length=12`"
        assert settings in card(run, evaluation, model=model)

    def test_every_metric_of_ours_has_a_name(self):
        assert METRICS.keys() == score(["a b c d"], ["a b c d"]).keys() | {"p1"}

    @pytest.mark.parametrize("evaluation", [{}, {"sets": {}}])
    def test_missing_scores_are_said_in_words(self, card, run, evaluation):
        assert NOT_EVALUATED in card(run, evaluation)


class TestTraining:
    @pytest.mark.parametrize(("seconds", "words"), [(0.6, "1 s"), (62, "1 min 2 s"), (7199.9, "2 h 0 min")])
    def test_time(self, card, run, seconds, words):
        run["training"]["seconds"] = seconds
        assert f"| Time | {words} |" in card(run, {})

    def test_origin(self, card, run):
        assert "trained from random weights with" in card(run, {})
        run["recipe"] = {"model_name_or_path": "user/parent"}
        assert "trained further from `user/parent` with" in card(run, {})

    def test_gpu(self, card, run):
        run["hardware"]["gpu"] = "Some GPU"
        assert "| Hardware | Some GPU; Some CPU, 2 cores |" in card(run, {})

    def test_installed_package_has_no_commit(self, card, run):
        run["commit"] = None
        assert "| Commit | not recorded |" in card(run, {})


class TestErrors:
    @pytest.mark.parametrize("key", RUN_VALUES)
    def test_record_without_a_needed_value(self, card, run, key):
        *path, last = key.split(".")
        part = run
        for step in path:
            part = part[step]
        message = f"run.json: no value for '{key}', which the model card needs: add it or train again"
        part[last] = ""
        with pytest.raises(UserError, match=message):
            card(run, {})
        del part[last]
        with pytest.raises(UserError, match=message):
            card(run, {})

    def test_record_without_a_whole_part(self, card, run):
        run["data"] = None
        with pytest.raises(UserError, match=r"run.json: no value for 'data.description'"):
            card(run, {})

    def test_language_that_is_no_code(self, card, run):
        run["target_lang"] = 'Old High "German"'
        with pytest.raises(UserError, match=r"run.json: 'target_lang' is 'Old High \"German\"': give a language"):
            card(run, {})

    @pytest.mark.parametrize("values", [{}, {"name": ""}, {"name": "  \n"}])
    def test_placeholder_without_value(self, values):
        with pytest.raises(UserError, match=r"model_card.md: the placeholder 'name' has no value"):
            fill_template("# {{name}}", values)

    def test_values_are_not_filled_again(self):
        assert fill_template("{{ a }} {{ b }}", {"a": "{{ b }}", "b": 0}) == "{{ b }} 0"


TRAINING_SECTIONS = ["Languages", "Training data", "Training", "How to reproduce"]


@pytest.fixture
def export_card(model):
    return lambda run, evaluation, certificate=None: ctranslate2_card(
        model, run, evaluation, name="mine", compute_type="int8", certificate=certificate
    )


def headings(text):
    return re.findall(r"^## (.*)", text, flags=re.MULTILINE)


def sections(text):
    return dict(zip(headings(text), re.split(r"^## .*", text, flags=re.MULTILINE)[1:], strict=True))


class TestCTranslate2:
    def test_is_the_card_of_the_model_but_for_usage_scores_and_code(self, card, export_card, run, evaluation):
        ours, theirs = card(run, evaluation), export_card(run, evaluation, "| the | table |")
        assert headings(theirs) == [{"Usage": "CTranslate2"}.get(title, title) for title in headings(ours)]
        before, after = sections(ours), sections(theirs)
        changed = {title for title in before if before[title] != after.get(title)}
        assert changed == {"Model", "Usage", "Results", "Licence"}
        assert after["Model"] == before["Model"].replace("| Weights | float32 |", "| Weights | int8 |")
        assert after["Licence"].strip() == NO_LICENSE
        assert after["Results"].endswith(before["Results"])
        assert "before it was exported" in after["Results"]
        assert "### Parity with transformers\n\n| the | table |\n" in after["CTranslate2"]
        assert "num_beams=2`, `max_length=12`" in after["CTranslate2"]
        assert "trust_remote_code" not in theirs

    def test_metadata(self, export_card, run, evaluation):
        data = ModelCard(export_card(run, evaluation)).data
        assert (data.library_name, data.pipeline_tag, data.model_name) == ("ctranslate2", "translation", "mine")
        assert (data.language, data.datasets) == (["en", "de"], ["someone/captions"])
        assert data.tags == ["translation", "vanilla-transformer", "ctranslate2"]
        assert data.eval_results is None  # they are those of the model under transformers

    @pytest.mark.parametrize("certificate", [None, "measured"])
    @pytest.mark.parametrize("scored", [True, False])
    @pytest.mark.parametrize(
        ("record", "languages"),
        [
            ({}, []),
            ({"source_lang": "en", "target_lang": "de"}, ["en", "de"]),
            ({"source_lang": "en"}, ["en"]),
            ({"source_lang": 'Old "High"', "target_lang": "de", "data": None}, ["de"]),
        ],
    )
    def test_without_a_record_of_the_training(self, export_card, evaluation, record, languages, scored, certificate):
        text = export_card(record, evaluation if scored else {}, certificate)
        assert headings(text) == ["Model", "CTranslate2", "Results", "Limits", "Licence", "Citation"]
        assert not re.search(
            r"None|nan|\{\{|(?<!`)``(?!`)|\|\s*\|\s*$", text.replace("| | |\n", ""), flags=re.MULTILINE
        )
        assert "High" not in text
        assert "(Vaswani et al. 2017), exported with\n`hf-vanilla-transformer`." in text
        assert "What it was trained on and how is not known here" in text
        both = len(languages) == 2
        assert f"translates {'`en` into `de`' if both else 'text from one language into another'}: the" in text
        assert (f"Put your {languages[0]} sentence" if "en" in languages else "Put a sentence here.") in text
        assert ModelCard(text).data.language == (languages or None)
        assert (NOT_EVALUATED in text) is not scored
        assert (NOT_CERTIFIED in text) is (certificate is None)

    @pytest.mark.parametrize("key", RUN_VALUES)
    def test_a_record_that_lacks_a_value_is_none(self, export_card, run, key):
        part = run
        *path, last = key.split(".")
        for step in path:
            part = part[step]
        del part[last]
        assert not set(TRAINING_SECTIONS) & set(headings(export_card(run, {})))
