"""Where a result comes from: command, commit, versions, hardware; and the records that say it."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from .errors import UserError

RUN_RECORD = "run.json"  # in a model's folder: how it was trained
EVALUATION_RECORD = "evaluation.json"  # in a model's folder: how it scores
PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "accelerate", "evaluate", "safetensors", "sacrebleu")


def provenance(*packages: str, device: Any = None) -> dict[str, Any]:
    """Everything about this process that a reader needs to repeat its result, ready for JSON.

    Args:
        packages: whose versions count besides those of our dependencies; null for what is not installed.
        device: on which the work is done; None for wherever there is a GPU, there.
    """
    return {
        "command": [*_program(), *without_folders(sys.argv[1:])],
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in (*PACKAGES, *packages)}},
        "hardware": _hardware(device),
    }


def read_record(path: Path) -> dict[str, Any]:
    """The content of a record; empty where there is none.

    Raises:
        UserError: a damaged file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UserError(f"{path}: is not valid JSON ({error}): restore the file or train again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds no JSON object: restore the file or train again")
    return content


def write_record(content: dict[str, Any], path: Path) -> None:
    """As `read_record` reads it; written beside the old file first, so that a full disk leaves that one whole."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def without_folders(words: Sequence[str]) -> list[str]:
    """The same words with paths to elsewhere cut to their last part: records are published, the disk is private."""
    return [_without_folder(word) for word in words]


def _without_folder(word: str) -> str:
    flag, equals, value = word.partition("=") if word.startswith("--") and "=" in word else ("", "", word)
    path = Path(value)
    return f"{flag}{equals}{path.name}" if path.is_absolute() or {"..", "~"} & {*path.parts} else word


def _program() -> list[str]:
    """How a reader would start this program: the console command, or a script of the repository."""
    program = Path(sys.argv[0])
    if program.parent.name == "scripts":
        return ["python", f"scripts/{program.name}"]
    return ["vanilla-transformer" if program.name == "cli.py" else program.name]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the source tree, with "-dirty" where files differ from it; None for an installed package."""
    root = Path(__file__).resolve().parents[2]
    try:
        if Path(_git("rev-parse", "--show-toplevel", folder=root)).resolve() != root:
            return None  # somebody else's repository, with our package in an environment inside it
        return _git("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty", folder=root)
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*words: str, folder: Path) -> str:
    answer = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    return answer.stdout.strip()


def _hardware(device: Any) -> dict[str, Any]:
    import torch

    on_gpu = device is None or torch.device(device).type == "cuda"
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() and on_gpu else None,
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
