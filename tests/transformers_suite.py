"""Fetch transformers' own common tests and run them against our classes.

They are part of transformers' source distribution on the package index and of nothing that is installed. What they
import but the distribution leaves out is filled in by `STUBS`. Nothing of it is kept.
"""

import os
import subprocess
import sys
import tarfile
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

TESTS = Path(__file__).resolve().parent
MODULES = [TESTS / "common_model_tests.py", TESTS / "common_tokenizer_tests.py"]
PACKAGE = "transformers_tests"  # the name under which `MODULES` import the fetched tests
SINCE = "5.23"  # the transformers whose tests the tables below list; a newer one may need other tables
TIMEOUT = 1800  # seconds: processes that wait for each other would wait for ever

# Files that the fetched tests import or open, and that the distribution leaves out.
STUBS = {
    "__init__.py": "",
    "exporters/__init__.py": "",
    "exporters/test_export.py": "class ExportTesterMixin: ...\n",
    "generation/__init__.py": "",
    "generation/test_utils.py": "class GenerationTesterMixin: ...\n",
    "utils/__init__.py": "",
    "utils/test_configuration_utils.py": "from common_config_values import config_common_kwargs\n",
    "distributed_testing_utils.py": "from rank_processes import *\n",
    "fixtures/sample_text.txt": "A dog runs.\n\nTwo dogs run on the beach.\n",
}

RESULTS = ("passed", "failed", "skipped")

# The classes of `MODULES` and what each of them runs.
SUITES = {
    "ConfigTest": "ConfigTester",
    "ModelTest": "ModelTesterMixin: one vocabulary, all embeddings tied, post-norm, sinusoids",
    "BiasedModelTest": "ModelTesterMixin: the same with a biased output projection and final layer norms",
    "OtherModelTest": "ModelTesterMixin: two vocabularies, nothing tied, pre-norm, learned positions",
    "TrainingTest": "TrainingTesterMixin",
    "TensorParallelTest": "TensorParallelTesterMixin, 2 processes",
    "ShardedDataTest": "FSDPTesterMixin, 2 and 4 processes",
    "JointTokenizerTest": "TokenizerTesterMixin, TokenizersBackendTesterMixin: one vocabulary",
    "SeparateVocabularyTokenizerTest": "TokenizerTesterMixin, TokenizersBackendTesterMixin: two vocabularies",
}

# Tests that do not run, and why. The first pattern that fits counts.
NOT_RUN = {
    "*.test_flash_attn_kernels_mps_*": "needs an Apple GPU",
    "*.test_flash_attn_*": "needs the kernels of FlashAttention on a GPU",
    "*.test_kernels_*": "needs the `kernels` package on a GPU",
    "*.test_flex_attention_with_grads": "needs a GPU",
    "*_deepspeed*": "needs DeepSpeed on a GPU",
    "*.test_can_load_with_*": "needs a GPU",
    "*_offload*": "needs a GPU",
    "*.test_model_parallelism": "needs several GPUs",
    "*.test_sdpa_can_compile_dynamic": "needs a GPU",
    "*.test_sdpa_can_dispatch_on_flash": "needs a GPU",
    "*.test_torch_compile_for_training": "needs a GPU",
    "*_composite_model*": "for models made of several models",
    "*.test_internal_model_config_and_subconfig_are_same": "for models made of several models",
    "*.test_eager_matches_batched_and_grouped_inference_*": "for mixtures of experts",
    "*.test_moe_*": "for mixtures of experts",
    "*_expert_parallel*": "for mixtures of experts",
    "*.test_output_router_logits_from_config": "for mixtures of experts",
    "*_rope*": "for rotary positions",
    "*.test_sliding_window_mask": "for sliding-window attention",
    "*.test_causal_lm_loss_honors_shift_labels": "for decoder-only models",
    "*.test_can_capture_specific_layers_hidden_states": "looks for `hidden_states`, which an encoder-decoder has "
    "twice, under other names; MarianMT skips it too",
    "*.test_can_load_from_already_mapped_keys": "for models that rename weights when they load; ours have no old names",
    "*.test_reverse_loading_mapping": "for models that rename weights when they load; ours have no old names",
    "*.test_keep_in_fp32_modules*": "for models with modules that stay in float32; ours works in any type throughout",
    "*.test_resize_position_vector_embeddings": "for models whose learned positions can be resized",
    "*.test_generation_tester_mixin_inheritance": "GenerationTesterMixin is not in the source distribution",
    "OtherModelTest.test_resize_*": "resizes the target's vocabulary by the method that resizes the source's, as if "
    "there were one",
    "OtherModelTest.test_inputs_embeds_matches_input_ids": "embeds the target with the source's matrix, as if there "
    "were one",
    "*TokenizerTest.test_chat_template_save_loading": "for tokenizers of chat models",
    "*TokenizerTest.test_integration*": "for one tokenizer on the Hub and its expected tokens",
    "SeparateVocabularyTokenizerTest.test_training_new_tokenizer*": "trains anew on one text, which cannot teach two "
    "vocabularies",
}

# Tests that run where these packages are installed.
IF_INSTALLED = {
    "*.test_peft_*": "needs the `peft` package",
    "*.test_tp_generation_quantized": "needs the `torchao` package",
}

# Tests that run with something changed, and why.
ADAPTED = {
    "*.test_eager_matches_sdpa_inference_*": "sets the epsilon of layer norms under its name in our configuration "
    "alone, which refuses the six other spellings that the test tries too",
    "*.test_load_save_without_tied_weights": "unties source and target as well: our configuration refuses "
    "`tie_word_embeddings=False` alone",
    "TrainingTest.*": "without label smoothing, under which no loss goes to 0; the last assertion must fail, because "
    "the output of an encoder-decoder begins with `decoder_start_token_id` and not with the prompt",
    "TensorParallelTest.test_tp_*": "the decoder gets `input_ids` too where the test gives nothing else",
    "TensorParallelTest.test_tp_generation_quantized": "with another seed: of one model with random weights, parts in "
    "8 bits wrote half of its words otherwise, of four others no more than the test allows",
    "ShardedDataTest.test_*_untied": "unties source and target as well, see above",
    "ShardedDataTest.test_fsdp2_plan_vs_ddp_*": "in float64: in float32, Adam scales up the rounding in gradients "
    "that are 0 by nature, those of the biases of keys",
    "ShardedDataTest.test_hsdp_*": "on any number of cores",
    "*TokenizerTest.test_tokenize_special_tokens": "with `split_special_tokens=False`; ours takes `<s>` in a text for "
    "three letters",
    "SeparateVocabularyTokenizerTest.*": "with the same vocabulary on both sides, because the tests decode what they "
    "encoded",
}


class CannotFetch(Exception):
    """The package index did not give what was asked for; the message is pip's last line."""


@dataclass(frozen=True)
class Outcome:
    """What became of one test.

    Args:
        suite: the test class.
        test: the name of its method.
        result: "passed", "failed" or "skipped".
        message: why it was skipped, or how it failed.
    """

    suite: str
    test: str
    result: str
    message: str = ""

    @property
    def name(self) -> str:
        return f"{self.suite}.{self.test}"

    def fits(self, pattern: str) -> bool:
        return fnmatch(self.name, pattern)


def pip(*arguments: str | Path):
    """Run pip.

    Raises:
        CannotFetch: it failed.
    """
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise CannotFetch((done.stderr or done.stdout).strip().splitlines()[-1])


def fetch(folder: Path):
    """Put the tests of the installed transformers version, and what they need, into `folder`.

    Raises:
        CannotFetch: the index cannot be reached or has no source distribution of this version.
    """
    pip("install", "--quiet", "--no-deps", "--target", folder, "parameterized")
    name = f"transformers=={version('transformers')}"
    pip("download", "--quiet", "--no-deps", "--no-binary", "transformers", name, "--dest", folder)
    (archive,) = folder.glob("transformers-*.tar.gz")
    unpack(archive, folder / PACKAGE)


def unpack(archive: Path, folder: Path):
    """The tests of a source distribution, completed by `STUBS`."""
    with tarfile.open(archive) as distribution:
        for member in distribution.getmembers():
            _, _, inside = member.name.partition("/")
            if inside.startswith("tests/") and ".." not in Path(inside).parts and member.isfile():
                write(folder / inside.removeprefix("tests/"), distribution.extractfile(member).read())
    for name, text in STUBS.items():
        write(folder / name, text.encode())


def write(path: Path, content: bytes):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def run(folder: Path, modules: list[Path]) -> list[Outcome]:
    """Run tests in a process of their own, on the CPU and offline.

    Args:
        folder: where `fetch` put the tests, and where everything that they write goes.
        modules: files with test classes, `MODULES` for all of ours.

    Raises:
        RuntimeError: pytest did not come to an end.
    """
    report, temporary = folder / "report.xml", folder / "temporary"
    temporary.mkdir(exist_ok=True)
    report.unlink(missing_ok=True)
    paths = [folder, TESTS, TESTS.parent / "src", os.environ.get("PYTHONPATH", "")]
    environment = {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "TMPDIR": str(temporary),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "RUN_SLOW": "1",
    }
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-W", "ignore"]
    command += [f"--junit-xml={report}", f"--rootdir={TESTS}", *map(str, modules)]
    done = subprocess.run(
        command, env={**os.environ, **environment}, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT
    )
    if done.returncode not in (0, 1):  # 1: some test failed
        raise RuntimeError(f"pytest ended with status {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return [outcome_of(case) for case in ElementTree.parse(report).iter("testcase")]


def outcome_of(case: ElementTree.Element) -> Outcome:
    """One <testcase> of a JUnit report."""
    suite, test = case.get("classname", "").rpartition(".")[2], case.get("name", "")
    for tag, result in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        if (element := case.find(tag)) is not None:
            return Outcome(suite, test, result, element.get("message", ""))
    return Outcome(suite, test, "passed")


def reason(outcome: Outcome) -> str | None:
    """Why a skipped test does not run, by our tables."""
    return next((why for pattern, why in {**NOT_RUN, **IF_INSTALLED}.items() if outcome.fits(pattern)), None)


def complaints(outcomes: list[Outcome]) -> list[str]:
    """What is not as it should be, one line each: failures, and whatever differs from the tables of this module."""
    passed = [outcome for outcome in outcomes if outcome.result == "passed"]
    skipped = [outcome for outcome in outcomes if outcome.result == "skipped"]
    lines = [f"failed: {o.name}: {o.message}" for o in outcomes if o.result == "failed"]
    lines += [f"skipped without a reason in the tables: {o.name}: {o.message}" for o in skipped if not reason(o)]
    first = {next((pattern for pattern in NOT_RUN if o.fits(pattern)), None) for o in skipped}
    lines += [f"nothing is skipped for NOT_RUN[{pattern!r}]" for pattern in NOT_RUN if pattern not in first]
    lines += [
        f"nothing passes that is ADAPTED[{pattern!r}]"
        for pattern in ADAPTED
        if not any(o.fits(pattern) for o in passed)
    ]
    lines += [f"nothing passes in {suite}" for suite in SUITES if suite not in {o.suite for o in passed}]
    return lines


def counts(outcomes: list[Outcome], suite: str) -> Counter:
    """How many tests of a suite passed, failed and were skipped."""
    return Counter(outcome.result for outcome in outcomes if outcome.suite == suite)


def markdown(outcomes: list[Outcome]) -> str:
    """Three tables: the counts of each suite, what did not run, what ran with something changed."""
    lines = ["| tests of transformers | passed | failed | skipped |", "|---|---|---|---|"]
    for suite, title in SUITES.items():
        count = counts(outcomes, suite)
        lines.append(f"| {title} | {count['passed']} | {count['failed']} | {count['skipped']} |")
    skipped = Counter(reason(outcome) or outcome.message for outcome in outcomes if outcome.result == "skipped")
    lines += ["", "| skipped | because the test is, or needs, or does what follows |", "|---|---|"]
    lines += [f"| {number} | {why} |" for why, number in skipped.most_common()]
    lines += ["", "| adapted | how |", "|---|---|"]
    lines += [f"| `{pattern}` | {how} |" for pattern, how in ADAPTED.items()]
    return "\n".join(lines)


def record(outcomes: list[Outcome]) -> dict:
    """The same as data."""
    return {
        "suites": {
            suite: {"tests": title, **{result: counts(outcomes, suite)[result] for result in RESULTS}}
            for suite, title in SUITES.items()
        },
        "skipped": {o.name: reason(o) or o.message for o in outcomes if o.result == "skipped"},
        "failed": {o.name: o.message for o in outcomes if o.result == "failed"},
        "adapted": ADAPTED,
    }
