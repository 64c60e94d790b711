"""transformers' common model tests on our classes.

Runs only where `transformers_suite.fetch` has put the fetched modules on the path; see `test_common_model_tests`.
Every test that is overridden here to fit an encoder-decoder is listed, with its reason, in `transformers_suite`.
"""

import unittest
from unittest import mock

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)
from transformers_tests import test_fsdp_mixin, test_modeling_common, test_tensor_parallel_mixin
from transformers_tests.test_configuration_common import ConfigTester
from transformers_tests.test_modeling_common import ModelTesterMixin, ids_tensor
from transformers_tests.test_training_mixin import TrainingTesterMixin

from hf_vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
)

# Where the tests look up which class has no head and which takes labels; classes that are registered are not there.
MODEL_MAPPING_NAMES["vanilla_transformer"] = VanillaTransformerModel.__name__
MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES["vanilla_transformer"] = (
    VanillaTransformerForConditionalGeneration.__name__
)
# The tests of sharding build every model with this class.
AutoModelForCausalLM.register(VanillaTransformerConfig, VanillaTransformerForConditionalGeneration, exist_ok=True)
# None: every model that has a plan, not only those of a list.
test_tensor_parallel_mixin.TP_DISTRIBUTED_TEST_MODEL_TYPES = None
test_fsdp_mixin.FSDP_DISTRIBUTED_TEST_MODEL_TYPES = None


def set_layer_norm_eps(config: VanillaTransformerConfig):
    """What the tests do with seven spellings of the field; our configuration refuses those that are not its own."""
    config.layer_norm_eps = 1.0


test_modeling_common.set_config_for_less_flaky_test = set_layer_norm_eps


class FedTheSource(VanillaTransformerForConditionalGeneration):
    """Takes `input_ids` for the decoder too, because the tests of parallelism give nothing else."""

    def forward(self, input_ids=None, **kwargs):
        if not kwargs.keys() & {"labels", "decoder_input_ids"}:
            kwargs["decoder_input_ids"] = input_ids
        return super().forward(input_ids, **kwargs)


class TinyModel:
    """What the mixins ask of a "model tester": a configuration, inputs, and the sizes to expect in the outputs."""

    batch_size = 3
    seq_length = encoder_seq_length = decoder_seq_length = key_length = 7
    is_training = True
    num_hidden_layers = 2
    num_attention_heads = 4
    hidden_size = 32
    causal_lm_class = FedTheSource  # the class with a head, in the mixins' words

    def __init__(self, **overrides):
        self.overrides = overrides

    def get_config(self) -> VanillaTransformerConfig:
        return VanillaTransformerConfig.preset("test", **{"vocab_size": 99, "dropout": 0.0, **self.overrides})

    def prepare_config_and_inputs_for_common(self) -> tuple[VanillaTransformerConfig, dict[str, torch.Tensor]]:
        shape = (self.batch_size, self.seq_length)
        source, target = (ids_tensor(shape, 60).clamp(min=4) for _ in range(2))
        inputs = {
            "input_ids": source,
            "attention_mask": torch.ones_like(source),
            "decoder_input_ids": target,
            "decoder_attention_mask": torch.ones_like(target),
        }
        return self.get_config(), inputs


class CommonSettings:
    """What the mixins read from a test class, the same for every configuration of ours."""

    all_model_classes = (VanillaTransformerModel, VanillaTransformerForConditionalGeneration)
    is_encoder_decoder = True
    test_can_init_all_missing_weights_before_2023 = True  # they read the year from a copyright line, which we lack
    overrides = {}  # noqa: RUF012
    model_tester = None  # abstract in the mixins

    def setUp(self):
        self.model_tester = TinyModel(**self.overrides)  # a test may override more


class CommonModelTests(CommonSettings, ModelTesterMixin):
    """What is overridden for every configuration of ours."""

    def test_load_save_without_tied_weights(self):
        self.model_tester.overrides["share_encoder_decoder_embeddings"] = False
        super().test_load_save_without_tied_weights()

    @unittest.skip("GenerationTesterMixin is not in the source distribution")
    def test_generation_tester_mixin_inheritance(self):
        """The stub that stands for the mixin tests nothing."""


class ModelTest(CommonModelTests, unittest.TestCase):
    """The paper's architecture: a joint vocabulary with all embeddings tied, post-norm, sinusoids."""


class BiasedModelTest(CommonModelTests, unittest.TestCase):
    """The same with a biased output projection and with final layer norms, which other implementations have."""

    overrides = {  # noqa: RUF012
        "lm_head_bias": True,
        "add_final_layer_norm": True,
    }


class OtherModelTest(CommonModelTests, unittest.TestCase):
    """All that the paper's architecture is not: two vocabularies, nothing tied, pre-norm, learned positions."""

    test_resize_embeddings = False
    overrides = {  # noqa: RUF012
        "encoder_vocab_size": 70,
        "share_encoder_decoder_embeddings": False,
        "tie_word_embeddings": False,
        "norm_position": "pre",
        "position_embedding_type": "learned",
    }

    @unittest.skip("one embedding for source and target is assumed")
    def test_inputs_embeds_matches_input_ids(self):
        """Takes the target's embeddings from the source's matrix."""


class TrainingTest(CommonSettings, TrainingTesterMixin, unittest.TestCase):
    overrides = {"label_smoothing": 0.0}  # noqa: RUF012 (a smoothed loss does not go to 0)

    def test_training_overfit(self):
        with self.assertRaisesRegex(AssertionError, "to generate the training sequence"):
            super().test_training_overfit()


class TensorParallelTest(CommonSettings, test_tensor_parallel_mixin.TensorParallelTesterMixin, unittest.TestCase):
    def _get_tp_config(self, tie_word_embeddings=None):
        self.model_tester.overrides["share_encoder_decoder_embeddings"] = tie_word_embeddings is not False
        return super()._get_tp_config(tie_word_embeddings)

    def test_tp_generation_quantized(self):
        with mock.patch.object(test_tensor_parallel_mixin, "set_seed", lambda seed: torch.manual_seed(seed + 1)):
            super().test_tp_generation_quantized()


class ShardedDataTest(CommonSettings, test_fsdp_mixin.FSDPTesterMixin, unittest.TestCase):
    def _get_tiny_config(self):
        self.model_tester.overrides["share_encoder_decoder_embeddings"] = "untied" not in self._testMethodName
        return super()._get_tiny_config()

    def _run_fsdp2_distributed_test(self, test_name, test_impl, *test_args, **test_kwargs):
        if "plan_vs_ddp" in test_name:
            test_kwargs["dtype"] = torch.float64
        super()._run_fsdp2_distributed_test(test_name, test_impl, *test_args, **test_kwargs)

    def _skip_if_insufficient_devices(self, world_size):
        """Any number of processes fits on a CPU."""


class ConfigTest(unittest.TestCase):
    def test_config(self):
        fields = TinyModel().get_config().to_diff_dict()
        ConfigTester(self, config_class=VanillaTransformerConfig, **fields).run_common_tests()
