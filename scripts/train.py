"""Train a translation model: the same as `vanilla-transformer train`, for `accelerate launch scripts/train.py`."""

import os
import sys

import psutil

from hf_vanilla_transformer.cli import main


def processes_asked_for() -> int:
    """How many processes `accelerate launch --cpu --num_processes N` should have started.

    accelerate 1.15 starts one, leaves MASTER_ADDR in its environment as it does for several, and does not tell it N:
    the only trace is its own command line.
    """
    alone = "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ
    if not alone or os.environ.get("ACCELERATE_USE_CPU") != "True":
        return 1
    words = [part for word in psutil.Process().parent().cmdline() for part in word.split("=", 1)]
    return int(words[words.index("--num_processes") + 1]) if "--num_processes" in words else 1


if __name__ == "__main__":
    if (processes := processes_asked_for()) > 1:
        launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
        launcher += ["--master_addr", os.environ["MASTER_ADDR"], "--master_port", os.environ["MASTER_PORT"]]
        os.execv(sys.executable, [sys.executable, *launcher, __file__, *sys.argv[1:]])
    sys.exit(main(["train", *sys.argv[1:]]))
