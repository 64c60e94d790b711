"""transformers' own tests on our classes: the harness here, and all of them in the slow suite."""

import tarfile
from importlib.metadata import version
from xml.etree import ElementTree

import pytest
import torch
from packaging.version import Version
from torch import nn

import transformers_suite
from transformers_suite import (
    MODULES,
    SINCE,
    STUBS,
    CannotFetch,
    Outcome,
    complaints,
    fetch,
    markdown,
    outcome_of,
    pip,
    record,
    run,
    unpack,
)

EXAMPLES = """
import unittest

class Example(unittest.TestCase):
    def test_passes(self):
        pass

    def test_fails(self):
        self.fail("on purpose")

    def test_fails_in_part(self):
        for number in range(3):
            with self.subTest(number):
                self.assertNotEqual(number, 1)

    @unittest.skip("no time")
    def test_is_skipped(self):
        pass
"""


@pytest.mark.slow
@pytest.mark.skipif(Version(version("transformers")) < Version(SINCE), reason=f"the tables hold from {SINCE} on")
def test_transformers_own_tests_pass_on_our_classes(tmp_path):
    try:
        fetch(tmp_path)
    except CannotFetch as error:
        pytest.skip(f"cannot fetch the tests of transformers: {error}")
    assert complaints(run(tmp_path, MODULES)) == []


class TestFetch:
    def test_says_what_pip_says(self, tmp_path):
        with pytest.raises(CannotFetch, match="No matching distribution found for no-such-package"):
            pip("download", "--no-index", "--isolated", "--dest", tmp_path, "no-such-package")

    def test_unpacks_the_tests_and_adds_what_they_miss(self, tmp_path):
        for name in ("tests/test_some.py", "tests/deep/er.py", "src/code.py"):
            path = tmp_path / "package-1" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
        with tarfile.open(tmp_path / "package-1.tar.gz", "w:gz") as archive:
            archive.add(tmp_path / "package-1", "package-1")
        unpack(tmp_path / "package-1.tar.gz", tmp_path / "out")
        files = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
        assert files == {"test_some.py", "deep/er.py", *STUBS}
        assert (tmp_path / "out" / "test_some.py").read_text() == "tests/test_some.py"


class TestRun:
    def test_outcomes(self, tmp_path):
        module = tmp_path / "test_examples.py"
        module.write_text(EXAMPLES)
        outcomes = {outcome.test: outcome for outcome in run(tmp_path, [module])}
        assert {test: outcome.result for test, outcome in outcomes.items()} == {
            "test_passes": "passed",
            "test_fails": "failed",
            "test_fails_in_part": "failed",
            "test_is_skipped": "skipped",
        }
        assert outcomes["test_is_skipped"] == Outcome("Example", "test_is_skipped", "skipped", "no time")
        assert "on purpose" in outcomes["test_fails"].message

    def test_says_when_nothing_ran(self, tmp_path):
        module = tmp_path / "test_examples.py"
        module.write_text("import no_such_module")
        with pytest.raises(RuntimeError, match=r"(?s)pytest ended with status 2:.*no_such_module"):
            run(tmp_path, [module])

    def test_an_error_outside_of_the_test_is_a_failure(self):
        case = ElementTree.fromstring('<testcase classname="m.A" name="t"><error message="in setUp"/></testcase>')
        assert outcome_of(case) == Outcome("A", "t", "failed", "in setUp")


class TestTables:
    GOOD = (Outcome("A", "test_a", "passed"), Outcome("A", "test_gpu_1", "skipped"))

    @pytest.fixture(autouse=True)
    def tables(self, monkeypatch):
        monkeypatch.setattr(transformers_suite, "SUITES", {"A": "the first"})
        monkeypatch.setattr(transformers_suite, "NOT_RUN", {"*.test_gpu_*": "needs a GPU"})
        monkeypatch.setattr(transformers_suite, "IF_INSTALLED", {"*.test_extra": "needs the extra"})
        monkeypatch.setattr(transformers_suite, "ADAPTED", {"A.test_a": "with another a"})

    def test_agree(self):
        assert complaints([*self.GOOD]) == []
        assert complaints([*self.GOOD, Outcome("A", "test_extra", "skipped")]) == []
        assert complaints([*self.GOOD, Outcome("A", "test_extra", "passed")]) == []

    @pytest.mark.parametrize(
        ("outcomes", "complaint"),
        [
            ([*GOOD, Outcome("A", "test_b", "failed", "oh")], "failed: A.test_b: oh"),
            ([*GOOD, Outcome("A", "test_b", "skipped", "so")], "skipped without a reason in the tables: A.test_b: so"),
            (GOOD[:1], "nothing is skipped for NOT_RUN['*.test_gpu_*']"),
            ([*GOOD[1:], Outcome("A", "test_b", "passed")], "nothing passes that is ADAPTED['A.test_a']"),
        ],
    )
    def test_disagree(self, outcomes, complaint):
        assert complaints(outcomes) == [complaint]

    def test_a_class_that_pytest_left_out(self, monkeypatch):
        monkeypatch.setattr(transformers_suite, "SUITES", {"A": "the first", "B": "the second"})
        assert complaints([*self.GOOD]) == ["nothing passes in B"]

    def test_summaries(self):
        outcomes = [*self.GOOD, Outcome("A", "test_b", "failed", "oh")]
        table = markdown(outcomes).splitlines()
        assert "| the first | 1 | 1 | 1 |" in table
        assert "| 1 | needs a GPU |" in table
        assert "| `A.test_a` | with another a |" in table
        assert record(outcomes) == {
            "suites": {"A": {"tests": "the first", "passed": 1, "failed": 1, "skipped": 1}},
            "skipped": {"A.test_gpu_1": "needs a GPU"},
            "failed": {"A.test_b": "oh"},
            "adapted": {"A.test_a": "with another a"},
        }


class TestWhatTheyFound:
    """Defects of ours that only transformers' tests showed."""

    def test_an_evaluation_loss_is_a_function_of_the_logits(self, tiny_model):
        """One output projection then serves both, and whoever changes the logits changes the loss."""
        source, labels = torch.tensor([[5, 6, 7, 3]]), torch.tensor([[8, 9, 3, -100]])
        output = tiny_model(source, labels=labels)
        (gradient,) = torch.autograd.grad(output.loss, output.logits)
        expected = output.logits.softmax(-1) - nn.functional.one_hot(labels.clamp(min=0), 99)
        torch.testing.assert_close(gradient, expected * labels.ne(-100)[..., None] / 3)

    @pytest.mark.parametrize("plan", ["tp_plan", "fsdp_plan"])
    def test_every_rule_of_a_parallel_plan_names_a_module(self, tiny_model, plan):
        for model in (tiny_model, tiny_model.model):
            names = {
                ".".join("*" if part.isdigit() else part for part in name.split("."))
                for name, _ in model.named_modules()
            }
            rules = getattr(model, plan)
            assert rules
            # older versions of transformers add a rule for models whose one embedding has this name
            assert {name for name in rules.keys() - names if not name.endswith("embed_tokens")} == set()

    def test_every_embedding_has_a_tensor_parallel_rule(self, tiny_model):
        embeddings = [name for name, module in tiny_model.named_modules() if isinstance(module, nn.Embedding)]
        assert embeddings
        assert all(tiny_model.tp_plan[name] == "embedding_rowwise" for name in embeddings)
