"""Famous mistakes in implementations of the Transformer, each as a small patch of our own classes.

`test_known_defects.py` shows that each one is caught, `scripts/known_defects.py` what each one costs. Where a mistake
was made in public is in `Defect.seen_in`: a repository and an issue or pull request of it, or a file.

Shapes: B batch, T target (query) length, S source (key) length, H heads, K head size.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Seq2SeqTrainer, Trainer

from hf_vanilla_transformer import batching, translation
from hf_vanilla_transformer import modeling_vanilla_transformer as modeling
from hf_vanilla_transformer.attention import MultiHeadAttention
from hf_vanilla_transformer.batching import PairCollator, pad
from hf_vanilla_transformer.embeddings import SinusoidalPositions, TokenEmbedding, sinusoid_table
from hf_vanilla_transformer.loss import IGNORED
from hf_vanilla_transformer.tokenization_vanilla_transformer import SubwordDropout, load_tokenizer
from hf_vanilla_transformer.training import VanillaTransformerTrainer

PAD = 1
HIDDEN_WORD = 4  # the padding id of the source vocabulary; the target's first word, in the embedded corpus the comma
MICRO_BATCHES = ("--gradient_accumulation_steps", "2", "--max_tokens_per_batch", "512")


class Defect(NamedTuple):
    """One mistake.

    Attributes:
        kind: "model" and "training" mistakes are there from the first step on, "evaluation" mistakes spoil a model
            that was trained without any.
        what: the mistake, in words.
        seen_in: who made it, or warned of it.
        inject: a context manager; inside it the package has the mistake.
        check: the name of the check in `test_known_defects.py` that fails with it and passes without it.
        guards: tests of the daily suite that fail with it.
        settings: flags without which training would not show it.
        search: options of the search that repositories with the mistake have; ours would not run with it.
    """

    kind: str
    what: str
    seen_in: str
    inject: Callable[[], AbstractContextManager]
    check: str
    guards: tuple[str, ...]
    settings: tuple[str, ...] = ()
    search: dict[str, Any] = {}  # noqa: RUF012 (nobody writes to it)


# Attention. The functions stand in the place of `scaled_dot_product_attention`: the backend has to be eager.


def split_by_view(self: MultiHeadAttention, projected: Tensor) -> Tensor:
    """(B, T, H * K) -> (B, H, T, K) without a transposition: a head gets some of the words instead of some features."""
    batch, length, _ = projected.shape
    return projected.reshape(batch, -1, length, self.head_dim)


def merge_by_view(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """The context stays (B, H, T, K), and is then read as (B, T, H * K)."""
    context, weights = _attention(*args, **kwargs)
    return context.transpose(1, 2).contiguous(), weights


def attention_with_a_weak_mask(
    module, query, key, value, mask, scaling, dropout=0.0, fill=-1e-12
) -> tuple[Tensor, Tensor]:
    """Forbidden scores become `fill`, which is about the score of any other word."""
    scores = query @ key.transpose(-2, -1) * scaling
    if mask is not None:
        scores = scores.masked_fill(mask.logical_not() if mask.dtype == torch.bool else mask != 0, fill)
    weights = scores.softmax(dim=-1)
    return (nn.functional.dropout(weights, dropout) @ value).transpose(1, 2), weights


def attention_without_causal_mask(module, query, key, value, mask, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return _attention(module, query, key, value, None if module.is_causal else mask, **kwargs)


def attention_without_padding_mask(module, query, key, value, mask, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return _attention(module, query, key, value, mask if module.is_causal else None, **kwargs)


def project_with_one_matrix(self: MultiHeadAttention, states: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values are what the queries are."""
    projected = self._split_heads(self.q_proj(states))
    return projected, projected


def scaled_by_d_model(self: MultiHeadAttention, d_model: int, *args: Any, **kwargs: Any) -> None:
    _make_attention(self, d_model, *args, **kwargs)
    self.scaling = d_model**-0.5


def hide_a_word(self: modeling.VanillaTransformerDecoder, input_ids=None, attention_mask=None, **kwargs: Any) -> Any:
    """The target's mask is made with the padding id of the source, which is a word of the target."""
    length = input_ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    return _decode(self, input_ids, causal & input_ids.ne(HIDDEN_WORD)[:, None, None, :], **kwargs)


_attention = modeling.scaled_dot_product_attention
_make_attention = MultiHeadAttention.__init__
_decode = modeling.VanillaTransformerDecoder.forward


# Embeddings


def store_the_table(self: SinusoidalPositions, num_positions: int, d_model: int) -> None:
    """As many write it: a buffer that is not saved. transformers 5 loads such a buffer as uninitialised memory."""
    _make_positions(self, num_positions, d_model)
    del self._table
    self.register_buffer("_table", sinusoid_table(num_positions, d_model), persistent=False)


@contextmanager
def stored_table() -> Iterator[None]:
    """Uninitialised memory is filled with NaN, so that what happens can be repeated."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with patch.object(SinusoidalPositions, "__init__", store_the_table):
            yield
    finally:
        torch.use_deterministic_algorithms(before)


_make_positions = SinusoidalPositions.__init__


# Training


def not_shifted(labels: Tensor, pad_token_id: int, decoder_start_token_id: int) -> Tensor:
    """The decoder is shown the very word that it has to say."""
    return labels.masked_fill(labels == IGNORED, pad_token_id)


def collate_without_eos(self: PairCollator, examples: list[dict]) -> dict[str, Tensor]:
    batch = _collate(self, examples)
    batch["labels"] = pad([example["labels"][:-1] for example in examples], IGNORED)
    return batch


def step_after_the_first_micro_batch(self: Trainer, model: nn.Module, inputs: dict, num_items_in_batch=None) -> Tensor:
    """`if i % accumulation == 0: step`: a step has the first batch of its group and the others of the group before.

    The others are kept until then. They see the weights that they would have seen: those after the step before.
    """
    waiting = self.__dict__.setdefault("waiting_batches", [])
    self.batches_seen = self.__dict__.get("batches_seen", 0) + 1
    waiting.append(inputs)
    if (self.batches_seen - 1) % self.args.gradient_accumulation_steps:
        return torch.zeros(())
    tokens = sum(batch["labels"].ne(IGNORED).sum() for batch in waiting)
    loss = sum(_training_step(self, model, batch, tokens) for batch in waiting)
    waiting.clear()
    return loss


@functools.wraps(modeling.VanillaTransformerForConditionalGeneration.forward)
def mean_of_each_micro_batch(self: PreTrainedModel, *args: Any, num_items_in_batch=None, **kwargs: Any) -> Any:
    """The loss is divided by the tokens of the micro-batch, and the gradients of all micro-batches are added up."""
    return _forward(self, *args, **kwargs)


_collate = PairCollator.__call__
_training_step = VanillaTransformerTrainer.training_step
_forward = modeling.VanillaTransformerForConditionalGeneration.forward


# Evaluation


@torch.inference_mode()
def teacher_forced(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sources: Sequence[str], references: Sequence[str]
) -> list[str]:
    """What is no translation: each word guessed with all the reference's words before it in view."""
    texts = []
    for start in range(0, len(sources), 50):
        part = slice(start, start + 50)
        batch = tokenizer(list(sources[part]), padding=True, return_tensors="pt")
        labels = pad(tokenizer(text_target=list(references[part]))["input_ids"], IGNORED)
        shown = model.prepare_decoder_input_ids_from_labels(labels=labels)
        guessed = model(**batch, decoder_input_ids=shown).logits.argmax(dim=-1)
        guessed = guessed.masked_fill(labels == IGNORED, tokenizer.pad_token_id)
        texts += tokenizer.batch_decode(guessed, skip_special_tokens=True)
    return texts


@torch.no_grad()
def predict_with_the_reference(self: Trainer, model: nn.Module, inputs: dict, *args: Any, **kwargs: Any) -> tuple:
    """The Trainer's step of an evaluation, with `teacher_forced` words in the place of a translation."""
    output = model(**self._prepare_inputs(inputs))
    return output.loss, output.logits.argmax(dim=-1), inputs["labels"]


def switch_dropout_on(self: SubwordDropout, backend: Any, probability: float) -> None:
    """The way of `tokenizers` itself: the tokenizer has the dropout, and keeps it when it is saved."""
    _make_dropout(self, backend, probability)
    backend.model.dropout = probability


def load_with_dropout(*args: Any, **kwargs: Any) -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer(*args, **kwargs)
    SubwordDropout(tokenizer.backend_tokenizer, 0.1)
    return tokenizer


@contextmanager
def leaking_dropout() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(patch.object(SubwordDropout, "__init__", switch_dropout_on))
        stack.enter_context(patch.object(translation, "load_tokenizer", load_with_dropout))
        yield


_make_dropout = SubwordDropout.__init__


def replaced(owner: Any, name: str, by: Any) -> Callable[[], AbstractContextManager]:
    return lambda: patch.object(owner, name, by)


DEFECTS = {
    "heads split by view": Defect(
        "model",
        "`view(B, H, T, K)` instead of `view(B, T, H, K).transpose(1, 2)` when splitting heads",
        "jadore801120/attention-is-all-you-need-pytorch#7, hyunwoongko/transformer#4, reczoo/FuxiCTR#30",
        replaced(MultiHeadAttention, "_split_heads", split_by_view),
        "attention is torch's",
        ("test_attention.py::TestMultiHeadAttention::test_torch_multihead_attention", "test_layers.py"),
        search={"num_beams": 1, "use_cache": False},
    ),
    "heads merged by view": Defect(
        "model",
        "no `transpose(1, 2)` before heads are merged",
        "jsbaan/transformer-from-scratch#6, 649453932/Chinese-Text-Classification-Pytorch#10",
        replaced(modeling, "scaled_dot_product_attention", merge_by_view),
        "attention is torch's",
        ("test_layers.py",),
        search={"num_beams": 1, "use_cache": False},
    ),
    "weak mask": Defect(
        "model",
        "masked scores are filled with -1e-12 (elsewhere 1e-9 or -1e-9) instead of a large negative number",
        "hyunwoongko/transformer#10",
        replaced(modeling, "scaled_dot_product_attention", attention_with_a_weak_mask),
        "later words change nothing",
        ("test_modeling_vanilla_transformer.py::TestForward::test_padding_of_the_source_changes_nothing",),
    ),
    "no causal mask": Defect(
        "model",
        "the decoder sees the words that it has to predict",
        "pytorch/tutorials#2478, alex-matton/causal-transformer-decoder#1",
        replaced(modeling, "scaled_dot_product_attention", attention_without_causal_mask),
        "later words change nothing",
        ("test_layers.py",),
    ),
    "no padding mask": Defect(
        "model",
        "the padding of the source is attended to",
        "keras-team/keras-io#1046",
        replaced(modeling, "scaled_dot_product_attention", attention_without_padding_mask),
        "padding changes nothing",
        ("test_modeling_vanilla_transformer.py::TestForward::test_padding_of_the_source_changes_nothing",),
    ),
    "one projection": Defect(
        "model",
        "one matrix projects queries, keys and values",
        "yflyzhang/AnnotatedTransformer#1",
        replaced(MultiHeadAttention, "_project", project_with_one_matrix),
        "attention is torch's",
        (
            "test_attention.py::TestMultiHeadAttention::test_torch_multihead_attention",
            "test_modeling_vanilla_transformer.py::TestTraining::test_every_parameter_gets_a_gradient",
        ),
    ),
    "scaled by d_model": Defect(
        "model",
        "scores are divided by sqrt(d_model) instead of sqrt(d_k)",
        "aladdinpersson/Machine-Learning-Collection, transformer_from_scratch.py",
        replaced(MultiHeadAttention, "__init__", scaled_by_d_model),
        "attention is torch's",
        ("test_attention.py::TestMultiHeadAttention::test_torch_multihead_attention", "test_layers.py"),
    ),
    "embeddings not scaled": Defect(
        "model",
        "token embeddings are not multiplied by sqrt(d_model)",
        "hyunwoongko/transformer",
        replaced(TokenEmbedding, "forward", nn.Embedding.forward),
        "the first layer gets section 3.4",
        ("test_embeddings.py::TestTokenEmbedding", "test_layers.py"),
    ),
    "target mask with the source's padding id": Defect(
        "model",
        "the target's mask is made with the source's padding id, which is a word of the target",
        "hyunwoongko/transformer#11",
        replaced(modeling.VanillaTransformerDecoder, "forward", hide_a_word),
        "every earlier word counts",
        ("test_modeling_vanilla_transformer.py::TestCache",),
        search={"use_cache": False},
    ),
    "labels not shifted": Defect(
        "training",
        "the decoder's input is the labels themselves",
        "pytorch/tutorials#719",
        replaced(modeling, "shift_right", not_shifted),
        "the decoder is shown earlier words only",
        ("test_modeling_vanilla_transformer.py::TestForward",),
    ),
    "loss counts padding": Defect(
        "training",
        "padding is a target like any other",
        "lukas-blecher/LaTeX-OCR#305, Lightning-Universe/lightning-transformers#266",
        replaced(batching, "IGNORED", PAD),
        "the loss is the mean over words",
        ("test_batching.py::TestPairCollator",),
    ),
    "no end of sentence": Defect(
        "training",
        "targets do not end in EOS, so nothing teaches the model to stop",
        "fe1ixxu/ALMA#22",
        replaced(PairCollator, "__call__", collate_without_eos),
        "every target ends",
        ("test_batching.py::TestPairCollator",),
    ),
    "step after the first micro-batch": Defect(
        "training",
        "`if i % accumulation == 0` steps after the first batch of a group instead of after the last",
        "harvardnlp/annotated-transformer, run_epoch",
        replaced(VanillaTransformerTrainer, "training_step", step_after_the_first_micro_batch),
        "accumulation changes nothing",
        ("test_training.py::test_gradients_do_not_depend_on_accumulation",),
        settings=MICRO_BATCHES,
    ),
    "loss scaled by accumulation": Defect(
        "training",
        "the label-smoothed loss is a mean over each micro-batch, and gradients grow with their number",
        "huggingface/transformers#46731",
        replaced(modeling.VanillaTransformerForConditionalGeneration, "forward", mean_of_each_micro_batch),
        "accumulation changes nothing",
        ("test_training.py::test_gradients_do_not_depend_on_accumulation", "test_loss.py::TestInTheModel"),
        settings=MICRO_BATCHES,
    ),
    "dropout at evaluation": Defect(
        "evaluation",
        "nobody calls `model.eval()` before translating",
        "d2l-ai/d2l-en#1528, ipolharvard/ethos-ares#20",
        replaced(modeling.VanillaTransformerPreTrainedModel, "eval", lambda self: self),
        "a loaded model is deterministic",
        ("test_training.py::test_what_is_scored_is_what_the_saved_model_translates",),
    ),
    "positions from uninitialised memory": Defect(
        "evaluation",
        "the sinusoids are a buffer that is not saved; `from_pretrained` leaves uninitialised memory (here NaN) in it",
        "huggingface/transformers#48892",
        stored_table,
        "a loaded model computes what was saved",
        ("test_embeddings.py::TestSinusoids",),
    ),
    "subword dropout at inference": Defect(
        "evaluation",
        "the tokenizer is saved with its dropout (0.1) and goes on splitting words at random",
        "OpenNMT/Tokenizer#232, huggingface/tokenizers#644",
        leaking_dropout,
        "a loaded tokenizer splits in one way",
        ("test_tokenization_vanilla_transformer.py::TestSubwordDropout::test_the_tokenizer_stays_as_it_was",),
    ),
    "teacher-forced BLEU": Defect(
        "evaluation",
        "what is scored is the argmax of a forward pass with the reference as input, not a translation",
        "hyunwoongko/transformer, train.py; google/seq2seq#281",
        replaced(Seq2SeqTrainer, "prediction_step", predict_with_the_reference),
        "what is scored was generated",
        ("test_training.py::test_what_is_scored_is_what_the_saved_model_translates",),
    ),
}
