"""The console command `vanilla-transformer`: parses, calls, prints."""

import argparse
import sys
from collections.abc import Sequence

from .errors import UserError


def _train(argv: Sequence[str]) -> None:
    from .arguments import parse_arguments
    from .evaluation import score
    from .training import train

    def validation_scores(hypotheses: list[str], references: list[str]) -> dict[str, float]:
        results = score(hypotheses, references, metrics=("bleu", "chrf"))
        return {name: result["score"] for name, result in results.items()}

    print(f"the model is in {train(parse_arguments(argv), validation_scores)}")


COMMANDS = {
    "train": (_train, "train a translation model from parallel text"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; a mistake in the input is one line on standard error and the exit status 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="vanilla-transformer",
        description="The Transformer of 'Attention Is All You Need', at home in Hugging Face.",
        epilog="\n".join(f"  {name:<12}{text}" for name, (_, text) in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="command")
    command = parser.parse_args(argv[:1]).command
    try:
        COMMANDS[command][0](argv[1:])
    except UserError as error:
        print(f"vanilla-transformer {command}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
