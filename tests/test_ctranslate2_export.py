"""CTranslate2 against our own model: the same translations, of the same scores."""

import json
from types import SimpleNamespace

import pytest
import torch

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.tokenization_vanilla_transformer import (
    SeparateVocabularyTokenizer,
    joint_tokenizer,
    learn_backend,
)
from hf_vanilla_transformer.translation import score_pairs, translate_nbest

pytest.importorskip("ctranslate2", reason="needs the extra ctranslate2")

from hf_vanilla_transformer.ctranslate2_export import CTranslate2Engine, export_ctranslate2

ENGLISH = ["a small dog runs", "the red house stands", "two old men sleep here", "a woman reads the long book"]
GERMAN = ["ein kleiner Hund rennt", "das rote Haus steht", "zwei alte Männer schlafen hier", "eine Frau liest"]
SENTENCES = [*ENGLISH, "", "the dog reads", "two women run here and there and sleep"]


def model_and_tokenizer(folder, separate=False, **overrides):
    torch.manual_seed(0)
    sizes = {"vocab_size": 70}
    if separate:
        paths = [str(folder / f"{side}.json") for side in ("source", "target")]
        for path, text, size in zip(paths, (ENGLISH, GERMAN), (60, 64), strict=True):
            learn_backend(text * 3, vocab_size=size).save(path)
        tokenizer = SeparateVocabularyTokenizer(*paths)
        sizes = {"vocab_size": 70, "encoder_vocab_size": 66, "share_encoder_decoder_embeddings": False}
    else:
        tokenizer = joint_tokenizer(learn_backend((ENGLISH + GERMAN) * 3, vocab_size=70))
    config = VanillaTransformerConfig.preset("test", dropout=0.0, **{**sizes, **overrides})
    model = VanillaTransformerForConditionalGeneration(config).eval()
    with torch.no_grad():  # biases and norms start at 0 and 1, which would hide a mix-up
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.generation_config.max_length = 24
    return model, tokenizer


SHAPES = {
    "the paper's": {},
    "pre-norm": {"norm_position": "pre", "layer_norm_eps": 1e-3},
    "pre-norm without a final norm": {"norm_position": "pre", "add_final_layer_norm": False},
    "learned positions": {"position_embedding_type": "learned"},
    "unscaled embeddings": {"scale_embedding": False},
    "unequal stacks": {"encoder_layers": 3, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_ffn_dim": 48},
    "a head size of its own": {"head_dim": 16},
    "no attention bias": {"attention_bias": False},
    "gelu, output bias, untied": {
        "activation_function": "gelu",
        "lm_head_bias": True,
        "share_encoder_decoder_embeddings": False,
        "tie_word_embeddings": False,
    },
    "two vocabularies": {"separate": True},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
class TestFloat32:
    def test_scores_of_given_translations(self, shape, tmp_path):
        model, tokenizer = model_and_tokenizer(tmp_path, **shape)
        engine = CTranslate2Engine(export_ctranslate2(model, tokenizer, tmp_path / "out"), threads=1)
        source = [tokenizer.convert_ids_to_tokens(ids) for ids in tokenizer(ENGLISH)["input_ids"]]
        labels = tokenizer(text_target=GERMAN)["input_ids"]
        target = [[engine._target.id_to_token(index) for index in ids[:-1]] for ids in labels]
        theirs = [sum(found.log_probs) for found in engine.translator.score_batch(source, target)]
        ours = [score.log_probability for score in score_pairs(model, tokenizer, ENGLISH, GERMAN)]
        assert theirs == pytest.approx(ours, abs=2e-4)

    def test_greedy_search(self, shape, tmp_path):
        model, tokenizer = model_and_tokenizer(tmp_path, **shape)
        engine = CTranslate2Engine(export_ctranslate2(model, tokenizer, tmp_path / "out"), threads=1)
        ours = [found[0].text for found in translate_nbest(model, tokenizer, SENTENCES, num_beams=1)]
        assert [found[0].text for found in engine.translate_nbest(SENTENCES, num_beams=1)] == ours
        assert ours[4] == ""


def test_batches_at_the_same_time(tmp_path):
    """Every sentence keeps its place."""
    folder = export_ctranslate2(*model_and_tokenizer(tmp_path), tmp_path / "out")
    engines = [CTranslate2Engine(folder, threads=1, parallel_batches=parallel) for parallel in (1, 3)]
    assert engines[1].translator.num_translators == 3
    alone, together = (engine.translate_nbest(SENTENCES * 5, max_tokens_per_batch=8) for engine in engines)
    assert [found[0].text for found in together] == [found[0].text for found in alone]


def test_there_are_batches_for_all_threads(tmp_path):
    folder, asked = export_ctranslate2(*model_and_tokenizer(tmp_path), tmp_path / "out"), []
    for parallel in (1, 3):
        engine = CTranslate2Engine(folder, threads=1, parallel_batches=parallel)
        search = engine.translator.translate_batch

        def record(source, *, search=search, **options):
            asked.append((sum(map(len, source)), options["max_batch_size"]))
            return search(source, **options)

        engine.translator = SimpleNamespace(translate_batch=record)
        engine.translate(SENTENCES * 20, num_beams=1)
    (tokens, alone), (_, together) = asked
    assert alone >= tokens
    assert 3 <= tokens / together <= 4 * 3


def test_a_maximum_of_new_tokens(tmp_path):
    model, tokenizer = model_and_tokenizer(tmp_path)
    model.generation_config.update(max_new_tokens=3, max_length=None)
    engine = CTranslate2Engine(export_ctranslate2(model, tokenizer, tmp_path / "out"), threads=1)
    [[found]] = engine.translate_nbest(ENGLISH[:1])
    ids = tokenizer(ENGLISH[:1], return_tensors="pt")["input_ids"]
    assert found.text == tokenizer.decode(model.generate(ids)[0], skip_special_tokens=True)


@pytest.mark.parametrize(
    ("early_stopping", "beams", "patience"), [(True, 3, 1), (False, 3, 2), ("never", 3, 2), (False, 1, 1)]
)
def test_the_search_stops_as_that_of_transformers(early_stopping, beams, patience, tmp_path):
    model, tokenizer = model_and_tokenizer(tmp_path)
    engine = CTranslate2Engine(export_ctranslate2(model, tokenizer, tmp_path / "out"), threads=1)
    engine.generation_config.early_stopping = early_stopping
    asked, search = {}, engine.translator.translate_batch
    engine.translator = SimpleNamespace(
        translate_batch=lambda source, **options: asked.update(options) or search(source, **options)
    )
    engine.translate_nbest(ENGLISH, num_beams=beams)
    assert (asked["patience"], asked["beam_size"]) == (patience, beams)


def test_settings_come_from_the_folder(tmp_path):
    model, tokenizer = model_and_tokenizer(tmp_path)
    model.generation_config.update(num_beams=3, length_penalty=0.3, max_length=9)
    engine = CTranslate2Engine(export_ctranslate2(model, tokenizer, tmp_path / "out"), threads=1)
    default = engine.translate_nbest(ENGLISH, nbest=2)
    assert default == engine.translate_nbest(ENGLISH, nbest=2, num_beams=3, length_penalty=0.3)
    assert default != engine.translate_nbest(ENGLISH, nbest=2, num_beams=3, length_penalty=3.0)
    assert [len(found) for found in default] == [2] * len(ENGLISH)
    ours = [found[0].text for found in translate_nbest(model, tokenizer, ENGLISH, num_beams=1)]  # cut off at max_length
    assert [found[0].text for found in engine.translate_nbest(ENGLISH, num_beams=1)] == ours
    with pytest.raises(UserError, match=r"^4 translations of each sentence need at least as many beams, not 3$"):
        engine.translate_nbest(ENGLISH, nbest=4)


def test_scores_without_beams_are_means(tmp_path):
    """Whatever length penalty the model has for its beams."""
    model, tokenizer = model_and_tokenizer(tmp_path)
    model.generation_config.update(num_beams=3, length_penalty=0.3, max_length=12)
    engine = CTranslate2Engine(export_ctranslate2(model, tokenizer, tmp_path / "out"), threads=1)
    for options in ({"num_beams": 1}, {"top_k": 1}):
        ours = [found[0].score for found in translate_nbest(model, tokenizer, ENGLISH, **options)]
        assert [found[0].score for found in engine.translate_nbest(ENGLISH, **options)] == pytest.approx(ours, abs=1e-4)


def test_samples(tmp_path):
    model, tokenizer = model_and_tokenizer(tmp_path)
    model.generation_config.max_length = 9
    folder = export_ctranslate2(model, tokenizer, tmp_path / "out")
    engine = CTranslate2Engine(folder, threads=1)
    drawn = engine.translate_nbest(ENGLISH[:2], nbest=8, top_k=0)
    assert [len({sample.text for sample in samples}) > 4 for samples in drawn] == [True, True]
    best = engine.translate(ENGLISH, num_beams=1)
    assert engine.translate(ENGLISH, top_k=1) == engine.translate(ENGLISH, top_k=0, temperature=1e-6) == best
    with pytest.raises(UserError, match="top_k draws samples, num_beams=4 searches"):
        engine.translate_nbest(ENGLISH, num_beams=4, top_k=3)


def test_the_seed_of_samples(tmp_path):
    """In new threads each time: a thread keeps the generator of its first sample."""
    folder = export_ctranslate2(*model_and_tokenizer(tmp_path), tmp_path / "out")
    found = [CTranslate2Engine(folder, threads=1, seed=seed).translate(ENGLISH, top_k=0) for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("compute_type", ["int8", "bfloat16", "float16"])
def test_smaller_types(compute_type, tmp_path):
    model, tokenizer = model_and_tokenizer(tmp_path, d_model=64, encoder_ffn_dim=256)
    plain = export_ctranslate2(model, tokenizer, tmp_path / "plain")
    small = export_ctranslate2(model, tokenizer, tmp_path / "small", compute_type=compute_type)
    share = 0.4 if compute_type == "int8" else 0.6
    assert (small / "model.bin").stat().st_size < share * (plain / "model.bin").stat().st_size
    assert len(CTranslate2Engine(small, threads=1).translate_nbest(ENGLISH)) == len(ENGLISH)


def test_the_converter_of_ctranslate2_knows_our_models(tmp_path):
    from ctranslate2.converters import TransformersConverter

    model, tokenizer = model_and_tokenizer(tmp_path)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    TransformersConverter(str(tmp_path / "model")).convert(str(tmp_path / "theirs"))
    ours = export_ctranslate2(model, tokenizer, tmp_path / "ours")
    assert (tmp_path / "theirs" / "model.bin").read_bytes() == (ours / "model.bin").read_bytes()
    assert json.loads((tmp_path / "theirs" / "config.json").read_text()) == json.loads(
        (ours / "config.json").read_text()
    )


class TestErrors:
    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            (
                {"add_final_layer_norm": True},
                r"^CTranslate2 has no final norm after post-norm layers: add_final_layer_n",
            ),
            ({"activation_function": "mish"}, r"^CTranslate2 has no activation_function='mish': it knows relu, gelu"),
        ],
    )
    def test_what_ctranslate2_lacks(self, overrides, message, tmp_path):
        with pytest.raises(UserError, match=message):
            export_ctranslate2(*model_and_tokenizer(tmp_path, **overrides), tmp_path / "out")

    def test_unknown_type(self, tmp_path):
        with pytest.raises(
            UserError, match=r"^unknown compute type 'int4': choose one of float32, float16, bfloat16, "
        ):
            export_ctranslate2(*model_and_tokenizer(tmp_path), tmp_path / "out", compute_type="int4")

    def test_a_folder_in_use(self, tmp_path):
        (tmp_path / "thesis.txt").write_text("mine")
        with pytest.raises(UserError, match=r"is not an empty folder: name a new one$"):
            export_ctranslate2(*model_and_tokenizer(tmp_path), tmp_path)
        assert (tmp_path / "thesis.txt").read_text() == "mine"

    def test_a_tokenizer_without_a_vocabulary_file(self, tmp_path):
        model, _ = model_and_tokenizer(tmp_path)
        tokenizer = SimpleNamespace(unk_token="", bos_token="", eos_token="", convert_ids_to_tokens=str)
        with pytest.raises(
            UserError, match=r"^CTranslate2 cannot be given a SimpleNamespace: only models with a token"
        ):
            export_ctranslate2(model, tokenizer, tmp_path / "out")

    def test_the_length_penalty_of_the_paper(self, tmp_path):
        """CTranslate2 has another one: silently it would translate otherwise than the model does."""
        model, tokenizer = model_and_tokenizer(tmp_path)
        model.generation_config.update(num_beams=2, length_penalty_type="wu")
        engine = CTranslate2Engine(export_ctranslate2(model, tokenizer, tmp_path / "out"), threads=1)
        with pytest.raises(UserError, match=r"^CTranslate2 does not know the model's length_penalty_type 'wu': transl"):
            engine.translate_nbest(ENGLISH)
        assert len(engine.translate_nbest(ENGLISH, num_beams=1)) == len(ENGLISH)

    def test_no_such_device(self, tmp_path):
        export_ctranslate2(*model_and_tokenizer(tmp_path), tmp_path / "out")
        with pytest.raises(UserError, match=r"^CTranslate2 cannot load .*out on toaster:1: unsupported device toaster"):
            CTranslate2Engine(tmp_path / "out", device="toaster:1")

    def test_no_model(self, tmp_path):
        with pytest.raises(UserError, match=r"has no model\.bin: make it with `vanilla-transformer export --format"):
            CTranslate2Engine(tmp_path)
