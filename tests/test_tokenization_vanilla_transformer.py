"""Tokenizers: round trips, determinism, special tokens, two vocabularies, subword dropout."""

import copy
import hashlib
import json
import os
import pickle
import random
import subprocess
import sys
import unicodedata
from collections import Counter

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_vanilla_transformer import VanillaTransformerConfig
from hf_vanilla_transformer.corpus import read_pairs
from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.tokenization_vanilla_transformer import (
    TOKENIZER_TYPES,
    SeparateVocabularyTokenizer,
    SubwordDropout,
    joint_tokenizer,
    learn_backend,
    load_tokenizer,
    require_fit,
    same_tokenizer,
    writes_lower_case,
)

ENGLISH = [
    "Two young, white males are outside near many bushes.",
    "Several men in hard hats are operating a giant pulley system.",
    "A little girl climbing into a wooden playhouse.",
    'A man in a blue shirt says: "I can\'t clean this window" (again).',
    "Two men are at the stove preparing food - 3 eggs, 12 onions & 1/2 pound of rice!",
]
GERMAN = [
    "Zwei junge weiße Männer sind im Freien in der Nähe vieler Büsche.",
    "Mehrere Männer mit Schutzhelmen bedienen ein Antriebsradsystem.",
    "Ein kleines Mädchen klettert in ein Spielhaus aus Holz.",
    "Ein Mann in einem blauen Hemd sagt: „Ich kann dieses Fenster nicht putzen“ (schon wieder).",
    "Zwei Männer stehen am Herd und bereiten Essen zu - 3 Eier, 12 Zwiebeln & 1/2 Pfund Reis!",
]
TEXT = [*ENGLISH, *GERMAN]
MERGES = ("bpe", "byte-level")


def pseudo_text(lines=400):
    """Made-up words in many forms, so that a vocabulary has something to choose from."""
    rng = random.Random(0)
    stems = ["".join(rng.choices("abdeiklmnoprstuäöü", k=rng.randint(2, 6))) for _ in range(150)]
    endings = ["", "", "e", "en", "er", "ung", "s"]
    return [" ".join(rng.choice(stems) + rng.choice(endings) for _ in range(12)) for _ in range(lines)]


def joint(tokenizer_type="bpe", vocab_size=300, **options):
    return joint_tokenizer(learn_backend(TEXT, tokenizer_type=tokenizer_type, vocab_size=vocab_size, **options))


def separate(folder, tokenizer_type="bpe"):
    """Two vocabularies that give the same words other ids."""
    files = [str(folder / "source.json"), str(folder / "target.json")]
    for text, vocab_size, file in zip((ENGLISH, GERMAN), (200, 280), files, strict=True):
        learn_backend(text, tokenizer_type=tokenizer_type, vocab_size=vocab_size).save(file)
    return SeparateVocabularyTokenizer(*files)


def run_python(code, *arguments, **environment):
    """Run code in a fresh process; its standard output."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("tokenizer_type", TOKENIZER_TYPES)
class TestEveryType:
    def test_round_trip(self, tokenizer_type):
        tokenizer = joint(tokenizer_type)
        for text in TEXT if tokenizer_type != "word-level" else ["A man in a blue shirt says: Ein Mann (again)."]:
            ids = tokenizer(text).input_ids
            assert tokenizer.unk_token_id not in ids
            assert tokenizer.decode(ids, skip_special_tokens=True) == text

    def test_real_text(self, tokenizer_type, shared_data):
        pairs = read_pairs(
            files=[], dataset=str(shared_data / "multi30k"), config_name="raw", split="validation",
            source_lang="en", target_lang="de", streaming=False,
        )  # fmt: skip
        texts = [" ".join(side.split()) for pair in pairs for side in (pair.source, pair.target)][:1000]
        vocab_size = 50000 if tokenizer_type == "word-level" else 2000
        backend = learn_backend(texts, tokenizer_type=tokenizer_type, vocab_size=vocab_size)
        tokenizer = joint_tokenizer(backend)
        decoded = tokenizer.batch_decode(tokenizer(texts).input_ids, skip_special_tokens=True)
        assert decoded == [unicodedata.normalize("NFC", text) for text in texts]

    def test_special_tokens(self, tokenizer_type):
        tokenizer = joint(tokenizer_type)
        assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3]) == ["<unk>", "<pad>", "<s>", "</s>"]
        roles = (tokenizer.unk_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
        assert roles == (0, 1, 2, 3)
        config = VanillaTransformerConfig()
        assert roles == (config.unk_token_id, config.pad_token_id, config.bos_token_id, config.eos_token_id)
        assert sorted(tokenizer.all_special_ids) == [0, 1, 2, 3]

    def test_eos_at_the_end_and_no_bos(self, tokenizer_type):
        tokenizer = joint(tokenizer_type)
        pairs = tokenizer(TEXT, TEXT).input_ids
        for sentences in (
            tokenizer(TEXT).input_ids,
            tokenizer(text_target=TEXT).input_ids,
            [tokenizer("").input_ids],
            pairs,
        ):
            for ids in sentences:
                assert ids[-1] == 3
                assert not {1, 2, 3} & set(ids[:-1])

    def test_the_letters_of_a_special_token_are_text(self, tmp_path, tokenizer_type):
        joint(tokenizer_type).save_pretrained(tmp_path)
        ids = AutoTokenizer.from_pretrained(tmp_path)("A man <s> in</s> <pad> a blue shirt <unk>").input_ids
        assert ids[-1] == 3
        assert not {1, 2, 3} & set(ids[:-1])

    def test_unknown_characters(self, tokenizer_type):
        tokenizer = joint(tokenizer_type)
        ids = tokenizer("A man 漢字").input_ids
        assert (0 in ids) == (tokenizer_type != "byte-level")
        decoded = tokenizer.decode(ids, skip_special_tokens=True)
        assert decoded.strip() == ("A man 漢字" if tokenizer_type == "byte-level" else "A man")

    def test_lowercase(self, tokenizer_type):
        tokenizer = joint(tokenizer_type, lowercase=True)
        upper, lower = tokenizer(["ZWEI JUNGE MÄNNER", "zwei junge männer"]).input_ids
        assert upper == lower
        assert tokenizer.decode(upper, skip_special_tokens=True) == "zwei junge männer"

    @pytest.mark.parametrize(
        ("normalization", "same"),
        [("nfc", ["Ma\u0308nner"]), ("nfkc", ["Ma\u0308nner", "Ｍänner"]), ("none", [])],
    )
    def test_normalization(self, tokenizer_type, normalization, same):
        tokenizer = joint(tokenizer_type, normalization=normalization)
        expected = tokenizer("Männer").input_ids
        for spelling in ("Ma\u0308nner", "Ｍänner"):
            assert (tokenizer(spelling).input_ids == expected) == (spelling in same)

    def test_size_of_the_vocabulary(self, tokenizer_type):
        backend = learn_backend(pseudo_text(), tokenizer_type=tokenizer_type, vocab_size=350)
        size = backend.get_vocab_size()
        assert size == 350 if tokenizer_type != "unigram" else 300 < size <= 350  # unigram stops when it runs out
        assert sorted(backend.get_vocab().values()) == list(range(size))

    def test_saved_and_loaded(self, tmp_path, tokenizer_type):
        tokenizer = joint(tokenizer_type, lowercase=True)
        tokenizer.save_pretrained(tmp_path)
        VanillaTransformerConfig().save_pretrained(tmp_path)
        for loaded in (AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)):
            assert type(loaded) is PreTrainedTokenizerFast
            assert loaded(TEXT).input_ids == tokenizer(TEXT).input_ids
            assert set(loaded(TEXT[0])) == {"input_ids", "attention_mask"}
            assert loaded.decode(loaded(TEXT[3]).input_ids) == tokenizer.decode(tokenizer(TEXT[3]).input_ids)

    def test_a_space_is_not_lost(self, tokenizer_type):
        """Before punctuation, after it, around brackets, and twice in a row."""
        tokenizer = joint(tokenizer_type)
        for text in ("A man , in", "A man, in", "( A ) man", "A  man"):
            assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


class TestDeterminism:
    CODE = (
        "import sys, json, hashlib\n"
        "from hf_vanilla_transformer.tokenization_vanilla_transformer import learn_backend, TOKENIZER_TYPES\n"
        "texts = json.load(open(sys.argv[1], encoding='utf-8'))\n"
        "for kind in TOKENIZER_TYPES:\n"
        "    backend = learn_backend(texts, tokenizer_type=kind, vocab_size=350)\n"
        "    print(kind, hashlib.sha256(backend.to_str().encode()).hexdigest())\n"
    )

    def test_another_process_learns_the_same(self, tmp_path):
        path = tmp_path / "texts.json"
        path.write_text(json.dumps(pseudo_text()), encoding="utf-8")
        here = "".join(
            f"{kind} {hashlib.sha256(backend.to_str().encode()).hexdigest()}\n"
            for kind in TOKENIZER_TYPES
            for backend in [learn_backend(pseudo_text(), tokenizer_type=kind, vocab_size=350)]
        )
        assert run_python(self.CODE, path, PYTHONHASHSEED="1", TOKENIZERS_PARALLELISM="true") == here


class TestErrors:
    @pytest.mark.parametrize(("tokenizer_type", "least"), [("bpe", 20), ("byte-level", 260)])
    def test_more_characters_than_tokens(self, tokenizer_type, least):
        text = ["abcdefghijklmno"] * 3
        with pytest.raises(ValueError, match=f"vocab_size=10: too small for the characters, it has {least} t"):
            learn_backend(text, vocab_size=10, tokenizer_type=tokenizer_type)
        learn_backend(text, vocab_size=least, tokenizer_type=tokenizer_type)

    def test_unknown_type(self):
        with pytest.raises(
            ValueError, match=r"tokenizer_type='wordpiece' is not one of bpe, unigram, byte-level, word-level"
        ):
            learn_backend(TEXT, tokenizer_type="wordpiece")

    def test_unknown_normalization(self):
        with pytest.raises(ValueError, match=r"normalization='nfd' is not one of nfc, nfkc, none"):
            learn_backend(TEXT, normalization="nfd")

    @pytest.mark.parametrize("tokenizer_type", ["unigram", "word-level"])
    def test_dropout_without_merges(self, tokenizer_type):
        backend = learn_backend(TEXT, tokenizer_type=tokenizer_type, vocab_size=200)
        kind = {"unigram": "Unigram", "word-level": "WordLevel"}[tokenizer_type]
        with pytest.raises(
            ValueError, match=rf"subword dropout needs merges: use a bpe or byte-level tokenizer, not {kind}"
        ):
            SubwordDropout(backend, 0.1)


class TestFit:
    def test_joint(self):
        tokenizer = joint()
        require_fit(tokenizer, VanillaTransformerConfig(vocab_size=len(tokenizer)))
        with pytest.raises(UserError, match=rf"does not fit the model: {len(tokenizer)} tokens, but vocab_size=99"):
            require_fit(tokenizer, VanillaTransformerConfig(vocab_size=99))

    def test_separate(self, tmp_path):
        tokenizer = separate(tmp_path)
        sizes = {"vocab_size": tokenizer.target_vocab_size, "encoder_vocab_size": len(tokenizer)}
        require_fit(tokenizer, VanillaTransformerConfig(**sizes, share_encoder_decoder_embeddings=False))
        for name in sizes:
            config = VanillaTransformerConfig(**{**sizes, name: 50}, share_encoder_decoder_embeddings=False)
            with pytest.raises(UserError, match=rf"{sizes[name]} tokens, but {name}=50"):
                require_fit(tokenizer, config)

    def test_two_vocabularies_for_a_model_of_one(self, tmp_path):
        with pytest.raises(UserError, match="it has two vocabularies, the model one"):
            require_fit(separate(tmp_path), VanillaTransformerConfig())

    @pytest.mark.parametrize("role", ["unk", "pad", "bos", "eos"])
    def test_other_special_tokens(self, role):
        config = VanillaTransformerConfig(**{f"{role}_token_id": 77})
        with pytest.raises(UserError, match=rf"its {role} token is \d, the model's is 77"):
            require_fit(joint(), config)


WITHOUT_PACKAGE = (
    "import json, sys\n"
    "sys.modules['hf_vanilla_transformer'] = None\n"
    "from transformers import AutoTokenizer\n"
    "texts = json.loads(sys.argv[2])\n"
    "def encode(folder, **options):\n"
    "    tokenizer = AutoTokenizer.from_pretrained(folder, **options)\n"
    "    labels = tokenizer(text_target=texts).input_ids\n"
    "    decoded = tokenizer.batch_decode(labels, skip_special_tokens=True)\n"
    "    return [tokenizer(texts).input_ids, labels, decoded]\n"
    "results = [encode(sys.argv[1] + '/joint'), encode(sys.argv[1] + '/separate', trust_remote_code=True)]\n"
    "print(json.dumps(results))\n"
)


def test_in_a_process_without_the_package(tmp_path, monkeypatch):
    """A joint vocabulary needs no code at all, two vocabularies need the code that can be saved beside them."""
    tokenizers = [joint(), separate(tmp_path)]
    tokenizers[0].save_pretrained(tmp_path / "joint")
    monkeypatch.setattr(SeparateVocabularyTokenizer, "_auto_class", "AutoTokenizer")
    tokenizers[1].save_pretrained(tmp_path / "separate")
    assert [path.name for path in (tmp_path / "joint").glob("*.py")] == []
    printed = run_python(
        WITHOUT_PACKAGE, tmp_path, json.dumps(GERMAN), HF_MODULES_CACHE=str(tmp_path / "modules"), HF_HUB_OFFLINE="1"
    )
    for tokenizer, result in zip(tokenizers, json.loads(printed.splitlines()[-1]), strict=True):
        assert result == [tokenizer(GERMAN).input_ids, tokenizer(text_target=GERMAN).input_ids, GERMAN]


class TestSeparateVocabularies:
    @pytest.fixture(params=["made", "loaded", "automatic", "again", "pickled", "copied"])
    def tokenizer(self, request, tmp_path):
        """One that was just made, and every way for it to come back."""
        tokenizer = separate(tmp_path)
        tokenizer(TEXT, text_target=TEXT, truncation=True, max_length=4, padding="max_length")
        tokenizer.save_pretrained(tmp_path / "saved")
        if request.param == "loaded":
            return load_tokenizer(tmp_path / "saved")
        if request.param == "automatic":
            return AutoTokenizer.from_pretrained(tmp_path / "saved")
        if request.param == "again":
            load_tokenizer(tmp_path / "saved").save_pretrained(tmp_path / "again")
            VanillaTransformerConfig().save_pretrained(tmp_path / "again")
            return AutoTokenizer.from_pretrained(tmp_path / "again")
        if request.param == "pickled":
            return pickle.loads(pickle.dumps(tokenizer))
        return copy.deepcopy(tokenizer) if request.param == "copied" else tokenizer

    @pytest.fixture
    def backends(self, tmp_path, tokenizer):
        return [Tokenizer.from_file(str(tmp_path / name)) for name in ("source.json", "target.json")]

    def test_each_side_has_its_own(self, tokenizer, backends):
        assert type(tokenizer) is SeparateVocabularyTokenizer
        source, target = backends
        batch = tokenizer(ENGLISH, text_target=GERMAN)
        assert batch.input_ids == [source.encode(text).ids for text in ENGLISH]
        assert batch.labels == [target.encode(text).ids for text in GERMAN]
        assert tokenizer(GERMAN).input_ids != tokenizer(text_target=GERMAN).input_ids
        assert tokenizer.encode(ENGLISH[0]) == source.encode(ENGLISH[0]).ids
        assert tokenizer.tokenize(ENGLISH[0]) == source.encode(ENGLISH[0], add_special_tokens=False).tokens

    def test_sizes_and_backends(self, tokenizer, backends):
        source, target = backends
        assert (len(tokenizer), tokenizer.target_vocab_size) == (source.get_vocab_size(), target.get_vocab_size())
        assert len(tokenizer) != tokenizer.target_vocab_size
        assert tokenizer.backend_tokenizer.get_vocab() == tokenizer.get_vocab() == source.get_vocab()
        assert tokenizer.target_backend.get_vocab() == target.get_vocab()

    def test_decoding_is_the_targets(self, tokenizer):
        labels = tokenizer(text_target=GERMAN).input_ids
        assert tokenizer.batch_decode(labels, skip_special_tokens=True) == GERMAN
        assert tokenizer.decode(labels[0], skip_special_tokens=True) == GERMAN[0]
        assert tokenizer.decode(torch.tensor(labels[0])) == GERMAN[0] + "</s>"
        assert tokenizer.decode(labels[0][-1]) == "</s>"

    def test_decoding_the_source_if_asked(self, tokenizer):
        ids = tokenizer(ENGLISH).input_ids
        options = {"skip_special_tokens": True, "use_source_tokenizer": True}
        assert tokenizer.batch_decode(ids, **options) == ENGLISH
        assert tokenizer.decode(ids[0], **options) == ENGLISH[0]

    def test_it_stays_in_source_mode(self, tokenizer):
        expected = tokenizer(ENGLISH[0]).input_ids
        tokenizer(text_target=GERMAN)
        assert tokenizer.encode(ENGLISH[0]) == expected
        tokenizer.decode([5, 6])
        assert tokenizer.encode(ENGLISH[0]) == expected
        with pytest.raises(ValueError, match="text input must be of type"):
            tokenizer(text_target=[3])
        assert tokenizer.encode(ENGLISH[0]) == expected
        with pytest.raises((TypeError, OverflowError)):
            tokenizer.decode(["not an id"])
        assert tokenizer.encode(ENGLISH[0]) == expected

    def test_padding_and_truncation_of_both_sides(self, tokenizer):
        batch = tokenizer(
            ENGLISH, text_target=GERMAN, padding=True, truncation=True, max_length=9, max_target_length=7,
            return_tensors="pt",
        )  # fmt: skip
        assert batch["input_ids"].shape == batch["attention_mask"].shape == (5, 9)
        assert batch["labels"].shape == (5, 7)
        assert batch["input_ids"][:, -1].tolist() == batch["labels"][:, -1].tolist() == [3] * 5
        short = tokenizer(["A man", "A"], text_target=["Ein Mann", "Ein"], padding=True, return_tensors="pt")
        assert short["labels"][1, -1] == short["input_ids"][1, -1] == 1
        assert tokenizer(text_target=GERMAN).input_ids == [tokenizer.target_backend.encode(t).ids for t in GERMAN]

    def test_special_tokens(self, tokenizer):
        assert (tokenizer.unk_token_id, tokenizer.pad_token_id) == (0, 1)
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (2, 3)
        for ids in (tokenizer("A <s> man</s> <pad>").input_ids, tokenizer(text_target="A <s> man</s> <pad>").input_ids):
            assert ids[-1] == 3
            assert not {1, 2, 3} & set(ids[:-1])

    def test_an_added_token_is_the_sources(self, tmp_path):
        tokenizer = separate(tmp_path)
        size, target_size = len(tokenizer), tokenizer.target_vocab_size
        tokenizer.add_tokens(["ʬ"])
        tokenizer.save_pretrained(tmp_path / "added")
        for either in (tokenizer, load_tokenizer(tmp_path / "added")):
            assert size in either("A ʬ").input_ids
            assert size in either("A ʬ", text_target="Ein").input_ids
            assert (len(either), either.target_vocab_size) == (size + 1, target_size)

    def test_saved_files(self, tokenizer, backends, tmp_path):
        files = tokenizer.save_pretrained(tmp_path / "files")
        names = ["source_tokenizer.json", "target_tokenizer.json", "tokenizer_config.json"]
        assert sorted(path.name for path in (tmp_path / "files").iterdir()) == names
        assert sorted(os.path.basename(file) for file in files) == names
        for backend, name in zip(backends, names, strict=False):
            saved = json.loads((tmp_path / "files" / name).read_text(encoding="utf-8"))
            assert saved["model"] == json.loads(backend.to_str())["model"]
        assert str(tmp_path) not in (tmp_path / "files" / "tokenizer_config.json").read_text()


def test_dropout_follows_the_algorithm():
    """How often "abc" falls into which parts, worked out by hand from algorithm 1 of Provilkov et al. 2020."""
    vocab = {"<unk>": 0, "<pad>": 1, "<s>": 2, "</s>": 3, "a": 4, "b": 5, "c": 6, "ab": 7, "bc": 8, "abc": 9}
    backend = Tokenizer(models.BPE(vocab, [("a", "b"), ("b", "c"), ("ab", "c")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    p, draws = 0.3, 20000
    dropout, rng = SubwordDropout(backend, p), random.Random(0)
    counts = Counter(tuple(dropout.encode("abc", rng)) for _ in range(draws))
    expected = {
        (4, 5, 6, 3): p * p,  # both first merges are left out
        (4, 8, 3): p * (1 - p),  # only a+b is: b+c is next, and nothing merges with it
        (7, 6, 3): (1 - p) * p,  # a+b is made, then ab+c is left out
        (9, 3): (1 - p) * (1 - p),
    }
    assert set(counts) == set(expected)
    for ids, probability in expected.items():
        assert counts[ids] / draws == pytest.approx(probability, abs=0.015)


@pytest.mark.parametrize("tokenizer_type", MERGES)
class TestSubwordDropout:
    @pytest.mark.parametrize(
        "options", [{}, {"lowercase": True}, {"normalization": "nfkc"}, {"normalization": "none"}], ids=str
    )
    def test_probability_zero_is_the_tokenizer(self, tokenizer_type, options):
        backend = learn_backend(TEXT, tokenizer_type=tokenizer_type, vocab_size=350, **options)
        tokenizer, dropout = joint_tokenizer(backend), SubwordDropout(backend, 0.0)
        odd = ["", "漢字 Ma\u0308nner Ｍänner", "A  man ,in ( 12 )", "A <s> man</s> <pad>", "zz?zz", "😀"]
        for text in (*TEXT, *pseudo_text(30), *odd):
            assert dropout.encode(text, random.Random(0)) == tokenizer(text).input_ids, text

    def test_it_varies_and_says_the_same(self, tokenizer_type):
        tokenizer = joint(tokenizer_type)
        dropout, rng = SubwordDropout(tokenizer.backend_tokenizer, 0.3), random.Random(0)
        drawn = [dropout.encode(TEXT[0], rng) for _ in range(20)]
        assert len({tuple(ids) for ids in drawn}) > 15
        assert {tokenizer.decode(ids, skip_special_tokens=True) for ids in drawn} == {TEXT[0]}
        for ids in drawn:
            assert ids[-1] == 3
            assert not {0, 1, 2, 3} & set(ids[:-1])

    def test_the_caller_has_the_seed(self, tokenizer_type):
        dropout = SubwordDropout(joint(tokenizer_type).backend_tokenizer, 0.3)
        once, again, other = (dropout.encode(TEXT[0], random.Random(seed)) for seed in (1, 1, 2))
        assert once == again != other

    def test_probability_one_leaves_characters(self, tokenizer_type):
        tokenizer = joint(tokenizer_type)
        ids = SubwordDropout(tokenizer.backend_tokenizer, 1.0).encode("A man", random.Random(0))
        assert len(ids) == len(" A man") + 1

    def test_the_tokenizer_stays_as_it_was(self, tmp_path, tokenizer_type):
        tokenizer = joint(tokenizer_type)
        before = tokenizer.backend_tokenizer.to_str()
        dropout = SubwordDropout(tokenizer.backend_tokenizer, 0.5)
        for text in TEXT:
            dropout.encode(text, random.Random(0))
        assert tokenizer.backend_tokenizer.to_str() == before
        tokenizer.save_pretrained(tmp_path)
        assert json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))["model"]["dropout"] is None
        loaded = AutoTokenizer.from_pretrained(tmp_path)
        assert len({tuple(loaded(TEXT[0]).input_ids) for _ in range(20)}) == 1
        assert isinstance(loaded.backend_tokenizer.model, models.BPE)


def test_a_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(UserError, match=r": holds no tokenizer: put the one that the model was trained with there$"):
        load_tokenizer(tmp_path)


class Bare:
    """A tokenizer without a `tokenizers` backend, as Marian's."""

    def __init__(self, *words):
        self.words = words

    def get_vocab(self):
        return {word: index for index, word in enumerate(self.words)}


def test_tokenizers_without_a_backend_are_compared_by_what_they_know():
    assert same_tokenizer(Bare("a", "b"), Bare("a", "b"))
    assert not same_tokenizer(Bare("a", "b"), Bare("b", "a"))
    assert not same_tokenizer(Bare("a"), joint_tokenizer(learn_backend(["a b c"], vocab_size=30)))
    assert not writes_lower_case(Bare("a"))
