"""Models that others trained become ours, and ours become theirs, exactly: the same logits, the same translations.

`FORMATS` lists the layouts. What a file of weights does not tell comes from `LayoutOptions`, else from the
configuration beside it where the format has one, else from the defaults of the reference.
"""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, MarianConfig

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .errors import UserError, on_one_line
from .foreign_tokenizers import export_tokenizer, import_tokenizer
from .modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .reference_layouts import LAYOUTS as REFERENCE_LAYOUTS
from .teaching_layouts import LAYOUTS as TEACHING_LAYOUTS
from .weight_files import find_weights, load_own_folder, read_json, read_weights, require_new_folder, write_weights
from .weight_layout import (
    EMBEDDINGS,
    TOKEN_IDS,
    Layout,
    LayoutOptions,
    State,
    check_state,
    has_moved_padding,
    own_config,
)

FORMATS: dict[str, Layout] = {**REFERENCE_LAYOUTS, **TEACHING_LAYOUTS}
NO_EMBEDDINGS = "the source holds no embeddings: those of the new model are random numbers and have to be trained"
MOVED_PADDING = (
    "the source pads with token 0, as generate() cannot: padding is now the token {}, which its tokenizer has to get, "
    "and further training wants --label_smoothing_factor 0"
)
SEARCH_SETTINGS = set(GenerationConfig().to_dict()) - {"transformers_version"}


def import_model(
    source: str | Path, format: str, options: LayoutOptions | None = None
) -> VanillaTransformerForConditionalGeneration:
    """A foreign model as one of ours, in evaluation mode and float32.

    Args:
        source: a file of weights (safetensors, npz or torch), or a folder that holds one.
        format: one of `FORMATS`.
        options: what the source does not tell, or tells wrongly.

    Raises:
        UserError: an unknown format; a source that cannot be read, or that our model cannot express.

    Warns:
        UserWarning: the source holds no embeddings.
    """
    model, _, notes = _import(source, format, options or LayoutOptions())
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return model


def import_folder(
    source: str | Path, format: str, output: str | Path, options: LayoutOptions | None = None
) -> list[str]:
    """Import a model and save it, with a tokenizer where the source has one that can be carried over.

    The other arguments and the errors are those of `import_model`.

    Args:
        output: a folder that is new or empty.

    Returns:
        what the user should know, a sentence each.
    """
    output = require_new_folder(output)
    model, settings, notes = _import(source, format, options or LayoutOptions())
    model.save_pretrained(output)
    notes.append(import_tokenizer(find_weights(source).parent, output, model.config, settings))
    if has_moved_padding(model.config, model.state_dict()):
        notes.append(MOVED_PADDING.format(model.config.pad_token_id))
    if format != "marian":  # whose configuration tells everything
        flags = _flags(model)
        notes.append(f"taken for given: {flags}: where that is wrong, import again with the right ones")
    return notes


def _flags(model: VanillaTransformerForConditionalGeneration) -> str:
    """What foreign weights do not tell of a model, or not all of them, as options of the command line."""
    config = model.config
    told = {"num_heads": config.encoder_attention_heads}
    if config.decoder_attention_heads != config.encoder_attention_heads:
        told["decoder_num_heads"] = config.decoder_attention_heads
    names = ["norm_position", "activation_function", "layer_norm_eps", *TOKEN_IDS]
    told |= {name: getattr(config, name) for name in names}
    if has_moved_padding(config, model.state_dict()):
        told["pad_token_id"] = 0
    return " ".join(f"--{name} {value}" for name, value in told.items())


def export_model(
    model: VanillaTransformerForConditionalGeneration | str | Path, format: str, output: str | Path
) -> list[str]:
    """Write one of our models in a foreign format.

    Args:
        model: a model, or the folder of one. With a folder, `marian` gets the tokenizer too.
        format: one of `FORMATS`.
        output: for `marian` a folder that is new or empty; otherwise a new file, whose ending says what is written:
            .safetensors, .npz or, for a torch file, .pt. A checkpoint of `fairseq` is a torch file.

    Returns:
        what the user should know, a sentence each.

    Raises:
        UserError: an unknown format; a model that the format cannot express, naming the field; a used `output`.
    """
    layout = _layout(format)
    folder = None
    if not isinstance(model, VanillaTransformerForConditionalGeneration):
        folder, model = Path(model), load_own_folder(model)
    config = model.config
    tensors = layout.write(config, {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()})
    settings = layout.write_settings(config) if layout.write_settings else None
    notes = [layout.advice(config)] if layout.advice else []
    if layout.name != "marian":
        write_weights(tensors, output, settings)
        return [*notes, f"to import it again: {_flags(model)}"]
    output = require_new_folder(output)
    notes += _write_marian_folder(model, tensors, settings or {}, output)
    return notes + ([export_tokenizer(folder, output)] if folder else [])


def _layout(format: str) -> Layout:
    if format not in FORMATS:
        raise UserError(f"format {format!r} is not one of {', '.join(FORMATS)}")
    return FORMATS[format]


def _import(
    source: str | Path, format: str, options: LayoutOptions
) -> tuple[VanillaTransformerForConditionalGeneration, dict[str, Any], list[str]]:
    """The model, what the source's own configuration says, and what the user should know."""
    layout = _layout(format)
    path = find_weights(source)
    tensors, settings = read_weights(path)
    if layout.name == "marian":
        settings = _marian_settings(path.parent)
    notes = []
    try:
        if layout.read_settings:
            stated = layout.read_settings(settings)
            if any(name.endswith("embed_positions.weight") for name in tensors):  # which says it better
                stated = replace(stated, max_position_embeddings=None)
            options = options.over(stated)
        fields, state = layout.read(tensors, options)
        model = VanillaTransformerForConditionalGeneration(own_config(fields))
        if not any(name in state for name in EMBEDDINGS):
            state = {**state, **{name: model.state_dict()[name] for name in EMBEDDINGS}}
            notes.append(NO_EMBEDDINGS)
        check_state(model.config, state)
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    model.load_state_dict(state)
    model.generation_config.update(**_search_settings(settings if layout.name == "marian" else {}, model.config))
    try:
        model.generation_config.validate(strict=True)  # or else saving it would fail
    except ValueError as error:
        raise UserError(f"{source}: its search settings contradict each other: {on_one_line(error)}") from error
    return model.eval(), settings, notes


def _marian_settings(folder: Path) -> dict[str, Any]:
    """config.json and generation_config.json, and what the tokenizer knows better."""
    settings = read_json(folder / "config.json")
    if settings.get("model_type") != "marian":
        raise UserError(f"{folder / 'config.json'}: model_type is {settings.get('model_type')!r}, not 'marian'")
    if (folder / "generation_config.json").is_file():
        settings |= read_json(folder / "generation_config.json")
    if (folder / "vocab.json").is_file():
        settings["unk_token_id"] = read_json(folder / "vocab.json").get("<unk>")
    settings["separate_vocabs"] = (folder / "source_tokenizer").is_dir() or (folder / "target_vocab.json").is_file()
    return settings


def _search_settings(settings: dict[str, Any], config: VanillaTransformerConfig) -> dict[str, Any]:
    """Those of the source if it has any, else those that a training ends with."""
    found = {name: settings[name] for name in SEARCH_SETTINGS & settings.keys()}
    if not found:
        found = {"num_beams": 5, "early_stopping": True, "max_length": min(256, config.max_position_embeddings)}
    ids = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
    return {**found, **{name: getattr(config, name) for name in ids}}


def _write_marian_folder(
    model: VanillaTransformerForConditionalGeneration, tensors: State, settings: dict[str, Any], output: Path
) -> list[str]:
    """A folder that transformers loads with nothing of ours installed."""
    write_weights(tensors, output / "model.safetensors")
    dtype = str(model.dtype).removeprefix("torch.")
    MarianConfig(**settings, architectures=["MarianMTModel"], dtype=dtype).save_pretrained(output)
    search = model.generation_config.to_dict()
    formula = search.pop("length_penalty_type", None)
    GenerationConfig(**search).save_pretrained(output)
    if formula in (None, "average"):
        return []
    return [f"length_penalty_type={formula!r} is left out: transformers ranks by the average log-probability"]


__all__ = ["FORMATS", "export_model", "import_folder", "import_model"]
