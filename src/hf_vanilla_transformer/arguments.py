"""The options of training: dataclasses for `HfArgumentParser`, from flags, from one YAML recipe, or from both.

Names are those of transformers' translation example where it has them.
"""

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser, Seq2SeqTrainingArguments

from .configuration_vanilla_transformer import PRESETS, VanillaTransformerConfig
from .corpus import LANGUAGE_CODE
from .errors import UserError, on_one_line
from .length_penalty import LENGTH_PENALTY_TYPES
from .tokenization_vanilla_transformer import NORMALIZATIONS, TOKENIZER_TYPES


@dataclass
class ModelArguments:
    """What is trained."""

    preset: str = field(default="paper-base", metadata={"help": f"A named size: {', '.join(PRESETS)}."})
    config_overrides: str | None = field(
        default=None,
        metadata={
            "help": "Configuration fields that differ from the preset, as 'dropout=0.1,encoder_layers=12' "
            "(in a recipe: a mapping)."
        },
    )
    model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "Go on from the weights and the tokenizer of this model instead of starting afresh."},
    )
    attn_implementation: str | None = field(
        default=None, metadata={"help": "Attention backend: eager, sdpa, flash_attention_2, ..._3 or flex_attention."}
    )


@dataclass
class DataArguments:
    """Where the parallel text comes from and what of it is used."""

    source_lang: str | None = field(default=None, metadata={"help": "Source language code, such as en."})
    target_lang: str | None = field(default=None, metadata={"help": "Target language code, such as de."})
    directions: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Learn several directions at once, such as en-de de-en fr-de, from a data set or a table that has "
            "these languages. Each source begins with the language to translate into, as in '2de A man sleeps.' "
            "--source_lang and --target_lang name the one of them that the validation set has."
        },
    )
    dataset_name: str | None = field(
        default=None,
        metadata={"help": "A Hub data set id, a folder of save_to_disk, or a Multi30k folder as upstream lays it out."},
    )
    dataset_config_name: str | None = field(
        default=None, metadata={"help": "The data set's configuration; for Multi30k raw or tok."}
    )
    train_file: list[str] = field(
        default_factory=list,
        metadata={"help": "Two aligned text files, source first, or one TSV, CSV, JSONL or Parquet file."},
    )
    validation_file: list[str] = field(default_factory=list, metadata={"help": "The same for the validation set."})
    test_file: list[str] = field(
        default_factory=list,
        metadata={"help": "The same for a test set: what it shares with training is dropped."},
    )
    synthetic_file: list[str] = field(
        default_factory=list,
        metadata={
            "help": "More training text in the form of --train_file, the sources of which a model has made of real "
            "targets (back-translation). Training puts the word 2bt before each of them."
        },
    )
    data_description: str = field(
        default="",
        metadata={
            "help": "For the model card: sentences that say what the training text is and who wrote or translated it."
        },
    )
    train_split: str = field(default="train", metadata={"help": "The data set's training split."})
    validation_split: str = field(default="validation", metadata={"help": "The data set's validation split."})
    test_splits: list[str] = field(
        default_factory=list, metadata={"help": "The data set's test splits: what they share with training is dropped."}
    )
    streaming: bool = field(default=False, metadata={"help": "Read a Hub data set without downloading it first."})
    max_train_samples: int | None = field(
        default=None, metadata={"help": "Stop reading after this many pairs of a file or a direction."}
    )
    max_eval_samples: int | None = field(
        default=None,
        metadata={"help": "Evaluate on the first so many validation pairs only; none of the set is trained on."},
    )
    max_source_length: int = field(
        default=256, metadata={"help": "Training drops pairs whose source has more tokens than this, EOS included."}
    )
    max_target_length: int = field(default=256, metadata={"help": "The same for the target."})
    align_final_marks: bool = field(
        default=False,
        metadata={
            "help": "Where only one side of a training pair ends with a mark such as a full stop, take it off: the "
            "model then learns to end as the source does."
        },
    )
    max_length_ratio: float = field(
        default=6.0,
        metadata={
            "help": "Training drops pairs of which one side is over this many times as long as the other, each counted "
            "in words plus 2, or in characters plus 10 where words have no spaces between them."
        },
    )


@dataclass
class TokenizerArguments:
    """The tokenizer that is learned from the training text."""

    tokenizer_type: str = field(default="bpe", metadata={"help": f"One of {', '.join(TOKENIZER_TYPES)}."})
    vocab_size: int = field(default=10000, metadata={"help": "Tokens of the vocabulary, or of each of two."})
    separate_vocabularies: bool = field(
        default=False, metadata={"help": "One vocabulary for each language instead of a joint one."}
    )
    lowercase: bool = field(default=False, metadata={"help": "Read and write lower case only."})
    normalization: str = field(default="nfc", metadata={"help": f"Unicode form: {', '.join(NORMALIZATIONS)}."})
    subword_dropout: float = field(
        default=0.0, metadata={"help": "BPE-dropout: the probability of leaving out a merge, while training only."}
    )


@dataclass
class TrainingArguments(Seq2SeqTrainingArguments):
    """transformers' own training arguments with the paper's optimiser as defaults, and what translation needs besides.

    `REFUSED` names those that are not taken.
    """

    max_tokens_per_batch: int = field(
        default=4096,
        metadata={
            "help": "Tokens of one batch on one device, padding included: pairs times the longest side, counted "
            "without subword dropout."
        },
    )
    learning_rate: float | None = field(
        default=None,
        metadata={"help": "Peak learning rate; by default the paper's, d_model^-0.5 * warmup_steps^-0.5."},
    )
    lr_scheduler_type: str = field(default="inverse_sqrt", metadata={"help": "Section 5.3, equation 3."})
    warmup_steps: float = field(default=4000, metadata={"help": "Steps of linear warm-up; below 1, a share of all."})
    adam_beta2: float = field(default=0.98, metadata={"help": "Section 5.3."})
    adam_epsilon: float = field(default=1e-9, metadata={"help": "Section 5.3."})
    muon: bool = field(
        default=False,
        metadata={
            "help": "Train the matrices of the layers with Muon (Jordan et al. 2024), everything else with AdamW, both "
            "at the same learning rate."
        },
    )
    max_grad_norm: float = field(default=0.0, metadata={"help": "Clip gradients at this norm; 0 = never."})
    label_smoothing_factor: float = field(
        default=0.1, metadata={"help": "Section 5.4. Applied inside the model, where it costs nothing."}
    )
    rdrop_alpha: float = field(
        default=0.0,
        metadata={
            "help": "R-Drop (Liang et al. 2021): go through each batch twice, with different dropout, and draw the two "
            "predictions together with this weight, 5 in the paper; 0 = never."
        },
    )
    simcut_alpha: float = field(
        default=0.0,
        metadata={
            "help": "SimCut (Gao et al. 2022): go through each batch twice, the second time with tokens cut out, and "
            "draw the two predictions together with this weight, 3 in the paper; 0 = never."
        },
    )
    simcut_p: float = field(default=0.05, metadata={"help": "The share of tokens that SimCut cuts out."})
    consistency_start: int = field(
        default=0,
        metadata={"help": "Train plainly for so many steps before R-Drop or SimCut begins, at half of the cost."},
    )
    average_checkpoints: int = field(
        default=5, metadata={"help": "The result is the mean of the last so many checkpoints (section 6.1); 0 = last."}
    )
    ema_decay: float = field(
        default=0.0,
        metadata={"help": "Keep an exponential moving average of the weights, evaluate it and make it the result."},
    )
    early_stopping_patience: int = field(
        default=0, metadata={"help": "Stop after so many evaluations without a better score; 0 = never."}
    )
    num_sample_translations: int = field(
        default=3, metadata={"help": "Sentences of the validation set that are shown at each evaluation."}
    )
    generation_max_length: int = field(default=256, metadata={"help": "Longest translation, in tokens."})
    generation_num_beams: int = field(default=5, metadata={"help": "Beams of the finished model."})
    eval_num_beams: int = field(default=1, metadata={"help": "Beams of the evaluations during training."})
    length_penalty: float = field(default=1.0, metadata={"help": "Exponent of the length in the beam score."})
    length_penalty_type: str = field(
        default="average",
        metadata={
            "help": "How the beam score divides by the length: average, length^length_penalty, or wu, the paper's "
            "((5 + length) / 6)^length_penalty with 0.6 (section 6.1)."
        },
    )
    output_dir: str = field(default="runs/model", metadata={"help": "Checkpoints, the finished model and run.json."})
    eval_strategy: str = field(default="epoch", metadata={"help": "no, steps or epoch."})
    save_strategy: str = field(default="epoch", metadata={"help": "no, steps or epoch."})
    logging_steps: float = field(default=100, metadata={"help": "Steps between two lines of the log."})
    predict_with_generate: bool = field(default=True, metadata={"help": "Translate the validation set for its BLEU."})
    per_device_eval_batch_size: int = field(default=64, metadata={"help": "Sentences of an evaluation batch."})
    metric_for_best_model: str | None = field(default="bleu", metadata={"help": "bleu, chrf or loss."})
    do_train: bool = field(default=True, metadata={"help": "It always does."})
    use_cpu: bool = field(default=False, metadata={"help": "Train on the CPU even where there is a GPU."})
    dataloader_pin_memory: bool = field(default=False, metadata={"help": "Pin batches in memory for the GPU."})
    ddp_find_unused_parameters: bool | None = field(default=False, metadata={"help": "Every parameter is used."})


OF_A_DATA_SET = ("dataset_config_name", "train_split", "validation_split", "test_splits", "streaming")
NO_EFFECT = "has no effect: batches are made by --max_tokens_per_batch"
NOT_FOR_BATCHES = "has no effect on the training batches: see --dataloader_num_workers"
WHOLE_TRANSLATIONS = "is not for this trainer: it scores the translations of the whole validation set"
NO_UPLOAD = "is not for training: `vanilla-transformer publish` uploads the finished model without the corpus"
REFUSED = {  # options of transformers, and why
    **dict.fromkeys(("per_device_train_batch_size", "auto_find_batch_size", "train_sampling_strategy"), NO_EFFECT),
    "dataloader_drop_last": NO_EFFECT,
    **dict.fromkeys(("dataloader_persistent_workers", "dataloader_prefetch_factor"), NOT_FOR_BATCHES),
    **dict.fromkeys(("eval_do_concat_batches", "batch_eval_metrics"), WHOLE_TRANSLATIONS),
    "prediction_loss_only": "is called --predict_with_generate false here",
    "do_train": "has no effect: `vanilla-transformer evaluate` scores a model without training",
    "do_predict": "has no effect: the test sets that are given are translated after training",
    **dict.fromkeys(("push_to_hub", "hub_model_id", "hub_token"), NO_UPLOAD),
}
Arguments = tuple[ModelArguments, DataArguments, TokenizerArguments, TrainingArguments]
CLASSES = (ModelArguments, DataArguments, TokenizerArguments, TrainingArguments)


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Parse flags and at most one YAML recipe, which stands before them; flags win over the recipe.

    Raises:
        UserError: a recipe that is missing, unreadable or has an unknown key; values that contradict each other.
    """
    argv = list(argv)
    if argv and argv[0].endswith((".yaml", ".yml")):
        argv = [*_recipe_flags(Path(argv[0])), *argv[1:]]
    for place, word in enumerate(argv):
        if word == "--resume_from_checkpoint" and (argv[place + 1 :] or ["--"])[0].startswith("--"):
            argv[place] = "--resume_from_checkpoint=true"  # the newest; transformers wants a value
    parser = HfArgumentParser(CLASSES, prog="vanilla-transformer train", allow_abbrev=False)
    try:
        *arguments, unknown = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True)
    except (ValueError, ImportError) as error:  # transformers checks flags against each other and what is installed
        raise UserError(on_one_line(error)) from error
    if unknown:
        known = [option.name for group in CLASSES for option in fields(group)]
        hint = _hint(unknown[0].lstrip("-"), known, "see vanilla-transformer train --help")
        if unknown[0].endswith((".yaml", ".yml")):
            hint = "a recipe comes before all flags"
        raise UserError(f"unknown word {unknown[0]!r}: {hint}")
    _check(*arguments)
    return tuple(arguments)


def idle_options(model: ModelArguments, data: DataArguments, tokenizer: TokenizerArguments) -> dict[str, list[str]]:
    """What is given, often by a recipe, and has no effect beside other options: {why: names of the options}."""
    learning = [option.name for option in fields(tokenizer) if option.name != "subword_dropout"]
    idle = {}
    if name := model.model_name_or_path:
        idle[f"size and tokenizer are those of {name}"] = _given(model, ["preset"]) + _given(tokenizer, learning)
    if not data.dataset_name:
        idle["there is no --dataset_name"] = _given(data, OF_A_DATA_SET)
    return {why: names for why, names in idle.items() if names}


def _given(group: Any, names: Iterable[str]) -> list[str]:
    defaults = {option.name: option for option in fields(group)}
    return [name for name in names if getattr(group, name) not in (defaults[name].default, [])]


def _check(model: ModelArguments, data: DataArguments, tokenizer: TokenizerArguments, training: TrainingArguments):
    if not data.source_lang or not data.target_lang:
        raise UserError("give both languages: --source_lang and --target_lang")
    for name in ("source_lang", "target_lang"):
        if not LANGUAGE_CODE.fullmatch(getattr(data, name)):
            raise UserError(f"{name}={getattr(data, name)!r} is not a language code such as 'de'")
    _check_data(data, training)
    for name, value, allowed in (
        ("preset", model.preset, PRESETS),
        ("tokenizer_type", tokenizer.tokenizer_type, TOKENIZER_TYPES),
        ("normalization", tokenizer.normalization, NORMALIZATIONS),
        ("length_penalty_type", training.length_penalty_type, LENGTH_PENALTY_TYPES),
    ):
        if value not in allowed:
            raise UserError(f"{name}={value!r} is not one of {', '.join(allowed)}")
    parse_overrides(model.config_overrides)
    for group, name, lowest in (
        (data, "max_train_samples", 1),
        (data, "max_eval_samples", 1),
        (tokenizer, "vocab_size", 1),
        (training, "max_tokens_per_batch", 1),
        (training, "gradient_accumulation_steps", 1),
        (training, "generation_max_length", 2),
        (training, "eval_num_beams", 1),
        (training, "generation_num_beams", 1),
        (training, "learning_rate", 0),
        (training, "weight_decay", 0),
        (training, "seed", 0),
        (training, "dataloader_num_workers", 0),
        (training, "average_checkpoints", 0),
        (training, "early_stopping_patience", 0),
    ):
        value = getattr(group, name)
        if value is not None and value < lowest:
            raise UserError(f"{name}={value} is below {lowest}")
    if not 0 <= tokenizer.subword_dropout < 1:
        raise UserError(f"subword_dropout={tokenizer.subword_dropout} is not in [0, 1)")
    if tokenizer.subword_dropout and tokenizer.tokenizer_type not in ("bpe", "byte-level"):
        raise UserError(f"subword_dropout needs a bpe or byte-level tokenizer, not {tokenizer.tokenizer_type}")
    _check_training(training)


def _check_training(training: TrainingArguments):
    refused = REFUSED
    if training.muon:
        refused = refused | dict.fromkeys(("optim", "optim_args"), "and muon exclude each other: give one of them")
    for name in _given(training, refused):
        raise UserError(f"{name} {refused[name]}")
    if training.generation_num_beams == training.eval_num_beams == 1:
        for name in _given(training, ("length_penalty", "length_penalty_type")):
            raise UserError(f"{name} has no effect with one beam: give --generation_num_beams")
    if training.save_only_model and training.average_checkpoints > 1:
        raise UserError("average_checkpoints needs complete checkpoints: give --average_checkpoints 0 as well")
    if training.max_steps <= 0 and training.num_train_epochs <= 0:
        raise UserError(f"num_train_epochs={training.num_train_epochs} is no training: give more, or --max_steps")
    if not 0 <= training.ema_decay < 1:
        raise UserError(f"ema_decay={training.ema_decay} is not in [0, 1)")
    _check_consistency(training)


def _check_consistency(training: TrainingArguments):
    for name in ("rdrop_alpha", "simcut_alpha"):
        if getattr(training, name) < 0:
            raise UserError(f"{name}={getattr(training, name)} is below 0")
    if training.consistency_start < 0:
        raise UserError(f"consistency_start={training.consistency_start} is below 0")
    if training.consistency_start and not (training.rdrop_alpha or training.simcut_alpha):
        raise UserError("consistency_start has no effect without --rdrop_alpha or --simcut_alpha")
    if training.rdrop_alpha and training.simcut_alpha:
        raise UserError("rdrop_alpha and simcut_alpha exclude each other: give one of them")
    if not 0 < training.simcut_p <= 1:
        raise UserError(f"simcut_p={training.simcut_p} is not in (0, 1]")
    if training.simcut_p != TrainingArguments.simcut_p and not training.simcut_alpha:
        raise UserError("simcut_p has no effect without --simcut_alpha")


def _check_data(data: DataArguments, training: TrainingArguments):
    if bool(data.train_file) == bool(data.dataset_name):
        raise UserError("the training text: give either --train_file or --dataset_name")
    for direction in data.directions:
        if direction.count("-") != 1 or not all(direction.split("-")):
            raise UserError(f"directions: {direction!r} is not two languages with a hyphen between them, such as en-de")
    main = f"{data.source_lang}-{data.target_lang}"
    if data.directions and main not in data.directions:
        raise UserError(f"directions: {main}, which source_lang and target_lang name, is not among them")
    if data.directions not in ([], [main]) and len(data.train_file) == 2:
        raise UserError("directions: two text files have one: give a data set, or a table with a column per language")
    if data.directions and data.synthetic_file:
        raise UserError("directions and synthetic_file exclude each other: give one of them")
    has_validation = data.validation_file or (data.dataset_name and data.validation_split)
    if not has_validation and (training.early_stopping_patience or training.load_best_model_at_end):
        what = "early stopping" if training.early_stopping_patience else "load_best_model_at_end"
        raise UserError(f"{what} needs a validation set: give --validation_file")


def read_recipe(path: Path) -> dict[str, Any]:
    """The settings of a recipe, checked for misspelt keys.

    Raises:
        UserError: the file is missing, is not a YAML mapping, or has an unknown key.
    """
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"recipe {path}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"recipe {path}: not YAML: {on_one_line(error)}") from error
    if not isinstance(recipe, dict):
        raise UserError(f"recipe {path}: expected a mapping of option names to values")
    known = {option.name: option.type for group in CLASSES for option in fields(group)}
    for key, value in recipe.items():
        if key not in known:
            hint = _hint(key, known, "see vanilla-transformer train --help")
            raise UserError(f"recipe {path}: unknown key {key!r}: {hint}")
        if isinstance(value, bool) and known[key] in (str, str | None):
            raise UserError(f"recipe {path}: {key}: put the value in quotes, or YAML takes it for true or false")
    return recipe


def _hint(name: Any, known: Iterable[str], otherwise: str) -> str:
    guess = difflib.get_close_matches(str(name), list(known), n=1)
    return f"did you mean {guess[0]!r}?" if guess else otherwise


def _recipe_flags(path: Path) -> list[str]:
    flags = []
    for key, value in read_recipe(path).items():
        if value is None:
            continue
        if isinstance(value, dict):
            value = json.dumps(value)
        values = value if isinstance(value, list) else [value]
        flags += [f"--{key}", *(str(item) for item in values)]
    return flags


def parse_overrides(text: str | None) -> dict[str, Any]:
    """'dropout=0.1,encoder_layers=12' or a JSON object -> configuration fields.

    Raises:
        UserError: a part without "=", a value that is not YAML, an object that is not JSON, an unknown field.
    """
    if not text:
        return {}
    try:
        overrides = json.loads(text) if text.lstrip().startswith("{") else dict(map(_override, text.split(",")))
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise UserError(f"config_overrides: {text!r} cannot be read: {on_one_line(error)}") from error
    known = [*VanillaTransformerConfig.__dataclass_fields__, *VanillaTransformerConfig.attribute_map]
    for name in overrides:
        if name not in known:
            hint = _hint(name, known, "see the fields of VanillaTransformerConfig")
            raise UserError(f"config_overrides: unknown field {name!r}: {hint}")
    return {name: _number(value) for name, value in overrides.items()}


def _number(value: Any) -> Any:
    """1e-6 is text to YAML, which wants a point in it."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _override(part: str) -> tuple[str, Any]:
    name, equals, value = part.partition("=")
    if not equals:
        raise UserError(f"config_overrides: {part!r} is not of the form name=value")
    return name.strip(), yaml.safe_load(value)
