"""Marian, torch and fairseq against models that share no line with ours: the same logits, the same translations."""

import argparse
import io
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig, MarianConfig, MarianMTModel

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.cli import main
from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.interchange import FORMATS, export_model, import_folder, import_model
from hf_vanilla_transformer.tokenization_vanilla_transformer import (
    SeparateVocabularyTokenizer,
    joint_tokenizer,
    learn_backend,
    load_tokenizer,
)
from hf_vanilla_transformer.translation import load_model, translate
from hf_vanilla_transformer.weight_layout import LayoutOptions
from reference_twins import (
    FairseqTransformer,
    TutorialTransformer,
    beam_search,
    fairseq_settings,
    open_fairseq_checkpoint,
    shake,
)

ROOT = Path(__file__).resolve().parents[1]
V, SV, PAD, BOS, EOS = 20, 31, 1, 2, 3
SOURCE = torch.tensor([[5, 6, 7, 8, 9, 10, EOS], [10, 11, EOS, PAD, PAD, PAD, PAD], [12, 13, 14, 15, EOS, PAD, PAD]])
TARGET = torch.tensor([[BOS, 4, 5, 6], [BOS, 7, 8, 9], [BOS, 10, 11, 12]])
SEARCH = GenerationConfig(
    num_beams=3,
    early_stopping=True,
    max_length=14,
    num_return_sequences=2,
    bos_token_id=BOS,
    eos_token_id=EOS,
    pad_token_id=PAD,
    decoder_start_token_id=BOS,
    suppress_tokens=[PAD],
)
TEXT = ["the old man sleeps", "a dog sees the small cat", "the cat runs", "who sees a dog"]
UNSHARED = {"share_encoder_decoder_embeddings": False}
SEPARATE = {"encoder_vocab_size": SV, **UNSHARED}
UNTIED = {"tie_word_embeddings": False}
EQUAL_FFN = {"decoder_ffn_dim": 48}


def own_model(seed=0, **overrides):
    torch.manual_seed(seed)
    settings = {"vocab_size": V, "encoder_ffn_dim": 48, "decoder_layers": 1, **overrides}
    return shake(VanillaTransformerForConditionalGeneration(VanillaTransformerConfig.preset("test", **settings)))


@torch.no_grad()
def own_logits(model, source=SOURCE, target=TARGET):
    return model(source, decoder_input_ids=target).logits


def assert_same(model, twin, source=SOURCE, search=SEARCH):
    """Logits and beams of ours and of a function of source and target."""
    with torch.no_grad():
        expected = twin(source, TARGET)
    # float32 rounds relative to the largest logits, which are large without a final norm
    tolerance = 2.5e-6 * expected.abs().max().item()
    torch.testing.assert_close(own_logits(model, source), expected, atol=tolerance, rtol=0)
    found = model.generate(source, generation_config=search).tolist()
    assert found == beam_search(twin, source, search, model.config.vocab_size)
    assert len({tuple(ids) for ids in found}) > 1


def saved(tmp_path, content, name="weights.pt"):
    torch.save(content, tmp_path / name)
    return tmp_path / name


# ---- Marian ----

EXPRESSIBLE = {
    "joint": {},
    "two-way": UNSHARED,
    "untied": {**UNSHARED, **UNTIED},
    "separate": SEPARATE,
    "separate-untied": {**SEPARATE, **UNTIED},
    "no-attention-bias": {"attention_bias": False},
    "output-bias": {"lm_head_bias": True},
    "unscaled-gelu": {"scale_embedding": False, "activation_function": "gelu"},
    "odd-width": {"d_model": 33, "encoder_attention_heads": 3, "decoder_attention_heads": 3},
    "other-ids": {"eos_token_id": 0, "pad_token_id": 19, "decoder_start_token_id": 19, "unk_token_id": 1},
    "unequal-heads": {"encoder_attention_heads": 8, "decoder_attention_heads": 2},
}


class TestExportToMarian:
    @pytest.mark.parametrize("overrides", EXPRESSIBLE.values(), ids=EXPRESSIBLE)
    def test_logits_and_beams(self, tmp_path, overrides):
        model = own_model(**overrides)
        model.generation_config.update(num_beams=3, early_stopping=True, max_length=14, length_penalty=0.7)
        export_model(model, "marian", tmp_path / "marian")
        theirs, report = MarianMTModel.from_pretrained(tmp_path / "marian", output_loading_info=True)
        assert not any(report[kind] for kind in ("unexpected_keys", "mismatched_keys"))
        source = SOURCE.masked_fill(SOURCE.eq(PAD), model.config.pad_token_id)
        mask = source.ne(model.config.pad_token_id).long()
        with torch.no_grad():
            expected = theirs.eval()(source, attention_mask=mask, decoder_input_ids=TARGET).logits
        torch.testing.assert_close(own_logits(model, source), expected, atol=1e-5, rtol=0)
        # each with the search settings of its own folder
        assert model.generate(source).tolist() == theirs.generate(source, attention_mask=mask).tolist()

    @pytest.mark.parametrize("overrides", EXPRESSIBLE.values(), ids=EXPRESSIBLE)
    def test_the_way_back_changes_nothing(self, tmp_path, overrides):
        model = own_model(**overrides)
        export_model(model, "marian", tmp_path / "marian")
        back = import_model(tmp_path / "marian", "marian")
        torch.testing.assert_close(own_logits(back), own_logits(model), atol=0, rtol=0)
        for name in (
            "d_model",
            "pad_token_id",
            "eos_token_id",
            "unk_token_id",
            "bos_token_id",
            "dropout",
            "tie_word_embeddings",
        ):
            assert getattr(back.config, name) == getattr(model.config, name), name

    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            (
                {"norm_position": "pre"},
                "norm_position='pre' cannot be written as marian, which has norm_position='post'",
            ),
            ({"position_embedding_type": "learned"}, "position_embedding_type='learned' cannot be written as marian"),
            (
                {"layer_norm_eps": 1e-6},
                "layer_norm_eps=1e-06 cannot be written as marian, which has layer_norm_eps=1e-05",
            ),
            ({"head_dim": 5}, "head_dim=5 cannot be written as marian: its 4 heads divide d_model=32"),
            ({"add_final_layer_norm": True}, "add_final_layer_norm=True cannot be written as marian"),
        ],
    )
    def test_refusals_name_the_field(self, tmp_path, overrides, message):
        with pytest.raises(UserError, match=re.escape(message)):
            export_model(own_model(**overrides), "marian", tmp_path / "marian")
        assert not (tmp_path / "marian").exists()

    def test_the_folder_loads_without_this_package(self, tmp_path):
        """In a process that cannot even import it, and with no code from the folder."""
        tokenizer = joint_tokenizer(learn_backend(TEXT * 3, vocab_size=60))
        model = own_model(vocab_size=len(tokenizer))
        model.generation_config.update(num_beams=2, early_stopping=True, max_length=12)
        model.save_pretrained(tmp_path / "ours")
        tokenizer.save_pretrained(tmp_path / "ours")
        notes = export_model(tmp_path / "ours", "marian", tmp_path / "marian")
        assert notes == [f"the tokenizer loads with AutoTokenizer.from_pretrained('{tmp_path / 'marian'}')"]
        code = (
            "import json, sys\n"
            "sys.modules['hf_vanilla_transformer'] = None\n"
            "from transformers import AutoModelForSeq2SeqLM, AutoTokenizer\n"
            "model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1])\n"
            "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])\n"
            "batch = tokenizer(json.loads(sys.argv[2]), padding=True, return_tensors='pt')\n"
            "texts = tokenizer.batch_decode(model.generate(**batch), skip_special_tokens=True)\n"
            "print(json.dumps([type(model).__name__, batch['input_ids'].tolist(), texts]))\n"
        )
        command = [sys.executable, "-c", code, str(tmp_path / "marian"), json.dumps(TEXT)]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        name, ids, texts = json.loads(output.splitlines()[-1])
        assert name == "MarianMTModel"
        assert ids == tokenizer(TEXT, padding=True)["input_ids"]
        own, own_tokenizer = load_model(str(tmp_path / "ours"), device="cpu")
        expected = own.generate(torch.tensor(ids))
        assert texts == own_tokenizer.batch_decode(expected, skip_special_tokens=True)

    def test_two_vocabularies_become_two_tokenizers_and_come_back(self, tmp_path):
        files = {}
        for side, text in (("source", TEXT), ("target", [line[::-1] for line in TEXT])):
            files[f"{side}_tokenizer_file"] = str(tmp_path / f"{side}.json")
            learn_backend(text * 3, vocab_size=50).save(files[f"{side}_tokenizer_file"])
        tokenizer = SeparateVocabularyTokenizer(**files)
        model = own_model(vocab_size=tokenizer.target_vocab_size, **UNSHARED, encoder_vocab_size=len(tokenizer))
        model.save_pretrained(tmp_path / "ours")
        tokenizer.save_pretrained(tmp_path / "ours")
        assert "two tokenizers" in export_model(tmp_path / "ours", "marian", tmp_path / "marian")[0]
        for side, encode in (("source", lambda x: tokenizer(x)), ("target", lambda x: tokenizer(text_target=x))):
            loaded = AutoTokenizer.from_pretrained(tmp_path / "marian", subfolder=f"{side}_tokenizer")
            assert loaded(TEXT[0])["input_ids"] == encode(TEXT[0])["input_ids"]
        notes = import_folder(tmp_path / "marian", "marian", tmp_path / "back")
        assert notes == ["the two vocabularies are carried over"]
        back, loaded = load_model(str(tmp_path / "back"), device="cpu")
        assert back.config.encoder_vocab_size == len(tokenizer)
        assert loaded(text_target=TEXT[0])["input_ids"] == tokenizer(text_target=TEXT[0])["input_ids"]

    def test_no_tokenizer_and_another_length_penalty_are_said(self, tmp_path):
        model = own_model()
        model.generation_config.update(length_penalty_type="wu")
        model.save_pretrained(tmp_path / "ours")
        notes = export_model(tmp_path / "ours", "marian", tmp_path / "marian")
        assert notes[0].startswith("length_penalty_type='wu' is left out")
        assert f"{tmp_path / 'ours'} holds no tokenizer" in notes[1]
        assert "length_penalty_type" not in (tmp_path / "marian" / "generation_config.json").read_text()

    def test_half_precision_stays(self, tmp_path):
        export_model(own_model().to(torch.bfloat16), "marian", tmp_path / "marian")
        assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "marian").dtype == torch.bfloat16


def sentencepiece_model(sentencepiece, text):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text * 3), model_writer=model, vocab_size=45, hard_vocab_limit=False, minloglevel=2
    )
    return model.getvalue()


@pytest.fixture(scope="module")
def opus(tmp_path_factory):
    """A folder as those of OPUS-MT on the Hub: random weights, two SentencePiece files, padding the last token."""
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("opus")
    pieces = sentencepiece_model(sentencepiece, TEXT)
    for name in ("source.spm", "target.spm"):
        (folder / name).write_bytes(pieces)
    loaded = sentencepiece.SentencePieceProcessor(model_proto=pieces)
    words = [loaded.id_to_piece(number) for number in range(3, loaded.get_piece_size())]
    vocab = {token: number for number, token in enumerate(["</s>", "<unk>", *words, "<pad>"])}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "tokenizer_config.json").write_text(json.dumps({"source_lang": "en", "target_lang": "de"}))
    padding = vocab["<pad>"]
    torch.manual_seed(1)
    config = MarianConfig(
        vocab_size=len(vocab), d_model=32, encoder_layers=2, decoder_layers=1, encoder_ffn_dim=48, decoder_ffn_dim=64,
        encoder_attention_heads=4, decoder_attention_heads=8, activation_function="swish", scale_embedding=True,
        max_position_embeddings=64, pad_token_id=padding, decoder_start_token_id=padding, eos_token_id=0,
        bos_token_id=0, forced_eos_token_id=0, dropout=0.2,
    )  # fmt: skip
    model = shake(MarianMTModel(config))
    with torch.no_grad():
        for stack in (model.model.encoder, model.model.decoder):
            stack.embed_positions.weight.copy_(stack.embed_positions.create_weight())
        model.final_logits_bias.normal_()
    model.generation_config = GenerationConfig(
        num_beams=4, max_length=16, bad_words_ids=[[padding]], forced_eos_token_id=0, eos_token_id=0, bos_token_id=0,
        pad_token_id=padding, decoder_start_token_id=padding,
    )  # fmt: skip
    model.save_pretrained(folder)
    return folder


class TestImportOfMarian:
    def test_an_opus_folder_translates_the_same(self, opus, tmp_path):
        notes = import_folder(opus, "marian", tmp_path / "ours")
        assert notes == ["the tokenizer is carried over, as MarianTokenizer of transformers"]
        theirs, tokenizer = MarianMTModel.from_pretrained(opus).eval(), AutoTokenizer.from_pretrained(opus)
        model, own_tokenizer = load_model(str(tmp_path / "ours"), device="cpu")
        assert type(own_tokenizer).__name__ == "MarianTokenizer"
        batch = tokenizer(TEXT, padding=True, return_tensors="pt")
        assert own_tokenizer(TEXT, padding=True)["input_ids"] == batch["input_ids"].tolist()
        target = torch.tensor([[model.config.decoder_start_token_id, 4, 5, 6]] * len(TEXT))
        with torch.no_grad():
            expected = theirs(**batch, decoder_input_ids=target).logits
        torch.testing.assert_close(own_logits(model, batch["input_ids"], target), expected, atol=1e-5, rtol=0)
        found = model.generate(**batch)
        assert found.tolist() == theirs.generate(**batch).tolist()
        assert translate(model, own_tokenizer, TEXT) == own_tokenizer.batch_decode(found, skip_special_tokens=True)

    def test_and_back(self, opus, tmp_path, monkeypatch):
        import_folder(opus, "marian", tmp_path / "ours")
        export_model(tmp_path / "ours", "marian", tmp_path / "back")
        (one, two), (ours, theirs) = (
            [cls.from_pretrained(folder) for folder in (opus, tmp_path / "back")]
            for cls in (AutoTokenizer, MarianMTModel)
        )
        assert two(TEXT)["input_ids"] == one(TEXT)["input_ids"]
        batch = one(TEXT, padding=True, return_tensors="pt")
        assert ours.generate(**batch).tolist() == theirs.generate(**batch).tolist()
        for name, tensor in ours.state_dict().items():
            torch.testing.assert_close(theirs.state_dict()[name], tensor, atol=0, rtol=0)

        def missing(folder):
            raise ImportError("MarianTokenizer requires the SentencePiece library")

        monkeypatch.setattr("hf_vanilla_transformer.foreign_tokenizers.load_tokenizer", missing)
        notes = export_model(tmp_path / "ours", "marian", tmp_path / "again")
        assert notes == ["the tokenizer is left out, because reading it needs sentencepiece: pip install sentencepiece"]

    def test_what_it_becomes(self, opus):
        model = import_model(opus, "marian")
        config = model.config
        assert (config.unk_token_id, config.eos_token_id, config.bos_token_id) == (1, 0, 0)
        assert config.pad_token_id == config.decoder_start_token_id == config.vocab_size - 1
        assert (config.encoder_attention_heads, config.decoder_attention_heads) == (4, 8)
        assert (config.activation_function, config.position_embedding_type) == ("swish", "sinusoidal")
        assert (config.lm_head_bias, config.tie_word_embeddings, config.encoder_vocab_size) == (True, True, None)
        assert (config.max_position_embeddings, config.dropout) == (64, 0.2)
        search = model.generation_config
        assert (search.num_beams, search.max_length, search.forced_eos_token_id) == (4, 16, 0)
        assert search.bad_words_ids == [[config.pad_token_id]]

    def test_an_old_folder(self, opus, tmp_path):
        """A pickle-era file with every tied tensor and the positions, and the search settings in config.json."""
        theirs = MarianMTModel.from_pretrained(opus).eval()
        state = theirs.state_dict()
        assert {"model.shared.weight", "lm_head.weight", "model.encoder.embed_positions.weight"} <= state.keys()
        saved(tmp_path, state, "pytorch_model.bin")
        config = json.loads((opus / "config.json").read_text()) | {"num_beams": 6, "max_length": 11}
        (tmp_path / "config.json").write_text(json.dumps(config))
        model = import_model(tmp_path, "marian")
        assert model.config.position_embedding_type == "sinusoidal"
        assert (model.generation_config.num_beams, model.generation_config.max_length) == (6, 11)
        source = SOURCE.masked_fill(SOURCE.eq(PAD), model.config.pad_token_id)
        mask = source.ne(model.config.pad_token_id).long()
        with torch.no_grad():
            expected = theirs(source, attention_mask=mask, decoder_input_ids=TARGET).logits
        torch.testing.assert_close(own_logits(model, source), expected, atol=1e-5, rtol=0)

    def test_positions_of_its_own_become_learned(self, opus, tmp_path):
        theirs = MarianMTModel.from_pretrained(opus).eval()
        state = dict(theirs.state_dict())
        for side in ("encoder", "decoder"):
            state[f"model.{side}.embed_positions.weight"] = torch.randn(64, 32)
        theirs.load_state_dict(state)
        saved(tmp_path, state, "pytorch_model.bin")
        (tmp_path / "config.json").write_text((opus / "config.json").read_text())
        model = import_model(tmp_path, "marian")
        assert model.config.position_embedding_type == "learned"
        with torch.no_grad():
            expected = theirs(SOURCE[:1], decoder_input_ids=TARGET[:1]).logits
        torch.testing.assert_close(own_logits(model, SOURCE[:1], TARGET[:1]), expected, atol=1e-5, rtol=0)

    @pytest.mark.parametrize("stated", [64, 32, None])
    def test_only_the_user_shortens_stored_positions(self, opus, tmp_path, stated):
        saved(tmp_path, MarianMTModel.from_pretrained(opus).state_dict(), "pytorch_model.bin")
        config = json.loads((opus / "config.json").read_text()) | {"max_position_embeddings": stated}
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
        assert import_model(tmp_path, "marian").config.max_position_embeddings == 64
        options = LayoutOptions(max_position_embeddings=16)
        assert import_model(tmp_path, "marian", options).config.max_position_embeddings == 16

    @pytest.mark.parametrize("name", ["vocab_size", "encoder_vocab_size"])
    def test_sizes_that_the_weights_contradict(self, opus, name):
        with pytest.raises(UserError, match=f"{name}=7, but the weights have embeddings of"):
            import_model(opus, "marian", LayoutOptions(**{name: 7}))

    def test_a_token_that_does_not_exist(self, opus):
        with pytest.raises(UserError, match=r"eos_token_id=99 is not one of \d+ tokens: pass --eos_token_id"):
            import_model(opus, "marian", LayoutOptions(eos_token_id=99))

    def test_separate_vocabularies(self, tmp_path):
        torch.manual_seed(2)
        config = MarianConfig(
            vocab_size=SV, decoder_vocab_size=V, share_encoder_decoder_embeddings=False, tie_word_embeddings=False,
            d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=48, decoder_ffn_dim=48, pad_token_id=PAD,
            encoder_attention_heads=4, decoder_attention_heads=4, decoder_start_token_id=BOS, eos_token_id=EOS,
            max_position_embeddings=32, forced_eos_token_id=None,
        )  # fmt: skip
        theirs = shake(MarianMTModel(config))
        theirs.save_pretrained(tmp_path)
        theirs = MarianMTModel.from_pretrained(tmp_path).eval()
        model = import_model(tmp_path, "marian")
        assert (model.config.encoder_vocab_size, model.config.vocab_size) == (SV, V)
        assert_same(
            model,
            lambda source, ids: theirs(source, attention_mask=source.ne(PAD).long(), decoder_input_ids=ids).logits,
        )

    def test_without_sentencepiece_the_files_are_carried_over(self, opus, tmp_path, monkeypatch):
        def missing(folder):
            raise ImportError("MarianTokenizer requires the SentencePiece library")

        monkeypatch.setattr("hf_vanilla_transformer.foreign_tokenizers.load_tokenizer", missing)
        notes = import_folder(opus, "marian", tmp_path / "ours")
        assert notes[0].endswith(
            "as MarianTokenizer of transformers; it needs sentencepiece: pip install sentencepiece"
        )
        assert load_tokenizer(tmp_path / "ours")(TEXT[0])["input_ids"][-1] == 0

    @pytest.mark.slow
    def test_in_a_process_without_sentencepiece(self, opus, tmp_path):
        """What transformers raises there, and that nothing else needs it."""
        code = (
            "import sys; sys.modules['sentencepiece'] = None\n"
            "from hf_vanilla_transformer.interchange import import_folder\n"
            "print(import_folder(sys.argv[1], 'marian', sys.argv[2])[0])\n"
        )
        command = [sys.executable, "-c", code, str(opus), str(tmp_path / "ours")]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "it needs sentencepiece: pip install sentencepiece" in output

    def test_a_tokenizer_that_does_not_fit_is_left_out(self, tmp_path):
        export_model(own_model(), "marian", tmp_path / "marian")
        joint_tokenizer(learn_backend(TEXT * 3, vocab_size=60)).save_pretrained(tmp_path / "marian")
        notes = import_folder(tmp_path / "marian", "marian", tmp_path / "ours")
        assert notes[0].startswith("the tokenizer beside the weights is left out: the tokenizer does not fit the model")
        assert not (tmp_path / "ours" / "tokenizer.json").exists()

    def test_search_settings_that_could_not_be_saved(self, opus, tmp_path):
        saved(tmp_path, MarianMTModel.from_pretrained(opus).state_dict(), "pytorch_model.bin")
        for name, changes in (("config.json", {}), ("generation_config.json", {"num_beams": 1, "length_penalty": 0.6})):
            (tmp_path / name).write_text(json.dumps(json.loads((opus / name).read_text()) | changes))
        with pytest.raises(UserError, match=r"its search settings contradict each other: .*length_penalty"):
            import_model(tmp_path, "marian")

    def test_another_model_type(self, tmp_path):
        own_model().save_pretrained(tmp_path)
        with pytest.raises(UserError, match=r"config.json: model_type is 'vanilla_transformer', not 'marian'"):
            import_model(tmp_path, "marian")

    def test_no_configuration(self, tmp_path):
        save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
        with pytest.raises(UserError, match=r"config.json: cannot be read"):
            import_model(tmp_path, "marian")


# ---- torch.nn.Transformer ----

TORCH_SHAPE = {"d_model": 32, "nhead": 4, "num_encoder_layers": 2, "num_decoder_layers": 1, "dim_feedforward": 48}


def tutorial(seed=0, shaken=0.2, **changes):
    torch.manual_seed(seed)
    return shake(TutorialTransformer(SV, V, **{**TORCH_SHAPE, **changes}), shaken)


class TestTorch:
    @pytest.mark.filterwarnings("ignore:enable_nested_tensor")
    @pytest.mark.parametrize(
        ("changes", "options"),
        [
            ({}, {}),
            ({"final_norms": False}, {}),
            ({"norm_first": True, "activation": "gelu"}, {"norm_position": "pre", "activation_function": "gelu"}),
            # nothing normalises the output: with larger weights the logits are in the tens, and rounding with them
            ({"norm_first": True, "final_norms": False, "shaken": 0.1}, {"norm_position": "pre"}),
            ({"layer_norm_eps": 1e-3, "nhead": 8}, {"layer_norm_eps": 1e-3, "num_heads": 8}),
        ],
    )
    def test_import_of_the_tutorial(self, tmp_path, changes, options):
        twin = tutorial(**changes)
        path = saved(tmp_path, twin.state_dict())
        model = import_model(path, "torch", LayoutOptions(**{"num_heads": 4, **options}))
        assert model.config.position_embedding_type == "sinusoidal"
        assert model.config.max_position_embeddings == 64
        assert_same(model, twin)

    @pytest.mark.filterwarnings("ignore:enable_nested_tensor")
    @pytest.mark.parametrize(
        "overrides",
        [
            {},
            {"add_final_layer_norm": True, "activation_function": "gelu"},
            {"norm_position": "pre"},
            {"norm_position": "pre", "add_final_layer_norm": False},
            {**SEPARATE, "lm_head_bias": True, "attention_bias": False},
            {"scale_embedding": False, "layer_norm_eps": 1e-3},
        ],
    )
    def test_export_to_the_tutorial(self, tmp_path, overrides):
        model = own_model(**EQUAL_FFN, **overrides)
        notes = export_model(model, "torch", tmp_path / "out.pt")
        final_norms = overrides.get("add_final_layer_norm", overrides.get("norm_position") == "pre")
        call = re.fullmatch(
            r"the weights are those of torch\.nn\.Transformer\((.*)\)( without encoder.norm and decoder.norm)?",
            notes[0],
        )
        assert bool(call[2]) is not final_norms
        arguments = eval(f"dict({call[1]})")
        twin = TutorialTransformer(model.config.encoder_vocab_size or V, V, final_norms=final_norms, **arguments)
        written = torch.load(tmp_path / "out.pt", weights_only=True)
        twin.load_state_dict(written)
        assert_same(model, twin)
        bare = eval(f"torch.nn.Transformer({call[1]})")
        if call[2]:
            bare.encoder.norm = bare.decoder.norm = None
        inside = "transformer."
        bare.load_state_dict({k.removeprefix(inside): x for k, x in written.items() if k.startswith(inside)})

    def test_there_and_back(self, tmp_path):
        choices = {"norm_position": "pre", "activation_function": "gelu", "layer_norm_eps": 1e-3}
        model = own_model(**SEPARATE, **EQUAL_FFN, **choices, position_embedding_type="sinusoidal", lm_head_bias=True)
        [_, note] = export_model(model, "torch", tmp_path / "out.npz")
        flags = note.removeprefix("to import it again: ").split()
        command = ["import", str(tmp_path / "out.npz"), "--format", "torch", "--output", str(tmp_path / "back")]
        assert main([*command, *flags]) == 0
        back = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path / "back").eval()
        torch.testing.assert_close(own_logits(back), own_logits(model), atol=0, rtol=0)

    def test_other_positions_become_learned_and_can_go_back(self, tmp_path):
        twin = tutorial()
        twin.positional_encoding.pos_embedding.normal_()
        model = import_model(saved(tmp_path, twin.state_dict()), "torch", LayoutOptions(num_heads=4))
        assert model.config.position_embedding_type == "learned"
        assert_same(model, twin)
        export_model(model, "torch", tmp_path / "back.safetensors")
        back = load_file(tmp_path / "back.safetensors")
        assert back.keys() == twin.state_dict().keys()
        for name, tensor in twin.state_dict().items():
            torch.testing.assert_close(back[name], tensor, atol=0, rtol=0)

    def test_a_bare_transformer_gets_fresh_embeddings(self, tmp_path):
        twin = tutorial()
        path = saved(tmp_path, twin.transformer.state_dict())
        with pytest.raises(UserError, match=r"weights hold no embeddings: pass --vocab_size, and --encoder_vocab_size"):
            import_model(path, "torch", LayoutOptions(num_heads=4))
        options = LayoutOptions(num_heads=4, vocab_size=V, encoder_vocab_size=SV, max_position_embeddings=64)
        with pytest.warns(UserWarning, match="holds no embeddings: those of the new model are random numbers"):
            model = import_model(path, "torch", options)
        ours = model.model
        twin.src_tok_emb.embedding.weight = ours.encoder.embed_tokens.weight
        twin.tgt_tok_emb.embedding.weight = ours.decoder.embed_tokens.weight
        twin.generator = nn.Linear(32, V, bias=False)
        twin.generator.weight = model.lm_head.weight
        assert_same(model, twin)
        notes = import_folder(path, "torch", tmp_path / "ours", LayoutOptions(num_heads=4, vocab_size=V))
        assert notes[0].startswith("the source holds no embeddings")
        assert notes[1].startswith("no tokenizer came with the weights")
        assert notes[2] == (
            "taken for given: --num_heads 4 --norm_position post --activation_function relu --layer_norm_eps 1e-05 "
            "--unk_token_id 0 --pad_token_id 1 --bos_token_id 2 --eos_token_id 3 "
            "--decoder_start_token_id 2: where that is wrong, import again with the right ones"
        )
        assert VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path / "ours").config.vocab_size == V

    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            (
                {"encoder_attention_heads": 8},
                "decoder_attention_heads=4 cannot be written as torch: it is one number there for both sides",
            ),
            ({"decoder_ffn_dim": 64}, "decoder_ffn_dim=64 cannot be written as torch"),
            ({"head_dim": 5}, "head_dim=5 cannot be written as torch"),
            ({"position_embedding_type": "learned"}, "position_embedding_type='learned' cannot be written as torch"),
            (
                {"activation_function": "silu"},
                "activation_function='silu' cannot be written as torch: it has relu and gelu",
            ),
        ],
    )
    def test_refusals_name_the_field(self, tmp_path, overrides, message):
        with pytest.raises(UserError, match=re.escape(message)):
            export_model(own_model(**{**EQUAL_FFN, **overrides}), "torch", tmp_path / "out.pt")
        assert not (tmp_path / "out.pt").exists()

    def test_only_one_final_norm(self, tmp_path):
        state = {name: tensor for name, tensor in tutorial().state_dict().items() if ".encoder.norm" not in name}
        with pytest.raises(UserError, match="only one of encoder and decoder ends in a layer norm"):
            import_model(saved(tmp_path, state), "torch", LayoutOptions(num_heads=4))


# ---- fairseq ----

PRE_NORM = {"encoder_normalize_before": True, "decoder_normalize_before": True}
LEARNED = {"encoder_learned_pos": True, "decoder_learned_pos": True}
SHARED = {"share_all_embeddings": True, "share_decoder_input_output_embed": True}
FAIRSEQ_CASES = {
    "post": {},
    "pre-learned": {**PRE_NORM, **LEARNED},
    "shared-unscaled": {**SHARED, "no_scale_embedding": True},
    "two-way-swish": {"share_decoder_input_output_embed": True, "activation_fn": "swish"},
}
# fairseq numbers its special tokens otherwise
FAIRSEQ_SOURCE = torch.tensor([[5, 6, 7, 8, 9, 10, 2], [10, 11, 2, 1, 1, 1, 1], [12, 13, 14, 15, 2, 1, 1]])
FAIRSEQ_SEARCH = GenerationConfig(
    **(SEARCH.to_diff_dict() | {"bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2})
)


def fairseq(seed=0, **settings):
    torch.manual_seed(seed)
    shared = settings.get("share_all_embeddings")
    return shake(FairseqTransformer(fairseq_settings(**settings), V if shared else SV, V))


def checkpoint(twin, settings):
    """As fairseq writes it, with its other contents."""
    settings = argparse.Namespace(**fairseq_settings(**settings), arch="transformer", task="translation")
    return {"args": settings, "model": twin.state_dict(), "optimizer_history": [{"num_updates": 7}], "extra_state": {}}


class TestFairseq:
    @pytest.mark.parametrize("settings", FAIRSEQ_CASES.values(), ids=FAIRSEQ_CASES)
    def test_import(self, tmp_path, settings):
        twin = fairseq(**settings)
        model = import_model(saved(tmp_path, checkpoint(twin, settings)), "fairseq")
        config = model.config
        assert (config.bos_token_id, config.pad_token_id, config.eos_token_id, config.unk_token_id) == (0, 1, 2, 3)
        assert config.decoder_start_token_id == 2
        assert config.tie_word_embeddings is ("share_decoder_input_output_embed" in settings)
        assert (config.position_embedding_type, config.dropout) == ("learned", 0.1)
        assert config.max_position_embeddings == 64
        assert_same(model, twin, FAIRSEQ_SOURCE, FAIRSEQ_SEARCH)

    @pytest.mark.parametrize(
        "overrides",
        [
            {},
            {"norm_position": "pre", **SEPARATE, "position_embedding_type": "learned"},
            {**UNSHARED, "scale_embedding": False, "activation_function": "swish", "attention_bias": False},
            {"pad_token_id": 5, "encoder_attention_heads": 8},
        ],
    )
    def test_export(self, tmp_path, overrides):
        model = own_model(**overrides)
        notes = export_model(model, "fairseq", tmp_path / "out.pt")
        assert notes[0].startswith("special tokens are not numbered as in a fairseq dictionary, but bos_token_id=2")
        with torch.serialization.safe_globals([argparse.Namespace]):
            written = open_fairseq_checkpoint(torch.load(tmp_path / "out.pt", weights_only=True))
        pad = model.config.pad_token_id
        twin = FairseqTransformer(vars(written["args"]), model.config.encoder_vocab_size or V, V, padding=pad)
        twin.load_state_dict(written["model"])
        source = SOURCE.masked_fill(SOURCE.eq(PAD), pad)
        search = GenerationConfig(**(SEARCH.to_diff_dict() | {"pad_token_id": pad, "suppress_tokens": [pad]}))
        target = TARGET.masked_fill(TARGET.eq(pad), 16)
        with torch.no_grad():
            torch.testing.assert_close(own_logits(model, source, target), twin(source, target), atol=1e-5, rtol=0)
        assert model.generate(source, generation_config=search).tolist() == beam_search(twin, source, search, V)

    @pytest.mark.parametrize("settings", FAIRSEQ_CASES.values(), ids=FAIRSEQ_CASES)
    def test_there_and_back(self, tmp_path, settings):
        first = import_model(saved(tmp_path, checkpoint(fairseq(**settings), settings)), "fairseq")
        notes = export_model(first, "fairseq", tmp_path / "back.pt")
        assert notes[0] == "special tokens are numbered as in a fairseq dictionary"
        assert notes[1].endswith(
            "--unk_token_id 3 --pad_token_id 1 --bos_token_id 0 --eos_token_id 2 --decoder_start_token_id 2"
        )
        second = import_model(tmp_path / "back.pt", "fairseq")
        for name, tensor in first.state_dict().items():
            torch.testing.assert_close(second.state_dict()[name], tensor, atol=0, rtol=0)
        changed = {"_name_or_path", "transformers_version"}
        assert {k: v for k, v in first.config.to_dict().items() if k not in changed} == {
            k: v for k, v in second.config.to_dict().items() if k not in changed
        }

    @pytest.mark.parametrize(("source", "target"), [(40, 40), (40, 30), (30, 40), (40, None)])
    def test_as_many_sinusoids_as_the_checkpoint_is_for(self, tmp_path, source, target):
        settings = {"max_source_positions": source, "max_target_positions": target}
        path = saved(tmp_path, checkpoint(fairseq(), settings))
        assert import_model(path, "fairseq").config.max_position_embeddings == 40
        options = LayoutOptions(max_position_embeddings=50)
        assert import_model(path, "fairseq", options).config.max_position_embeddings == 50

    def test_a_newer_checkpoint_keeps_its_settings_in_cfg(self, tmp_path):
        settings = fairseq_settings(**PRE_NORM, no_scale_embedding=True)
        twin = shake(FairseqTransformer(settings, SV, V))
        content = {"args": None, "cfg": {"model": argparse.Namespace(**settings)}, "model": twin.state_dict()}
        model = import_model(saved(tmp_path, content), "fairseq")
        assert (model.config.norm_position, model.config.scale_embedding) == ("pre", False)
        assert_same(model, twin, FAIRSEQ_SOURCE, FAIRSEQ_SEARCH)

    def test_the_names_of_older_checkpoints(self, tmp_path):
        twin = fairseq()
        state = dict(twin.state_dict())
        state["decoder.embed_out"] = state.pop("decoder.output_projection.weight")
        state["encoder.embed_positions.weights"] = torch.zeros(9, 32)
        norms = {
            "encoder": ("self_attn_layer_norm", "final_layer_norm"),
            "decoder": ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
        }
        for name in list(state):
            side, rest = name.split(".", 1)
            if "layer_norm." in rest:
                layer, number, norm, parameter = rest.split(".")
                old = f"{side}.{layer}.{number}.layer_norms.{norms[side].index(norm)}.{parameter}"
                state[old] = state.pop(name)
            elif ".q_proj." in rest:
                parts = [state.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
                state[name.replace("q_proj.", "in_proj_")] = torch.cat(parts)
        assert not any("q_proj" in name or "attn_layer_norm" in name for name in state)
        model = import_model(saved(tmp_path, {"model": state}), "fairseq", LayoutOptions(num_heads=4))
        assert_same(model, twin, FAIRSEQ_SOURCE, FAIRSEQ_SEARCH)

    def test_different_numbers_of_positions(self, tmp_path):
        content = checkpoint(fairseq(**LEARNED), LEARNED)
        name = "decoder.embed_positions.weight"
        content["model"][name] = content["model"][name][:-4]
        path = saved(tmp_path, content)
        with pytest.raises(UserError, match="the encoder has 64 positions and the decoder 60: pass --max_position_emb"):
            import_model(path, "fairseq")
        model = import_model(path, "fairseq", LayoutOptions(max_position_embeddings=60))
        assert model.config.max_position_embeddings == 60

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"no_token_positional_embeddings": True}, "with no_token_positional_embeddings cannot be expressed"),
            ({"activation_fn": "gelu_fast"}, "activation_fn='gelu_fast' of fairseq is not one of relu, gelu"),
            ({"encoder_attention_heads": 5}, "32 rows of the query projections do not divide into 5 attention heads"),
        ],
    )
    def test_settings_that_we_have_not(self, tmp_path, settings, message):
        path = saved(tmp_path, checkpoint(fairseq(), settings))
        with pytest.raises(UserError, match=re.escape(f"{path}: ") + ".*" + re.escape(message)):
            import_model(path, "fairseq")

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("encoder.layernorm_embedding.weight", "a fairseq model with layernorm_embedding cannot be expressed"),
            ("decoder.project_in_dim.weight", "tensors that this layout does not know: decoder.project_in_dim.weight"),
            ("encoder.layers.3.fc1.weight", r"the weights hold no model.encoder.stack.layers.2.*, but later layers"),
        ],
    )
    def test_tensors_that_we_have_not(self, tmp_path, name, message):
        content = checkpoint(fairseq(), {})
        content["model"][name] = torch.zeros(48, 32)
        with pytest.raises(UserError, match=re.escape(message)):
            import_model(saved(tmp_path, content), "fairseq")

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("decoder.layers.1.fc2.bias", "missing: model.decoder.stack.layers.1.feed_forward.fc2.bias"),
            ("decoder.embed_tokens.weight", "the weights hold no decoder.embed_tokens.weight: is it another --format?"),
        ],
    )
    def test_tensors_that_are_missing(self, tmp_path, name, message):
        content = checkpoint(fairseq(), {})
        del content["model"][name]
        with pytest.raises(UserError, match=re.escape(message)):
            import_model(saved(tmp_path, content), "fairseq")

    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            ({"lm_head_bias": True}, "lm_head_bias=True cannot be written as fairseq, which has lm_head_bias=False"),
            ({"layer_norm_eps": 1e-6}, "layer_norm_eps=1e-06 cannot be written as fairseq"),
            ({"add_final_layer_norm": True}, "add_final_layer_norm=True cannot be written as fairseq"),
            ({"head_dim": 5}, "head_dim=5 cannot be written as fairseq"),
            ({"activation_function": "quick_gelu"}, "activation_function='quick_gelu' cannot be written as fairseq"),
        ],
    )
    def test_refusals_name_the_field(self, tmp_path, overrides, message):
        with pytest.raises(UserError, match=re.escape(message)):
            export_model(own_model(**overrides), "fairseq", tmp_path / "out.pt")

    def test_one_dictionary_becomes_the_tokenizer(self, tmp_path):
        words = [f"w{number}" for number in range(V - 4)]
        for language in ("en", "de"):
            (tmp_path / f"dict.{language}.txt").write_text("".join(f"{word} {9}\n" for word in words))
        saved(tmp_path, checkpoint(fairseq(**SHARED), SHARED), "checkpoint_best.pt")
        notes = import_folder(tmp_path, "fairseq", tmp_path / "ours")
        assert notes[0].startswith("fairseq's dictionary is the tokenizer: it splits at spaces")
        model, tokenizer = load_model(str(tmp_path / "ours"), device="cpu")
        assert tokenizer("w0 w3 nothing")["input_ids"] == [4, 7, 3, 2]
        assert tokenizer.decode([4, 7, 2], skip_special_tokens=True) == "w0 w3"
        assert len(translate(model, tokenizer, ["w0 w3", "w1"])) == 2

    def test_two_dictionaries(self, tmp_path):
        for language, size in (("en", SV), ("de", V)):
            lines = [f"{language}{number} 1\n" for number in range(size - 4)]
            (tmp_path / f"dict.{language}.txt").write_text("".join(lines))
        path = saved(tmp_path, checkpoint(fairseq(), {"source_lang": "en", "target_lang": "de"}))
        import_folder(path, "fairseq", tmp_path / "ours")
        tokenizer = load_tokenizer(tmp_path / "ours")
        assert tokenizer("en1 de1")["input_ids"] == [5, 3, 2]
        assert tokenizer(text_target="en1 de1")["input_ids"] == [3, 5, 2]
        saved(tmp_path, checkpoint(fairseq(), {}))
        notes = import_folder(path, "fairseq", tmp_path / "unnamed")
        assert "the checkpoint does not say which dict.*.txt is the source's" in notes[0]

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"a 5\nb 4\na 3\n", "dict.en.txt:3: 'a' is there twice"),
            (b"a 5\n<s> 3 #fairseq:overwrite\n", "dict.en.txt:2: '<s>' is there twice"),
            (b"a 5\nb\n", "dict.en.txt:2: 'b' is not a word and a count"),
            (b"a 5\n\xff 3\n", "dict.en.txt: cannot be read as UTF-8"),
        ],
    )
    def test_a_damaged_dictionary(self, tmp_path, content, message):
        (tmp_path / "dict.en.txt").write_bytes(content)
        saved(tmp_path, checkpoint(fairseq(), {}))
        notes = import_folder(tmp_path, "fairseq", tmp_path / "ours")
        assert message in notes[0]

    def test_odd_words_in_a_dictionary(self, tmp_path):
        """A line ends at its end only, and a word that comes again with fairseq's flag gets the later number."""
        words = ["a 9", "\u2028 8", "\x85 7", "a 6 #fairseq:overwrite", "b 5", "b 4 #fairseq:overwrite"]
        words += [f"w{number} 1" for number in range(V - 4 - len(words))]
        (tmp_path / "dict.en.txt").write_text("\n".join(words), encoding="utf-8")
        saved(tmp_path, checkpoint(fairseq(**SHARED), SHARED))
        import_folder(tmp_path, "fairseq", tmp_path / "ours")
        tokenizer = load_tokenizer(tmp_path / "ours")
        assert (tokenizer("a b w0")["input_ids"], len(tokenizer)) == ([7, 9, 10, 2], V)


# ---- every format ----


@pytest.mark.parametrize("name", FORMATS)
def test_a_round_trip_in_every_format(name, tmp_path):
    options = LayoutOptions(num_heads=4, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, unk_token_id=0)
    settings = {
        "annotated": {"norm_position": "pre", "layer_norm_eps": 1e-6},
        "hyunwoongko": {"layer_norm_eps": 1e-12, "scale_embedding": False},
        "conv1d": {"scale_embedding": False},
        "keras": {"layer_norm_eps": 1e-6},
        "keras-interleaved": {"layer_norm_eps": 1e-6},
    }
    sides = {} if name in ("marian", "fairseq") else {**EQUAL_FFN, "decoder_layers": 2}
    model = own_model(**settings.get(name, {}), **sides)
    output = tmp_path / ("folder" if name == "marian" else "weights.pt")
    export_model(model, name, output)
    back = import_model(output, name, options)
    torch.testing.assert_close(own_logits(back), own_logits(model), atol=1e-5, rtol=0)
    again = tmp_path / ("again" if name == "marian" else "again.pt")
    export_model(back, name, again)
    one, two = (
        load_file(path / "model.safetensors") if name == "marian" else torch.load(path, weights_only=name != "fairseq")
        for path in (output, again)
    )
    one, two = (content.get("model", content) for content in (one, two))
    assert one.keys() == two.keys()
    for key, tensor in one.items():
        torch.testing.assert_close(two[key], tensor, atol=1e-6, rtol=0)


def test_the_record_of_agreement_is_whole_and_keeps_the_promise():
    """scripts/agreement.py made it."""
    record = json.loads((ROOT / "scripts" / "results" / "agreement.json").read_text(encoding="utf-8"))
    found = [(row["reference"], row["direction"]) for row in record["rows"]]
    assert found == [(name, direction) for name in FORMATS for direction in ("import", "export")]
    for row in record["rows"]:
        assert row["max_logit_difference"] <= 1e-5, row
        assert row["equal_beams"] == row["beams"] > 0, row


@pytest.mark.slow
def test_the_agreement_of_today():
    command = [sys.executable, str(ROOT / "scripts" / "agreement.py"), "--check"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.count("\n") == 2 + len(FORMATS)


def test_an_imported_model_knows_how_to_search(tmp_path):
    model = import_model(saved(tmp_path, tutorial().state_dict()), "torch", LayoutOptions(num_heads=4))
    search = model.generation_config
    assert (search.num_beams, search.early_stopping, search.max_length) == (5, True, 64)
    assert (search.decoder_start_token_id, search.eos_token_id, search.pad_token_id) == (BOS, EOS, PAD)
    model.save_pretrained(tmp_path / "ours")
    loaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path / "ours")
    assert loaded.generation_config.num_beams == 5


# ---- files ----


class TestFiles:
    @pytest.mark.filterwarnings("ignore:Detected pickle protocol")
    @pytest.mark.parametrize("zipped", [True, False])
    def test_no_code_is_run(self, tmp_path, zipped):
        mark = tmp_path / "ran"

        class Attack:
            def __reduce__(self):
                return os.system, (f"touch {mark}",)

        path = tmp_path / "weights.pt"
        torch.save({"model": {}, "args": Attack()}, path, _use_new_zipfile_serialization=zipped)
        with pytest.raises(UserError, match="holds more than tensors, and opening that could run foreign code"):
            import_model(path, "fairseq")
        path = tmp_path / "weights.npz"
        np.savez(path, a=np.array([Attack()], dtype=object))
        with pytest.raises(UserError, match="cannot be read as npz of plain arrays"):
            import_model(path, "torch")
        path = tmp_path / "plain.bin"
        path.write_bytes(pickle.dumps(Attack()))
        with pytest.raises(UserError, match=r"plain.bin: (holds more than|cannot be read)"):
            import_model(path, "torch")
        assert not mark.exists()

    @pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".npz"])
    def test_every_kind_of_file(self, tmp_path, suffix):
        model = own_model(**EQUAL_FFN, add_final_layer_norm=True)
        export_model(model, "torch", tmp_path / "new" / f"out{suffix}")
        back = import_model(tmp_path / "new", "torch", LayoutOptions(num_heads=4))
        torch.testing.assert_close(own_logits(back), own_logits(model), atol=0, rtol=0)

    @pytest.mark.parametrize("key", ["model", "state_dict", "model_state_dict"])
    def test_a_training_checkpoint(self, tmp_path, key):
        twin = tutorial()
        path = saved(tmp_path, {key: twin.state_dict(), "epoch": 3, "optimizer": {"state": {}}})
        assert_same(import_model(path, "torch", LayoutOptions(num_heads=4)), twin)

    @pytest.mark.parametrize("weight_map", [[], None, "a", {"a": ["b"]}])
    def test_an_index_that_is_none(self, tmp_path, weight_map):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(UserError, match=r"index\.json: its weight_map does not say in which files the tensors are"):
            import_model(tmp_path, "torch")

    def test_bfloat16_as_npz(self, tmp_path):
        model = own_model(**EQUAL_FFN).to(torch.bfloat16)
        export_model(model, "torch", tmp_path / "out.npz")
        back = import_model(tmp_path / "out.npz", "torch", LayoutOptions(num_heads=4))
        for name, tensor in model.state_dict().items():
            assert torch.equal(back.state_dict()[name], tensor.float()), name

    def test_shards_and_half_precision(self, tmp_path):
        model = own_model().to(torch.bfloat16)
        export_model(model, "marian", tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        (tmp_path / "model.safetensors").unlink()
        weight_map = {name: f"model-0000{number % 2}.safetensors" for number, name in enumerate(sorted(tensors))}
        for shard in set(weight_map.values()):
            save_file({name: tensors[name] for name in tensors if weight_map[name] == shard}, tmp_path / shard)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        back = import_model(tmp_path, "marian")
        assert back.dtype == torch.float32
        torch.testing.assert_close(own_logits(back), own_logits(model.float()), atol=0, rtol=0)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ([torch.zeros(1)], "holds a list instead of named tensors"),
            ({"a": torch.zeros(1), "epoch": 3}, "'epoch' is not a tensor: save the tensors alone"),
            ({"stranger.1.weight": torch.zeros(1)}, "does not know: stranger.1.weight: is it another --format?"),
            ({}, "the weights hold no decoder.layers.0.norm1.weight: is it another --format?"),
            (
                {"transformer.decoder.layers.0.norm1.weight": torch.ones(32)},
                "the weights hold no generator.weight: is it another --format?",
            ),
        ],
    )
    def test_contents_that_are_no_model(self, tmp_path, content, message):
        path = saved(tmp_path, content)
        with pytest.raises(UserError, match=re.escape(f"{path}: ") + ".*" + re.escape(message)):
            import_model(path, "torch")

    @pytest.mark.parametrize("name", ["marian", "torch", "fairseq"])
    @pytest.mark.parametrize("shape", [(), (7,)])
    def test_tensors_without_axes(self, name, shape):
        """In the place of each tensor in turn. Those of fairseq that are ignored are left out."""
        model = own_model(**EQUAL_FFN, decoder_layers=1, lm_head_bias=name != "fairseq", tie_word_embeddings=False,
                          share_encoder_decoder_embeddings=False)  # fmt: skip
        layout, options = FORMATS[name], LayoutOptions(num_heads=4, pad_token_id=1, decoder_start_token_id=2)
        tensors = layout.write(model.config, dict(model.state_dict()))
        layout.read(tensors, options)
        for key, tensor in tensors.items():
            if len(shape) < tensor.dim() and key not in ("final_logits_bias", "encoder.version", "decoder.version"):
                with pytest.raises(UserError, match=r"has . axes, not .|does not divide into 3|positions has two axes"):
                    layout.read({**tensors, key: torch.zeros(shape)}, options)

    @pytest.mark.parametrize("name", ["a.pt", "a.npz", "a.safetensors"])
    @pytest.mark.parametrize("content", [b"PK\x03\x04 no such thing", b"", b"\x80\x02."])
    def test_files_that_are_damaged(self, tmp_path, name, content):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=rf"{name}: cannot be read as"):
            import_model(tmp_path, "torch")

    def test_which_file(self, tmp_path):
        with pytest.raises(UserError, match="nowhere: no such file or folder"):
            import_model(tmp_path / "nowhere", "torch")
        with pytest.raises(
            UserError, match=r"^user/name: no such file .* first: hf download user/name --local-dir FOLDER"
        ):
            import_model("user/name", "marian")
        with pytest.raises(UserError, match="holds no file of weights"):
            import_model(tmp_path, "torch")
        for name in ("checkpoint1.pt", "checkpoint2.pt"):
            saved(tmp_path, {}, name)
        with pytest.raises(UserError, match=r"holds several files of weights: name one, such as .*checkpoint1.pt"):
            import_model(tmp_path, "torch")

    def test_an_unknown_format(self, tmp_path):
        with pytest.raises(UserError, match="format 'onnx' is not one of marian, torch, fairseq"):
            import_model(tmp_path, "onnx")

    def test_nothing_is_overwritten(self, tmp_path):
        (tmp_path / "out.pt").write_text("precious")
        for name, output, message in (
            ("torch", tmp_path / "out.pt", "out.pt: is there already: name a new file"),
            ("torch", tmp_path / "out.h5", "out.h5: the name of this export has to end in .safetensors or .npz or .pt"),
            ("fairseq", tmp_path / "out.npz", "out.npz: the name of this export has to end in .pt"),
            ("marian", tmp_path, "is not an empty folder: name a new one"),
        ):
            with pytest.raises(UserError, match=re.escape(message)):
                export_model(own_model(**EQUAL_FFN), name, output)
        with pytest.raises(UserError, match="is not an empty folder: name a new one"):
            import_folder(tmp_path / "out.pt", "torch", tmp_path)
        assert (tmp_path / "out.pt").read_text() == "precious"

    def test_only_our_models_are_exported(self, tmp_path, opus):
        with pytest.raises(UserError, match="model_type is 'marian', not 'vanilla_transformer': only our"):
            export_model(opus, "torch", tmp_path / "out.pt")
        with pytest.raises(UserError, match=r"config.json: cannot be read"):
            export_model(tmp_path, "torch", tmp_path / "out.pt")


class TestCommandLine:
    def test_there_and_back(self, tmp_path, capsys):
        twin = tutorial(norm_first=False)
        path = saved(tmp_path, twin.state_dict())
        ours, back = tmp_path / "ours", tmp_path / "back.pt"
        command = ["import", str(path), "--format", "torch", "--output", str(ours), "--num_heads", "4"]
        assert main([*command, "--layer_norm_eps", "1e-5", "--scale_embedding"]) == 0
        assert f"the model is in {ours}" in capsys.readouterr().out
        assert_same(VanillaTransformerForConditionalGeneration.from_pretrained(ours), twin)
        assert main(["export", str(ours), "--format", "torch", "--output", str(back)]) == 0
        printed = capsys.readouterr().out
        assert "torch.nn.Transformer(d_model=32, nhead=4" in printed
        assert f"the export is in {back}" in printed
        for name, tensor in torch.load(back, weights_only=True).items():
            torch.testing.assert_close(tensor, twin.state_dict()[name], atol=1e-5, rtol=0)

    def test_a_mistake_is_one_line(self, tmp_path, capsys):
        path = saved(tmp_path, tutorial().state_dict())
        command = ["import", str(path), "--format", "torch", "--output", str(tmp_path / "ours")]
        assert main([*command, "--num_heads", "5"]) == 2
        error = (
            f"vanilla-transformer import: {path}: 32 rows of the query projections do not divide into "
            "5 attention heads: pass --num_heads"
        )
        assert capsys.readouterr().err.strip() == error
        assert main([*command, "--norm_position", "middle"]) == 2
        assert "this model cannot be expressed: norm_position='middle'" in capsys.readouterr().err

    @pytest.mark.parametrize("command", ["import", "export"])
    def test_help_lists_the_formats(self, capsys, command):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        printed = capsys.readouterr().out
        assert all(f"  {name} " in printed for name in FORMATS)
