"""The Transformer of "Attention Is All You Need", from scratch and at home in Hugging Face.

Importing the package teaches the Auto classes of transformers the model type `vanilla_transformer`, and `pipeline` the
task "vanilla-translation".
"""

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.pipelines import PIPELINE_REGISTRY

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
    VanillaTransformerPreTrainedModel,
)
from .pipeline_vanilla_transformer import VanillaTransformerTranslationPipeline
from .tokenization_vanilla_transformer import SeparateVocabularyTokenizer
from .version import __version__

AutoConfig.register(VanillaTransformerConfig.model_type, VanillaTransformerConfig)
AutoModel.register(VanillaTransformerConfig, VanillaTransformerModel)
AutoModelForSeq2SeqLM.register(VanillaTransformerConfig, VanillaTransformerForConditionalGeneration)
# Joint vocabularies name another class in their own files and load without this one.
AutoTokenizer.register(VanillaTransformerConfig, SeparateVocabularyTokenizer)
# The name "translation" is not ours to give: transformers has removed it for the models of everybody. And not by
# `register_pipeline`, which would write the task into the configuration of every model that a pipeline saves.
PIPELINE_REGISTRY.supported_tasks["vanilla-translation"] = {
    "impl": VanillaTransformerTranslationPipeline,
    "pt": (AutoModelForSeq2SeqLM,),
    "type": "text",
}

__all__ = [
    "VanillaTransformerConfig",
    "VanillaTransformerForConditionalGeneration",
    "VanillaTransformerModel",
    "VanillaTransformerPreTrainedModel",
    "__version__",
]
