"""Some batches of an epoch by us and by the peers, timed inside each trainer; and a single training step.

All get the same corpus, sizes, dropout, label smoothing, learning rate and clipping, and AdamW, fused wherever the
trainer has that option (JoeyNMT has not).
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback
from transformers.trainer_pt_utils import LabelSmoother

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.arguments import TrainingArguments
from hf_vanilla_transformer.batching import PairCollator, TokenBatchSampler, TrainingPairs
from hf_vanilla_transformer.embeddings import SinusoidalPositions
from hf_vanilla_transformer.loss import IGNORED
from hf_vanilla_transformer.modeling_vanilla_transformer import shift_right
from hf_vanilla_transformer.preparation import PreparedCorpus, token_lengths
from hf_vanilla_transformer.training import VanillaTransformerTrainer
from taking_turns import Round
from train_marian import marian_like

LEARNING_RATE = 1e-3
CLIPPING = 1.0


class Shape(NamedTuple):
    """A model and how it is trained here.

    Attributes:
        tokens: padded tokens of a batch; Seq2SeqTrainers may also take half or twice as many.
        parts: a round trains on one of so many parts of an epoch.
        trial: the same for trying a batch size.
    """

    preset: str
    tokens: int
    parts: int
    trial: int

    def config(self, vocab_size: int) -> VanillaTransformerConfig:
        return VanillaTransformerConfig.preset(self.preset, vocab_size=vocab_size)


TINY = Shape("multi30k-tiny", tokens=4096, parts=4, trial=12)
BASE = Shape("paper-base", tokens=2048, parts=29, trial=36)


def prepared(folder: str, shape: Shape) -> tuple[PreparedCorpus, VanillaTransformerConfig]:
    """What `prepare` of scripts/benchmark.py left in `folder`, and a model for it."""
    corpus = PreparedCorpus.load(Path(folder) / "prepared")
    corpus.train = corpus.train.select_columns(["input_ids", "labels"])
    return corpus, shape.config(len(corpus.tokenizer))


class StepClock(TrainerCallback):
    """Stands in the place of a collator; counts what is in its batches and notes when each step ends."""

    def __init__(self, collate: Callable):
        self.collate = collate
        self.batches: list[tuple[int, int, int]] = []  # target tokens, all tokens, all places
        self.ends: list[float] = []

    def __call__(self, examples: Sequence) -> Any:
        batch = self.collate(examples)
        self.count(batch["input_ids"].ne(1), batch["labels"].ne(IGNORED))
        return batch

    def count(self, is_source: Tensor, is_target: Tensor) -> None:
        target = int(is_target.sum())
        self.batches.append((target, int(is_source.sum()) + target, is_source.numel() + is_target.numel()))

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())

    def round(self) -> Round:
        """Of all steps but the first, which also makes the optimiser's state."""
        target, tokens, places = (sum(column) for column in zip(*self.batches[1 : len(self.ends)], strict=True))
        seconds = self.ends[-1] - self.ends[0]
        return {"work": target, "seconds": seconds, "padding": 1 - tokens / places, "steps": len(self.ends) - 1}


def trainer_settings(folder: Path, bf16: bool) -> dict[str, Any]:
    """What all of transformers' trainers are told; the fused AdamW is their default."""
    silent = {"save_strategy": "no", "eval_strategy": "no", "logging_strategy": "no", "report_to": "none"}
    recipe = {"learning_rate": LEARNING_RATE, "lr_scheduler_type": "constant", "warmup_steps": 0}
    recipe |= {"max_grad_norm": CLIPPING, "num_train_epochs": 1, "bf16": bf16, "use_cpu": True}
    return {**silent, **recipe, "output_dir": str(folder), "disable_tqdm": True, "dataloader_pin_memory": False}


class OurTrainer(VanillaTransformerTrainer):
    def __init__(self, part: slice, **kwargs: Any):
        super().__init__(**kwargs)
        self.part = part

    def get_train_dataloader(self) -> DataLoader:
        loader = super().get_train_dataloader()
        loader.batch_sampler.bounds = loader.batch_sampler.bounds[self.part]
        return loader


def our_trainer(folder: Path, tokenizer: Any, config: Any, pairs: Any, tokens: int, bf16: bool, part: slice) -> Round:
    clock = StepClock(PairCollator(config.pad_token_id))
    args = TrainingArguments(**trainer_settings(folder, bf16), max_tokens_per_batch=tokens, label_smoothing_factor=0.0)
    OurTrainer(
        part,
        model=VanillaTransformerForConditionalGeneration(config),  # which smooths the labels itself
        args=args,
        data_collator=clock,
        train_dataset=TrainingPairs(pairs),
        callbacks=[clock],
        train_lengths=np.maximum(*token_lengths(pairs)),
        eval_max_length=1,
    ).train()
    return clock.round()


class PlainTrainer(Seq2SeqTrainer):
    """Its groups of similar length are those of a whole epoch, of which it gets some batches."""

    def __init__(self, part: slice, **kwargs: Any):
        super().__init__(**kwargs)
        self.part = part

    def _get_train_sampler(self, *args: Any) -> list[int]:
        order, size = list(super()._get_train_sampler(*args)), self.args.per_device_train_batch_size
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        return [index for batch in batches[self.part] if len(batch) == size for index in batch]


def seq2seq_trainer(
    folder: Path, tokenizer: Any, config: Any, pairs: Any, tokens: int, bf16: bool, part: slice, marian: bool = False
) -> Round:
    model = marian_like(config) if marian else VanillaTransformerForConditionalGeneration(config)
    clock = StepClock(DataCollatorForSeq2Seq(tokenizer, model=model))
    args = Seq2SeqTrainingArguments(
        **trainer_settings(folder, bf16),
        per_device_train_batch_size=int(tokens / np.maximum(*token_lengths(pairs)).mean()),
        train_sampling_strategy="group_by_length",
        label_smoothing_factor=0.1 if marian else 0.0,
    )
    PlainTrainer(
        part,
        model=model,
        args=args,
        data_collator=clock,
        train_dataset=pairs,
        processing_class=tokenizer,
        callbacks=[clock],
    ).train()
    return clock.round()


def marian_trainer(*args: Any) -> Round:
    return seq2seq_trainer(*args, marian=True)


class TorchTransformer(nn.Module):
    """`torch.nn.Transformer` with one matrix for all embeddings, and dropout where the paper has it."""

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        nn.init.normal_(self.embedding.weight, std=config.d_model**-0.5)
        self.positions = SinusoidalPositions(256, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.transformer = nn.Transformer(
            config.d_model,
            config.encoder_attention_heads,
            config.encoder_layers,
            config.decoder_layers,
            config.encoder_ffn_dim,
            config.dropout,
            batch_first=True,
        )
        for layer in [*self.transformer.encoder.layers, *self.transformer.decoder.layers]:
            layer.dropout.p = layer.self_attn.dropout = 0.0
            getattr(layer, "multihead_attn", layer.self_attn).dropout = 0.0

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        config = self.config
        targets = shift_right(labels, config.pad_token_id, config.decoder_start_token_id)
        padding = input_ids == config.pad_token_id
        hidden = self.transformer(
            self.embed(input_ids),
            self.embed(targets),
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(targets.shape[1]),
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        return hidden @ self.embedding.weight.T

    def embed(self, ids: Tensor) -> Tensor:
        positions = self.positions(torch.arange(ids.shape[1]), ids.shape[1])
        return self.dropout(self.embedding(ids) * self.config.d_model**0.5 + positions)


def torch_loop(folder: Path, tokenizer: Any, config: Any, pairs: Any, tokens: int, bf16: bool, part: slice) -> Round:
    model = TorchTransformer(config).train()
    criterion = nn.CrossEntropyLoss(ignore_index=IGNORED, label_smoothing=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    clock, pairs = StepClock(PairCollator(config.pad_token_id)), TrainingPairs(pairs)
    sampler = TokenBatchSampler(np.maximum(*token_lengths(pairs.pairs)), tokens, seed=1)
    sampler.bounds = sampler.bounds[part]
    for keys in sampler:
        batch = clock(pairs.__getitems__(keys))
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = model(batch["input_ids"], batch["labels"])
            loss = criterion(logits.flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()
        optimizer.zero_grad()
        clock.on_step_end()
    return clock.round()


def joeynmt_trainer(
    folder: Path, tokenizer: Any, config: Any, pairs: Any, tokens: int, bf16: bool, part: slice
) -> Round:
    """JoeyNMT's own training; it has no bfloat16 on CPUs. Tokens are written as words.

    It does not sort by length, so that a part of the pairs is as good as a part of its batches.
    """
    from joeynmt.config import parse_global_args
    from joeynmt.prediction import prepare
    from joeynmt.training import TrainManager

    folder.mkdir(exist_ok=True)
    vocabulary = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    (folder / "vocabulary").write_text("\n".join(vocabulary), encoding="utf-8")
    for language, column in (("en", "input_ids"), ("de", "labels")):
        lines = (" ".join(vocabulary[token] for token in ids[:-1]) for ids in pairs[column][part])
        (folder / f"train.{language}").write_text("\n".join(lines), encoding="utf-8")
    side = {"level": "word", "voc_file": str(folder / "vocabulary"), "voc_min_freq": 0}
    stack = {"type": "transformer", "hidden_size": config.d_model, "ff_size": config.encoder_ffn_dim}
    stack |= {"num_layers": config.encoder_layers, "num_heads": config.encoder_attention_heads}
    stack |= {"dropout": config.dropout, "layer_norm": "post"}
    stack |= {"embeddings": {"embedding_dim": config.d_model, "scale": True, "dropout": config.dropout}}
    special = dict(zip(("unk_token", "pad_token", "bos_token", "eos_token"), vocabulary[:4], strict=True))
    settings = {
        "name": "benchmark",
        "model_dir": str(folder),
        "use_cuda": False,
        "data": {
            "train": str(folder / "train"),
            "src": {"lang": "en", **side},
            "trg": {"lang": "de", **side},
            "special_symbols": special,
        },
        "testing": {},
        "training": {
            "optimizer": "adamw",
            "learning_rate": LEARNING_RATE,
            "scheduling": "warmupinversesquareroot",
            "learning_rate_warmup": 1,
            "learning_rate_min": LEARNING_RATE,  # of all its schedules the one that can be made constant
            "clip_grad_norm": CLIPPING,
            "label_smoothing": 0.1,
            "normalization": "tokens",
            "batch_type": "token",
            "batch_size": tokens,
            "epochs": 1,
            "validation_freq": 10**9,
            "logging_freq": 10**9,
        },
        "model": {"tied_embeddings": True, "tied_softmax": True, "encoder": stack, "decoder": stack},
    }
    args = parse_global_args(settings)
    model, data, _, _ = prepare(args, rank=0, mode="train")
    manager = TrainManager(0, model, folder, args.device, autocast=args.autocast, train_args=args.train)
    clock, collate = StepClock(data.collate_fn), data.collate_fn

    def counted(*args: Any, **kwargs: Any) -> Any:
        batch = collate(*args, **kwargs)
        clock.count(batch.src_mask, batch.trg_mask)
        return batch

    data.collate_fn = counted
    manager.optimizer.register_step_post_hook(clock.on_step_end)
    manager.train_and_validate(data, data)
    return clock.round()


TRAINERS: dict[str, Callable[..., Round]] = {
    "ours": our_trainer,
    "ours, plain Seq2SeqTrainer": seq2seq_trainer,
    "marian": marian_trainer,
    "torch.nn.Transformer": torch_loop,
    "joeynmt": joeynmt_trainer,
}


# ---- one step ----


def step_operations(config: VanillaTransformerConfig, batch: dict[str, Tensor]) -> int:
    """Floating-point operations of the matrix products of a training step on `batch`, places of padding included.

    Of each product forward there are two backward. Only real target tokens are projected on the vocabulary.
    """
    (rows, source), target = batch["input_ids"].shape, batch["labels"].shape[1]
    d, (encoder_ff, decoder_ff) = config.d_model, (config.encoder_ffn_dim, config.decoder_ffn_dim)
    encoder = source * (4 * d * d + 2 * d * encoder_ff) + 2 * source * source * d
    self_attention = target * 4 * d * d + 2 * target * target * d
    cross_attention = (2 * target + 2 * source) * d * d + 2 * target * source * d
    decoder = self_attention + cross_attention + target * 2 * d * decoder_ff
    layers = rows * (config.encoder_layers * encoder + config.decoder_layers * decoder)
    projection = int(batch["labels"].ne(IGNORED).sum()) * d * config.vocab_size
    return 3 * 2 * (layers + projection)


def training_step(model: nn.Module, bf16: bool) -> Callable[[dict[str, Tensor]], None]:
    """Forward, backward, clipping, optimiser; for MarianMT with the label smoother as in Seq2SeqTrainer."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4, fused=True)
    smoother = LabelSmoother(0.1)

    def step(batch: dict[str, Tensor]) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            if isinstance(model, VanillaTransformerForConditionalGeneration):
                loss = model(**batch).loss
            else:
                inputs = {name: values for name, values in batch.items() if name != "labels"}
                shifted = shift_right(batch["labels"], model.config.pad_token_id, model.config.decoder_start_token_id)
                loss = smoother(model(**inputs, decoder_input_ids=shifted), batch["labels"])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()
        optimizer.zero_grad()

    return step


def random_batch(config: VanillaTransformerConfig, rows: int, length: int) -> dict[str, Tensor]:
    source, labels = torch.randint(4, config.vocab_size, (2, rows, length))
    return {"input_ids": source, "attention_mask": torch.ones_like(source), "labels": labels}
