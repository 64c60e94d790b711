"""The Transformer of "Attention Is All You Need", from scratch and at home in Hugging Face.

Importing the package teaches the Auto classes of transformers the model type `vanilla_transformer`.
"""

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
    VanillaTransformerPreTrainedModel,
)
from .tokenization_vanilla_transformer import SeparateVocabularyTokenizer
from .version import __version__

AutoConfig.register(VanillaTransformerConfig.model_type, VanillaTransformerConfig)
AutoModel.register(VanillaTransformerConfig, VanillaTransformerModel)
AutoModelForSeq2SeqLM.register(VanillaTransformerConfig, VanillaTransformerForConditionalGeneration)
# Joint vocabularies name another class in their own files and load without this one.
AutoTokenizer.register(VanillaTransformerConfig, SeparateVocabularyTokenizer)

__all__ = [
    "VanillaTransformerConfig",
    "VanillaTransformerForConditionalGeneration",
    "VanillaTransformerModel",
    "VanillaTransformerPreTrainedModel",
    "__version__",
]
