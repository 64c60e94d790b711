"""New sizes of vocabularies: one, or two of different size; embeddings, output projection, bias and configuration."""

import pytest
import torch
from torch import nn

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration, VanillaTransformerModel
from tiny_models import SEPARATE, SOURCE, TARGET, V, embedding_tables, random_model

TYING = {
    "three-way": {},
    "two-way": {"share_encoder_decoder_embeddings": False},
    "none": {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
}
KEPT = V - 4  # tokens that every size below has
source_ids, target_ids = SOURCE.clamp(max=KEPT - 1), TARGET


def sharing(model):
    return [x is y for x, y in zip(embedding_tables(model), embedding_tables(model)[1:], strict=False)]


@torch.no_grad()
def logits_of(model):
    return model(source_ids, decoder_input_ids=target_ids).logits


def check_consistent(model, source_size, target_size):
    """Every tensor, module and field agrees on the sizes."""
    joint = model.config.encoder_vocab_size is None
    assert [len(table) for table in embedding_tables(model)] == [source_size, target_size, target_size]
    assert model.model.encoder.embed_tokens.num_embeddings == source_size
    assert model.model.decoder.embed_tokens.num_embeddings == model.lm_head.out_features == target_size
    assert model.config.vocab_size == target_size
    assert model.config.encoder_vocab_size == (None if joint else source_size)
    assert model.lm_head.bias is None or len(model.lm_head.bias) == target_size


def check_round_trip(model, folder):
    model.save_pretrained(folder)
    loaded = VanillaTransformerForConditionalGeneration.from_pretrained(folder)
    torch.testing.assert_close(logits_of(loaded), logits_of(model), atol=0, rtol=0)
    assert sharing(loaded) == sharing(model)


def check_training_step(model):
    model.train()(source_ids, labels=target_ids).loss.backward()
    assert all(parameter.grad.shape == parameter.shape for parameter in model.parameters())


@pytest.mark.parametrize("lm_head_bias", [False, True])
@pytest.mark.parametrize("size", [V + 7, KEPT])
class TestJoint:
    @pytest.mark.parametrize("name", TYING)
    def test_everything_is_resized(self, tmp_path, name, size, lm_head_bias):
        model = random_model(**TYING[name], lm_head_bias=lm_head_bias)
        before, tied = logits_of(model), sharing(model)
        assert model.resize_token_embeddings(size) is model.get_input_embeddings()
        check_consistent(model, size, size)
        assert sharing(model) == tied
        torch.testing.assert_close(logits_of(model)[..., :KEPT], before[..., :KEPT])
        check_round_trip(model, tmp_path)
        check_training_step(model)


@pytest.mark.parametrize("lm_head_bias", [False, True])
@pytest.mark.parametrize("tied", [False, True])
class TestTwoVocabularies:
    @pytest.mark.parametrize("size", [40, 25])
    def test_source(self, tmp_path, size, tied, lm_head_bias):
        model = random_model(**SEPARATE, tie_word_embeddings=tied, lm_head_bias=lm_head_bias)
        before = logits_of(model)
        assert model.resize_token_embeddings(size) is model.model.encoder.embed_tokens
        check_consistent(model, size, V)
        torch.testing.assert_close(logits_of(model), before, atol=0, rtol=0)
        check_round_trip(model, tmp_path)

    @pytest.mark.parametrize("size", [V + 7, KEPT, V + 11])  # V + 11 is the size of the source's vocabulary
    def test_target(self, tmp_path, size, tied, lm_head_bias):
        model = random_model(**SEPARATE, tie_word_embeddings=tied, lm_head_bias=lm_head_bias)
        before, sharing_before = logits_of(model), sharing(model)
        assert model.resize_decoder_token_embeddings(size) is model.model.decoder.embed_tokens
        check_consistent(model, SEPARATE["encoder_vocab_size"], size)
        assert sharing(model) == sharing_before == [False, tied]
        torch.testing.assert_close(logits_of(model)[..., :KEPT], before[..., :KEPT])
        check_round_trip(model, tmp_path)
        check_training_step(model)

    def test_both_and_translate(self, tied, lm_head_bias):
        model = random_model(**SEPARATE, tie_word_embeddings=tied, lm_head_bias=lm_head_bias)
        model.resize_token_embeddings(50)
        model.resize_decoder_token_embeddings(60)
        check_consistent(model, 50, 60)
        output = model.generate(
            torch.tensor([[49, 48, 3]]), max_length=6, output_logits=True, return_dict_in_generate=True
        )
        assert output.logits[0].shape == (1, 60)


def test_padded_to_a_multiple():
    joint, separate = random_model(), random_model(**SEPARATE)
    joint.resize_token_embeddings(pad_to_multiple_of=8)
    check_consistent(joint, 24, 24)
    separate.resize_token_embeddings(pad_to_multiple_of=8)
    separate.resize_decoder_token_embeddings(21, pad_to_multiple_of=16)
    check_consistent(separate, 32, 32)


def test_no_size_changes_nothing():
    for overrides in ({}, SEPARATE):
        model = random_model(**overrides)
        before = [table.clone() for table in embedding_tables(model)]
        assert model.resize_token_embeddings() is model.get_input_embeddings()
        assert all(torch.equal(x, y) for x, y in zip(embedding_tables(model), before, strict=True))
    assert model.resize_decoder_token_embeddings() is model.model.decoder.embed_tokens
    check_consistent(model, 31, V)


@pytest.mark.parametrize("tied", [False, True])
def test_new_rows(tied):
    """Around the mean of the old ones, or as at the start; a new token's bias is the average."""
    options = {"tie_word_embeddings": tied, "share_encoder_decoder_embeddings": tied, "lm_head_bias": True}
    model = random_model(**options)
    mean, bias = embedding_tables(model)[2].mean(0), model.lm_head.bias.mean()
    model.resize_token_embeddings(V + 500)
    for table in embedding_tables(model)[2:]:
        torch.testing.assert_close(table[V:].mean(0), mean, atol=0.1, rtol=0)
    torch.testing.assert_close(model.lm_head.bias[V:], bias.expand(500))
    model = random_model(**options)
    model.resize_token_embeddings(V + 500, mean_resizing=False)
    assert embedding_tables(model)[0][V:].std().item() == pytest.approx(32**-0.5, rel=0.05)


def test_what_was_frozen_stays_frozen():
    model = random_model(**TYING["none"], lm_head_bias=True).requires_grad_(False)
    model.resize_token_embeddings(V + 3)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_headless():
    for name in TYING:
        model = random_model(VanillaTransformerModel, **TYING[name])
        model.resize_token_embeddings(V + 3)
        assert len(model.encoder.embed_tokens.weight) == len(model.decoder.embed_tokens.weight) == V + 3
        assert model.config.vocab_size == V + 3
    model = random_model(VanillaTransformerModel, **SEPARATE)
    model.resize_decoder_token_embeddings(V + 3)
    assert isinstance(model.decoder.embed_tokens, nn.Embedding)
    assert (model.config.encoder_vocab_size, model.config.vocab_size) == (31, V + 3)


def test_the_second_door_is_for_two_vocabularies():
    for overrides in TYING.values():
        with pytest.raises(ValueError, match="resize_decoder_token_embeddings needs two vocabularies: a joint one is"):
            random_model(**overrides).resize_decoder_token_embeddings(40)
