"""`provenance`: where a result comes from."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_vanilla_transformer import provenance as module
from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.provenance import provenance, read_record, without_folders, write_record


@pytest.mark.parametrize(("device", "gpu"), [(None, "Some GPU"), ("cuda:1", "Some GPU"), ("cpu", None)])
def test_a_gpu_counts_where_it_did_the_work(device, gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    assert provenance(device=device)["hardware"]["gpu"] == gpu


def test_paths_to_elsewhere_are_cut_in_either_form():
    words = [
        "--output_dir",
        "/data/me/out",
        "--output_dir=/data/me/out",
        "--output_dir=/data/me/lr=1e-3",
        "../me/text",
        "~/me/valid",
        "--a=b",
        "inside/path",
        "a ... b",
    ]
    cut = [
        "--output_dir",
        "out",
        "--output_dir=out",
        "--output_dir=lr=1e-3",
        "text",
        "valid",
        "--a=b",
        "inside/path",
        "a ... b",
    ]
    assert without_folders(words) == cut


@pytest.mark.parametrize(
    ("program", "words"),
    [("/x/scripts/train.py", ["python", "scripts/train.py"]), ("/x/cli.py", ["vanilla-transformer"])],
)
def test_the_command_is_that_of_a_reader(monkeypatch, program, words):
    monkeypatch.setattr(sys, "argv", [program, "--a"])
    assert provenance()["command"] == [*words, "--a"]


def test_an_installed_package_has_no_commit_though_a_repository_is_around_it(tmp_path, monkeypatch):
    """An environment inside somebody's own project."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "theirs"], cwd=tmp_path, check=True)
    for place, is_ours in ((tmp_path / "env/lib/site-packages/us", False), (tmp_path / "src/us", True)):
        place.mkdir(parents=True)
        monkeypatch.setattr(module, "__file__", str(place / "provenance.py"))
        assert bool(provenance()["commit"]) == is_ours


def test_records_that_cannot_be_read(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    assert read_record(path) == {}
    write_record({"a": 1}, path)
    assert read_record(path) == {"a": 1}

    def refused(*args, **options):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", refused)
        with pytest.raises(UserError, match=r"run.json: cannot be read \(Permission denied\)$"):
            read_record(path)
    path.write_text("[]")
    with pytest.raises(UserError, match=r"run.json: holds no JSON object"):
        read_record(path)
