"""Tokenizers that come with foreign models, and ours for those who do not have this package."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .errors import UserError
from .tokenization_vanilla_transformer import SeparateVocabularyTokenizer, joint_tokenizer, load_tokenizer, require_fit
from .weight_files import read_json, write_json

SENTENCEPIECE_FILES = ("source.spm", "target.spm", "vocab.json", "target_vocab.json")
SENTENCEPIECE = "sentencepiece: pip install sentencepiece"
JOINT_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
SIDES = ("source", "target")
# The numbers that fairseq gives before those of the lines of its dictionary.
FAIRSEQ_SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")
OVERWRITE = " #fairseq:overwrite"
NO_TOKENIZER = "no tokenizer came with the weights: put the one that the model was trained with into {}"


def import_tokenizer(
    folder: Path, output: Path, config: VanillaTransformerConfig, settings: Mapping[str, Any] | None = None
) -> str:
    """Carry the tokenizer that lies beside foreign weights over into the folder of an imported model.

    Args:
        folder: where the weights are; their tokenizer is two SentencePiece files (OPUS-MT), a tokenizer.json, or the
            dict.*.txt of fairseq.
        output: the folder of our model.
        config: our model's.
        settings: of a fairseq checkpoint, where `source_lang` and `target_lang` tell two dictionaries apart.

    Returns:
        what has become of it, in a sentence.
    """
    before = set(output.iterdir())
    try:
        note = _carry_over(folder, output, settings or {})
        if note:
            require_fit(load_tokenizer(output), config)
    except ImportError:
        return f"{note}; it needs {SENTENCEPIECE}"
    except UserError as error:
        for path in set(output.iterdir()) - before:
            path.unlink()
        return f"the tokenizer beside the weights is left out: {error}"
    return note or NO_TOKENIZER.format(output)


def export_tokenizer(folder: Path, output: Path) -> str:
    """Write the tokenizer of one of our models so that `AutoTokenizer` loads it without this package.

    Returns:
        what has become of it, in a sentence.
    """
    if not (folder / "tokenizer_config.json").is_file():
        return f"{folder} holds no tokenizer: there is none in {output} either"
    try:
        tokenizer = load_tokenizer(folder)
    except ImportError:
        return f"the tokenizer is left out, because reading it needs {SENTENCEPIECE}"
    if not isinstance(tokenizer, SeparateVocabularyTokenizer):
        tokenizer.save_pretrained(output)
        return f"the tokenizer loads with AutoTokenizer.from_pretrained({str(output)!r})"
    for side, backend in zip(SIDES, (tokenizer.backend_tokenizer, tokenizer.target_backend), strict=True):
        joint_tokenizer(backend).save_pretrained(output / f"{side}_tokenizer")
    return (
        "two vocabularies are two tokenizers, which load with "
        f"AutoTokenizer.from_pretrained({str(output)!r}, subfolder='source_tokenizer') and 'target_tokenizer'"
    )


def _carry_over(folder: Path, output: Path, settings: Mapping[str, Any]) -> str | None:
    if (folder / "source.spm").is_file():
        return _copy_sentencepiece(folder, output)
    if (folder / "source_tokenizer").is_dir():
        files = {f"{side}_tokenizer_file": str(folder / f"{side}_tokenizer" / "tokenizer.json") for side in SIDES}
        SeparateVocabularyTokenizer(**files).save_pretrained(output)
        return "the two vocabularies are carried over"
    if (folder / "tokenizer.json").is_file():
        _copy(folder, output, JOINT_FILES)
        return "the tokenizer is carried over"
    return _convert_dictionaries(folder, output, settings)


def _copy(folder: Path, output: Path, names: tuple[str, ...]) -> None:
    for name in names:
        if (folder / name).is_file():
            shutil.copy(folder / name, output / name)


def _copy_sentencepiece(folder: Path, output: Path) -> str:
    _copy(folder, output, SENTENCEPIECE_FILES)
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.is_file() else {}
    # transformers finds the class by the model type unless it is named
    write_json({**settings, "tokenizer_class": "MarianTokenizer"}, output / path.name)
    return "the tokenizer is carried over, as MarianTokenizer of transformers"


def _convert_dictionaries(folder: Path, output: Path, settings: Mapping[str, Any]) -> str | None:
    """A tokenizer of fairseq's kind: words between spaces. What made the words is not in a checkpoint."""
    backends = {path.name.split(".")[1]: _dictionary(path) for path in sorted(folder.glob("dict.*.txt"))}
    if not backends:
        return None
    note = "fairseq's dictionary is the tokenizer: it splits at spaces, so give it text that is prepared as for fairseq"
    if len({backend.to_str() for backend in backends.values()}) == 1:
        joint_tokenizer(next(iter(backends.values()))).save_pretrained(output)
        return note
    languages = [settings.get("source_lang"), settings.get("target_lang")]
    if any(language not in backends for language in languages):
        raise UserError("the checkpoint does not say which dict.*.txt is the source's")
    files = {}
    for side, language in zip(SIDES, languages, strict=True):
        files[f"{side}_tokenizer_file"] = str(output / f"{side}_tokenizer.json")
        backends[language].save(files[f"{side}_tokenizer_file"])
    SeparateVocabularyTokenizer(**files).save_pretrained(output)
    return note


def _dictionary(path: Path) -> Tokenizer:
    """A vocabulary of words from lines of the form "word count", or "word count #fairseq:overwrite" for one that has
    been there already and gets this number instead."""
    vocab = {token: number for number, token in enumerate(FAIRSEQ_SPECIAL_TOKENS)}
    try:
        with path.open(encoding="utf-8") as file:  # str.splitlines would cut at U+2028 too, which may be a word
            lines = [line.rstrip() for line in file]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 ({error})") from error
    for number, line in enumerate(lines, start=1):
        word, _, count = line.removesuffix(OVERWRITE).rpartition(" ")
        if not count.isdecimal():
            raise UserError(f"{path}:{number}: {line!r} is not a word and a count")
        if word in vocab:
            if word in FAIRSEQ_SPECIAL_TOKENS or not line.endswith(OVERWRITE):
                raise UserError(f"{path}:{number}: {word!r} is there twice")
            old = vocab.pop(word)
            vocab[f"{word} {old}"] = old  # a name that no text has, because of the space
        vocab[word] = len(vocab)
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in FAIRSEQ_SPECIAL_TOKENS])
    backend.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A $B </s>", special_tokens=[("</s>", vocab["</s>"])]
    )
    return backend


__all__ = ["export_tokenizer", "import_tokenizer"]
