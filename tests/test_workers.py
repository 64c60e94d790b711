"""`Workers`: what one process translates, in the same order, and the same complaints."""

import pytest
import torch

from hf_vanilla_transformer import workers as module
from hf_vanilla_transformer.cli import main
from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.int8 import quantize_linear_layers
from hf_vanilla_transformer.tokenization_vanilla_transformer import joint_tokenizer, learn_backend
from hf_vanilla_transformer.translation import translate_nbest
from hf_vanilla_transformer.workers import Workers
from tiny_models import random_model

TEXT = ["the old man sleeps", "a dog sees the small cat", "", "the cat runs", "who sees a dog"]


@pytest.fixture(scope="module")
def tokenizer():
    return joint_tokenizer(learn_backend(TEXT * 3, vocab_size=60))


@pytest.fixture
def model(tokenizer):
    model = random_model(vocab_size=len(tokenizer))
    model.generation_config.update(num_beams=3, early_stopping=True, max_length=20)
    return model


@pytest.mark.parametrize("prepare", [lambda model: model, quantize_linear_layers], ids=["float32", "int8"])
def test_the_translations_of_one_process(model, tokenizer, prepare):
    model = prepare(model)
    expected = translate_nbest(model, tokenizer, TEXT, nbest=2, max_tokens_per_batch=1)  # each sentence for itself
    with Workers(model, tokenizer, 2) as workers:
        assert workers.translate(TEXT, max_tokens_per_batch=1) == [hypotheses[0].text for hypotheses in expected]
        for _ in range(2):  # the processes stay
            found = workers.translate_nbest(TEXT, nbest=2, max_tokens_per_batch=1)
            assert [[h.text for h in hypotheses] for hypotheses in found] == [[h.text for h in one] for one in expected]
            for hypotheses, others in zip(found, expected, strict=True):
                assert [h.score for h in hypotheses] == pytest.approx([h.score for h in others], abs=1e-5)
    assert len({one[0].text for one in expected}) > 2


def test_samples_do_not_depend_on_who_draws_them(model, tokenizer):
    found = []
    with Workers(model, tokenizer, 2) as workers:
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            found.append(workers.translate(TEXT[:2] * 4, top_k=0))
    assert found[0] == found[1] != found[2]
    assert len(set(found[0])) > 2, "the same sentence got the same sample everywhere"


def test_nothing_to_translate(model, tokenizer):
    with Workers(model, tokenizer, 2) as workers:
        assert workers.translate_nbest([]) == []


def test_mistakes_are_said_as_by_one_process(model, tokenizer):
    with Workers(model, tokenizer, 2) as workers:
        with pytest.raises(UserError, match=r"line 2: .* tokens, but the model reads at most"):
            workers.translate_nbest(["a dog", "dog " * 3000])
        with pytest.raises(UserError, match="4 translations of each sentence need at least as many beams, not 3"):
            workers.translate_nbest(TEXT, nbest=4)
    model.model.register_forward_hook(lambda *_: None)
    with pytest.raises(UserError, match=r"other processes cannot get this model \(.*\): load it anew for them"):
        Workers(model, tokenizer, 2)
    with pytest.raises(UserError, match="several processes are for CPUs, the model is on meta"):
        Workers(model.to(torch.device("meta")), tokenizer, 2)


def test_workers_of_the_command(model, tokenizer, tmp_path, capsys):
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    outputs = []
    for options in ([], ["--workers", "2"]):
        assert main(["translate", str(tmp_path), *TEXT, *options]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert main(["translate", str(tmp_path), "a", "--workers", "0"]) == 2
    assert "--workers 0 is below 1" in capsys.readouterr().err


def test_workers_share_the_threads(model, tokenizer, monkeypatch):
    seen = []
    monkeypatch.setattr(module, "ProcessPoolExecutor", lambda *args: seen.append(args[-1][1]))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    for processes in (2, 3, 20):
        Workers(model, tokenizer, processes)
    assert seen == [4, 2, 1]
