"""Tokenizers learned from the training text: section 5.1 of "Attention Is All You Need".

A joint vocabulary is an ordinary `tokenizers` file that plain `AutoTokenizer` loads without any code of ours.
Separate source and target vocabularies need the class `SeparateVocabularyTokenizer`.

Every vocabulary begins with the same four special tokens. EOS ends source and target; BOS is what the decoder starts
from (`decoder_start_token_id`) and is never part of an encoded text.
"""

import itertools
import json
import os
import random
from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from .errors import UserError

UNK, PAD, BOS, EOS = SPECIAL_TOKENS = ("<unk>", "<pad>", "<s>", "</s>")
SPECIAL_TOKEN_ROLES = {"unk_token": UNK, "pad_token": PAD, "bos_token": BOS, "eos_token": EOS}
# A text that happens to hold the letters "<s>" must not smuggle in a special token. Nor are special tokens found that
# users add, unless they set `split_special_tokens` to False.
SETTINGS = {"model_input_names": ["input_ids", "attention_mask"], "split_special_tokens": True, **SPECIAL_TOKEN_ROLES}
TOKENIZER_TYPES = ("bpe", "unigram", "byte-level", "word-level")
NORMALIZATIONS = ("nfc", "nfkc", "none")


def learn_backend(
    texts: Iterable[str],
    *,
    tokenizer_type: str = "bpe",
    vocab_size: int = 10000,
    lowercase: bool = False,
    normalization: str = "nfc",
) -> Tokenizer:
    """Learn one vocabulary from text. The same text gives the same vocabulary.

    Args:
        texts: the training text, one sentence each.
        tokenizer_type: "bpe" (Sennrich et al. 2016), "unigram" (Kudo 2018), "byte-level" (BPE over UTF-8 bytes, which
            knows every character) or "word-level".
        vocab_size: tokens, special ones included; fewer where the text does not hold so many.
        lowercase: whether the model reads and writes lower case only.
        normalization: the Unicode normal form, "nfc", "nfkc" or "none".

    Raises:
        ValueError: an unknown `tokenizer_type` or `normalization`; a vocabulary that is too small for the characters.
    """
    if tokenizer_type not in TOKENIZER_TYPES:
        raise ValueError(f"tokenizer_type={tokenizer_type!r} is not one of {', '.join(TOKENIZER_TYPES)}")
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"normalization={normalization!r} is not one of {', '.join(NORMALIZATIONS)}")
    model, trainer = _model_and_trainer(tokenizer_type, vocab_size)
    backend = Tokenizer(model)
    steps = [{"nfc": normalizers.NFC, "nfkc": normalizers.NFKC}[normalization]()] if normalization != "none" else []
    if lowercase:
        steps.append(normalizers.Lowercase())
    backend.normalizer = normalizers.Sequence(steps)
    if tokenizer_type == "byte-level":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    else:
        # The space travels with the word that it precedes, so that decoding restores the text exactly.
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()])
        backend.decoder = decoders.Metaspace()
    try:
        backend.train_from_iterator(texts, trainer)
    except Exception as error:  # the class that tokenizers raises
        if type(error) is not Exception:
            raise
        raise ValueError(f"{tokenizer_type} tokenizer with vocab_size={vocab_size}: {error}") from error
    if (least := backend.get_vocab_size()) > vocab_size:
        raise ValueError(
            f"{tokenizer_type} tokenizer with vocab_size={vocab_size}: too small for the characters, it has {least} "
            "tokens"
        )
    if tokenizer_type == "unigram":
        backend.model = _canonical_unigram(backend)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", pair=f"$A $B {EOS}", special_tokens=[(EOS, backend.token_to_id(EOS))]
    )
    return backend


def _model_and_trainer(tokenizer_type: str, vocab_size: int) -> tuple[models.Model, trainers.Trainer]:
    common = {"vocab_size": vocab_size, "special_tokens": list(SPECIAL_TOKENS), "show_progress": False}
    if tokenizer_type == "unigram":
        return models.Unigram(), trainers.UnigramTrainer(unk_token=UNK, **common)
    if tokenizer_type == "word-level":
        return models.WordLevel(unk_token=UNK), trainers.WordLevelTrainer(**common)
    if tokenizer_type == "byte-level":
        return models.BPE(), trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **common)
    return models.BPE(unk_token=UNK), trainers.BpeTrainer(**common)


def _canonical_unigram(backend: Tokenizer) -> models.Unigram:
    """The same model whatever the order in which the trainer met its hash tables.

    The trainer sums in random order, which moves scores by about 1e-11, and it gives the characters that it has to
    keep at any price, in random order, the lowest score and then 1e-4 more each. Rounding removes the first, one
    common lowest score the second.
    """
    vocab = json.loads(backend.to_str())["model"]["vocab"]
    scores = {token: score for token, score in vocab if token not in SPECIAL_TOKENS}
    lowest = min(scores.values(), default=0.0)
    kept_at_any_price = lowest + 1e-4 * sum(len(token) == 1 for token in scores)
    pieces = [
        (token, round(lowest if len(token) == 1 and score < kept_at_any_price else score, 3))
        for token, score in scores.items()
    ]
    pieces.sort(key=lambda piece: (-piece[1], piece[0]))
    return models.Unigram([*((token, 0.0) for token in SPECIAL_TOKENS), *pieces], unk_id=0)


def joint_tokenizer(backend: Tokenizer) -> PreTrainedTokenizerFast:
    """One vocabulary for both languages, as the paper has it."""
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **SETTINGS)


class SeparateVocabularyTokenizer(PreTrainedTokenizerFast):
    """A source vocabulary for `tokenizer(text)` and a target vocabulary for `tokenizer(text_target=...)` and decoding.

    All that knows no sides is the source's: `get_vocab`, `convert_ids_to_tokens`, `len`. So `stop_strings` of
    `generate()`, which looks there for the words of a translation, stops nothing.

    Args:
        source_tokenizer_file: the source vocabulary, a `tokenizers` file.
        target_tokenizer_file: the target vocabulary.
    """

    vocab_files_names = {  # noqa: RUF012
        # not tokenizer.json: transformers without this class would take it for both languages
        "source_tokenizer_file": "source_tokenizer.json",
        "target_tokenizer_file": "target_tokenizer.json",
    }

    def __init__(self, source_tokenizer_file: str, target_tokenizer_file: str, **kwargs):
        self._source = Tokenizer.from_file(source_tokenizer_file)
        self._target = Tokenizer.from_file(target_tokenizer_file)
        kwargs.pop("tokenizer_object", None)
        super().__init__(tokenizer_object=self._source, **{**SETTINGS, **kwargs})
        self._source = self._tokenizer

    @classmethod
    def convert_to_native_format(cls, **kwargs):
        """Leave the files to `__init__`; transformers would rebuild a single backend from the first."""
        return kwargs

    @property
    def target_backend(self) -> Tokenizer:
        """The target side's `tokenizers.Tokenizer`; `backend_tokenizer` is the source side's."""
        return self._target

    @property
    def target_vocab_size(self) -> int:
        """Tokens of the target vocabulary; `len(tokenizer)` is the source's."""
        return self._target.get_vocab_size(with_added_tokens=True)

    def _switch_to_target_mode(self):
        self._tokenizer = self._target

    def _switch_to_input_mode(self):
        self._tokenizer = self._source

    def _encode_plus(self, *args, **kwargs):
        try:
            return super()._encode_plus(*args, **kwargs)
        finally:  # transformers would stay in target mode after a target that it cannot encode
            self._switch_to_input_mode()

    def _decode(self, token_ids, skip_special_tokens=False, use_source_tokenizer=False, **kwargs) -> str:
        if use_source_tokenizer:
            return super()._decode(token_ids, skip_special_tokens=skip_special_tokens, **kwargs)
        self._switch_to_target_mode()
        try:
            return super()._decode(token_ids, skip_special_tokens=skip_special_tokens, **kwargs)
        finally:
            self._switch_to_input_mode()

    def save_pretrained(self, *args, **kwargs):
        """As in transformers; the code that a published tokenizer names is named only where it is saved along."""
        if self._auto_class is None:
            self.init_kwargs.pop("auto_map", None)
        return super().save_pretrained(*args, **kwargs)

    def _save_pretrained(self, save_directory, file_names, legacy_format=None, filename_prefix=None):
        prefix = f"{filename_prefix}-" if filename_prefix else ""
        for backend, name in ((self._source, "source_tokenizer.json"), (self._target, "target_tokenizer.json")):
            path = os.path.join(save_directory, prefix + name)
            backend.save(path)
            file_names += (path,)
        return file_names


def load_tokenizer(name_or_path: str | os.PathLike, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a saved model, with one vocabulary or two; a folder or a name on the Hub.

    Raises:
        UserError: a folder without a tokenizer.
    """
    files = ("tokenizer_config.json", "tokenizer.json")
    if os.path.isdir(name_or_path) and not any(os.path.isfile(os.path.join(name_or_path, file)) for file in files):
        raise UserError(f"{name_or_path}: holds no tokenizer: put the one that the model was trained with there")
    if os.path.isfile(os.path.join(name_or_path, "target_tokenizer.json")):
        return SeparateVocabularyTokenizer.from_pretrained(name_or_path)
    return AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)


def backends(tokenizer: PreTrainedTokenizerBase) -> list[Tokenizer]:
    """What encodes sources and what encodes targets; nothing for the tokenizers that do it themselves, as Marian's."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return [backend, getattr(tokenizer, "target_backend", backend)] if backend else []


def same_tokenizer(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether both encode sources and targets alike; of tokenizers without a backend, whether they know the same."""
    ours, theirs = ([backend.to_str() for backend in backends(tokenizer)] for tokenizer in (one, other))
    return ours == theirs and (bool(ours) or one.get_vocab() == other.get_vocab())


def writes_lower_case(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether no capital letter of a target is ever encoded."""
    normalizers = [backend.normalizer for backend in backends(tokenizer)[1:]]
    return any(normalizer and normalizer.normalize_str("A") == "a" for normalizer in normalizers)


def require_fit(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
    """Check that a tokenizer and a model belong together.

    Raises:
        UserError: more tokens than embeddings, two vocabularies for a model of one, or other special tokens.
    """
    joint = getattr(config, "encoder_vocab_size", None) is None
    if joint and isinstance(tokenizer, SeparateVocabularyTokenizer):
        raise UserError("the tokenizer does not fit the model: it has two vocabularies, the model one")
    sizes = {"vocab_size": getattr(tokenizer, "target_vocab_size", len(tokenizer))}
    if not joint:
        sizes["encoder_vocab_size"] = len(tokenizer)
    for name, size in sizes.items():
        if size > getattr(config, name):
            raise UserError(f"the tokenizer does not fit the model: {size} tokens, but {name}={getattr(config, name)}")
    for role in ("unk", "pad", "bos", "eos"):
        ours, theirs = getattr(tokenizer, f"{role}_token_id"), getattr(config, f"{role}_token_id", None)
        if None not in (ours, theirs) and ours != theirs:
            raise UserError(
                f"the tokenizer does not fit the model: its {role} token is {ours}, the model's is {theirs}"
            )


class SubwordDropout:
    """BPE-dropout (Provilkov et al. 2020): each merge is left out with probability p, anew for each sentence.

    It works beside the tokenizer, on a copy of its merges, and never switches anything inside it: a saved tokenizer
    cannot carry it. Unlike the `dropout` of `tokenizers`, its randomness comes from the caller.

    Args:
        backend: a BPE or byte-level tokenizer.
        probability: p.

    Raises:
        ValueError: a tokenizer without merges.
    """

    def __init__(self, backend: Tokenizer, probability: float):
        model = json.loads(backend.to_str())["model"]
        if model["type"] != "BPE":
            raise ValueError(f"subword dropout needs merges: use a bpe or byte-level tokenizer, not {model['type']}")
        self.backend = backend
        self.probability = probability
        self.vocab: dict[str, int] = model["vocab"]
        self.ranks = {tuple(merge): rank for rank, merge in enumerate(model["merges"])}
        self.unk_id = self.vocab[UNK]
        self.eos_id = self.vocab[EOS]

    def encode(self, text: str, rng: random.Random) -> list[int]:
        """Token ids of one sentence, EOS included."""
        if self.backend.normalizer is not None:
            text = self.backend.normalizer.normalize_str(text)
        words = self.backend.pre_tokenizer.pre_tokenize_str(text)
        ids = [self.vocab.get(part, self.unk_id) for word, _ in words for part in self._segment(word, rng)]
        return [*ids, self.eos_id]

    def _segment(self, word: str, rng: random.Random) -> list[str]:
        parts, never = list(word), len(self.ranks)
        rank_of, draw, probability = self.ranks.get, rng.random, self.probability
        ranks = [rank_of(pair, never) for pair in itertools.pairwise(parts)]  # of each pair of neighbours
        while True:
            best, lowest = None, never
            for position, rank in enumerate(ranks):
                if rank < lowest and draw() >= probability:  # whether a worse one is left out makes no difference
                    best, lowest = position, rank
            if best is None:
                return parts
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
            del ranks[best]
            for left in (best - 1, best):
                if 0 <= left < len(ranks):
                    ranks[left] = rank_of((parts[left], parts[left + 1]), never)


__all__ = [
    "SeparateVocabularyTokenizer",
    "SubwordDropout",
    "joint_tokenizer",
    "learn_backend",
    "load_tokenizer",
    "require_fit",
    "same_tokenizer",
]
