"""`generate()`: every search against plain forward passes of the model, and against transformers' handling of beams."""

import copy
import itertools
import json
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import GenerationConfig, dynamic_module_utils
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation import EosTokenCriteria, MaxLengthCriteria
from transformers.modeling_outputs import BaseModelOutput

from hf_vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    cpu_attention,
    modeling_vanilla_transformer,
)
from hf_vanilla_transformer import beam_search as searches
from hf_vanilla_transformer.beam_search import SharedHistory, best_continuations, likeliest
from hf_vanilla_transformer.length_penalty import LENGTH_PENALTY_TYPES, WuLengthPenalty, length_penalty_of_type
from hf_vanilla_transformer.publishing import _code_travels
from tiny_models import BOS, EOS, PAD, SOURCE, V

MASK = SOURCE.ne(PAD).long()
ROWS = [row[row != PAD][None] for row in SOURCE]
# With two vocabularies the source's words have ids that the target does not have.
SEPARATE = {"encoder_vocab_size": 2 * V, "share_encoder_decoder_embeddings": False}
MODELS = {
    "post": {},
    "pre": {"norm_position": "pre"},
    "deep decoder": {"encoder_layers": 1, "decoder_layers": 3},
    "deep encoder": {"encoder_layers": 3, "decoder_layers": 1},
    "separate": SEPARATE,
}
BACKENDS = pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])


def source_of(name, ids=SOURCE):
    return ids.where(ids < 4, ids + V) if name == "separate" else ids


@cache
def half_trained(name):
    """A model that has begun to learn to reverse words and is unsure when to end: its beams are worth a search."""
    torch.manual_seed(0)
    model = VanillaTransformerForConditionalGeneration(
        VanillaTransformerConfig.preset("test", vocab_size=V, dropout=0.0, label_smoothing=0.0, **MODELS[name])
    )
    optimizer, place = torch.optim.Adam(model.parameters(), lr=5e-3, betas=(0.9, 0.98)), torch.arange(8)
    for _ in range(80):
        lengths, words = torch.randint(1, 7, (32, 1)), torch.randint(4, V, (32, 8))
        ends = (lengths + torch.randint(0, 3, (32, 1))).clamp(max=7)
        sources = torch.where(place < lengths, words, torch.where(place == lengths, EOS, PAD))
        reversed_words = words.gather(1, (lengths - 1 - place).clamp(min=0))
        labels = torch.where(place < ends, reversed_words, torch.where(place == ends, EOS, -100))
        optimizer.zero_grad()
        model(source_of(name, sources), labels=labels).loss.backward()
        optimizer.step()
    return model.eval()


def model_of(name="post", attn_implementation="sdpa"):
    model = copy.deepcopy(half_trained(name))
    model.set_attn_implementation(attn_implementation)
    return model


class StockModel(VanillaTransformerForConditionalGeneration):
    """Generation as transformers does it: the source is copied for each beam, both caches are reordered."""

    def _prepare_generation_config(self, *args, **kwargs):
        return self.stock._prepare_generation_config(*args, **kwargs)

    def _prepare_model_inputs(self, *args, **kwargs):
        return self.stock._prepare_model_inputs(*args, **kwargs)

    def _expand_inputs_for_generation(self, **kwargs):
        return self.stock._expand_inputs_for_generation(**kwargs)

    def _beam_search(self, *args, **kwargs):
        return self.stock._beam_search(*args, **kwargs)

    @property
    def stock(self):
        return super(VanillaTransformerForConditionalGeneration, self)

    @staticmethod
    def _reorder_cache(past_key_values, beam_idx):
        past_key_values.reorder_cache(beam_idx)
        return past_key_values


def ours_and_stock(attn_implementation="sdpa", **options):
    """The outputs of two models with the same weights and the same random numbers."""
    ours = model_of(attn_implementation=attn_implementation)
    stock = StockModel(copy.deepcopy(ours.config)).eval()
    stock.load_state_dict(ours.state_dict())
    outputs = []
    for model in (ours, stock):
        torch.manual_seed(7)
        outputs.append(model.generate(SOURCE, attention_mask=MASK, return_dict_in_generate=True, **options))
    return outputs


def beam_scores(model, **options):
    """The scores of the best translations, which tell one formula from another even where the translations agree."""
    return model.generate(SOURCE, return_dict_in_generate=True, output_scores=True, **options).sequences_scores.tolist()


def without_padding(ids):
    """Lists of tokens, without what fills a row up after EOS."""
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in ids.tolist()]


@torch.no_grad()
def next_log_probabilities(model, source, prefixes):
    """(N, V), from a whole forward pass without any cache for N prefixes of one length to one source (1, S)."""
    prefixes = torch.tensor(prefixes)
    logits = model(source.expand(len(prefixes), -1), decoder_input_ids=prefixes, use_cache=False).logits
    return logits[:, -1].log_softmax(-1)


def log_probability(model, source, ids, prefix=1):
    """Of what follows the prefix, EOS included, from one forward pass."""
    with torch.no_grad():
        logits = model(source, decoder_input_ids=torch.tensor([ids]), use_cache=False).logits[0, prefix - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids)[prefix:, None]).sum().item()


def greedy(model, source, length, prefix=(BOS,), shortest=0, end=(EOS,)):
    """Greedy search by hand for one sentence."""
    ids = list(prefix)
    while len(ids) < length and ids[-1] not in end:
        log_probabilities = next_log_probabilities(model, source, [ids])[0]
        if len(ids) < shortest:
            log_probabilities[list(end)] = -torch.inf
        ids.append(log_probabilities.argmax().item())
    return ids


def normaliser(name, exponent):
    """What a log-probability is divided by: equation 14 of Wu et al. 2016, or transformers' power of the length."""
    if name == "wu":
        return lambda length: (5 + length) ** exponent / (5 + 1) ** exponent
    return lambda length: length**exponent


def beam_search(model, source, beams, length, normalise, early_stopping=False, prefix=(BOS,)):
    """Beam search by hand for one sentence: [(score, tokens)], best first.

    Args:
        normalise: number of generated tokens -> what a log-probability is divided by.
        early_stopping: as in transformers: whether to stop at so many hypotheses as beams (True), or as soon as the
            best beam could not do better at its present length (False) or at any length ("never").
    """
    live, finished, generated = [(0.0, list(prefix))], [], 0
    while True:
        log_probabilities = next_log_probabilities(model, source, [ids for _, ids in live]).tolist()
        candidates = [
            (total + step, [*ids, token])
            for (total, ids), row in zip(live, log_probabilities, strict=True)
            for token, step in enumerate(row)
        ]
        candidates = sorted(candidates, reverse=True)[: 2 * beams]
        generated += 1
        has_ended = [ids[-1] == EOS or len(ids) == length for _, ids in candidates]
        ended = [pair for pair, end in zip(candidates[:beams], has_ended, strict=False) if end]
        finished += [(total / normalise(generated), ids) for total, ids in ended]
        finished = sorted(finished, reverse=True)[:beams]
        live = [pair for pair, end in zip(candidates, has_ended, strict=True) if not end][:beams]
        if not live or (len(finished) == beams and early_stopping is True):
            return finished
        reachable = range(generated, length - len(prefix) + 1) if early_stopping == "never" else [generated]
        if len(finished) == beams and max(live[0][0] / normalise(n) for n in reachable) <= finished[-1][0]:
            return finished


class TestGreedySearch:
    @BACKENDS
    @pytest.mark.parametrize("name", MODELS)
    def test_equals_whole_forward_passes(self, name, attn_implementation):
        model = model_of(name, attn_implementation)
        expected = [greedy(model, source_of(name, row), 12) for row in ROWS]
        assert len({len(ids) for ids in expected}) > 1, "some sentences must end before others"
        for options in ({}, {"use_cache": False}, {"cache_implementation": "static"}, {"attention_mask": MASK}):
            output = model.generate(source_of(name), max_length=12, do_sample=False, **options)
            assert without_padding(output) == expected
            assert all(set(row[len(ids) :]) <= {PAD} for row, ids in zip(output.tolist(), expected, strict=True))

    @pytest.mark.parametrize(
        ("options", "by_hand"),
        [
            ({"max_new_tokens": 4}, {"length": 5}),
            ({"max_length": 12, "min_length": 9}, {"length": 12, "shortest": 9}),
            ({"max_length": 12, "min_new_tokens": 9}, {"length": 12, "shortest": 10}),
            ({"max_length": 12, "eos_token_id": [EOS, 7, 10]}, {"length": 12, "end": (EOS, 7, 10)}),
        ],
        ids=str,
    )
    def test_lengths_and_ends(self, options, by_hand):
        model = model_of()
        expected = [greedy(model, row, **by_hand) for row in ROWS]
        assert expected != [greedy(model, row, 12) for row in ROWS], "the options must matter"
        output = model.generate(SOURCE, **options).tolist()
        assert [row[: len(ids)] for row, ids in zip(output, expected, strict=True)] == expected
        assert all(set(row[len(ids) :]) <= {PAD} for row, ids in zip(output, expected, strict=True))


class TestSampling:
    @staticmethod
    def by_hand(model, samples, length, temperature=1.0, top_k=V):
        """All sentences at once, as each step draws one number for each of them."""
        source = SOURCE.repeat_interleave(samples, dim=0)
        ids = torch.full((len(source), 1), BOS)
        while ids.shape[1] < length and not ids.eq(EOS).any(1).all():
            with torch.no_grad():
                scores = model(source, decoder_input_ids=ids, use_cache=False).logits[:, -1] / temperature
            threshold = scores.sort(descending=True).values[:, top_k - 1, None]
            probabilities = scores.masked_fill(scores < threshold, -torch.inf).softmax(-1)
            drawn = torch.multinomial(probabilities, 1)
            ids = torch.cat([ids, drawn.masked_fill(ids.eq(EOS).any(1, keepdim=True), PAD)], dim=1)
        return ids

    @pytest.mark.parametrize("samples", [1, 4])
    @pytest.mark.parametrize("options", [{}, {"temperature": 0.6}, {"top_k": 3}], ids=str)
    def test_draws_what_the_forward_pass_says(self, samples, options):
        model = model_of()
        torch.manual_seed(11)
        expected = self.by_hand(model, samples, 12, **options)
        assert len({tuple(row) for row in expected.tolist()}) > samples
        torch.manual_seed(11)
        output = model.generate(
            SOURCE, do_sample=True, max_length=12, num_return_sequences=samples, **{"top_k": 0, **options}
        )
        assert output.tolist() == expected.tolist()


SEARCHES = [
    {"early_stopping": False, "length_penalty": 2.0},
    {"early_stopping": True, "length_penalty": 2.0},
    {"early_stopping": "never", "length_penalty": 2.0},
    {"early_stopping": False, "length_penalty": 1.0},
    {"early_stopping": True, "length_penalty": 0.6},
    {"early_stopping": "never", "length_penalty": 0.0},
    {"early_stopping": "never", "length_penalty": -1.0},
]


def assert_hypotheses(output, expected):
    """Of one sentence after another, best first: tokens and scores."""
    hypotheses = [hypothesis for sentence in expected for hypothesis in sentence]
    assert without_padding(output.sequences) == [ids for _, ids in hypotheses]
    torch.testing.assert_close(
        output.sequences_scores, torch.tensor([score for score, _ in hypotheses]), atol=1e-5, rtol=1e-4
    )


class TestBeamSearch:
    @pytest.mark.parametrize("name", LENGTH_PENALTY_TYPES)
    @pytest.mark.parametrize("options", SEARCHES, ids=str)
    def test_equals_a_search_by_hand(self, options, name):
        model = model_of()
        normalise = normaliser(name, options["length_penalty"])
        expected = [beam_search(model, row, 4, 10, normalise, options["early_stopping"]) for row in ROWS]
        output = model.generate(
            SOURCE,
            max_length=10,
            num_beams=4,
            num_return_sequences=4,
            length_penalty_type=name,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
        assert_hypotheses(output, expected)

    def test_those_searches_are_not_all_the_same(self):
        """Or else the test above would prove little."""
        model = model_of()

        def found(name, exponent, early_stopping):
            normalise = normaliser(name, exponent)
            return str([ids for row in ROWS for _, ids in beam_search(model, row, 4, 10, normalise, early_stopping)])

        kinds = [*itertools.product(LENGTH_PENALTY_TYPES, (-1.0, 2.0), (True, "never")), ("average", 2.0, False)]
        results = {kind: found(*kind) for kind in kinds}
        assert len({results["average", 2.0, stop] for stop in (False, True, "never")}) > 1
        assert len({results[name, 2.0, "never"] for name in LENGTH_PENALTY_TYPES}) == 2
        assert len({results["wu", alpha, "never"] for alpha in (-1.0, 2.0)}) == 2

    @BACKENDS
    @pytest.mark.parametrize("name", ["pre", "deep decoder", "separate"])
    def test_other_models(self, name, attn_implementation):
        model = model_of(name, attn_implementation)
        rows = [source_of(name, row) for row in ROWS]
        expected = [beam_search(model, row, 3, 10, normaliser("average", 1.0)) for row in rows]
        output = model.generate(
            source_of(name),
            max_length=10,
            num_beams=3,
            num_return_sequences=3,
            return_dict_in_generate=True,
            output_scores=True,
        )
        assert_hypotheses(output, expected)


class TestAssistedGeneration:
    """One sentence at a time, which is all that transformers offers."""

    @staticmethod
    def count_steps(model):
        """The number of tokens that the decoder reads in each of its forward passes."""
        steps = []
        model.get_decoder().register_forward_pre_hook(lambda _, inputs: steps.append(inputs[0].shape[1]))
        return steps

    @pytest.mark.parametrize("row", range(3))
    def test_by_a_smaller_model(self, row):
        model, assistant = model_of(), model_of("deep encoder")
        assert len(assistant.get_decoder().stack.layers) < len(model.get_decoder().stack.layers)
        expected = greedy(model, ROWS[row], 14)
        steps = self.count_steps(model)
        output = model.generate(ROWS[row], assistant_model=assistant, max_length=14)
        assert output[0].tolist() == expected
        assert max(steps) > 1, "the assistant must have proposed something"

    def test_by_its_equal_it_needs_fewer_steps(self):
        model, assistant = model_of(), model_of()
        expected = greedy(model, ROWS[0], 14)
        steps = self.count_steps(model)
        output = model.generate(ROWS[0], assistant_model=assistant, max_length=14)
        assert output[0].tolist() == expected
        assert len(steps) < len(expected) - 1

    def test_by_looking_up_what_is_already_there(self):
        """A prefix that repeats itself: what followed the last time is proposed."""
        model = model_of()
        prefix = [BOS, 9, 8, 7, 6, 5, 9, 8, 7, 6]
        expected = greedy(model, ROWS[0], 18, prefix=prefix)
        steps = self.count_steps(model)
        output = model.generate(
            ROWS[0], decoder_input_ids=torch.tensor([prefix]), prompt_lookup_num_tokens=3, max_length=18
        )
        assert output[0].tolist() == expected
        assert steps[0] == len(prefix) + 3, "the repeated pair must have been found"


class TestPrefixes:
    PREFIXES = ([BOS, 9, 8], [BOS, 11, 10], [BOS, 13, 13])

    def test_greedy(self):
        model = model_of()
        expected = [greedy(model, row, 12, prefix) for row, prefix in zip(ROWS, self.PREFIXES, strict=True)]
        prefixes = torch.tensor(self.PREFIXES)
        for given in (prefixes, prefixes[:, 1:]):  # transformers puts the start token before a prefix without it
            output = model.generate(SOURCE, decoder_input_ids=given, max_length=12)
            assert without_padding(output) == expected

    @pytest.mark.parametrize("num_beams", [1, 4])
    @pytest.mark.parametrize("cache", [{}, {"use_cache": False}, {"cache_implementation": "static"}], ids=str)
    def test_of_different_lengths_padded_on_the_left(self, num_beams, cache):
        model, options = model_of(), {"max_new_tokens": 8, "num_beams": num_beams}
        prefixes = torch.tensor([[BOS, 9, 8], [PAD, BOS, 11], [PAD, PAD, BOS]])
        mask = prefixes.ne(PAD).long()
        output = model.generate(SOURCE, decoder_input_ids=prefixes, decoder_attention_mask=mask, **options, **cache)
        for row, ids, prefix in zip(ROWS, output[:, 3:], prefixes, strict=True):
            prefix = prefix[prefix != PAD]
            alone = model.generate(row, decoder_input_ids=prefix[None], **options)[:, len(prefix) :]
            assert without_padding(ids[None]) == without_padding(alone)

    @pytest.mark.parametrize("name", LENGTH_PENALTY_TYPES)
    def test_a_prefix_does_not_count_as_length(self, name):
        model, normalise = model_of(), normaliser(name, 0.6)
        expected = [
            beam_search(model, row, 4, 10, normalise, "never", prefix)
            for row, prefix in zip(ROWS, self.PREFIXES, strict=True)
        ]
        output = model.generate(
            SOURCE,
            decoder_input_ids=torch.tensor(self.PREFIXES),
            max_length=10,
            num_beams=4,
            num_return_sequences=4,
            length_penalty=0.6,
            length_penalty_type=name,
            early_stopping="never",
            return_dict_in_generate=True,
            output_scores=True,
        )
        assert_hypotheses(output, expected)


class TestInputs:
    @pytest.mark.parametrize("num_beams", [1, 4])
    def test_padding_of_the_source(self, num_beams):
        """On the right, on the left, or none; with the mask or without it."""
        model, options = model_of(), {"max_length": 12, "num_beams": num_beams}
        left = torch.stack([row.roll(int(row.eq(PAD).sum())) for row in SOURCE])
        expected = [without_padding(model.generate(row, **options))[0] for row in ROWS]
        for source in (SOURCE, left, nn.functional.pad(SOURCE, (0, 3), value=PAD)):
            for mask in (None, source.ne(PAD).long()):
                assert without_padding(model.generate(source, attention_mask=mask, **options)) == expected

    @pytest.mark.parametrize("num_beams", [1, 4])
    def test_embeddings(self, num_beams):
        model, options = model_of(), {"max_length": 12, "num_beams": num_beams}
        expected = model.generate(SOURCE, **options)
        embeddings = model.get_input_embeddings()(SOURCE)
        output = model.generate(inputs_embeds=embeddings, attention_mask=MASK, **options)
        assert output.tolist() == expected.tolist()
        alone = model.generate(inputs_embeds=embeddings[:1], **options)  # without a mask every position is real
        assert without_padding(alone) == without_padding(expected[:1])

    @pytest.mark.parametrize("num_beams", [1, 4])
    def test_encoder_outputs_given_and_left_as_they_are(self, num_beams):
        model, options = model_of(), {"max_length": 12, "num_beams": num_beams, "attention_mask": MASK}
        with torch.no_grad():
            given = model.get_encoder()(SOURCE, attention_mask=MASK, output_hidden_states=True)
        kept = copy.deepcopy(given)
        expected = model.generate(SOURCE, **options)
        for _ in range(2):
            assert model.generate(encoder_outputs=given, **options).tolist() == expected.tolist()
        assert list(given) == list(kept)
        torch.testing.assert_close(given.to_tuple(), kept.to_tuple(), atol=0, rtol=0)
        assert model.generate(encoder_outputs=given.to_tuple(), **options).tolist() == expected.tolist()
        bare = BaseModelOutput(given.last_hidden_state)
        assert model.generate(SOURCE, encoder_outputs=bare, **options).tolist() == expected.tolist()

    def test_a_misspelt_option_is_an_error(self):
        with pytest.raises(ValueError, match="num_beam"):
            model_of().generate(SOURCE, num_beam=3)


class TestOthersInTheBatch:
    @pytest.mark.parametrize(
        "options",
        [
            {"num_beams": 1},
            {"num_beams": 4, "early_stopping": True},
            {"num_beams": 4, "early_stopping": False},
            {"num_beams": 4, "early_stopping": "never", "length_penalty": 1.0},
            {"num_beams": 4, "early_stopping": "never", "length_penalty": 2.0, "length_penalty_type": "wu"},
        ],
        ids=str,
    )
    def test_change_nothing(self, options):
        """A sentence that is finished waits for the others without changing, whoever they are and in any order."""
        options |= {"max_length": 14, "return_dict_in_generate": True, "output_scores": True}
        model = model_of()
        alone = [model.generate(row, **options) for row in ROWS]
        assert len({output.sequences.shape[1] for output in alone}) > 1, "some must end before others"
        for order in ([0, 1, 2], [2, 1, 0], [1, 1, 0], [2, 1]):
            together = model.generate(SOURCE[order], **options)
            assert without_padding(together.sequences) == [without_padding(alone[row].sequences)[0] for row in order]
            if options["num_beams"] > 1:
                scores = torch.cat([alone[row].sequences_scores for row in order])
                torch.testing.assert_close(together.sequences_scores, scores, atol=1e-5, rtol=1e-5)


class TestScores:
    @pytest.mark.parametrize("options", [{"num_beams": 1}, {"num_beams": 4, "num_return_sequences": 2}], ids=str)
    @pytest.mark.parametrize("normalize_logits", [True, False])
    @pytest.mark.parametrize("name", ["post", "separate"])
    def test_transition_scores(self, name, normalize_logits, options):
        """The log-probability of each token, or its logit in greedy search; zero after the end of a beam."""
        model, source = model_of(name), source_of(name)
        options |= {"max_length": 12, "return_dict_in_generate": True, "output_scores": True}
        output = model.generate(source, **options)
        scores = model.compute_transition_scores(
            output.sequences, output.scores, output.get("beam_indices"), normalize_logits=normalize_logits
        )
        source = source.repeat_interleave(len(scores) // len(source), dim=0)
        with torch.no_grad():
            logits = model(source, decoder_input_ids=output.sequences, use_cache=False).logits[:, :-1]
        if normalize_logits or options["num_beams"] > 1:
            logits = logits.log_softmax(-1)
        expected = logits.gather(2, output.sequences[:, 1:, None])[..., 0]
        real = output.sequences[:, 1:].ne(PAD)
        torch.testing.assert_close(scores[real], expected[real], atol=1e-4, rtol=1e-4)
        if options["num_beams"] > 1:
            assert scores[~real].eq(0).all()
            torch.testing.assert_close(output.sequences_scores, scores.sum(1) / real.sum(1), atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("num_beams", [1, 4])
    def test_one_row_of_scores_and_logits_for_each_beam_and_step(self, num_beams):
        output = model_of().generate(
            SOURCE,
            max_length=9,
            num_beams=num_beams,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
        )
        for scores in (output.scores, output.logits):
            assert {tuple(step.shape) for step in scores} == {(3 * num_beams, V)}
        normalised = [step.log_softmax(-1) if num_beams > 1 else step for step in output.logits]
        torch.testing.assert_close(normalised, list(output.scores))


class TestRecordedOutputs:
    """Shapes, with the batch of each: sentences on the source's side, sentences * beams on the target's.

    transformers documents `encoder_hidden_states` of a beam search with a row for each beam, and cross-attention with
    one for each sentence. What it returns is the opposite, and so do we: the test below compares the values.
    """

    @pytest.mark.parametrize("use_cache", [True, False])
    @pytest.mark.parametrize("num_beams", [1, 4])
    def test_shapes(self, num_beams, use_cache):
        model = model_of("deep decoder", "eager")
        output = model.generate(
            SOURCE,
            max_length=7,
            num_beams=num_beams,
            use_cache=use_cache,
            return_dict_in_generate=True,
            output_attentions=True,
            output_hidden_states=True,
        )
        b, r, s, h = 3, 3 * num_beams, 6, 4
        assert [tuple(x.shape) for x in output.encoder_attentions] == [(b, h, s, s)]
        assert [tuple(x.shape) for x in output.encoder_hidden_states] == [(b, s, 32)] * 2
        steps = len(output.decoder_attentions)
        assert steps == len(output.cross_attentions) == len(output.decoder_hidden_states) > 2
        for step in range(steps):
            new, known = (1, step + 1) if use_cache else (step + 1, step + 1)
            assert [tuple(x.shape) for x in output.decoder_attentions[step]] == [(r, h, new, known)] * 3
            assert [tuple(x.shape) for x in output.cross_attentions[step]] == [(r, h, new, s)] * 3
            assert [tuple(x.shape) for x in output.decoder_hidden_states[step]] == [(r, new, 32)] * 4

    @pytest.mark.parametrize("use_cache", [True, False])
    def test_values_are_those_of_the_stock_path(self, use_cache):
        ours, stock = ours_and_stock(
            "eager",
            max_length=7,
            num_beams=4,
            use_cache=use_cache,
            output_attentions=True,
            output_hidden_states=True,
        )
        for name in (
            "encoder_attentions",
            "encoder_hidden_states",
            "decoder_attentions",
            "cross_attentions",
            "decoder_hidden_states",
        ):
            torch.testing.assert_close(ours[name], stock[name], atol=1e-4, rtol=1e-4)


class TestBeamsShareTheirSource:
    @BACKENDS
    @pytest.mark.parametrize(
        "options",
        [
            {"num_beams": 5},
            {"num_beams": 5, "use_cache": False},
            {"num_beams": 5, "cache_implementation": "static"},
            {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.6, "early_stopping": True},
            {"num_beams": 3, "do_sample": True, "num_return_sequences": 2},
            {"num_beams": 3, "do_sample": True, "cache_implementation": "static"},
            {"do_sample": True, "num_return_sequences": 4, "top_k": 0},
            {"num_beams": 3, "decoder_input_ids": torch.tensor([[BOS, 8], [BOS, 11], [BOS, 15]])},
        ],
        ids=str,
    )
    def test_and_find_what_the_stock_path_finds(self, options, attn_implementation):
        ours, stock = ours_and_stock(attn_implementation, max_length=12, output_scores=True, **options)
        assert ours.sequences.tolist() == stock.sequences.tolist()
        assert len({tuple(row) for row in ours.sequences.tolist()}) > 2
        torch.testing.assert_close(ours.scores, stock.scores, atol=1e-4, rtol=1e-4)
        if options.get("num_beams"):
            torch.testing.assert_close(ours.sequences_scores, stock.sequences_scores, atol=1e-5, rtol=1e-5)
            assert ours.beam_indices.tolist() == stock.beam_indices.tolist()

    @pytest.mark.parametrize("cache_implementation", ["dynamic", "static"])
    @pytest.mark.parametrize("options", [{"num_beams": 4}, {"do_sample": True, "num_return_sequences": 4}], ids=str)
    def test_one_memory_for_all_of_them(self, options, cache_implementation):
        """The encoder runs once; its output, the mask and the cross-attention cache have a row for each sentence."""
        model, encoded, received = model_of(), [], []
        model.get_encoder().register_forward_hook(lambda _, __, output: encoded.append(len(output[0])))
        model.get_decoder().register_forward_pre_hook(
            lambda _, inputs, named: received.append(
                (len(inputs[0]), len(named["encoder_hidden_states"]), len(named["encoder_attention_mask"]))
            ),
            with_kwargs=True,
        )
        cache = model.generate(
            SOURCE,
            max_length=6,
            return_dict_in_generate=True,
            output_scores=True,  # or else beams are searched in another way, see TestOwnBeamSearch
            cache_implementation=cache_implementation,
            **options,
        ).past_key_values
        assert encoded == [3]
        assert len(received) > 2
        assert set(received) == {(12, 3, 3)}
        assert {layer.keys.shape[0] for layer in cache.cross_attention_cache.layers} == {3}
        assert {layer.values.shape[0] for layer in cache.cross_attention_cache.layers} == {3}
        assert {layer.keys.shape[0] for layer in cache.self_attention_cache.layers} == {12}

    def test_nothing_of_the_source_is_copied(self):
        """What `generate()` hands on for three beams: the target's side three times, the source's as it was."""
        source = {
            "attention_mask": MASK,
            "encoder_outputs": BaseModelOutput(torch.zeros(3, 6, 32)),
            "inputs_embeds": torch.zeros(3, 6, 32),
        }
        target = {"decoder_attention_mask": torch.tensor([[1], [2], [3]])}
        ids, expanded = model_of()._expand_inputs_for_generation(
            expand_size=3, is_encoder_decoder=True, input_ids=torch.tensor([[4], [5], [6]]), **source, **target
        )
        assert ids.flatten().tolist() == [4, 4, 4, 5, 5, 5, 6, 6, 6]
        assert expanded.pop("decoder_attention_mask").flatten().tolist() == [1, 1, 1, 2, 2, 2, 3, 3, 3]
        assert all(expanded.pop(name) is value for name, value in source.items())
        assert not expanded

    def test_the_cross_attention_cache_is_never_reordered(self, monkeypatch):
        """It is written once, in the first step, and is the same memory at the end."""
        places = []
        original = VanillaTransformerForConditionalGeneration._reorder_cache

        def spy(past_key_values, beam_idx):
            places.append([layer.keys.data_ptr() for layer in past_key_values.cross_attention_cache.layers])
            return original(past_key_values, beam_idx)

        monkeypatch.setattr(VanillaTransformerForConditionalGeneration, "_reorder_cache", staticmethod(spy))
        model_of().generate(SOURCE, max_length=8, num_beams=4, return_dict_in_generate=True, output_scores=True)
        assert len(places) > 2
        assert all(place == places[0] for place in places)


class TestOwnBeamSearch:
    """`beam_search`, which stands in wherever nobody asks for what happens at each step."""

    @BACKENDS
    @pytest.mark.parametrize("early_stopping", [True, False, "never"])
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"num_return_sequences": 3},
            {"length_penalty": 0.4, "length_penalty_type": "wu"},
            {"length_penalty": -0.5},
            {"max_length": 4},
            {"num_beams": 2, "eos_token_id": [EOS, 5, 9]},
            {"decoder_input_ids": torch.tensor([[BOS, 8], [BOS, 11], [BOS, 15]])},
            {"attention_mask": torch.ones_like(MASK)},
        ],
        ids=str,
    )
    def test_finds_what_transformers_finds(self, options, early_stopping, attn_implementation):
        options = {"num_beams": 4, "max_length": 12, "early_stopping": early_stopping, "attention_mask": MASK} | options
        ours = model_of(attn_implementation=attn_implementation)
        stock = StockModel(copy.deepcopy(ours.config))
        stock.load_state_dict(ours.state_dict())
        stock._prepare_generation_config = ours._prepare_generation_config
        found = ours.generate(SOURCE, return_dict_in_generate=True, **options)
        expected = stock.eval().generate(SOURCE, return_dict_in_generate=True, output_scores=True, **options)
        assert found.past_key_values is None, "not our search"
        assert expected.past_key_values is not None, "not that of transformers"
        assert found.sequences.tolist() == expected.sequences.tolist()
        assert found.beam_indices.tolist() == expected.beam_indices.tolist()
        torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, atol=1e-4, rtol=1e-5)
        assert ours.generate(SOURCE, **options).tolist() == found.sequences.tolist()

    @pytest.mark.parametrize("name", MODELS)
    def test_every_kind_of_model(self, name):
        model, source = model_of(name), source_of(name)
        found = model.generate(source, num_beams=3, max_length=12)
        steps = {"return_dict_in_generate": True, "output_scores": True}
        assert found.tolist() == model.generate(source, num_beams=3, max_length=12, **steps).sequences.tolist()

    def test_finished_sentences_leave_and_change_nothing_for_the_others(self):
        model, sentences = model_of(), []
        model.get_decoder().register_forward_pre_hook(
            lambda _, inputs, named: sentences.append((len(inputs[0]), len(named["encoder_hidden_states"]))),
            with_kwargs=True,
        )
        short = torch.tensor([[5, EOS] + [PAD] * 4])
        source = torch.cat([short, short, SOURCE, short])
        together = model.generate(source, num_beams=4, max_length=20)
        assert sentences[0] == (6, 6)  # the first step is the same for all beams
        assert sentences[1] == (24, 6)
        assert sentences[-1][1] < 6
        assert [rows // memory for rows, memory in sentences[1:]] == [4] * (len(sentences) - 1)
        alone = [model.generate(row[None], num_beams=4, max_length=20) for row in source]
        assert without_padding(together) == [without_padding(ids)[0] for ids in alone]

    @pytest.mark.parametrize("num_beams", [1, 3])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
    def test_the_default_type_changes_nothing(self, num_beams, dtype):
        model, options = model_of(), {"num_beams": num_beams, "max_length": 12, "return_dict_in_generate": True}
        expected = model.generate(SOURCE, **options)
        torch.set_default_dtype(dtype)
        try:
            found = model.generate(SOURCE, **options)
        finally:
            torch.set_default_dtype(torch.float32)
        assert found.sequences.tolist() == expected.sequences.tolist()
        torch.testing.assert_close(found.sequences_scores, expected.sequences_scores)

    @pytest.mark.parametrize("num_beams", [1, 4])
    @pytest.mark.parametrize("amx", [True, False])
    def test_what_all_steps_read_is_converted_once(self, num_beams, amx, monkeypatch):
        """bfloat16 on a CPU, where attention mostly computes in float32: the same as if every step converted it."""
        monkeypatch.setattr(cpu_attention, "HAS_AMX", amx)
        model, caches = copy.deepcopy(model_of(attn_implementation="sdpa")).bfloat16(), []
        original = searches._empty_cache
        monkeypatch.setattr(searches, "_empty_cache", lambda *of: caches.append(original(*of)) or caches[-1])
        found = model.generate(SOURCE, num_beams=num_beams, max_length=12)
        halves = caches[0].self_attention_cache.layers[0].buffers[0], caches[0].cross_attention_cache.layers[0].keys
        assert [half.dtype for half in halves] == [torch.bfloat16 if amx and num_beams == 1 else torch.float32] * 2
        monkeypatch.setattr(searches, "_type_as_read", lambda layer, states: states.dtype)
        assert model.generate(SOURCE, num_beams=num_beams, max_length=12).tolist() == found.tolist()
        assert caches[1].self_attention_cache.layers[0].buffers[0].dtype == torch.bfloat16

    @pytest.mark.parametrize("vocabulary", [37, 1000, 1009, 1280])
    def test_likeliest_is_the_first_of_equal_ones(self, vocabulary):
        """In whole numbers there are many of them."""
        logits = torch.randint(-3, 4, (200, vocabulary), generator=torch.Generator().manual_seed(0)).float()
        assert likeliest(logits).tolist() == [row.index(max(row)) for row in logits.tolist()]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("vocabulary", [37, 1000, 1009, 1280])
    def test_best_continuations(self, vocabulary, dtype):
        """More sentences than one block has; the beams are as good as each other, so that all of them go on."""
        generator = torch.Generator().manual_seed(0)
        logits = (10 * torch.randn(70 * 4, vocabulary, generator=generator)).to(dtype)
        scores = torch.randn(70, 4, generator=generator)
        values, tokens, parents = best_continuations(logits, scores, 8)
        expected = scores[:, :, None] + logits.float().log_softmax(dim=-1).view(70, 4, vocabulary)
        torch.testing.assert_close(values, expected.flatten(1).topk(8).values, atol=1e-4, rtol=1e-6)
        found = expected[torch.arange(70)[:, None], parents, tokens]
        torch.testing.assert_close(values, found, atol=1e-4, rtol=1e-6)
        assert all(len(set(pairs)) == 8 for pairs in (vocabulary * parents + tokens).tolist())

    def test_the_history_is_appended_and_never_moved(self):
        """Room for 16 steps is taken at once; so many steps write into the same memory."""
        history, generator = SharedHistory(3, False), torch.Generator().manual_seed(0)
        written = [torch.randn(2, 4, 1, 8, generator=generator) for _ in range(40)]
        places = set()
        for step, states in enumerate(written):
            rows = states.repeat_interleave(3, dim=0) if step else states
            keys, values = history.update(rows, rows + 1)
            places.add(history.buffers[0].data_ptr())
            assert keys.shape == (2, 4, 1 + 3 * step, 8)
            assert history.get_seq_length() == step + 1
        assert len(places) == 3
        expected = torch.cat([written[0], *(states.expand(-1, -1, 3, -1) for states in written[1:])], dim=2)
        torch.testing.assert_close(keys, expected)
        torch.testing.assert_close(values, expected + 1)
        history.batch_select_indices(torch.tensor([1]))
        torch.testing.assert_close(history.update(rows[:3], rows[:3])[0][:, :, :-3], expected[1:])

    @pytest.mark.parametrize(
        "options",
        [
            {"output_scores": True},
            {"output_attentions": True},
            {"do_sample": True},
            {"use_cache": False},
            {"cache_implementation": "static"},
            {"repetition_penalty": 1.3},
            {"max_time": 100.0},
            {"num_beams": 12},
            {"decoder_attention_mask": torch.ones(3, 1)},
        ],
        ids=str,
    )
    def test_what_it_cannot_do_is_left_to_transformers(self, options, monkeypatch):
        monkeypatch.setattr(modeling_vanilla_transformer, "beam_search", None)
        options = {"num_beams": 3, "max_length": 6, "return_dict_in_generate": True, **options}
        assert len(model_of(attn_implementation="eager").generate(SOURCE, **options).sequences) == 3


class TestOwnGreedySearch:
    """`greedy_search`, which stands in wherever nobody asks for what happens at each step."""

    @BACKENDS
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"max_length": 4},
            {"eos_token_id": [EOS, 5, 9]},
            {"decoder_input_ids": torch.tensor([[BOS, 8], [BOS, 11], [BOS, 15]])},
            {"attention_mask": torch.ones_like(MASK)},
        ],
        ids=str,
    )
    def test_finds_what_transformers_finds(self, options, attn_implementation):
        options = {"max_length": 12, "attention_mask": MASK} | options
        model = model_of(attn_implementation=attn_implementation)
        expected = model.generate(SOURCE, return_dict_in_generate=True, output_scores=True, **options)
        assert expected.past_key_values is not None, "not that of transformers"
        found = model.generate(SOURCE, return_dict_in_generate=True, **options)
        assert found.past_key_values is None, "not our search"
        assert found.sequences.tolist() == expected.sequences.tolist()
        assert model.generate(SOURCE, **options).tolist() == expected.sequences.tolist()
        steps = model.compute_transition_scores(expected.sequences, expected.scores, normalize_logits=True)
        written = steps.masked_fill(expected.sequences[:, -steps.shape[1] :].eq(PAD), torch.nan)
        torch.testing.assert_close(found.sequences_scores, written.nanmean(dim=1))

    def test_several_beginnings_for_one_source_are_left_to_transformers(self):
        beginnings = torch.tensor([[BOS, 5], [BOS, 6], [BOS, 7]])
        model, source = model_of(), SOURCE[:1]
        found = model.generate(source, decoder_input_ids=beginnings, max_length=12)
        alone = [model.generate(source, decoder_input_ids=row[None], max_length=12) for row in beginnings]
        assert without_padding(found) == [without_padding(ids)[0] for ids in alone]

    @pytest.mark.parametrize("name", MODELS)
    def test_every_kind_of_model(self, name):
        model, source = model_of(name), source_of(name)
        steps = {"return_dict_in_generate": True, "output_scores": True}
        expected = model.generate(source, max_length=12, **steps).sequences
        assert model.generate(source, max_length=12).tolist() == expected.tolist()

    def test_finished_sentences_leave_and_change_nothing_for_the_others(self):
        model, rows = model_of(), []
        model.get_decoder().register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
        short = torch.tensor([[5, EOS] + [PAD] * 4])
        source = torch.cat([short, SOURCE, short])
        together = model.generate(source, max_length=20)
        assert rows[0] == 5
        assert rows[-1] < 5
        alone = [model.generate(row[None], max_length=20) for row in source]
        assert without_padding(together) == [without_padding(ids)[0] for ids in alone]

    @pytest.mark.parametrize(
        "options",
        [
            {"return_dict_in_generate": True, "output_scores": True},
            {"return_dict_in_generate": True, "output_hidden_states": True},
            {"streamer": SimpleNamespace(put=lambda ids: None, end=lambda: None)},
            {"do_sample": True},
            {"use_cache": False},
            {"cache_implementation": "static"},
            {"repetition_penalty": 1.3},
            {"max_time": 100.0},
        ],
        ids=str,
    )
    def test_what_it_cannot_do_is_left_to_transformers(self, options, monkeypatch):
        monkeypatch.setattr(modeling_vanilla_transformer, "greedy_search", None)
        found = model_of(attn_implementation="eager").generate(SOURCE, max_length=6, **options)
        assert len(getattr(found, "sequences", found)) == 3


class Prepared(VanillaTransformerForConditionalGeneration):
    """Somebody's model with inputs of its own at every step, as an adapter may have them."""

    def prepare_inputs_for_generation(self, *args, **kwargs):
        self.calls = getattr(self, "calls", 0) + 1
        return super().prepare_inputs_for_generation(*args, **kwargs)


def only_nine(output):
    output.logits[..., :9] = output.logits[..., 10:] = -torch.inf
    return output


class OfNines(VanillaTransformerForConditionalGeneration):
    """Somebody's model that says in `forward` what may be written."""

    def forward(self, *args, **kwargs):
        return only_nine(super().forward(*args, **kwargs))


@pytest.mark.parametrize("num_beams", [1, 3])
def test_logits_of_some_sentences_at_a_time(num_beams, monkeypatch):
    options = {"num_beams": num_beams, "max_length": 12, "return_dict_in_generate": True}
    model, rows = model_of(), []
    expected = model.generate(SOURCE, **options)
    model.lm_head.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    monkeypatch.setattr(searches, "LOGITS_BYTES", 1)
    monkeypatch.setattr(searches, "BLOCK", 2 * num_beams)
    found = model.generate(SOURCE, **options)
    assert max(rows) == 2 * num_beams
    assert found.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(found.sequences_scores, expected.sequences_scores)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_activation_checkpointing_in_training_mode_caches_nothing(num_beams):
    """Layers that are computed twice leave the cache out, and one token at a time would know no history."""
    options = {"attention_mask": MASK, "num_beams": num_beams, "max_length": 12}
    expected = model_of().generate(SOURCE, **options).tolist()
    model = model_of()
    model.gradient_checkpointing_enable()
    model.train()
    assert model.generate(SOURCE, **options).tolist() == expected
    assert model(SOURCE, decoder_input_ids=SOURCE).past_key_values is None
    model.eval()
    assert model(SOURCE, decoder_input_ids=SOURCE).past_key_values is not None


@pytest.mark.parametrize("num_beams", [1, 3])
class TestWhatCallersBringAlong:
    """Neither of our searches may pass over it."""

    def test_a_maximal_length(self, num_beams):
        criteria = [MaxLengthCriteria(5)]
        found = model_of().generate(SOURCE, num_beams=num_beams, max_length=12, stopping_criteria=criteria)
        assert found.shape[1] <= 5

    def test_an_end(self, num_beams, monkeypatch):
        for name in ("beam_search", "greedy_search"):
            monkeypatch.setattr(modeling_vanilla_transformer, name, None)
        criteria = [EosTokenCriteria(torch.tensor([EOS, 5]))]
        assert len(model_of().generate(SOURCE, num_beams=num_beams, max_length=6, stopping_criteria=criteria)) == 3

    def test_a_cache(self, num_beams):
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        model_of().generate(SOURCE, num_beams=num_beams, max_length=6, past_key_values=cache)
        assert cache.get_seq_length() > 0

    def test_a_cache_that_is_kept_elsewhere(self, num_beams, monkeypatch):
        """As with cache_implementation="offloaded", for which a GPU is needed: here it is only said to be."""

        def said_to_be(cache, *args, **kwargs):
            make(cache, *args, **kwargs)
            cache.offloading = True

        def updated(cache, *args, **kwargs):
            cache.offloading = False
            return update(cache, *args, **kwargs)

        make, update = DynamicCache.__init__, DynamicCache.update
        monkeypatch.setattr(DynamicCache, "__init__", said_to_be)
        monkeypatch.setattr(DynamicCache, "update", updated)
        for name in ("beam_search", "greedy_search"):
            monkeypatch.setattr(modeling_vanilla_transformer, name, None)
        model_of().generate(SOURCE, num_beams=num_beams, max_length=6)

    @pytest.mark.parametrize("way", ["subclass", "wrapper", "hook", "compiler"])
    def test_a_step_of_their_own(self, way, num_beams):
        model = OfNines(model_of().config).eval() if way == "subclass" else model_of()
        if way == "wrapper":  # as accelerate does in mixed precision
            forward = model.forward
            model.forward = lambda *args, **kwargs: only_nine(forward(*args, **kwargs))
        elif way == "hook":
            model.register_forward_hook(lambda _, __, output: only_nine(output))
        elif way == "compiler":  # as `model.compile()` does
            model._compiled_call_impl = lambda *args, **kwargs: only_nine(model._call_impl(*args, **kwargs))
        found = model.generate(SOURCE, num_beams=num_beams, max_length=6, return_dict_in_generate=True)
        assert found.sequences[:, 1:].eq(9).all()
        assert found.past_key_values is None, "not our search"

    def test_a_hook_before_each_step(self, num_beams):
        model, steps = model_of(), []
        model.register_forward_pre_hook(lambda *_: steps.append(1))
        model.generate(SOURCE, num_beams=num_beams, max_length=6)
        assert len(steps) > 1

    def test_inputs_of_their_own(self, num_beams):
        model = Prepared(model_of().config)
        model.generate(SOURCE, num_beams=num_beams, max_length=6)
        assert model.calls > 0


class TestLengthPenalty:
    def test_equation_14(self):
        """lp(Y) = (5 + |Y|)^alpha / (5 + 1)^alpha."""
        for alpha, length in itertools.product((-1.0, 0.0, 0.6, 2.0), (1, 7, 50)):
            assert length ** WuLengthPenalty(alpha) == pytest.approx((5 + length) ** alpha / (5 + 1) ** alpha)
        assert 1 ** WuLengthPenalty(0.6) == 1
        assert copy.deepcopy(WuLengthPenalty(0.6)) == 0.6
        assert 7 ** copy.deepcopy(WuLengthPenalty(1.0)) == 2

    def test_types(self):
        assert type(length_penalty_of_type(0.6, "average")) is type(length_penalty_of_type(0.6, None)) is float
        assert type(length_penalty_of_type(0.6, "wu")) is WuLengthPenalty
        assert length_penalty_of_type(None, "wu") is None

    @pytest.mark.parametrize("name", LENGTH_PENALTY_TYPES)
    @pytest.mark.parametrize("alpha", [-0.5, 0.6, 1.5])
    @pytest.mark.parametrize("early_stopping", [False, "never"])
    def test_equals_the_best_of_all_hypotheses(self, name, alpha, early_stopping):
        """5 tokens, at most 3 of them: 85 hypotheses, scored by hand; a search of 80 beams forgets none of the best."""
        torch.manual_seed(0)
        model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig.preset("test", vocab_size=5)).eval()
        source, normalise = torch.tensor([[4, 4, EOS]]), normaliser(name, alpha)
        hypotheses = []
        for length in (1, 2, 3):
            for tokens in itertools.product(range(5), repeat=length):
                if EOS not in tokens[:-1] and (tokens[-1] == EOS or length == 3):
                    ids = [BOS, *tokens]
                    hypotheses.append((log_probability(model, source, ids) / normalise(length), ids))
        assert len(hypotheses) == 85
        output = model.generate(
            source,
            max_length=4,
            num_beams=80,
            num_return_sequences=40,
            length_penalty=alpha,
            length_penalty_type=name,
            early_stopping=early_stopping,
            return_dict_in_generate=True,
            output_scores=True,
        )
        assert_hypotheses(output, [sorted(hypotheses, reverse=True)[:40]])

    def test_from_where_it_is_taken(self):
        """The call comes first, then the configuration given to the call, then the model's, then transformers' own."""
        model, options = model_of(), {"max_length": 12, "num_beams": 4, "length_penalty": 2.0}
        wu, average = (beam_scores(model, length_penalty_type=name, **options) for name in ("wu", "average"))
        assert beam_scores(model, **options) == average != wu
        given = GenerationConfig(length_penalty_type="wu", **options)
        assert beam_scores(model, generation_config=given) == wu
        assert type(given.length_penalty) is float
        model.generation_config.update(length_penalty_type="wu", **options)
        assert beam_scores(model) == wu
        assert beam_scores(model, length_penalty_type="average") == average
        assert model.generation_config.length_penalty_type == "wu"
        assert type(model.generation_config.length_penalty) is float
        del model.generation_config.length_penalty_type  # as in a configuration that knows nothing of it
        assert beam_scores(model) == average
        assert beam_scores(model, length_penalty_type="wu") == wu

    def test_without_beams_it_means_nothing(self):
        model = model_of()
        expected = model.generate(SOURCE, max_length=12)
        for penalty in (1.0, None):
            output = model.generate(SOURCE, max_length=12, length_penalty=penalty, length_penalty_type="wu")
            assert output.tolist() == expected.tolist()

    @pytest.mark.parametrize("num_beams", [1, 2])
    def test_an_unknown_name(self, num_beams):
        model, message = model_of(), r"^length_penalty_type='Wu' is not one of average, wu$"
        with pytest.raises(ValueError, match=message):
            model.generate(SOURCE, num_beams=num_beams, length_penalty_type="Wu")
        model.generation_config.length_penalty_type = "Wu"
        with pytest.raises(ValueError, match=message):
            model.generate(SOURCE, num_beams=num_beams)


class TestSavedSettings:
    SETTINGS = {"max_length": 9, "num_beams": 4, "length_penalty": 2.0, "length_penalty_type": "wu"}  # noqa: RUF012

    def save(self, folder):
        """The scores of what the saved model finds."""
        model = model_of()
        model.generation_config.update(**self.SETTINGS)
        model.save_pretrained(folder)
        written = json.loads((folder / "generation_config.json").read_text())
        assert {key: written.get(key) for key in self.SETTINGS} == self.SETTINGS
        assert beam_scores(model) != beam_scores(model, length_penalty_type="average")
        return beam_scores(model)

    def test_are_loaded_and_saved_again(self, tmp_path):
        expected = self.save(tmp_path / "one")
        loaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path / "one")
        assert beam_scores(loaded) == expected
        loaded.save_pretrained(tmp_path / "two")
        again = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path / "two")
        assert beam_scores(again) == expected

    @pytest.mark.usefixtures("remote_code")
    def test_hold_where_the_code_comes_with_the_model(self, tmp_path):
        """As `trust_remote_code=True` loads it: a class of its own, from the files beside the weights."""
        with _code_travels():
            expected = self.save(tmp_path / "published")
        name = "modeling_vanilla_transformer.VanillaTransformerForConditionalGeneration"
        remote = dynamic_module_utils.get_class_from_dynamic_module(name, tmp_path / "published")
        assert remote is not VanillaTransformerForConditionalGeneration
        assert beam_scores(remote.from_pretrained(tmp_path / "published")) == expected

    def test_a_whole_configuration_replaces_the_models(self, tmp_path):
        model = model_of()
        model.generation_config = GenerationConfig(
            pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS, decoder_start_token_id=BOS, **self.SETTINGS
        )
        model.save_pretrained(tmp_path)
        loaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)
        assert beam_scores(loaded) == beam_scores(model_of(), **self.SETTINGS)
