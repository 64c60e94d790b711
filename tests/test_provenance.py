"""`provenance`: where a result comes from."""

import sys

import pytest
import torch

from hf_vanilla_transformer.provenance import provenance, without_folders


@pytest.mark.parametrize(("device", "gpu"), [(None, "Some GPU"), ("cuda:1", "Some GPU"), ("cpu", None)])
def test_a_gpu_counts_where_it_did_the_work(device, gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    assert provenance(device=device)["hardware"]["gpu"] == gpu


def test_absolute_paths_are_cut_in_either_form():
    words = ["--output_dir", "/data/me/out", "--output_dir=/data/me/out", "--a=b", "relative/path"]
    assert without_folders(words) == ["--output_dir", "out", "--output_dir=out", "--a=b", "relative/path"]


@pytest.mark.parametrize(
    ("program", "words"),
    [("/x/scripts/train.py", ["python", "scripts/train.py"]), ("/x/cli.py", ["vanilla-transformer"])],
)
def test_the_command_is_that_of_a_reader(monkeypatch, program, words):
    monkeypatch.setattr(sys, "argv", [program, "--a"])
    assert provenance()["command"] == [*words, "--a"]
