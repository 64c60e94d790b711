"""PEFT: adapters that are trained, saved, loaded and merged, on every part of the model."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from tiny_models import LABELS, SEPARATE, SOURCE, TARGET, losses, random_model, trained

peft = pytest.importorskip("peft", reason="needs the extra `peft`")
load = VanillaTransformerForConditionalGeneration.from_pretrained
TWO_WAY = {"share_encoder_decoder_embeddings": False}
UNTIED = {**TWO_WAY, "tie_word_embeddings": False}
WAYS = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "all linear layers": {"target_modules": "all-linear"},
    "feed-forward and embeddings": {"target_modules": ["fc1", "fc2", "embed_tokens"]},
    "output projection": {"target_modules": ["q_proj", "lm_head"]},
    "whole modules": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
}


def adapted(model, **options):
    """With an adapter that does something from the start."""
    config = peft.LoraConfig(task_type="SEQ_2_SEQ_LM", r=4, init_lora_weights=False, **options)
    return peft.get_peft_model(model, config)


@torch.no_grad()
def logits_of(model):
    return model.eval()(SOURCE, decoder_input_ids=TARGET).logits


@pytest.mark.parametrize("way", WAYS)
class TestLora:
    def test_trained_saved_loaded_and_merged(self, tmp_path, way):
        """Without tied weights every part can be adapted on its own."""
        overrides = {**UNTIED, "encoder_vocab_size": 31}
        random_model(**overrides).save_pretrained(tmp_path / "base")
        model = adapted(load(tmp_path / "base"), **WAYS[way])
        frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
        start = logits_of(model)
        assert not torch.allclose(start, logits_of(load(tmp_path / "base")))

        curve = losses(trained(model, tmp_path / "run"))
        assert curve[-1] < curve[0]
        trained_logits = logits_of(model)
        assert not torch.allclose(trained_logits, start)
        assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)
        translations = model.generate(input_ids=SOURCE, max_length=10, num_beams=3)

        model.save_pretrained(tmp_path / "adapter")
        loaded = peft.PeftModel.from_pretrained(load(tmp_path / "base"), tmp_path / "adapter")
        torch.testing.assert_close(logits_of(loaded), trained_logits, atol=0, rtol=0)
        automatic = peft.AutoPeftModelForSeq2SeqLM.from_pretrained(tmp_path / "adapter")
        torch.testing.assert_close(logits_of(automatic), trained_logits, atol=0, rtol=0)

        merged = loaded.merge_and_unload()
        torch.testing.assert_close(logits_of(merged), trained_logits, atol=1e-4, rtol=1e-4)
        assert merged.generate(SOURCE, max_length=10, num_beams=3).tolist() == translations.tolist()
        merged.save_pretrained(tmp_path / "merged")
        torch.testing.assert_close(logits_of(load(tmp_path / "merged")), logits_of(merged), atol=0, rtol=0)

    def test_the_loss_of_training_is_that_of_the_logits(self, way):
        """The adapter on the output projection takes part, in the value and in the gradients."""
        model = adapted(random_model(**UNTIED, label_smoothing=0.0), **WAYS[way])
        expected = model.eval()(SOURCE, labels=LABELS).loss
        loss = model.train()(SOURCE, labels=LABELS).loss
        torch.testing.assert_close(loss, expected)
        loss.backward()
        missing = [n for n, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
        assert missing == []


class TestTiedWeights:
    @pytest.mark.parametrize("way", ["attention", "all linear layers"])
    def test_stay_tied(self, tmp_path, way):
        model = adapted(random_model(), **WAYS[way])
        expected = logits_of(model)
        model.merge_and_unload().save_pretrained(tmp_path)
        loaded = load(tmp_path)
        torch.testing.assert_close(logits_of(loaded), expected, atol=1e-4, rtol=1e-4)
        assert loaded.lm_head.weight is loaded.model.decoder.embed_tokens.weight is loaded.get_input_embeddings().weight

    @pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied")
    @pytest.mark.parametrize("overrides", [TWO_WAY, SEPARATE], ids=["one vocabulary", "two"])
    def test_stay_tied_where_the_source_has_its_own(self, tmp_path, overrides):
        """peft compares the output projection with the source embedding, and takes two-way tying for none."""
        model = adapted(random_model(**overrides), **WAYS["attention"])
        expected = logits_of(model)
        merged = model.merge_and_unload()
        assert not merged.config.tie_word_embeddings
        merged.save_pretrained(tmp_path)
        loaded = load(tmp_path)
        torch.testing.assert_close(logits_of(loaded), expected, atol=1e-4, rtol=1e-4)
        assert loaded.lm_head.weight is loaded.model.decoder.embed_tokens.weight

    def test_rows_that_are_trained_stay_tied(self):
        model = peft.get_peft_model(
            random_model(),
            peft.LoraConfig(task_type="SEQ_2_SEQ_LM", target_modules=["q_proj"], trainable_token_indices=[5, 6, 7]),
        )
        with torch.no_grad():
            next(p for name, p in model.named_parameters() if "trainable_tokens_delta" in name).add_(1.0)
        expected = logits_of(model)
        tables = [half.embed_tokens.eval()(torch.arange(10)) for half in (model.get_encoder(), model.get_decoder())]
        assert torch.equal(*tables)
        assert not torch.equal(tables[0], random_model().get_encoder().embed_tokens(torch.arange(10)))
        torch.testing.assert_close(logits_of(model.merge_and_unload()), expected)

    @pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
    @pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied")
    def test_untied_by_merging(self, tmp_path):
        """PEFT changes one of the two fields that decide; saving says which is the other, and with it all is well."""
        model = adapted(random_model(), **WAYS["whole modules"])
        with torch.no_grad():
            model.base_model.model.lm_head.modules_to_save["default"].weight.add_(1.0)
        expected = logits_of(model)
        merged = model.merge_and_unload()
        with pytest.raises(StrictDataclassError, match="set share_encoder_decoder_embeddings=False too"):
            merged.save_pretrained(tmp_path)
        merged.config.share_encoder_decoder_embeddings = False
        merged.save_pretrained(tmp_path)
        torch.testing.assert_close(logits_of(load(tmp_path)), expected, atol=1e-4, rtol=1e-4)


def test_accumulation_changes_nothing(tmp_path):
    """The Trainer finds through the adapter that the model divides by the tokens of the whole step itself."""
    curves = []
    for accumulation in (1, 4):
        torch.manual_seed(0)
        trainer = trained(
            adapted(random_model(), **WAYS["attention"]),
            tmp_path,
            per_device_train_batch_size=4 // accumulation,
            gradient_accumulation_steps=accumulation,
        )
        curves.append(losses(trainer))
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated")
def test_activation_checkpointing(tmp_path):
    curves = [
        losses(trained(adapted(random_model(), **WAYS["attention"]), tmp_path, gradient_checkpointing=checkpointing))
        for checkpointing in (False, True)
    ]
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)
