"""`translation`: order, batches, scores, and what it refuses."""

import math

import pytest
import torch
from transformers import MarianConfig, MarianMTModel, T5Config, T5ForConditionalGeneration

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.tokenization_vanilla_transformer import joint_tokenizer, learn_backend
from hf_vanilla_transformer.translation import load_model, score_pairs, translate, translate_nbest

TEXT = ["the old man sleeps .", "a dog sees the small cat .", "the cat runs .", "who sees a dog ?", "the man runs ."]
TEXT *= 4


@pytest.fixture(scope="module")
def tokenizer():
    return joint_tokenizer(learn_backend(TEXT, vocab_size=60))


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(1)
    config = VanillaTransformerConfig.preset("test", vocab_size=len(tokenizer))
    model = VanillaTransformerForConditionalGeneration(config).eval()
    model.generation_config.max_length = 64
    with torch.no_grad():  # a random model says the same to everything, unless it listens to the source loudly
        for layer in model.model.decoder.stack.layers:
            layer.encoder_attn.out_proj.weight.mul_(8)
    return model


def alone(model, tokenizer, sentence, **options):
    """One sentence through plain `generate()`."""
    written = model.generate(**tokenizer([sentence], return_tensors="pt"), **{"max_length": 64, **options})
    return tokenizer.decode(written[0], skip_special_tokens=True)


@pytest.mark.parametrize("beams", [1, 3])
def test_each_sentence_is_translated_as_if_alone_and_in_its_place(model, tokenizer, beams):
    sentences = [TEXT[1], TEXT[0], TEXT[3], TEXT[2]]
    expected = [alone(model, tokenizer, sentence, num_beams=beams) for sentence in sentences]
    assert len(set(expected)) > 1, "the model must tell sentences apart, or the order is not tested"
    for budget in (20, 10_000):
        assert translate(model, tokenizer, sentences, num_beams=beams, max_tokens_per_batch=budget) == expected


def test_one_text_is_no_list(model, tokenizer):
    with pytest.raises(UserError, match="one text came where a list of sentences belongs"):
        translate(model, tokenizer, "a dog")


def test_an_empty_line_stays_empty_in_its_place(model, tokenizer):
    translations = translate(model, tokenizer, ["", TEXT[0], "   ", TEXT[1]], num_beams=1)
    assert translations[0] == translations[2] == ""
    expected = [alone(model, tokenizer, text, num_beams=1) for text in (TEXT[0], TEXT[1])]
    assert [translations[1], translations[3]] == expected
    assert any(expected)
    assert translate(model, tokenizer, []) == []


def test_without_a_maximum_the_papers_holds(model, tokenizer, monkeypatch):
    monkeypatch.setattr(model.generation_config, "max_length", None)
    source = tokenizer(TEXT[2])["input_ids"]
    [text] = translate(model, tokenizer, [TEXT[2]], num_beams=1)
    assert text == alone(model, tokenizer, TEXT[2], num_beams=1, max_length=len(source) + 50)


@pytest.mark.parametrize(("allowed", "written"), [(3, 3), (1000, 63)])
def test_a_maximum_of_new_tokens_ends_where_the_model_ends(model, tokenizer, monkeypatch, caplog, allowed, written):
    monkeypatch.setattr(model.generation_config, "max_new_tokens", allowed)
    monkeypatch.setattr(model.generation_config, "suppress_tokens", [tokenizer.eos_token_id])
    assert model.config.max_position_embeddings == 64
    [text] = translate(model, tokenizer, [TEXT[2]], num_beams=1)
    assert text == alone(model, tokenizer, TEXT[2], num_beams=1, max_new_tokens=written, max_length=None)
    assert "seem to have been set" not in caplog.text


def test_nbest_is_ranked_and_its_first_is_the_translation(model, tokenizer):
    results = translate_nbest(model, tokenizer, [TEXT[0], "", TEXT[1]], nbest=3, num_beams=4)
    assert [len(hypotheses) for hypotheses in results] == [3, 1, 3]
    for hypotheses in results:
        scores = [hypothesis.score for hypothesis in hypotheses]
        assert scores == sorted(scores, reverse=True)
    best = translate(model, tokenizer, [TEXT[0], "", TEXT[1]], num_beams=4)
    assert [hypotheses[0].text for hypotheses in results] == best


def test_greedy_score_is_the_mean_log_probability_of_what_was_written(model, tokenizer):
    batch = tokenizer([TEXT[0]], return_tensors="pt")
    written = model.generate(**batch, num_beams=1, max_length=64)
    logits = model(**batch, decoder_input_ids=written[:, :-1]).logits.log_softmax(-1)
    expected = logits.gather(2, written[:, 1:, None]).mean().item()
    [[hypothesis]] = translate_nbest(model, tokenizer, [TEXT[0]], num_beams=1)
    assert hypothesis.score == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("beams", [1, 3])
def test_scores_are_the_same_where_transformers_searches(model, tokenizer, beams, monkeypatch):
    """Which it does for options that our own searches do not know, such as this one, here without an effect."""
    batches = {"num_beams": beams, "max_tokens_per_batch": 1}  # a sentence each
    expected = translate_nbest(model, tokenizer, TEXT, **batches)
    monkeypatch.setattr(model.generation_config, "max_time", 1000.0)
    found = translate_nbest(model, tokenizer, TEXT, **batches)
    assert [one.text for [one] in found] == [one.text for [one] in expected]
    assert [one.score for [one] in found] == pytest.approx([one.score for [one] in expected], abs=1e-5)
    assert min(abs(one.score) for [one] in found) > 1e-3


def test_the_length_penalty_of_the_paper(model, tokenizer):
    """Scores are log-probability / ((5 + length) / 6)^alpha, and the model is asked for what the caller asked for."""
    for alpha in (0.6, 2.0):
        options = {"num_beams": 4, "length_penalty": alpha, "length_penalty_type": "wu"}
        [hypotheses] = translate_nbest(model, tokenizer, [TEXT[0]], nbest=4, **options)
        output = model.generate(
            **tokenizer([TEXT[0]], return_tensors="pt"),
            **options,
            num_return_sequences=4,
            return_dict_in_generate=True,
            output_scores=True,
        )
        texts = tokenizer.batch_decode(output.sequences, skip_special_tokens=True)
        steps = model.compute_transition_scores(output.sequences, output.scores, output.beam_indices)
        lengths = output.sequences[:, 1:].ne(tokenizer.pad_token_id).sum(1)
        expected = steps.sum(1) / ((5 + lengths) / 6) ** alpha
        assert [hypothesis.text for hypothesis in hypotheses] == texts
        assert [hypothesis.score for hypothesis in hypotheses] == pytest.approx(expected.tolist(), rel=1e-4)
        assert translate(model, tokenizer, [TEXT[0]], **options) == texts[:1]


@pytest.mark.parametrize("penalty", [{"length_penalty": 0.6}, {"length_penalty_type": "wu"}])
@pytest.mark.parametrize("search", [{"num_beams": 1}, {"top_k": 5}])
def test_a_length_penalty_without_beams(model, tokenizer, search, penalty):
    for function in (translate, translate_nbest):
        with pytest.raises(UserError, match=r"^a length penalty ranks the translations of several beams, and this"):
            function(model, tokenizer, [TEXT[0]], **search, **penalty)


def test_a_length_penalty_that_the_model_does_not_know(model, tokenizer):
    with pytest.raises(UserError, match=r"^length_penalty_type='Wu' is not one of average, wu$"):
        translate(model, tokenizer, [TEXT[0]], length_penalty_type="Wu")
    other = MarianMTModel(
        MarianConfig(
            vocab_size=len(tokenizer),
            d_model=8,
            encoder_layers=1,
            decoder_layers=1,
            encoder_ffn_dim=8,
            decoder_ffn_dim=8,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            decoder_start_token_id=tokenizer.bos_token_id,
        )
    ).eval()
    with pytest.raises(UserError, match="length_penalty_type is an option of our models: leave it out for marian"):
        translate(other, tokenizer, [TEXT[0]], num_beams=2, length_penalty_type="wu")
    assert len(translate_nbest(other, tokenizer, [TEXT[0]], nbest=2, num_beams=2, length_penalty=0.6)[0]) == 2


def test_more_translations_than_beams_is_an_error(model, tokenizer):
    with pytest.raises(UserError, match="3 translations of each sentence need at least as many beams, not 2"):
        translate_nbest(model, tokenizer, [TEXT[0]], nbest=3, num_beams=2)
    for options in ({"nbest": 0}, {"nbest": -1}, {"num_beams": 0}):
        with pytest.raises(UserError, match=r"^(nbest|num_beams): (0|-1) is below 1$"):
            translate_nbest(model, tokenizer, [TEXT[0]], **options)


def test_samples_are_of_the_most_probable_tokens(model, tokenizer):
    torch.manual_seed(5)
    results = translate_nbest(model, tokenizer, TEXT[:2], nbest=20, top_k=3)
    assert [len(samples) for samples in results] == [20, 20]
    assert all(len({sample.text for sample in samples}) > 10 for samples in results)
    batch = tokenizer(TEXT[:1], return_tensors="pt")
    torch.manual_seed(5)
    written = model.generate(**batch, do_sample=True, top_k=3, num_return_sequences=20, max_length=64)
    logits = model(input_ids=batch["input_ids"].expand(20, -1), decoder_input_ids=written[:, :-1]).logits
    chosen = written[:, 1:]
    real = chosen.ne(tokenizer.pad_token_id)
    rank = logits.gt(logits.gather(2, chosen[..., None])).sum(-1)
    assert rank[real].unique().tolist() == [0, 1, 2]
    torch.manual_seed(5)
    alone = translate_nbest(model, tokenizer, TEXT[:1], nbest=20, top_k=3)[0]
    assert [sample.text for sample in alone] == tokenizer.batch_decode(written, skip_special_tokens=True)
    means = (logits.log_softmax(-1).gather(2, chosen[..., None])[..., 0] * real).sum(1) / real.sum(1)
    assert [sample.score for sample in alone] == pytest.approx(means.tolist(), abs=1e-4)


def test_the_generator_of_torch_draws_the_samples(model, tokenizer):
    def sampled(seed, **options):
        torch.manual_seed(seed)
        return translate(model, tokenizer, TEXT[:4], **options)

    assert sampled(1, top_k=0) == sampled(1, top_k=0) != sampled(2, top_k=0)
    best = translate(model, tokenizer, TEXT[:4], num_beams=1)
    assert sampled(1, top_k=0, temperature=1e-6) == sampled(1, top_k=1) == best != sampled(1, top_k=0, temperature=1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": -1}, "top_k: -1 is below 0"),
        ({"top_k": 5, "temperature": 0.0}, "temperature: 0.0 is not above 0"),
        ({"temperature": 0.5}, "temperature is for samples: give top_k too"),
        ({"top_k": 5, "num_beams": 4}, "top_k draws samples, num_beams=4 searches: give one of them"),
        ({"top_k": 5, "nbest": 0}, "nbest: 0 is below 1"),
    ],
)
def test_samples_that_cannot_be_drawn(model, tokenizer, options, message):
    with pytest.raises(UserError, match=message):
        translate_nbest(model, tokenizer, TEXT[:1], **options)


def test_a_sentence_that_is_too_long_is_named_before_anything_is_translated(model, tokenizer, monkeypatch):
    monkeypatch.setattr(model, "generate", lambda **_: pytest.fail("translated although a line does not fit"))
    with pytest.raises(UserError, match=r"line 2: \d+ tokens, but the model reads at most 64 \(max_position"):
        translate(model, tokenizer, [TEXT[0], "dog " * 100])


def test_score_is_the_sum_of_log_probabilities_one_token_at_a_time(model, tokenizer):
    source, target = TEXT[0], TEXT[3]
    batch = tokenizer([source], return_tensors="pt")
    labels = tokenizer(text_target=target)["input_ids"]
    prefix, total = [model.config.decoder_start_token_id], 0.0
    for label in labels:
        logits = model(**batch, decoder_input_ids=torch.tensor([prefix])).logits[0, -1]
        total += math.log(torch.softmax(logits.double(), -1)[label].item())
        prefix.append(label)
    for budget in (1, 10_000):
        scores = score_pairs(
            model, tokenizer, [TEXT[1], source, TEXT[2]], [TEXT[1], target, TEXT[0]], max_tokens_per_batch=budget
        )
        assert scores[1].log_probability == pytest.approx(total, abs=1e-4)
        assert scores[1].tokens == len(labels)


def test_what_cannot_be_scored(model, tokenizer):
    with pytest.raises(UserError, match="2 source sentences but 1 translations"):
        score_pairs(model, tokenizer, ["a", "b"], ["c"])
    with pytest.raises(UserError, match="line 2: an empty sentence has no score"):
        score_pairs(model, tokenizer, [TEXT[0], TEXT[1]], [TEXT[0], " "])
    with pytest.raises(UserError, match=r"line 1: .* tokens, but the model reads at most 64"):
        score_pairs(model, tokenizer, [TEXT[0]], ["dog " * 100])


def test_models_without_positions_read_any_length(tokenizer):
    """T5 has relative ones."""
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    special = {name: getattr(tokenizer, name) for name in ("pad_token_id", "eos_token_id")}
    config = T5Config(**sizes, **special, decoder_start_token_id=tokenizer.bos_token_id)
    model = T5ForConditionalGeneration(config).eval()
    model.generation_config.max_length = 8
    long = "dog " * 600
    assert len(translate(model, tokenizer, [TEXT[0], long], num_beams=2)) == 2
    assert score_pairs(model, tokenizer, [long], [TEXT[0]])[0].log_probability < 0


def test_load_model_names_what_is_wrong(tmp_path, model, tokenizer):
    with pytest.raises(UserError, match="nowhere: no such folder"):
        load_model(str(tmp_path / "nowhere"))
    model.save_pretrained(tmp_path)
    other = joint_tokenizer(learn_backend([f"{text} and {n}" for n, text in enumerate(TEXT)], vocab_size=90))
    other.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"the tokenizer does not fit the model: .* tokens, but vocab_size="):
        load_model(str(tmp_path))
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="device gpu: Expected one of cpu, cuda"):
        load_model(str(tmp_path), device="gpu")
    loaded, again = load_model(str(tmp_path), device="cpu")
    assert translate(loaded, again, TEXT[:2], num_beams=1) == translate(model, tokenizer, TEXT[:2], num_beams=1)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"no model to load \(.*ncomplete"):
        load_model(str(tmp_path))


def test_special_tokens_that_differ_do_not_fit(tmp_path, model, tokenizer):
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"pad_token_id": 1', '"pad_token_id": 4'))
    with pytest.raises(UserError, match="its pad token is 1, the model's is 4"):
        load_model(str(tmp_path))
