"""Beam search in which nothing is copied that the beams of a sentence have in common; greedy search alike.

The results are those of `GenerationMixin` of transformers; what differs is the work:

- Keys and values of the words written so far stay where they are. Which beam descends from which is a mask over the
  history that the beams of a sentence share; transformers copies the histories of all surviving beams at every step.
- A finished sentence leaves the batch; transformers goes on with all of them until the last one is finished.
- The vocabulary is gone through for the largest logits and for their norm, in folds; no distribution is written down.
- On a CPU, logits are made for some hundred beams at a time, whose memory stays with the process.

Shapes: B sentences, A sentences that are still in the batch, K beams, C candidates of a sentence, V vocabulary,
H heads, P places in the history, T target length.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache
from transformers.generation import (
    EosTokenCriteria,
    GenerateBeamEncoderDecoderOutput,
    GenerateEncoderDecoderOutput,
    MaxLengthCriteria,
)
from transformers.modeling_outputs import BaseModelOutput

from .cpu_attention import widens

NEVER = -1.0e9  # the score of what must not be chosen, as in transformers
BLOCK = 128  # beams whose logits are gone through at once, which a CPU's caches hold
LOGITS_BYTES = 2**24  # of logits that are made at once; glibc gives blocks of 32 MiB back to the system
LEAVERS = 1 / 8  # the share of finished sentences at which making the batch smaller pays


@dataclass
class GreedyOutput(GenerateEncoderDecoderOutput):
    """What transformers returns, and what it calls so with beams: (B), the mean log-probability of the tokens."""

    sequences_scores: Tensor | None = None


class SharedHistory(DynamicLayer):
    """Keys and values of one decoder layer, (A, H, P, head size): the K beams of a sentence side by side.

    They are appended and never moved.

    Args:
        beams: K.
        for_sdpa: whether `sdpa` is what attends to them.
        steps: tokens of each beam that memory is taken for at once.
    """

    def __init__(self, beams: int, for_sdpa: bool, steps: int = 16):
        super().__init__()
        self.beams = beams
        self.for_sdpa = for_sdpa
        self.steps = steps
        self.places = 0  # P
        self.length = 0  # tokens of each beam
        self.buffers: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append (A, H, T, head size), which all beams share, or (A * K, H, 1, head size); returns all of it."""
        sentences = self.buffers[0].shape[0] if self.buffers else key_states.shape[0]
        new = [
            states.unflatten(0, (sentences, -1)).transpose(1, 2).flatten(2, 3) for states in (key_states, value_states)
        ]
        end = self.places + new[0].shape[2]
        if not self.buffers or end > self.buffers[0].shape[2]:
            self._make_room(new, end + self.steps * self.beams)
        for buffer, states in zip(self.buffers, new, strict=True):
            buffer[:, :, self.places : end] = states
        self.places, self.length = end, self.length + key_states.shape[2]
        keys, values = (buffer[:, :, :end] for buffer in self.buffers)
        return keys, values

    def _make_room(self, like: Sequence[Tensor], places: int) -> None:
        shape, dtype = (*like[0].shape[:2], places, like[0].shape[3]), _type_as_read(self, like[0])
        grown = [states.new_empty(shape, dtype=dtype) for states in like]
        for buffer, old in zip(grown, self.buffers, strict=False):
            buffer[:, :, : self.places] = old[:, :, : self.places]
        self.buffers = grown

    def get_seq_length(self) -> int:
        """Tokens of each beam, from which the positions are counted."""
        return self.length

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sentences."""
        self.buffers = [buffer[indices] for buffer in self.buffers]


class SourceLayer(DynamicLayer):
    """Keys and values of the source, (A, H, S, head size); the arguments as above."""

    def __init__(self, beams: int, for_sdpa: bool):
        super().__init__()
        self.beams = beams
        self.for_sdpa = for_sdpa

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append (B, H, S, head size); returns all of it."""
        dtype = _type_as_read(self, key_states)
        return super().update(key_states.to(dtype), value_states.to(dtype), *args, **kwargs)


def _type_as_read(layer: SharedHistory | SourceLayer, states: Tensor) -> torch.dtype:
    """Where `sdpa` computes in float32, what all steps read is converted once."""
    return torch.float32 if layer.for_sdpa and widens(states, layer.beams) else states.dtype


def beam_search_applies(
    model_config: PreTrainedConfig,
    config: GenerationConfig,
    processors: Sequence[Any],
    criteria: Sequence[Any],
    model_kwargs: dict[str, Any],
    rows: int,
) -> bool:
    """Whether the searches here can do what `generate()` asks for; what they cannot do is left to transformers.

    Args:
        rows: B * K, of the prompt.
    """
    wanted = (config.output_scores, config.output_logits, config.output_attentions, config.output_hidden_states)
    cache = model_kwargs.get("past_key_values")
    return (
        not config.do_sample
        and not (config.return_dict_in_generate and any(wanted))
        and not processors
        and config._eos_token_tensor is not None
        and all(_says_what_is_configured(criterion, config) for criterion in criteria)
        and _candidates(config) <= model_config.vocab_size
        and isinstance(cache, EncoderDecoderCache)
        and type(cache.self_attention_cache) is DynamicCache
        and not cache.self_attention_cache.offloading
        and not getattr(cache, "_is_user_defined", False)  # or the caller would find it empty
        and len(model_kwargs["encoder_outputs"][0]) * config.num_beams == rows
        and model_kwargs.get("decoder_attention_mask") is None
    )


def _says_what_is_configured(criterion: Any, config: GenerationConfig) -> bool:
    """Callers may bring a criterion of their own, which transformers obeys instead."""
    if type(criterion) is MaxLengthCriteria:
        return criterion.max_length == config.max_length
    return type(criterion) is EosTokenCriteria and torch.equal(
        criterion.eos_token_id.cpu(), config._eos_token_tensor.cpu()
    )


def beam_search(
    model: nn.Module, prompt: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
) -> GenerateBeamEncoderDecoderOutput | Tensor:
    """What `generate()` calls where `beam_search_applies`.

    Args:
        model: its decoder takes more rows than the encoder has sentences.
        prompt: (B * K, T), what the translations begin with, the start token at least.
        generation_config: beams, lengths, penalty, early stopping.
        model_kwargs: `encoder_outputs` and `attention_mask` of B sentences.

    Returns:
        token ids (B * num_return_sequences, T), or an output that holds them and their scores, but no cache: that of
        this search is without the sentences that have left, and of no use to another.
    """
    search = _Search(model, prompt[:: generation_config.num_beams], generation_config, model_kwargs)
    logits = search.first_logits()
    for _ in range(generation_config.max_length - prompt.shape[1]):
        search.advance(*search.candidates(logits))
        if not search.is_live.any():
            break
        search.let_finished_sentences_go()
        logits = search.next_logits()
    sequences, scores, beam_indices = search.best(generation_config.num_return_sequences)
    if not generation_config.return_dict_in_generate:
        return sequences
    return GenerateBeamEncoderDecoderOutput(sequences=sequences, sequences_scores=scores, beam_indices=beam_indices)


def greedy_search(
    model: nn.Module, prompt: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
) -> GreedyOutput | Tensor:
    """What `generate()` calls for one beam where `beam_search_applies`.

    Args:
        model: as in `beam_search`.
        prompt: (B, T), what the translations begin with, the start token at least.
        generation_config: lengths and special tokens.
        model_kwargs: `encoder_outputs` and `attention_mask` of B sentences.

    Returns:
        token ids (B, T), or an output that holds them and their scores, but no cache, as in `beam_search`.
    """
    memory, memory_mask = model_kwargs["encoder_outputs"][0], model_kwargs.get("attention_mask")
    cache = _empty_cache(model.config, 1)
    rows = torch.arange(len(prompt), device=prompt.device)  # (A), the place of each sentence in the input
    is_live = torch.ones_like(rows, dtype=torch.bool)  # (A), whether it goes on
    columns, tokens, length = [prompt], prompt, prompt.shape[1]
    scores, lengths = torch.zeros(2, len(prompt), dtype=torch.float32, device=prompt.device)  # (B)
    padding, live = int(generation_config._pad_token_tensor), len(rows)
    while live and length < generation_config.max_length:
        if live <= (1 - LEAVERS) * len(rows):
            rows, tokens, memory = rows[is_live], tokens[is_live], memory[is_live]
            memory_mask = None if memory_mask is None else memory_mask[is_live]
            _select(cache, is_live.nonzero()[:, 0])
            is_live = is_live[is_live]
        written, gained = [], []
        for logits in _logits(model, tokens, None, memory, memory_mask, cache):
            written.append(likeliest(logits)[:, None])
            if generation_config.return_dict_in_generate:
                gained.append(log_probability_of_likeliest(logits))
        tokens = torch.cat(written)
        if gained:
            scores[rows[is_live]] += torch.cat(gained)[is_live]
            lengths[rows[is_live]] += 1
        column = prompt.new_full((len(prompt),), padding)
        columns.append(column.index_copy_(0, rows, tokens[:, 0].to(prompt.dtype).where(is_live, padding))[:, None])
        is_live &= ~torch.isin(tokens[:, 0], generation_config._eos_token_tensor)
        live, length = int(is_live.sum()), length + 1
    sequences = torch.cat(columns, dim=1)
    if not generation_config.return_dict_in_generate:
        return sequences
    return GreedyOutput(sequences=sequences, sequences_scores=scores / lengths.clamp(min=1))


def _empty_cache(config: PreTrainedConfig, beams: int) -> EncoderDecoderCache:
    how = beams, config._attn_implementation == "sdpa"
    history, source = ([kind(*how) for _ in range(config.decoder_layers)] for kind in (SharedHistory, SourceLayer))
    return EncoderDecoderCache(Cache(layers=history), Cache(layers=source))


def _logits(
    model: nn.Module,
    tokens: Tensor,
    mask: Tensor | None,
    memory: Tensor,
    memory_mask: Tensor | None,
    cache: EncoderDecoderCache,
    beams: int = 1,
) -> Iterator[Tensor]:
    """The logits after the last of `tokens`, (rows of tokens, V).

    On a CPU they come some rows at a time, all beams of a sentence together; but not where a call of the model is more
    than its parts one after the other.
    """
    in_blocks = tokens.device.type == "cpu" and model._is_called_plainly()
    output = (model.model if in_blocks else model)(
        decoder_input_ids=tokens,
        decoder_attention_mask=mask,
        encoder_outputs=BaseModelOutput(last_hidden_state=memory),
        attention_mask=memory_mask,
        past_key_values=cache,
        use_cache=True,
    )
    if not in_blocks:
        return iter([output.logits[:, -1]])
    states = output.last_hidden_state[:, -1]
    whole = max(1, BLOCK // beams) * beams  # what `best_continuations` goes through at once
    rows = max(1, LOGITS_BYTES // (states.element_size() * model.config.vocab_size * whole)) * whole
    return map(model.lm_head, states.split(rows))


def _select(cache: EncoderDecoderCache, staying: Tensor) -> None:
    """Keep these sentences."""
    for half in (cache.self_attention_cache, cache.cross_attention_cache):
        half.batch_select_indices(staying)


def likeliest(logits: Tensor) -> Tensor:
    """The first of the largest logits of each row (R, V), as `argmax`, which goes through a row slowly on CPUs.

    A row is folded; the first fold that holds the largest is gone through.
    """
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    folds = next(n for n in range(20, 0, -1) if logits.shape[1] % n == 0)
    folded = logits.unflatten(1, (folds, -1))
    fold = folded.amax(dim=-1).argmax(dim=-1)
    inside = folded[torch.arange(len(logits)), fold]
    return inside.argmax(dim=-1) + fold * inside.shape[1]


def log_probability_of_likeliest(logits: Tensor) -> Tensor:
    """max x - log sum exp(x) of each row x of logits (R, V), (R) in float32: in one pass instead of three."""
    blocks = logits.split(BLOCK if logits.device.type == "cpu" else max(1, len(logits)))
    return torch.cat([block.float().softmax(dim=-1).amax(dim=-1).log() for block in blocks])


def best_continuations(logits: Tensor, scores: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` likeliest continuations of each sentence, best first.

    `topk` goes through a row slowly. So the logits of a sentence are folded into columns; the best continuations are in
    those columns whose own best are the best.

    Args:
        logits: (A * K, V), after each beam.
        scores: (A, K), log-probability of each beam.
        count: C.

    Returns:
        scores in float32, tokens and the beams they continue, (A, C) each.
    """
    sentences, beams = scores.shape
    vocabulary = logits.shape[1]
    folds = next(n for n in range(10, 0, -1) if vocabulary % n == 0 and vocabulary >= n * count)
    width = vocabulary // folds
    at_once = max(1, BLOCK // beams) if logits.device.type == "cpu" else sentences
    found = []
    for block, before in zip(logits.split(at_once * beams), scores.split(at_once), strict=True):
        values = block.float()
        folded = values.view(len(before), beams, folds, width)
        tops = folded.amax(dim=2)  # (A, K, width)
        before = before + log_probability_of_likeliest(values).view_as(before) - tops.amax(dim=-1)
        columns = (tops + before[:, :, None]).amax(dim=1).topk(count, sorted=False).indices  # (A, C)
        inside = folded.gather(3, columns[:, None, None].expand(-1, beams, folds, -1)) + before[:, :, None, None]
        best, places = inside.flatten(1).topk(count)
        tokens = places // count % folds * width + columns.gather(1, places % count)
        found.append((best, tokens, places // (folds * count)))
    best, tokens, parents = (torch.cat(parts) for parts in zip(*found, strict=True))
    return best, tokens, parents


def _candidates(config: GenerationConfig) -> int:
    """C: enough for K hypotheses to go on if K end."""
    return max(2, 1 + len(config._eos_token_tensor)) * config.num_beams


class _Search:
    """The state of a search: K hypotheses of each sentence that go on, and the K best that have ended."""

    def __init__(
        self, model: nn.Module, prompt: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
    ):
        self.model, self.prompt, self.config = model, prompt, generation_config
        self.beams = generation_config.num_beams
        self.end = generation_config._eos_token_tensor
        self.kept = _candidates(generation_config)
        self.memory = model_kwargs["encoder_outputs"][0]
        self.memory_mask = model_kwargs.get("attention_mask")
        self.cache = _empty_cache(model.config, self.beams)

        sentences, device = prompt.shape[0], prompt.device
        size = (sentences, self.beams)
        self.rows = torch.arange(sentences, device=device)  # (A), the place of each sentence in the input
        self.is_live = torch.ones(sentences, dtype=torch.bool, device=device)  # (A), whether it can still improve
        # (A, K) of what goes on; at first one hypothesis
        self.scores = torch.zeros(sentences, 1, dtype=torch.float32, device=device)
        self.tokens = prompt[:, -1:]  # (A, K), the last token of each
        self.parents = torch.zeros(size, dtype=torch.long, device=device)  # (A, K), from which beam it comes
        self.visible = torch.ones(*size, prompt.shape[1], dtype=torch.bool, device=device)  # (A, K, P)
        self.history: list[tuple[Tensor, Tensor]] = []  # (B, K) tokens and parents of each step
        self.ended_scores = torch.full(size, NEVER, dtype=torch.float32, device=device)  # (B, K), best first
        self.is_ended = torch.zeros(size, dtype=torch.bool, device=device)  # (B, K), or not filled yet
        self.ended = torch.full((3, *size), -1, device=device)  # (3, B, K): step, parent, last token

    def first_logits(self) -> Iterator[Tensor]:
        """(A, V), some at a time: all beams begin with the same."""
        return self._logits(self.prompt, None)

    def next_logits(self) -> Iterator[Tensor]:
        """(A * K, V), some at a time, of the tokens that were chosen last."""
        ancestors = self.visible.gather(1, self.parents[:, :, None].expand_as(self.visible))
        itself = torch.eye(self.beams, dtype=torch.bool, device=ancestors.device)
        self.visible = torch.cat([ancestors, itself.expand(len(self.rows), -1, -1)], dim=2)
        return self._logits(self.tokens.reshape(-1, 1), self.visible[:, None])

    def _logits(self, tokens: Tensor, mask: Tensor | None) -> Iterator[Tensor]:
        beams = self.scores.shape[1]
        return _logits(self.model, tokens, mask, self.memory, self.memory_mask, self.cache, beams)

    def candidates(self, logits: Iterator[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """What `best_continuations` finds in all of them."""
        found, start = [], 0
        for block in logits:
            end = start + len(block) // self.scores.shape[1]
            found.append(best_continuations(block, self.scores[start:end], self.kept))
            start = end
        return tuple(torch.cat(parts) for parts in zip(*found, strict=True))

    def advance(self, scores: Tensor, tokens: Tensor, parents: Tensor) -> None:
        """Go on with the K best candidates that have not ended; keep the best of those that have."""
        step, config = len(self.history), self.config
        length = step + 1
        has_ended = torch.isin(tokens, self.end)
        if self.prompt.shape[1] + length >= config.max_length:
            has_ended = torch.ones_like(has_ended)
        self._end(scores, tokens, parents, has_ended, step)

        self.scores, chosen = (scores + NEVER).where(has_ended, scores).topk(self.beams)
        self.tokens, self.parents = tokens.gather(1, chosen), parents.gather(1, chosen)
        everything = self.prompt.new_zeros(2, *self.ended_scores.shape)
        everything[:, self.rows] = torch.stack([self.tokens, self.parents])
        self.history.append(tuple(everything))

        ended, worst = self.is_ended[self.rows], self.ended_scores[self.rows].amin(dim=1, keepdim=True)
        if config.early_stopping == "never" and config.length_penalty > 0:
            length = config.max_length - self.prompt.shape[1]
        best_to_come = self.scores[:, :1] / length**config.length_penalty
        can_improve = (best_to_come > worst.where(ended, NEVER)).any(dim=1)
        if config.early_stopping is True:
            can_improve &= ~ended.all(dim=1)
        self.is_live &= can_improve & ~has_ended.all()

    def _end(self, scores: Tensor, tokens: Tensor, parents: Tensor, has_ended: Tensor, step: int) -> None:
        """Take candidates that have ended among the K best of their sentence, if they are among the K best now."""
        counts = has_ended & self.is_live[:, None]
        counts[:, self.beams :] = False
        final = (scores / (step + 1) ** self.config.length_penalty).masked_fill(~counts, NEVER)
        rows = self.rows
        self.ended_scores[rows], places = torch.cat([self.ended_scores[rows], final], dim=1).topk(self.beams)
        self.is_ended[rows] = torch.cat([self.is_ended[rows], counts], dim=1).gather(1, places)
        new = torch.stack([torch.full_like(tokens, step), parents, tokens])
        merged = torch.cat([self.ended[:, rows], new], dim=2)
        self.ended[:, rows] = merged.gather(2, places.expand(3, -1, -1))

    def let_finished_sentences_go(self) -> None:
        """Make the batch smaller if enough sentences are finished."""
        staying = self.is_live.nonzero()[:, 0]
        if len(staying) > (1 - LEAVERS) * len(self.rows):
            return
        for name in ("rows", "is_live", "scores", "tokens", "parents", "visible", "memory"):
            setattr(self, name, getattr(self, name)[staying])
        if self.memory_mask is not None:
            self.memory_mask = self.memory_mask[staying]
        _select(self.cache, staying)

    def best(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """The `count` best of each sentence: token ids (B * count, T), scores, and the beam of each step, or -1."""
        last_step, beam, last_token = self.ended[:, :, :count].flatten(1)
        sentence = torch.arange(len(self.ended_scores), device=beam.device).repeat_interleave(count)
        steps = int(last_step.max()) + 1
        padding = self.config._pad_token_tensor
        tokens = self.prompt.new_full((len(beam), steps), int(self.end[0] if padding is None else padding))
        indices = torch.full((len(beam), steps), -1, dtype=torch.int32, device=beam.device)
        for step in reversed(range(steps)):
            before_last, last = step < last_step, step == last_step
            step_tokens, step_parents = (values[sentence, beam] for values in self.history[step])
            tokens[:, step] = step_tokens.where(before_last, last_token.where(last, tokens[:, step]))
            beam = step_parents.where(before_last, beam)
            indices[:, step] = (sentence * self.beams + beam).where(before_last | last, -1)
        sequences = torch.cat([self.prompt.repeat_interleave(count, dim=0), tokens], dim=1)
        return sequences, self.ended_scores[:, :count].flatten(), indices


__all__ = ["beam_search", "beam_search_applies", "greedy_search"]
