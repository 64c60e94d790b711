"""Translate text and score given translations with any sequence-to-sequence model of transformers."""

from collections.abc import Iterator, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from tqdm.auto import tqdm
from transformers import AutoModelForSeq2SeqLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import ModelOutput

from .batching import pad
from .configuration_vanilla_transformer import VanillaTransformerConfig
from .ensemble import Ensemble
from .errors import UserError, first_line, on_one_line
from .int8 import quantize_linear_layers
from .length_penalty import LENGTH_PENALTY_TYPES
from .loss import IGNORED
from .modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .packed import packed_linear_layers
from .tokenization_vanilla_transformer import load_tokenizer, require_fit, same_tokenizer
from .weight_files import require_folder_or_hub_id, require_whole

# Where generation_config names no maximum, that of section 6.1: "input length + 50"; here the longest of a batch.
EXTRA_LENGTH = 50
TOKENS_WITH_LOGITS = 4096  # of a batch whose logits are held as a whole


class Hypothesis(NamedTuple):
    """One translation.

    Attributes:
        text: without special tokens.
        score: what the search ranks by: natural log-probability divided by the length penalty, see length_penalty.py.
    """

    text: str
    score: float


class PairScore(NamedTuple):
    """How probable a model finds a translation.

    Attributes:
        log_probability: natural logarithm, the sum over the target's tokens, EOS included.
        tokens: how many those are.
    """

    log_probability: float
    tokens: int


def load_model(
    name_or_path: str, *, device: str | None = None, dtype: str = "auto", trust_remote_code: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A saved model and its tokenizer, from a folder or from the Hub, ready to translate.

    Args:
        name_or_path: a folder, or "user/name" on the Hub.
        device: such as "cuda"; None takes a GPU where there is one.
        dtype: "auto", as saved, or "float32", "bfloat16", "float16", or, on a CPU, "int8" (see `int8`).
        trust_remote_code: run the code that lies beside the weights.

    Raises:
        UserError: there is no model, it is not whole, or its tokenizer does not fit it; no such device; 8-bit weights
            on a GPU.
    """
    path = Path(name_or_path)
    require_folder_or_hub_id(path)
    if (path / "model.bin").is_file():
        raise UserError(f"{name_or_path} is a CTranslate2 model: translate with --engine ctranslate2")
    if (path / "encoder.onnx").is_file():
        raise UserError(f"{name_or_path} holds ONNX graphs: name the folder that they were exported from")
    float_type = "float32" if dtype == "int8" else dtype
    try:
        model, report = AutoModelForSeq2SeqLM.from_pretrained(
            name_or_path, dtype=float_type, trust_remote_code=trust_remote_code, output_loading_info=True
        )
        tokenizer = load_tokenizer(name_or_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{name_or_path}: no model to load ({on_one_line(error)})") from error
    if model.config.model_type == VanillaTransformerConfig.model_type:
        require_whole(name_or_path, report)
    require_fit(tokenizer, model.config)
    try:
        model = model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device {device}: {first_line(error)}") from error
    return (quantize_linear_layers(model) if dtype == "int8" else model), tokenizer


def load_ensemble(names: Sequence[str], **options: Any) -> tuple[Ensemble, PreTrainedTokenizerBase]:
    """Several saved models as one, and their tokenizer.

    Args:
        names: folders, or "user/name" on the Hub.
        options: those of `load_model`.

    Raises:
        UserError: as `load_model`; a model that is not ours, or tokenizers that differ.
    """
    models, tokenizers = zip(*(load_model(name, **options) for name in names), strict=True)
    for name, model, tokenizer in zip(names, models, tokenizers, strict=True):
        if not isinstance(model, VanillaTransformerForConditionalGeneration):
            raise UserError(f"{name} is a model of type {model.config.model_type}: only ours make an ensemble")
        if not same_tokenizer(tokenizers[0], tokenizer):
            raise UserError(f"{name} has another tokenizer than {names[0]}: train with the same text and options")
    return Ensemble(models).eval(), tokenizers[0]


def translate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: Sequence[str],
    *,
    num_beams: int | None = None,
    length_penalty: float | None = None,
    length_penalty_type: str | None = None,
    top_k: int | None = None,
    temperature: float | None = None,
    max_tokens_per_batch: int = 16384,
    progress: bool = False,
) -> list[str]:
    """The best translation of each sentence, or a sample, in the order of the input; an empty sentence stays empty.

    Args:
        model: in evaluation mode.
        tokenizer: the model's.
        sentences: source text, one sentence each.
        num_beams: None takes the model's `generation_config`.
        length_penalty: exponent of the length in the beam score; None takes the model's `generation_config`.
        length_penalty_type: "average" or "wu", the paper's, see length_penalty.py; None as above.
        top_k: instead of searching, draw each token from the so many most probable ones (Edunov et al. 2018), from all
            for 0; torch's generator decides.
        temperature: of the probabilities that are drawn from; the logits are divided by it.
        max_tokens_per_batch: sentences * beams * longest source of one batch.
        progress: whether to show a bar.

    Raises:
        UserError: before anything is translated: a sentence that is longer than the model can read; a
            `length_penalty_type` that is unknown or given to another library's model; a `top_k` or `temperature` that
            cannot be, or with beams; a length penalty without beams.
    """
    options = _search_options(model, 1, num_beams, length_penalty, length_penalty_type, top_k, temperature)
    results = _search(model, tokenizer, sentences, options, max_tokens_per_batch, progress, scored=False)
    return [hypotheses[0].text for hypotheses in results]


def translate_nbest(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: Sequence[str],
    *,
    nbest: int = 1,
    num_beams: int | None = None,
    length_penalty: float | None = None,
    length_penalty_type: str | None = None,
    top_k: int | None = None,
    temperature: float | None = None,
    max_tokens_per_batch: int = 16384,
    progress: bool = False,
) -> list[list[Hypothesis]]:
    """The `nbest` best translations of each sentence, best first; an empty sentence gets one, empty, of score 0.

    The other arguments are those of `translate`. With `top_k` the translations are `nbest` samples, which may be alike.

    Raises:
        UserError: as `translate`; or more translations than beams.
    """
    options = _search_options(model, nbest, num_beams, length_penalty, length_penalty_type, top_k, temperature)
    if options["num_beams"] > 1 and not isinstance(model, VanillaTransformerForConditionalGeneration):
        options["output_scores"] = True
    return _search(model, tokenizer, sentences, options, max_tokens_per_batch, progress, scored=True)


def _search_options(
    model: PreTrainedModel,
    nbest: int,
    num_beams: int | None,
    length_penalty: float | None,
    length_penalty_type: str | None,
    top_k: int | None,
    temperature: float | None,
) -> dict[str, Any]:
    """Arguments for `generate()`. Those that mean nothing without beams get the values that silence transformers."""
    _check_length_penalty_type(model, length_penalty_type)
    penalised = length_penalty is not None or length_penalty_type is not None
    beams = beams_for(nbest, num_beams, model.generation_config, top_k, temperature, penalised)
    options: dict[str, Any] = {"num_beams": beams, "num_return_sequences": nbest}
    if top_k is not None:
        options |= {"do_sample": True, "top_k": top_k, "temperature": 1.0 if temperature is None else temperature}
    if beams == 1:
        return {**options, "length_penalty": 1.0, "early_stopping": False}
    penalty = {"length_penalty": length_penalty, "length_penalty_type": length_penalty_type}
    return options | {key: value for key, value in penalty.items() if value is not None}


def beams_for(
    nbest: int,
    num_beams: int | None,
    config: GenerationConfig,
    top_k: int | None = None,
    temperature: float | None = None,
    penalised: bool = False,
) -> int:
    """The beams of a search: `num_beams`, or those of the model's `config`; 1 where `top_k` asks for samples.

    Raises:
        UserError: a number that is too small; fewer beams than the `nbest` translations that are wanted of them;
            samples with beams; a temperature without samples; a search without beams that is `penalised` for length.
    """
    for name, count, least in (("nbest", nbest, 1), ("num_beams", num_beams, 1), ("top_k", top_k, 0)):
        if count is not None and count < least:
            raise UserError(f"{name}: {count} is below {least}")
    if top_k is not None:
        if num_beams not in (None, 1):
            raise UserError(f"top_k draws samples, num_beams={num_beams} searches: give one of them")
        if temperature is not None and not temperature > 0:
            raise UserError(f"temperature: {temperature} is not above 0")
    elif temperature is not None:
        raise UserError("temperature is for samples: give top_k too")
    beams = 1 if top_k is not None else num_beams or config.num_beams or 1
    if beams == 1 and penalised:
        raise UserError("a length penalty ranks the translations of several beams, and this search has one")
    if top_k is None and nbest > beams:
        raise UserError(f"{nbest} translations of each sentence need at least as many beams, not {beams}")
    return beams


def _check_length_penalty_type(model: PreTrainedModel, name: str | None) -> None:
    if name is None:
        return
    if name not in LENGTH_PENALTY_TYPES:
        raise UserError(f"length_penalty_type={name!r} is not one of {', '.join(LENGTH_PENALTY_TYPES)}")
    if model.config.model_type != VanillaTransformerConfig.model_type:
        raise UserError(f"length_penalty_type is an option of our models: leave it out for {model.config.model_type}")


def _search(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: Sequence[str],
    options: dict[str, Any],
    max_tokens_per_batch: int,
    progress: bool,
    scored: bool,
) -> list[list[Hypothesis]]:
    """`options` are for `generate()`; without `scored` all scores are 0."""
    encoded = encode_sources(tokenizer, sentences, _longest(model))
    results: list[list[Hypothesis]] = [[Hypothesis("", 0.0)] for _ in sentences]
    lengths = list(map(len, encoded))
    longest_first = sorted((row for row, length in enumerate(lengths) if length), key=lambda row: -lengths[row])
    nbest = options["num_return_sequences"]
    bar = tqdm(total=len(longest_first), unit=" sentences", disable=not progress)
    with bar, packed_linear_layers(model):
        for rows in _batches(longest_first, lengths, max_tokens_per_batch // max(options["num_beams"], nbest)):
            hypotheses = _generate(model, tokenizer, [encoded[row] for row in rows], options, scored)
            for position, row in enumerate(rows):
                results[row] = hypotheses[position * nbest : (position + 1) * nbest]
            bar.update(len(rows))
    return results


def score_pairs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[str],
    targets: Sequence[str],
    *,
    max_tokens_per_batch: int = TOKENS_WITH_LOGITS,
    progress: bool = False,
) -> list[PairScore]:
    """The log-probability of each given translation, in the order of the input.

    Args:
        model: in evaluation mode.
        tokenizer: the model's.
        sources, targets: text, one sentence each.
        max_tokens_per_batch: pairs * longest side of one batch.
        progress: whether to show a bar.

    Raises:
        UserError: different numbers of sources and targets; an empty or an overlong sentence.
    """
    if len(sources) != len(targets):
        raise UserError(f"{len(sources)} source sentences but {len(targets)} translations: they must be aligned")
    limit = _longest(model)
    encoded = encode_sources(tokenizer, sources, limit)
    labels = tokenizer(text_target=list(targets), return_attention_mask=False)["input_ids"] if targets else []
    for line, (ids, label) in enumerate(zip(encoded, labels, strict=True), start=1):
        if not ids or not targets[line - 1].strip():
            raise UserError(f"line {line}: an empty sentence has no score")
        _require_length(line, len(label), limit)
    return _score_encoded(model, encoded, labels, max_tokens_per_batch, progress)


def check_lengths(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sentences: Sequence[str]) -> None:
    """Raises UserError for the first sentence that is longer than the model can read."""
    encode_sources(tokenizer, sentences, _longest(model))


def _longest(model: PreTrainedModel) -> float:
    """Tokens of a sentence; infinite for relative positions, as T5 has them."""
    return getattr(model.config, "max_position_embeddings", None) or inf


def encode_sources(tokenizer: PreTrainedTokenizerBase, sentences: Sequence[str], limit: float) -> list[list[int]]:
    """Token ids of each sentence; none at all for an empty one."""
    if isinstance(sentences, str):
        raise UserError("one text came where a list of sentences belongs: put it into brackets")
    if not sentences:
        return []
    encoded = tokenizer(list(sentences), return_attention_mask=False)["input_ids"]
    for line, ids in enumerate(encoded, start=1):
        _require_length(line, len(ids), limit)
    return [ids if text.strip() else [] for ids, text in zip(encoded, sentences, strict=True)]


def _require_length(line: int, length: int, limit: float) -> None:
    if length > limit:
        raise UserError(
            f"line {line}: {length} tokens, but the model reads at most {limit} (max_position_embeddings): "
            "split it into sentences"
        )


def longest_translation(generation: GenerationConfig, source_length: int, limit: float) -> float:
    """Tokens of a translation, with the one that it starts from, as `generate()` counts its `max_length`.

    Args:
        generation: what it says goes first.
        source_length: tokens of the longest source.
        limit: what the model can write.
    """
    if generation.max_new_tokens:
        return min(generation.max_new_tokens + 1, limit)
    return min(generation.max_length or source_length + EXTRA_LENGTH, limit)


def _batches(order: Sequence[int], lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Cut a list of rows, longest first, into batches of at most `max_tokens`, padding included."""
    start = 0
    while start < len(order):
        rows = max(1, max_tokens // lengths[order[start]])
        yield list(order[start : start + rows])
        start += rows


@torch.inference_mode()
def _generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sources: list, options: dict[str, Any], scored: bool
) -> list[Hypothesis]:
    input_ids = pad(sources, tokenizer.pad_token_id).to(model.device)
    generate = partial(
        model.generate,
        input_ids=input_ids,
        attention_mask=input_ids.ne(tokenizer.pad_token_id).long(),
        max_length=longest_translation(model.generation_config, input_ids.shape[1], _longest(model)),
        max_new_tokens=None,
        return_dict_in_generate=scored,
    )
    output = generate(**options)
    if scored and options["num_beams"] > 1 and output.get("sequences_scores") is None:
        options["output_scores"] = True  # it was transformers that searched
        output = generate(**options)
    texts = tokenizer.batch_decode(output.sequences if scored else output, skip_special_tokens=True)
    scores = _search_scores(model, tokenizer, sources, output) if scored else [0.0] * len(texts)
    return [Hypothesis(text, score) for text, score in zip(texts, scores, strict=True)]


def _search_scores(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sources: list[list[int]], output: ModelOutput
) -> list[float]:
    """What beam search ranks by. transformers does not say it without beams, where it is the mean log-probability; the
    logits of all steps, which it would give, fill the memory."""
    if output.get("sequences_scores") is not None:
        return output.sequences_scores.tolist()
    targets = [row[row.ne(tokenizer.pad_token_id)].tolist() for row in output.sequences[:, 1:]]
    sources = [source for source in sources for _ in range(len(targets) // len(sources))]
    scores = _score_encoded(model, sources, targets, TOKENS_WITH_LOGITS, progress=False)
    return [score.log_probability / score.tokens for score in scores]


def _score_encoded(
    model: PreTrainedModel, sources: list[list[int]], targets: list[list[int]], max_tokens: int, progress: bool
) -> list[PairScore]:
    """Scores of token ids, in batches of at most `max_tokens` of the longer side."""
    lengths = [max(len(source), len(target)) for source, target in zip(sources, targets, strict=True)]
    longest_first = sorted(range(len(sources)), key=lambda row: -lengths[row])
    results: list[PairScore | None] = [None] * len(sources)
    with tqdm(total=len(sources), unit=" pairs", disable=not progress) as bar:
        for rows in _batches(longest_first, lengths, max_tokens):
            scores = _score_batch(model, [sources[row] for row in rows], [targets[row] for row in rows])
            for row, score in zip(rows, scores, strict=True):
                results[row] = score
            bar.update(len(rows))
    return results


@torch.inference_mode()
def _score_batch(model: PreTrainedModel, sources: list, targets: list) -> list[PairScore]:
    input_ids = pad(sources, model.config.pad_token_id).to(model.device)
    labels = pad(targets, IGNORED).to(model.device)
    logits = model(
        input_ids=input_ids,
        attention_mask=input_ids.ne(model.config.pad_token_id).long(),
        decoder_input_ids=model.prepare_decoder_input_ids_from_labels(labels=labels),
    ).logits
    losses = [  # pair by pair: the logits are the largest thing here, and all at once would be copied
        torch.nn.functional.cross_entropy(row.float(), label, ignore_index=IGNORED, reduction="sum")
        for row, label in zip(logits, labels, strict=True)
    ]
    return [PairScore(-loss, len(target)) for loss, target in zip(torch.stack(losses).tolist(), targets, strict=True)]
