"""`Ensemble`: several models that search together."""

import pytest
import torch
from transformers import GenerationConfig

from hf_vanilla_transformer.ensemble import Ensemble
from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.tokenization_vanilla_transformer import joint_tokenizer, learn_backend
from hf_vanilla_transformer.translation import load_ensemble, translate, translate_nbest
from reference_twins import beam_search
from tiny_models import BOS, EOS, PAD, SEPARATE, SOURCE, TARGET, V, random_model

TEXT = ["the old man sleeps", "a dog sees the small cat", "the cat runs", "who sees a dog"]
SEARCH = GenerationConfig(
    num_beams=3,
    early_stopping=True,
    max_length=12,
    num_return_sequences=2,
    bos_token_id=BOS,
    eos_token_id=EOS,
    pad_token_id=PAD,
    decoder_start_token_id=BOS,
)
OTHERS = {"like the first": {}, "deeper": {"decoder_layers": 3}, "wider": {"d_model": 48, "norm_position": "pre"}}


def mean_log_probabilities(members, source, target):
    """Each member by itself, without a cache."""
    probabilities = [member(source, decoder_input_ids=target).logits.softmax(dim=-1) for member in members]
    return torch.stack(probabilities).mean(dim=0).log()


@pytest.fixture(params=OTHERS)
def members(request):
    return [random_model(seed=0), random_model(seed=1, **OTHERS[request.param])]


@torch.no_grad()
def test_the_next_word_has_the_mean_probability(members):
    found = Ensemble(members)(SOURCE, SOURCE.ne(PAD), TARGET).logits
    torch.testing.assert_close(found, mean_log_probabilities(members, SOURCE, TARGET))
    torch.testing.assert_close(Ensemble(members)(SOURCE, decoder_input_ids=TARGET).logits, found)
    with pytest.raises(ValueError, match="an ensemble is not trained: it has no loss of labels"):
        Ensemble(members)(SOURCE, labels=TARGET)


def test_beam_search_is_that_of_the_mean(members):
    found = Ensemble(members).generate(SOURCE, generation_config=SEARCH).tolist()
    assert found == beam_search(lambda *ids: mean_log_probabilities(members, *ids), SOURCE, SEARCH, V)
    assert found != members[0].generate(SOURCE, generation_config=SEARCH).tolist()


def test_searches_of_transformers_find_the_same(members):
    """They are taken where scores of each step are wanted, and make a cache of another kind."""
    ensemble = Ensemble(members)
    for options in ({"num_beams": 3}, {"num_beams": 1}):
        options |= {"max_length": 12, "return_dict_in_generate": True}
        own, theirs = (ensemble.generate(SOURCE, **options, output_scores=scores) for scores in (False, True))
        assert own.sequences.tolist() == theirs.sequences.tolist()


@pytest.mark.parametrize("overrides", [{}, SEPARATE], ids=["joint", "separate"])
def test_an_ensemble_of_one_is_the_model(overrides):
    model = random_model(**overrides)
    assert Ensemble([model]).generate(SOURCE, generation_config=SEARCH).tolist() == (
        model.generate(SOURCE, generation_config=SEARCH).tolist()
    )


def test_prompts_padded_on_the_left(members):
    ensemble = Ensemble(members)
    prompts = torch.tensor([[BOS, 9], [PAD, BOS], [BOS, 11]])
    options = {"num_beams": 3, "max_new_tokens": 8}
    found = ensemble.generate(SOURCE, decoder_input_ids=prompts, decoder_attention_mask=prompts.ne(PAD), **options)
    alone = ensemble.generate(SOURCE[1:2], decoder_input_ids=prompts[1:2, 1:], **options)[0, 1:]
    assert found[1, 2 : 2 + len(alone)].tolist() == alone.tolist()


def test_vocabularies_must_not_differ():
    with pytest.raises(UserError, match="agree in this: vocab_size is 20 and 21"):
        Ensemble([random_model(), random_model(vocab_size=21)])


def test_it_is_not_saved(tmp_path):
    with pytest.raises(UserError, match="an ensemble cannot be saved: save its members"):
        Ensemble([random_model()]).save_pretrained(tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.fixture
def folders(tmp_path):
    """Three models of one tokenizer, and one of another."""
    names = []
    for number, text in enumerate([TEXT, TEXT, [f"{line} and {line[::-1]}" for line in TEXT]]):
        tokenizer = joint_tokenizer(learn_backend(text * 3, vocab_size=60))
        names.append(str(tmp_path / f"model{number}"))
        model = random_model(seed=number, vocab_size=len(tokenizer))
        model.generation_config.update(num_beams=2, early_stopping=True, max_length=20)
        model.save_pretrained(names[-1])
        tokenizer.save_pretrained(names[-1])
    return names


def test_saved_models_translate_together(folders):
    together, tokenizer = load_ensemble(folders[:2], device="cpu")
    found = translate_nbest(together, tokenizer, TEXT, nbest=2)
    expected = Ensemble([load_ensemble([name], device="cpu")[0].members[0] for name in folders[:2]])
    batch = tokenizer(TEXT, padding=True, return_tensors="pt")
    written = expected.generate(**batch, num_beams=2, num_return_sequences=2, max_length=20, early_stopping=True)
    texts = tokenizer.batch_decode(written, skip_special_tokens=True)
    assert [hypothesis.text for hypotheses in found for hypothesis in hypotheses] == texts
    assert translate(together, tokenizer, TEXT) == texts[::2]


def test_tokenizers_must_not_differ(folders):
    with pytest.raises(UserError, match=r"model2 has another tokenizer than .*model0"):
        load_ensemble([folders[0], folders[2]], device="cpu")


def test_only_our_models_make_an_ensemble(folders, tmp_path):
    from transformers import MarianConfig, MarianMTModel

    tokenizer = load_ensemble(folders[:1], device="cpu")[1]
    sizes = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": len(tokenizer)}
    special = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    name = tmp_path / "marian"
    MarianMTModel(MarianConfig(**sizes, **special, decoder_start_token_id=special["bos_token_id"])).save_pretrained(
        name
    )
    tokenizer.save_pretrained(name)
    with pytest.raises(UserError, match="is a model of type marian: only ours make an ensemble"):
        load_ensemble([folders[0], str(name)], device="cpu")


def test_members_compute_alike():
    with pytest.raises(UserError, match=r"agree in this: dtype is torch\.float32 and torch\.bfloat16"):
        Ensemble([random_model(), random_model().bfloat16()])
    other = random_model()
    other.set_attn_implementation("eager")
    with pytest.raises(UserError, match="agree in this: attn_implementation is sdpa and eager"):
        Ensemble([random_model(), other])


@pytest.mark.parametrize("name", ["encoder_vocab_size", "pad_token_id", "eos_token_id", "decoder_start_token_id"])
def test_members_share_special_tokens_and_source_vocabularies(name):
    other = random_model()
    setattr(other.config, name, 9)
    with pytest.raises(UserError, match=rf"agree in this: {name} is \w+ and 9"):
        Ensemble([random_model(), other])


def test_it_reads_as_far_as_all_of_its_members():
    members = [random_model(max_position_embeddings=length) for length in (30, 20)]
    assert Ensemble(members).config.max_position_embeddings == 20
