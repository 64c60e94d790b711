"""transformers' common tokenizer tests on our tokenizers; runs where `common_model_tests` does."""

import tempfile
import unittest
from pathlib import Path
from unittest.mock import patch

from transformers import PreTrainedTokenizerFast
from transformers_tests.test_tokenization_common import TokenizerTesterMixin
from transformers_tests.test_tokenizers_backend_mixin import TokenizersBackendTesterMixin

from hf_vanilla_transformer.embedded_corpus import make_corpus
from hf_vanilla_transformer.tokenization_vanilla_transformer import (
    SeparateVocabularyTokenizer,
    joint_tokenizer,
    learn_backend,
)

ONE_TEXT = "one text cannot teach two vocabularies"


class TokenizerTests(TokenizerTesterMixin, TokenizersBackendTesterMixin):
    """A tokenizer of ours in the folder from which the mixins load it."""

    @classmethod
    def setUpClass(cls):
        folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        text = [side for pair in make_corpus(train=1000, validation=10, test=10).train for side in pair]
        cls.make_tokenizer(learn_backend(text, vocab_size=600), folder).save_pretrained(folder)
        cls.from_pretrained_id = str(folder)
        super().setUpClass()

    def test_tokenize_special_tokens(self):
        whole = self.get_tokenizer(split_special_tokens=False)
        with patch.object(self, "get_tokenizer", return_value=whole):
            super().test_tokenize_special_tokens()


class JointTokenizerTest(TokenizerTests, unittest.TestCase):
    tokenizer_class = rust_tokenizer_class = PreTrainedTokenizerFast

    @staticmethod
    def make_tokenizer(backend, folder):
        return joint_tokenizer(backend)


class SeparateVocabularyTokenizerTest(TokenizerTests, unittest.TestCase):
    """The same vocabulary twice: the tests decode, with the target's, what they encoded with the source's."""

    tokenizer_class = rust_tokenizer_class = SeparateVocabularyTokenizer

    @staticmethod
    def make_tokenizer(backend, folder):
        file = str(folder / "backend.json")
        backend.save(file)
        return SeparateVocabularyTokenizer(file, file)

    @unittest.skip(ONE_TEXT)
    def test_training_new_tokenizer(self):
        """Trains the tokenizer anew on one text."""

    @unittest.skip(ONE_TEXT)
    def test_training_new_tokenizer_with_special_tokens_change(self):
        """The same with other special tokens."""
