"""Files of weights, read without running code that they hold, and written: safetensors, npz and torch files."""

import argparse
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .errors import UserError, first_line, require_folder_path
from .modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration

# In a folder, the first of these that is there; else its only file with one of SUFFIXES.
WEIGHT_FILES = ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin")
SUFFIXES = (".safetensors", ".npz", ".pt", ".pth", ".bin", ".ckpt")
# Under which name a training script keeps the tensors in a torch file that holds more.
STATE_KEYS = ("model", "state_dict", "model_state_dict")


def find_weights(source: str | Path) -> Path:
    """The file of weights in a folder, or the file that was named.

    Raises:
        UserError: nothing is there, or more than one file could be meant.
    """
    source = Path(source)
    if source.is_file():
        return source
    if not source.is_dir():
        hint = (
            "" if source.is_absolute() else f"; from the Hub, fetch it first: hf download {source} --local-dir FOLDER"
        )
        raise UserError(f"{source}: no such file or folder{hint}")
    for name in WEIGHT_FILES:
        if (source / name).is_file():
            return source / name
    found = sorted(path for path in source.iterdir() if path.suffix in SUFFIXES)
    if not found:
        raise UserError(f"{source}: holds no file of weights ({', '.join(SUFFIXES)})")
    if len(found) > 1:
        raise UserError(f"{source}: holds several files of weights: name one, such as {found[0]}")
    return found[0]


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a file, and the settings that a checkpoint of a training holds besides.

    Floating point becomes float32, which loses nothing. The ending of the name says what the file is; one that is
    neither safetensors nor npz is taken for a torch file.

    Raises:
        UserError: a file that cannot be read, or that holds anything but tensors.
    """
    settings: dict[str, Any] = {}
    if path.name.endswith(".index.json"):
        weight_map = read_json(path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise UserError(f"{path}: its weight_map does not say in which files the tensors are")
        shards = sorted(set(weight_map.values()))
        tensors = {name: tensor for shard in shards for name, tensor in _read_safetensors(path.parent / shard).items()}
    elif path.suffix == ".safetensors":
        tensors = _read_safetensors(path)
    elif path.suffix == ".npz":
        tensors = _read_npz(path)
    else:
        tensors, settings = _read_torch(path)
    floats = {name: tensor.float() for name, tensor in tensors.items() if tensor.is_floating_point()}
    return {**tensors, **floats}, settings


def read_json(path: Path) -> dict[str, Any]:
    """Raises UserError unless the file holds a JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds no JSON object")
    return content


def write_json(content: Mapping[str, Any], path: Path) -> None:
    """As `read_json` reads it."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def require_folder_or_hub_id(name_or_path: str | Path) -> None:
    """Raises UserError for a folder that is not there, which `from_pretrained` would look for on the Hub."""
    path = Path(name_or_path)
    if not path.exists() and (path.is_absolute() or (path.parent.is_dir() and path.parent != Path())):
        raise UserError(f"{name_or_path}: no such folder")


def load_own_model(name_or_path: str | Path, **options: Any) -> VanillaTransformerForConditionalGeneration:
    """A model of ours from a folder or the Hub, all of it; `options` are for `from_pretrained`.

    Raises:
        UserError: weights that cannot be read, are missing, are too many, or have another shape.
    """
    try:
        model, report = VanillaTransformerForConditionalGeneration.from_pretrained(
            name_or_path, output_loading_info=True, ignore_mismatched_sizes=True, use_safetensors=True, **options
        )
    except (SafetensorError, OSError) as error:
        raise UserError(f"{name_or_path}: the weights cannot be read ({first_line(error)})") from error
    require_whole(name_or_path, report)
    return model


def load_own_folder(folder: str | Path) -> VanillaTransformerForConditionalGeneration:
    """The model in a folder. Raises UserError if it is not one of this package, or not whole."""
    require_own(Path(folder))
    return load_own_model(folder)


def require_own(folder: Path) -> dict[str, Any]:
    """The content of config.json. Raises UserError if it is not that of a model of this package."""
    config = read_json(folder / "config.json")
    ours, found = VanillaTransformerForConditionalGeneration.config_class.model_type, config.get("model_type")
    if found != ours:
        raise UserError(f"{folder / 'config.json'}: model_type is {found!r}, not {ours!r}: only our models will do")
    return config


def require_whole(name_or_path: str | Path, report: Mapping[str, Any]) -> None:
    """Raises UserError where `from_pretrained` reports in its `output_loading_info` that weights did not fit."""
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if wrong := sorted(map(str, report[kind])):
            problem = f"{kind.replace('_', ' ')}: {', '.join(wrong[:3])}"
            raise UserError(f"{name_or_path}: the weights do not fit the configuration: {problem}")


def require_new_folder(output: str | Path) -> Path:
    """The path. Raises UserError if it is there already and not an empty folder, or below a file."""
    output = Path(output)
    require_folder_path(output.parent)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output}: is not an empty folder: name a new one")
    return output


def write_weights(tensors: Mapping[str, Tensor], path: str | Path, beside: Mapping[str, Any] | None = None) -> None:
    """Write tensors into a new file; the ending of its name says how: .safetensors, .npz or, for a torch file, .pt.

    Args:
        tensors: any that share memory are written out each; bfloat16, which npz has not, as float32 there.
        path: its folder is made if it is not there.
        beside: write a checkpoint that holds this and, as "model", the tensors; only as .pt.

    Raises:
        UserError: another ending, or a file that is there already.
    """
    path = Path(path)
    suffixes = (".pt",) if beside is not None else (".safetensors", ".npz", ".pt")
    if path.suffix not in suffixes:
        raise UserError(f"{path}: the name of this export has to end in {' or '.join(suffixes)}")
    if path.exists():
        raise UserError(f"{path}: is there already: name a new file")
    require_folder_path(path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    if beside is not None:
        torch.save({**beside, "model": tensors}, path)
    elif path.suffix == ".safetensors":
        save_file(tensors, path, metadata={"format": "pt"})
    elif path.suffix == ".npz":
        half = torch.bfloat16
        np.savez(path, **{name: (x.float() if x.dtype == half else x).numpy() for name, x in tensors.items()})
    else:
        torch.save(tensors, path)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: cannot be read as safetensors ({first_line(error)})") from error


def _read_npz(path: Path) -> dict[str, Tensor]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    except (OSError, EOFError, ValueError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: cannot be read as npz of plain arrays ({first_line(error)})") from error


def _read_torch(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise UserError(
            f"{path}: holds more than tensors, and opening that could run foreign code: save the tensors alone, with "
            "torch.save(model.state_dict(), ...)"
        ) from error
    except (OSError, RuntimeError, EOFError, LookupError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as a torch file ({first_line(error)})") from error
    if not isinstance(loaded, Mapping):
        raise UserError(f"{path}: holds a {type(loaded).__name__} instead of named tensors")
    state = next((loaded[key] for key in STATE_KEYS if isinstance(loaded.get(key), Mapping)), loaded)
    if others := [key for key, value in state.items() if not isinstance(value, Tensor)]:
        raise UserError(f"{path}: {others[0]!r} is not a tensor: save the tensors alone")
    return dict(state), _settings(loaded)


def _settings(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """`args`, or the `model` of `cfg`."""
    settings = checkpoint.get("args")
    if settings is None and isinstance(checkpoint.get("cfg"), Mapping):
        settings = checkpoint["cfg"].get("model")
    if isinstance(settings, argparse.Namespace):
        settings = vars(settings)
    return dict(settings) if isinstance(settings, Mapping) else {}


__all__ = [
    "find_weights",
    "load_own_folder",
    "load_own_model",
    "read_json",
    "read_weights",
    "require_new_folder",
    "require_whole",
    "write_json",
    "write_weights",
]
