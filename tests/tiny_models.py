"""A random model and a batch, for tests that compare one way of computing with another."""

import torch

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration

V, PAD, BOS, EOS = 20, 1, 2, 3
SOURCE = torch.tensor([[5, 6, 7, 8, 9, EOS], [10, 11, EOS, PAD, PAD, PAD], [12, 13, 14, 15, EOS, PAD]])
TARGET = torch.tensor([[BOS, 4, 5, 6], [BOS, 7, 8, 9], [BOS, 10, 11, 12]])
LABELS = torch.tensor([[4, 5, 6, EOS], [7, 8, EOS, -100], [10, EOS, -100, -100]])
SEPARATE = {"encoder_vocab_size": 31, "share_encoder_decoder_embeddings": False}


def random_model(head=VanillaTransformerForConditionalGeneration, seed=0, **overrides):
    """Evaluation mode, no dropout; norms and biases are random as well, and EOS is likely now and then."""
    torch.manual_seed(seed)
    config = VanillaTransformerConfig.preset("test", **{"vocab_size": V, "dropout": 0.0, **overrides})
    model = head(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def training_rows(count=16):
    """Sentence pairs of one length, so that every way of cutting them into batches is without padding."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"input_ids": 5, "labels": 4}
    return [{k: torch.randint(4, V, (n,), generator=generator) for k, n in shapes.items()} for _ in range(count)]


def trained(model, folder, **arguments):
    """A `Seq2SeqTrainer` after four steps of length 0.1.

    Not with Adam, which makes a large step of a gradient that is nothing but rounding.
    """
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    settings = {
        "use_cpu": True,
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "optim": "sgd",
        "learning_rate": 1.0,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    training_arguments = Seq2SeqTrainingArguments(folder, **{**settings, **arguments})
    trainer = Seq2SeqTrainer(model, training_arguments, train_dataset=training_rows())
    trainer.train()
    return trainer


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def embedding_tables(model):
    """Of the source, of the target, and the output projection."""
    return (model.model.encoder.embed_tokens.weight, model.model.decoder.embed_tokens.weight, model.lm_head.weight)
