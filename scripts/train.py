"""Train a translation model: the same as `vanilla-transformer train`, for `accelerate launch scripts/train.py`."""

import sys

from hf_vanilla_transformer.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
