"""The model card: the template `model_card.md`, filled from the model and from the records of its run.

Every figure comes from the configuration, from `run.json` (the record of the training) or from `evaluation.json` (the
scores). What is not known is said in words, never left blank. `ctranslate2_card` makes the README of an export from the
same template.

This module knows nothing of training and evaluation: it reads what they left.
"""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .corpus import HUB_ID, LANGUAGE_CODE, tagged
from .errors import UserError
from .modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration

CARD_TEMPLATE = Path(__file__).with_name("model_card.md")


# The key in evaluation.json: metric of the Hub, name in the card.
METRICS = {
    "bleu": ("bleu", "BLEU"),
    "chrf": ("chrf", "chrF2"),
    "ter": ("ter", "TER (lower is better)"),
    "p1": ("bleu", "BLEU (P1: lower-cased, tokenised)"),
}

NOT_EVALUATED = "Not evaluated yet: no scores have been recorded for this model."
NO_LICENSE = "No licence has been stated for the weights: ask their author before you use them."
NOT_CERTIFIED = (
    "Not measured: whether this folder translates as the model does under transformers, how large it is beside it and "
    "how fast. `vanilla-transformer export` measures that where it is given a test set."
)

CTRANSLATE2_USAGE = """\
`model.bin` and the vocabularies are for [CTranslate2](https://github.com/OpenNMT/CTranslate2), an inference engine in
C++; the tokenizer and `generation_config.json` lie beside them. transformers does not load this folder, and no code is
in it. With `hf-vanilla-transformer[ctranslate2]` installed, and `FOLDER` for this folder:

```bash
vanilla-transformer translate FOLDER --engine ctranslate2 "{{ sample }}"
```

```python
from hf_vanilla_transformer.ctranslate2_export import CTranslate2Engine

engine = CTranslate2Engine("FOLDER")
print(*engine.translate(["{{ sample }}"]))
```

It searches as `generation_config.json` says: {{ generation }}.

### Parity with transformers

{{ certificate }}

"""
SCORES_OF_THE_MODEL = """\
Of the model under transformers, before it was exported; for the export see "Parity with transformers".

{{ results }}

"""

# Besides these, run.json may name `commit`, `hardware.gpu`, `data.dataset`, `recipe.model_name_or_path` and
# `training.resumed_from`.
RUN_VALUES = (
    "source_lang",
    "target_lang",
    "command",
    "date",
    "versions",
    "seed",
    "recipe",
    "hardware.cpu",
    "hardware.cores",
    "data.description",
    "data.report.read",
    "data.report.kept",
    "data.report.dropped",
    "training.seconds",
    "training.steps",
    "training.epochs",
    "training.target_tokens",
    "training.weights",
)
SEARCH_SETTINGS = (
    "do_sample",
    "num_beams",
    "length_penalty",
    "length_penalty_type",
    "early_stopping",
    "max_length",
    "max_new_tokens",
)


def model_card(
    model: VanillaTransformerForConditionalGeneration,
    run: dict[str, Any],
    evaluation: dict[str, Any],
    *,
    repo_id: str,
    license: str | None = None,
) -> str:
    """The text of the card.

    Args:
        model: the model as it is published, with its `generation_config`.
        run: the content of run.json; see `RUN_VALUES` for what it must hold.
        evaluation: the content of evaluation.json; empty before the first evaluation.
        repo_id: "user/name", the name under which the card speaks of the model.
        license: the Hub's name of the licence of the weights; None says in the card that none was stated.

    Raises:
        UserError: a value that the card needs is missing in `run`, or a language is no code.
    """
    _check_run(run)
    name = repo_id.split("/")[1]
    values = {
        "metadata": _metadata(run, evaluation, name, license),
        "repo_id": repo_id,
        "name": name,
        "license": f"The weights are under the licence `{license}`." if license else NO_LICENSE,
        "results": _results(evaluation),
        **_model_values(model),
        **_data_values(run["data"]),
        **_training_values(run),
    }
    return fill_template(CARD_TEMPLATE.read_text(encoding="utf-8"), values)


def ctranslate2_card(
    model: VanillaTransformerForConditionalGeneration,
    run: dict[str, Any],
    evaluation: dict[str, Any],
    *,
    name: str,
    compute_type: str,
    certificate: str | None = None,
) -> str:
    """The text of the README in a CTranslate2 folder: the card of the model, with what is different there.

    Args:
        model: the model that was exported, with its `generation_config`.
        run: the content of run.json. Where a value of `RUN_VALUES` is missing, as in an imported model, the README
            says so and leaves out the training.
        evaluation: the content of evaluation.json; empty before the first evaluation.
        name: of the model.
        compute_type: how the weights are stored.
        certificate: Markdown that says what has been measured of the export; None says that nothing has been.
    """
    sections: dict[str, str | None] = {
        "Usage": "## CTranslate2\n\n" + CTRANSLATE2_USAGE,
        "Results": "## Results\n\n" + SCORES_OF_THE_MODEL,
        "Licence": "## Licence\n\n{{ license }}\n\n",  # there are no code files to speak of
    }
    if _is_complete(run):
        records = {**_data_values(run["data"]), **_training_values(run)}
    else:
        codes = {key: str(run.get(key) or "") for key in ("source_lang", "target_lang")}
        run = {key: code for key, code in codes.items() if LANGUAGE_CODE.fullmatch(code)}
        records = _unrecorded_values(run)
        sections.update(dict.fromkeys(("Languages", "Training data", "Training", "How to reproduce")))
    values = {
        "metadata": _metadata(run, {}, name, None, library="ctranslate2"),
        "name": name,
        "license": NO_LICENSE,
        "results": _results(evaluation),
        "sample": _sample(run),
        "certificate": certificate or NOT_CERTIFIED,
        **_model_values(model),
        **records,
        "dtype": compute_type,
    }
    return fill_template(_with_sections(CARD_TEMPLATE.read_text(encoding="utf-8"), sections), values)


def _with_sections(template: str, sections: dict[str, str | None]) -> str:
    """The template with other texts in the place of some sections; None leaves a section out."""
    head, *parts = re.split(r"^(?=## )", template, flags=re.MULTILINE)
    kept = []
    for part in parts:
        title = part.split("\n", 1)[0].removeprefix("## ")
        kept.append(sections.get(title, part) or "")
    return head + "".join(kept)


def fill_template(template: str, values: dict[str, Any]) -> str:
    """Replace each `{{ name }}` by its value. Values are taken as they are, braces included.

    Raises:
        UserError: a placeholder without a value, or with one that is blank.
    """

    def fill(match: re.Match) -> str:
        text = str(values.get(match[1], "")).strip()
        if not text:
            raise UserError(f"model_card.md: the placeholder '{match[1]}' has no value")
        return text

    return re.sub(r"\{\{\s*(.*?)\s*\}\}", fill, template)


def _check_run(run: dict[str, Any]) -> None:
    for key in RUN_VALUES:
        value = run
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value in (None, "", [], {}):
            raise UserError(f"run.json: no value for '{key}', which the model card needs: add it or train again")
    for key in ("source_lang", "target_lang"):
        if not LANGUAGE_CODE.fullmatch(str(run[key])):
            raise UserError(f"run.json: '{key}' is {run[key]!r}: give a language code such as 'de'")


def _is_complete(run: dict[str, Any]) -> bool:
    try:
        _check_run(run)
    except UserError:
        return False
    return True


def _metadata(run: dict, evaluation: dict, name: str, license: str | None, library: str = "transformers") -> str:
    """The YAML block at the head of the card, which the Hub reads: without its `---` lines."""
    dataset = _hub_dataset(run.get("data", {}))
    languages = [run[key] for key in ("source_lang", "target_lang") if key in run]
    results = [
        EvalResult(
            task_type="translation",
            task_name=f"Translation {run['source_lang']}-{run['target_lang']}",
            dataset_type=test_set,
            dataset_name=test_set,
            metric_type=METRICS[metric][0],
            metric_name=METRICS[metric][1],
            metric_value=score["score"],
            metric_args={"signature": score["signature"]},
        )
        for test_set, _, metric, score in _scores(evaluation)
    ]
    data = ModelCardData(
        language=list(dict.fromkeys(languages)) or None,
        license=license,
        library_name=library,
        pipeline_tag="translation",
        tags=["translation", "vanilla-transformer", *([library] if library != "transformers" else [])],
        datasets=[dataset] if dataset else None,
        metrics=list(dict.fromkeys(result.metric_type for result in results)) or None,
        model_name=name,
        eval_results=results or None,
    )
    return data.to_yaml()


def _scores(evaluation: dict) -> Iterator[tuple[str, dict, str, dict]]:
    """Each recorded score: name of the test set, the test set, metric, {"score", "signature"}."""
    for name, test_set in evaluation.get("sets", {}).items():
        for metric, score in test_set["scores"].items():
            yield name, test_set, metric, score


def _results(evaluation: dict) -> str:
    rows = [
        [
            f"`{name}`",
            f"{test_set['n']:,}",
            test_set["text"],
            METRICS[metric][1],
            f"{score['score']:.2f}",
            f"`{score['signature']}`",
        ]
        for name, test_set, metric, score in _scores(evaluation)
    ]
    if not rows:
        return NOT_EVALUATED
    table = markdown_table(["Test set", "Sentences", "Text", "Metric", "Score", "Signature"], rows)
    return (
        f"{table}\n\nText is the form in which the model read the sentences and wrote its translations, "
        f"with {_settings(evaluation['generation'])}."
    )


def _model_values(model: VanillaTransformerForConditionalGeneration) -> dict[str, Any]:
    config = model.config
    search = {key: getattr(model.generation_config, key, None) for key in SEARCH_SETTINGS}
    unsaid = (None, "average")  # what a reader who knows transformers expects
    return {
        "parameters": f"{model.num_parameters():,}",
        "encoder_layers": config.encoder_layers,
        "decoder_layers": config.decoder_layers,
        "encoder_heads": config.encoder_attention_heads,
        "decoder_heads": config.decoder_attention_heads,
        "d_model": config.d_model,
        "encoder_ffn_dim": config.encoder_ffn_dim,
        "decoder_ffn_dim": config.decoder_ffn_dim,
        "norm_position": {
            "post": "after each sublayer (post-norm)",
            "pre": "before each sublayer (pre-norm)",
        }[config.norm_position],
        "positions": config.position_embedding_type,
        "vocabulary": f"{config.vocab_size:,} tokens shared by both languages"
        if config.encoder_vocab_size is None
        else f"{config.encoder_vocab_size:,} source tokens and {config.vocab_size:,} target tokens",
        "embeddings": _embeddings(config),
        "dtype": str(model.dtype).removeprefix("torch."),
        "generation": _settings({key: value for key, value in search.items() if value not in unsaid}),
        "length_limit": {
            "sinusoidal": "Positions are computed: `generate` takes input of any length, the pipeline at most "
            f"{config.max_position_embeddings:,} tokens; text longer than that of the training data is untested.",
            "learned": f"Source and translation can have at most {config.max_position_embeddings:,} tokens each.",
        }[config.position_embedding_type],
    }


def _embeddings(config: VanillaTransformerConfig) -> str:
    if config.share_encoder_decoder_embeddings:
        return "one matrix for source, target and output"
    if config.tie_word_embeddings:
        return "one matrix for the source, one for target and output"
    return "one matrix each for source, target and output"


def _data_values(data: dict) -> dict[str, str]:
    before = (f"Before that, on: {text}" for text in reversed(data.get("before", [])))
    description = "\n\n".join([f"Trained on: {data['description']}", *before])
    if dataset := _hub_dataset(data):
        description += f"\n\nOn the Hub: [`{dataset}`](https://huggingface.co/datasets/{dataset})."
    report = data["report"]
    kept = f"Of {report['read']:,} sentence pairs that were read, {report['kept']:,} were kept"
    if "back_translations" in report:
        kept = f"{report['back_translations']['kept']:,} pairs have back-translated sources. {kept}"
    dropped = [[reason, f"{count:,}"] for reason, count in report["dropped"].items() if count]
    if not dropped:
        return {"data": description, "data_report": f"{kept} and none dropped."}
    total = sum(report["dropped"].values())
    return {
        "data": description,
        "data_report": f"{kept} and {total:,} dropped:\n\n{markdown_table(['Reason', 'Pairs'], dropped)}",
    }


def _hub_dataset(data: dict) -> str | None:
    """The dataset's name on the Hub; None where the data were files."""
    name = data.get("dataset")
    return name if name and HUB_ID.fullmatch(name) else None


def _training_values(run: dict) -> dict[str, Any]:
    training, hardware = run["training"], run["hardware"]
    parent = run["recipe"].get("model_name_or_path")
    recipe = json.dumps(run["recipe"], indent=2, ensure_ascii=False)
    return {
        "origin": f"trained further from `{parent}`" if parent else "trained from random weights",
        "known_text": 'It knows the kind of text described under "Training data": other kinds of text come out worse '
        "than the results above.",
        "languages": _languages(run),
        "sample": _sample(run),
        "direction": _direction(run),
        "time": _duration(training["seconds"]),
        "chosen_weights": training["weights"],
        "steps": f"{training['steps']:,}",
        "epochs": f"{training['epochs']:.4g}",
        "target_tokens": f"{training['target_tokens']:,}",
        "hardware": f"{hardware.get('gpu') or 'no GPU'}; {hardware['cpu']}, {hardware['cores']} cores",
        "command": shlex.join(run["command"]),
        "commit": f"`{run['commit']}`" if run.get("commit") else "not recorded",
        "seed": run["seed"],
        "date": run["date"],
        "versions": ", ".join(f"{name} {number}" for name, number in sorted(run["versions"].items()) if number),
        "recipe": f"With these settings:\n\n```json\n{recipe}\n```",
    }


def _unrecorded_values(run: dict) -> dict[str, str]:
    """What a card says in the place of `_data_values` and `_training_values` where no training is recorded."""
    return {
        "direction": _direction(run),
        "origin": "exported",
        "known_text": "What it was trained on and how is not known here, for want of a complete record (`run.json`): "
        "text of another kind comes out worse.",
    }


def _direction(run: dict) -> str:
    if "source_lang" in run and "target_lang" in run:
        return f"`{run['source_lang']}` into `{run['target_lang']}`"
    return "text from one language into another"


def _languages(run: dict) -> str:
    if directions := run["recipe"].get("directions"):
        names = ", ".join(f"`{direction}`" for direction in directions)
        word = tagged("", run["target_lang"]).strip()
        return f"{names}. A source begins with a word that names the language to translate into, such as `{word}`."
    return f"From `{run['source_lang']}` to `{run['target_lang']}`. The other direction needs a model of its own."


def _sample(run: dict) -> str:
    """A source to be replaced by the reader."""
    sample = f"Put your {run['source_lang']} sentence here." if "source_lang" in run else "Put a sentence here."
    return tagged(sample, run["target_lang"]) if run.get("recipe", {}).get("directions") else sample


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def _settings(settings: dict[str, Any]) -> str:
    return ", ".join(f"`{name}={value}`" for name, value in settings.items())


def markdown_table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; a bar inside a cell would end it, even inside code, hence the backslash."""
    lines = [head, ["---"] * len(head), *([cell.replace("|", r"\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
