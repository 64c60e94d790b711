"""`provenance`: where a result comes from."""

import pytest
import torch

from hf_vanilla_transformer.provenance import provenance


@pytest.mark.parametrize(("device", "gpu"), [(None, "Some GPU"), ("cuda:1", "Some GPU"), ("cpu", None)])
def test_a_gpu_counts_where_it_did_the_work(device, gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    assert provenance(device=device)["hardware"]["gpu"] == gpu
