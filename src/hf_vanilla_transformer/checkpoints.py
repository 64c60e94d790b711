"""Checkpoints that can be trusted: which ones are whole, and where a run goes on."""

import json
import re
import zipfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from .errors import UserError, require_folder_path
from .provenance import RUN_RECORD


def complete_checkpoints(folder: Path, world_size: int = 1) -> list[Path]:
    """The checkpoints in `folder` that were written to the end, oldest first.

    The Trainer writes `trainer_state.json` last on the first rank; the other ranks write their random state at
    the same time, and after a crash of the machine any file may lack its end.
    """
    found = [path for path in Path(folder).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    found.sort(key=lambda path: int(path.name.split("-")[1]))
    return [path for path in found if _is_complete(path, world_size)]


def _is_complete(checkpoint: Path, world_size: int = 1) -> bool:
    random_states = ["rng_state.pth"] if world_size == 1 else [f"rng_state_{rank}.pth" for rank in range(world_size)]
    files = ["model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json", *random_states]
    return all((checkpoint / file).is_file() for file in files) and all(map(_is_whole, checkpoint.iterdir()))


def _is_whole(file: Path) -> bool:
    """Whether a file has the end that its format asks for."""
    try:
        if file.suffix == ".json":
            json.loads(file.read_bytes())
        elif file.suffix == ".safetensors":
            safe_open(file, "pt")
        elif file.suffix in (".pt", ".pth", ".bin"):
            return zipfile.is_zipfile(file)
    except (OSError, ValueError, SafetensorError):
        return False
    return True


def steps_of(checkpoint: Path) -> int:
    """After how many steps a complete checkpoint was written, whatever its folder is called."""
    return _state(checkpoint)["global_step"]


def evaluations_in_vain(checkpoint: Path) -> int:
    """Evaluations without a gain in a row up to a complete checkpoint; 0 for a run without early stopping."""
    stopping = _state(checkpoint)["stateful_callbacks"].get("EarlyStoppingCallback")
    return stopping["attributes"]["early_stopping_patience_counter"] if stopping else 0


def _state(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "trainer_state.json").read_bytes())


def checkpoint_to_resume(output: Path, wanted: str | None, world_size: int) -> Path | None:
    """Where a run goes on, or None for a fresh one.

    Args:
        output: the run's folder.
        wanted: None or "false" for a fresh run, "true" for the newest complete checkpoint in `output`, or a checkpoint.
        world_size: processes of the run.

    Raises:
        UserError: it is not a complete checkpoint, or there is none; or a fresh run would overwrite another.
    """
    require_folder_path(output)
    if wanted is None or str(wanted).lower() == "false":
        runs = [path.name for path in output.glob("*") if path.name in (RUN_RECORD, "model.safetensors")]
        runs += [path.name for path in output.glob("checkpoint-*")]
        if runs:
            raise UserError(
                f"{output} holds another run ({runs[0]}): choose another --output_dir, or go on with "
                "--resume_from_checkpoint"
            )
        return None
    if str(wanted).lower() == "true":
        complete = complete_checkpoints(output, world_size)
        if not complete:
            raise UserError(f"{output} holds no complete checkpoint to resume from")
        return complete[-1]
    if not _is_complete(Path(wanted), world_size):
        raise UserError(f"{wanted} is not a complete checkpoint: expected a folder checkpoint-<step> of this training")
    return Path(wanted)
