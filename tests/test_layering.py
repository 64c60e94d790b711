"""Who imports whom inside the package, lazy imports included: data flows one way, from level 0 to level 8."""

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest

import hf_vanilla_transformer

PACKAGE = Path(hf_vanilla_transformer.__file__).parent
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")

# A module may import from lower levels.
LEVELS = [
    {
        "errors",
        "version",
        "provenance",
        "beam_search",
        "length_penalty",
        "attention",
        "autocast",
        "cpu_attention",
        "dropout",
        "embeddings",
        "loss",
        "configuration_vanilla_transformer",
        "tokenization_vanilla_transformer",
    },
    {"layers", "attention_backends"},
    {"transformer"},
    {"modeling_vanilla_transformer"},
    {
        "corpus",
        "embedded_corpus",
        "batching",
        "averaging",
        "muon",
        "checkpoints",
        "consistency",
        "ensemble",
        "int8",
        "packed",
        "weight_files",
    },
    {"arguments", "preparation", "training"},
    {
        "translation",
        "pipeline_vanilla_transformer",
        "evaluation",
        "card",
        "weight_layout",
        "reference_layouts",
        "teaching_layouts",
        "foreign_tokenizers",
    },
    {
        "onnx_export",
        "inspection",
        "interchange",
        "publishing",
        "reporting",
        "ctranslate2_export",
        "certificate",
        "workers",
    },
    {"demo", "cli"},
]
# Inside a level: (who imports, from whom).
INSIDE_A_LEVEL = {
    ("attention", "autocast"),
    ("beam_search", "cpu_attention"),
    ("loss", "autocast"),
    ("provenance", "errors"),
    ("tokenization_vanilla_transformer", "errors"),
    ("preparation", "arguments"),
    ("training", "arguments"),
    ("training", "preparation"),
    ("reference_layouts", "weight_layout"),
    ("teaching_layouts", "weight_layout"),
    ("certificate", "ctranslate2_export"),
    ("certificate", "reporting"),
    ("ctranslate2_export", "workers"),
    ("cli", "demo"),
}
LEVEL = {module: number for number, level in enumerate(LEVELS) for module in level}

# What travels to the Hub with a model, and what it may import from outside.
MODEL_FILES = {
    "modeling_vanilla_transformer",
    "configuration_vanilla_transformer",
    "transformer",
    "layers",
    "attention",
    "attention_backends",
    "autocast",
    "cpu_attention",
    "dropout",
    "embeddings",
    "errors",
    "loss",
    "beam_search",
    "length_penalty",
}
TOKENIZER_FILES = {"tokenization_vanilla_transformer", "errors"}
PIPELINE_FILES = {"pipeline_vanilla_transformer", "errors"}


@cache
def source_of(module):
    return (PACKAGE / f"{module}.py").read_text(encoding="utf-8")


def import_statements(module):
    """Every import of a module, those inside functions and blocks too."""
    return [n for n in ast.walk(ast.parse(source_of(module))) if isinstance(n, (ast.Import, ast.ImportFrom))]


@cache
def own_imports(module):
    return {node.module for node in import_statements(module) if isinstance(node, ast.ImportFrom) and node.level}


def third_party(module):
    names = set()
    for node in import_statements(module):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif not node.level:
            names.add(node.module)
    return {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)


def closure(module):
    found, waiting = set(), [module]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += own_imports(module)
    return found


def test_every_module_has_a_level():
    assert set(MODULES) == set(LEVEL)


def test_every_exception_is_one():
    assert all(other in own_imports(module) for module, other in INSIDE_A_LEVEL)


@pytest.mark.parametrize("module", MODULES)
def test_imports_come_from_below(module):
    wrong = {
        other
        for other in own_imports(module)
        if LEVEL[other] >= LEVEL[module] and (module, other) not in INSIDE_A_LEVEL
    }
    assert wrong == set()


@pytest.mark.parametrize("module", ["__init__", *MODULES])
def test_the_form_of_imports(module):
    """The Hub's loader follows `from .module import name` and nothing else."""
    for node in import_statements(module):
        if isinstance(node, ast.Import):
            assert not any(alias.name.split(".")[0] == PACKAGE.name for alias in node.names), node.lineno
        elif node.level:
            assert node.level == 1, f"line {node.lineno}: one dot only"
            assert node.module, f"line {node.lineno}: `from . import module`"
            assert "." not in node.module, f"line {node.lineno}: the package is flat"
            assert node.module in MODULES, f"line {node.lineno}: no such module"
            assert all(alias.name != "*" for alias in node.names), node.lineno
        else:
            assert node.module.split(".")[0] != PACKAGE.name, f"line {node.lineno}: import it with a dot"


def test_no_cycles():
    for module in MODULES:
        for other in own_imports(module):
            assert module not in closure(other), f"{module} -> {other} -> ... -> {module}"


def test_the_package_itself_imports_little():
    assert own_imports("__init__") == {
        "configuration_vanilla_transformer",
        "modeling_vanilla_transformer",
        "pipeline_vanilla_transformer",
        "tokenization_vanilla_transformer",
        "version",
    }


@pytest.mark.parametrize(
    ("start", "files", "libraries"),
    [
        ("modeling_vanilla_transformer", MODEL_FILES, {"torch", "transformers", "huggingface_hub"}),
        ("tokenization_vanilla_transformer", TOKENIZER_FILES, {"tokenizers", "transformers"}),
        ("pipeline_vanilla_transformer", PIPELINE_FILES, {"torch", "transformers"}),
    ],
)
class TestWhatTravelsToTheHub:
    def test_files(self, start, files, libraries):
        assert closure(start) == files

    def test_libraries(self, start, files, libraries):
        assert set().union(*map(third_party, files)) == libraries

    def test_the_loader_sees_the_same_imports(self, start, files, libraries):
        """It looks for them with a regular expression, which finds those in a docstring too."""
        for module in files:
            seen = re.findall(r"^\s*from\s+\.(\S+)\s+import", source_of(module), flags=re.MULTILINE)
            assert set(seen) == own_imports(module)
