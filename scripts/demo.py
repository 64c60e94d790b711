"""What `make demo` runs: the same as `vanilla-transformer demo`."""

import sys

from hf_vanilla_transformer.cli import main

if __name__ == "__main__":
    sys.exit(main(["demo", *sys.argv[1:]]))
