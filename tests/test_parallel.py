"""Two processes against one: sharded layers (tensor parallelism) and sharded parameters (FSDP2), over gloo on the CPU.

The processes get what to expect through files; what they assert fails the test that started them.
"""

import multiprocessing
import os
import socket

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from torch.multiprocessing import ProcessRaisedException, start_processes
from transformers import AutoModelForSeq2SeqLM
from transformers.distributed import DistributedConfig

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from tiny_models import LABELS, SEPARATE, SOURCE, TARGET, losses, random_model, trained

load = VanillaTransformerForConditionalGeneration.from_pretrained
VARIANTS = {
    "as in the paper": {},
    "pre-norm, nothing tied": {
        "norm_position": "pre",
        "share_encoder_decoder_embeddings": False,
        "tie_word_embeddings": False,
        "lm_head_bias": True,
    },
    "two vocabularies": SEPARATE,
}
SEARCH = {"max_length": 10, "num_beams": 3, "num_return_sequences": 2}


def in_two_processes(function, *arguments):
    """Call `function(*arguments)` in two processes, started as torchrun would, and wait for them.

    Raises:
        ProcessRaisedException: one of them failed; it quotes the traceback.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    multiprocessing.set_forkserver_preload(["tiny_models", "transformers.trainer"])
    start_processes(one_of_two, (port, function, arguments), nprocs=2, start_method="forkserver")


def one_of_two(rank, port, function, arguments):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=port)
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    try:
        function(*arguments)
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture(params=VARIANTS)
def folder(request, tmp_path):
    """A checkpoint, and what one process makes of it."""
    model = random_model(**VARIANTS[request.param])
    model.save_pretrained(tmp_path / "model")
    expected = {
        "logits": model(SOURCE, decoder_input_ids=TARGET).logits.detach(),
        "sequences": model.generate(SOURCE, **SEARCH),
        "evaluation loss": model(SOURCE, labels=LABELS).loss.detach(),
    }
    loss = model.train()(SOURCE, labels=LABELS).loss
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.save({**expected, "training loss": loss.detach(), "gradients": gradients}, tmp_path / "expected.pt")
    return tmp_path


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def compare(folder, settings):
    """What each process does: everything with a shard, compared with one process that has the whole."""
    expected = torch.load(folder / "expected.pt")
    model = load(folder / "model", distributed_config=DistributedConfig(**settings))
    layer = model.model.decoder.stack.layers[0]
    for linear in (layer.self_attn.q_proj, layer.encoder_attn.out_proj, layer.feed_forward.fc1):
        assert linear.weight.to_local().numel() == linear.weight.numel() // 2
    with torch.no_grad():
        logits = model(SOURCE, decoder_input_ids=TARGET).logits
        loss = model(SOURCE, labels=LABELS).loss
    torch.testing.assert_close(logits, expected["logits"], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(loss, expected["evaluation loss"])
    assert model.generate(SOURCE, **SEARCH).tolist() == expected["sequences"].tolist()
    output = model.train()(SOURCE, labels=LABELS)
    assert (output.logits is None) == ("fsdp_size" in settings)  # a shard of the output projection needs its module
    torch.testing.assert_close(output.loss.detach(), expected["training loss"])
    output.loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(whole(parameter.grad), expected["gradients"][name], atol=1e-4, rtol=1e-3)
    model.save_pretrained(folder / "saved")


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"tp_size": 2, "tp_plan": "auto"}, {"fsdp_size": 2}], ids=["tensor parallel", "sharded data"]
)
def test_equals_one_process(folder, settings):
    """Logits, beam search, losses and gradients; and the checkpoint that two processes save is the one they loaded."""
    in_two_processes(compare, folder, settings)
    saved, original = load(folder / "saved").state_dict(), load(folder / "model").state_dict()
    assert saved.keys() == original.keys()
    for name, tensor in original.items():
        torch.testing.assert_close(saved[name], tensor, atol=0, rtol=0)


def train_sharded(folder, settings):
    """`Seq2SeqTrainer` with a model that was sharded while it was loaded; each process sees half of a batch."""
    model = load(folder / "model", distributed_config=DistributedConfig(**settings))
    trainer = trained(
        model,
        folder / "run",
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        save_strategy="steps",
        save_steps=2,
        save_only_model=True,
    )
    torch.save(losses(trainer), folder / f"losses-{os.environ['RANK']}.pt")


class TestTrainer:
    @pytest.mark.slow
    def test_sharded_data(self, tmp_path):
        """The curve and the weights of one process; checkpoints load anywhere."""
        random_model().save_pretrained(tmp_path / "model")
        single = trained(load(tmp_path / "model"), tmp_path / "single", save_strategy="steps", save_steps=2)
        in_two_processes(train_sharded, tmp_path, {"fsdp_size": 2})
        for rank in range(2):
            assert torch.load(tmp_path / f"losses-{rank}.pt") == pytest.approx(losses(single), rel=1e-4)
        for step in (2, 4):
            ours, expected = (
                AutoModelForSeq2SeqLM.from_pretrained(tmp_path / run / f"checkpoint-{step}").state_dict()
                for run in ("run", "single")
            )
            for name, tensor in expected.items():
                torch.testing.assert_close(ours[name], tensor, atol=1e-4, rtol=1e-3)

    @pytest.mark.slow
    @pytest.mark.xfail(
        strict=True,
        raises=ProcessRaisedException,
        reason="accelerate 1.15 refuses tensor parallelism on CPUs",
    )
    def test_tensor_parallel(self, tmp_path):
        random_model().save_pretrained(tmp_path / "model")
        try:
            in_two_processes(train_sharded, tmp_path, {"tp_size": 2, "tp_plan": "auto"})
        except ProcessRaisedException as error:
            assert "ParallelismConfig is only compatible" in str(error)
            raise


def test_what_accelerate_would_wrap():
    """`accelerate launch --use_fsdp` needs a GPU to run; which modules it makes units of does not."""
    model = random_model()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    plugin.set_auto_wrap_policy(model)
    policy = fsdp2_prepare_auto_wrap_policy(plugin, model)
    units = {name for name, module in model.named_modules() if policy(module)}
    assert units == {f"model.{half}.stack.layers.{i}" for half in ("encoder", "decoder") for i in range(2)}
