"""What is written down runs, exists and is up to date."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration, __version__
from hf_vanilla_transformer.arguments import parse_arguments
from hf_vanilla_transformer.cli import COMMANDS, main
from hf_vanilla_transformer.configuration_vanilla_transformer import PRESETS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RECIPES = sorted((ROOT / "scripts" / "recipes").glob("*.yaml"))
MEASUREMENTS = ROOT / "scripts" / "results" / "README.md"


def blocks(language: str) -> list[str]:
    text = README + MEASUREMENTS.read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands() -> list[list[str]]:
    """Every `vanilla-transformer ...` and `scripts/train.py ...` of the documents and the recipes' heads, in words."""
    text = "\n".join(blocks("bash")).replace("\\\n", " ")
    for recipe in RECIPES:
        head = re.match(r"(#.*\n)*", recipe.read_text(encoding="utf-8"))[0]
        text += "\n" + re.sub(r"^#", "", head, flags=re.MULTILINE)
    text = text.replace("python scripts/train.py", "vanilla-transformer train")
    found = re.findall(r"vanilla-transformer ((?:train|translate|score|evaluate|publish|import|export) [^;\n]*)", text)
    words = [shlex.split(re.sub(r"<[^>]*>", "FOLDER", line), comments=True) for line in found]
    return [list(command) for command in dict.fromkeys(map(tuple, words))]


def test_the_two_commands_exist_and_ci_runs_the_tests():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("demo", "test"):
        assert f"make {target}" in README
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_of_the_documents_parse(words, capsys):
    command, *flags = words
    assert command in COMMANDS
    if command == "train":
        parse_arguments([str(ROOT / flag) if flag.endswith(".yaml") else flag for flag in flags])
        return
    with pytest.raises(SystemExit) as stopped:  # argparse looks at the flags before it prints the help
        main([command, *flags, "--help"])
    assert stopped.value.code == 0
    known = capsys.readouterr().out
    assert all(flag in known for flag in flags if flag.startswith("--"))


def test_resuming_as_the_readme_says_needs_no_value():
    assert "with `--resume_from_checkpoint` continues" in README
    flags = ["--train_file", "a", "b", "--source_lang", "en", "--target_lang", "de"]
    for argv in ([*flags, "--resume_from_checkpoint"], ["--resume_from_checkpoint", *flags]):
        assert parse_arguments(argv)[3].resume_from_checkpoint == "true"
    assert parse_arguments([*flags, "--resume_from_checkpoint", "x"])[3].resume_from_checkpoint == "x"


@pytest.mark.parametrize("code", blocks("python"))
def test_python_of_the_readme_compiles(code):
    compile(code, "README.md", "exec")


@pytest.mark.parametrize("document", [ROOT / "README.md", MEASUREMENTS], ids=["README", "measurements"])
def test_links_lead_somewhere(document):
    links = re.findall(r"\]\(([^):]*)\)", document.read_text(encoding="utf-8"))
    assert len(links) > 5
    for link in links:
        name, _, heading = link.partition("#")
        target = document.parent / name if name else document
        assert target.exists(), link
        if heading:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in [re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in headings], link


def test_recipes_parse():
    assert RECIPES
    for recipe in RECIPES:
        parse_arguments([str(recipe), "--dataset_name", "FOLDER"])


def test_the_table_of_results_is_what_the_results_say():
    done = subprocess.run([sys.executable, ROOT / "scripts" / "results_table.py", "--check"])
    assert done.returncode == 0, "run: python scripts/results_table.py"


def test_the_table_of_presets_tells_the_truth():
    for name in PRESETS:
        assert f"`{name}`" in README
    for name, vocab_size, claim in (
        ("paper-base", 37000, "63.1M with 37,000"),
        ("paper-big", 37000, "214.2M with 37,000"),
        ("multi30k-tiny", 6000, "2.1M with 6,000"),
    ):
        with torch.device("meta"):
            config = VanillaTransformerConfig.preset(name, vocab_size=vocab_size)
            count = VanillaTransformerForConditionalGeneration(config).num_parameters()
        assert claim.startswith(f"{count / 1e6:.1f}M")
        assert claim in README


def test_versions_agree():
    assert f"version: {__version__}" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_nothing_names_a_machine():
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if files.returncode:
        pytest.skip("not a git checkout")
    roots = "|".join(["work", "farm", "root", r"home/\w+"])
    pattern = re.compile(rf"(?<![\w.])/(?:{roots})/")
    for name in files.stdout.splitlines():
        path = ROOT / name
        if path.suffix in (".png", ".gz") or not path.is_file():
            continue
        assert not pattern.search(path.read_text(encoding="utf-8")), name
