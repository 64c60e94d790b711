"""From the folder of a training run to a model on the Hub that says what it is and loads anywhere.

The published folder holds the weights, the configuration, the tokenizer, the code of the model and of its pipeline, and
a card (see `card`). The records that the card is made from, `run.json` and `evaluation.json`, stay at home: they quote
sentences of the training data.

This module knows nothing of training and evaluation: it reads what they left in the folder.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedTokenizerBase
from transformers.dynamic_module_utils import custom_object_save

from .card import model_card
from .configuration_vanilla_transformer import VanillaTransformerConfig
from .errors import UserError, first_line, on_one_line
from .modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration, VanillaTransformerModel
from .pipeline_vanilla_transformer import VanillaTransformerTranslationPipeline
from .provenance import EVALUATION_RECORD, RUN_RECORD, read_record
from .tokenization_vanilla_transformer import SeparateVocabularyTokenizer, load_tokenizer, require_fit
from .weight_files import load_own_model, require_new_folder, require_own


def publish(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    license: str | None = None,
    commit_message: str = "Publish the model",
    token: str | None = None,
    endpoint: str | None = None,
) -> str:
    """Export a training output folder and upload it; returns the address of the model on the Hub.

    Publishing again updates what has changed.

    Args:
        folder: the output folder of a training run; see `export_folder`.
        repo_id: "user/name" on the Hub; the repository is made if it is not there.
        private: whether the repository is hidden from others; one that is public is not published to then.
        license: the Hub's name of the licence of the weights, such as "cc-by-4.0".
        commit_message: of the commit on the Hub.
        token: access token; None takes the one of `hf auth login` or of HF_TOKEN.
        endpoint: address of the Hub; None takes HF_ENDPOINT or the public one.

    Raises:
        UserError: bad `repo_id`, no token, a folder that cannot be published, a Hub that refuses or cannot be
            reached. Nothing has been uploaded then.
    """
    check_repo_id(repo_id)
    if (token or get_token()) is None:
        raise UserError("not logged in to the Hub: run `hf auth login` or set HF_TOKEN")
    api = HfApi(endpoint=endpoint, token=token)
    with tempfile.TemporaryDirectory() as scratch:
        output = export_folder(folder, Path(scratch) / "model", repo_id=repo_id, license=license)
        with _hub_errors(repo_id, api.endpoint):
            url = api.create_repo(repo_id, private=private, exist_ok=True)
            if private and not api.repo_info(repo_id).private:
                raise UserError(
                    f"{repo_id} is there already and public: hide it on the Hub first, or leave --private out"
                )
            api.upload_folder(repo_id=repo_id, folder_path=output, commit_message=commit_message)
    return str(url)


def export_folder(folder: str | Path, output: str | Path, *, repo_id: str, license: str | None = None) -> Path:
    """Write the folder that goes to the Hub; returns its path.

    The result loads with `AutoModelForSeq2SeqLM.from_pretrained(output, trust_remote_code=True)` and translates with
    `pipeline("translation", model=output, trust_remote_code=True)` where this package is not installed. It has been
    read back and compared with `folder` before this function returns.

    Args:
        folder: holds config.json, model.safetensors, generation_config.json, the tokenizer's files, run.json
            and, where the model has been evaluated, evaluation.json. Anything else in it (optimizer,
            checkpoints) stays behind.
        output: a folder that is new or empty.
        repo_id: "user/name", the name under which the card speaks of the model.
        license: the Hub's name of the licence of the weights; None says in the card that none was stated.

    Raises:
        UserError: bad `repo_id`, a file or a value missing in `folder`, weights or a tokenizer that do
            not fit the configuration, or a used `output`.
    """
    folder = Path(folder)
    check_repo_id(repo_id)
    _check_folder(folder)
    output = require_new_folder(output)
    run = _read_json(folder / RUN_RECORD)
    evaluation = read_record(folder / EVALUATION_RECORD)
    model = load_own_model(folder)
    tokenizer = _load_tokenizer(folder, model.config)
    card = model_card(model, run, evaluation, repo_id=repo_id, license=license)

    _save_with_code(model, tokenizer, output)
    (output / "README.md").write_text(card, encoding="utf-8")
    _verify(output, model)
    return output


def check_repo_id(repo_id: str) -> None:
    """Raises UserError unless `repo_id` has the form "user/name" with characters that the Hub takes."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError:
        valid = False
    else:
        valid = repo_id.count("/") == 1
    if not valid:
        raise UserError(
            f"bad repository name {repo_id!r}: write it as 'user/name', of letters, digits, '-', '_' and '.'"
        )


def _check_folder(folder: Path) -> None:
    _read_json(folder / "config.json")
    joint = require_own(folder).get("encoder_vocab_size") is None
    tokenizers = ["tokenizer.json"] if joint else ["source_tokenizer.json", "target_tokenizer.json"]
    for name in ["generation_config.json", "tokenizer_config.json", *tokenizers]:
        _read_json(folder / name)
    if not list(folder.glob("model*.safetensors")):
        raise UserError(f"{folder / 'model.safetensors'}: is missing: name the output folder of a training run")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{path}: is missing: name the output folder of a training run")
    return read_record(path)


def _load_tokenizer(folder: Path, config: VanillaTransformerConfig) -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer(folder)
    try:
        require_fit(tokenizer, config)
    except UserError as error:
        raise UserError(f"{folder}: {error}: put the tokenizer there that the model was trained with") from error
    return tokenizer


def _save_with_code(
    model: VanillaTransformerForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, output: Path
) -> None:
    # Saving registers only the class that is saved: the bare model has to be named by hand.
    model.config.auto_map = {"AutoModel": _reference(VanillaTransformerModel)}
    pipeline = _reference(VanillaTransformerTranslationPipeline)
    model.config.custom_pipelines = {
        "translation": {"impl": pipeline, "pt": ["AutoModelForSeq2SeqLM"], "type": "text"},
    }
    output.mkdir(parents=True, exist_ok=True)
    custom_object_save(VanillaTransformerTranslationPipeline, output)  # first: the model looks whether it is there
    with _code_travels():
        model.save_pretrained(output)
        tokenizer.save_pretrained(output)


def _reference(cls: type) -> str:
    """How config.json names a class of a file that lies beside it."""
    return f"{cls.__module__.split('.')[-1]}.{cls.__name__}"


@contextlib.contextmanager
def _code_travels() -> Iterator[None]:
    """While this lasts, saving copies the code too; outside of it a checkpoint is data alone."""
    classes = {
        VanillaTransformerConfig: "AutoConfig",
        VanillaTransformerForConditionalGeneration: "AutoModelForSeq2SeqLM",
        SeparateVocabularyTokenizer: "AutoTokenizer",
    }
    before = {cls: cls._auto_class for cls in classes}
    try:
        for cls, auto_class in classes.items():
            cls.register_for_auto_class(auto_class)
        yield
    finally:
        for cls, auto_class in before.items():
            cls._auto_class = auto_class


def _verify(output: Path, model: VanillaTransformerForConditionalGeneration) -> None:
    """Read the folder back and compare it with the model that went into it.

    Raises:
        RuntimeError: they differ, which no input should be able to cause.
    """
    expected, found = model.state_dict(), load_own_model(output).state_dict()
    different = [name for name in expected if name not in found or not torch.equal(expected[name], found[name])]
    config = VanillaTransformerConfig.from_pretrained(output)
    if different or expected.keys() != found.keys() or config.to_diff_dict() != model.config.to_diff_dict():
        raise RuntimeError(f"{output}: does not hold the model that was saved there: {different or 'config.json'}")


@contextlib.contextmanager
def _hub_errors(repo_id: str, endpoint: str) -> Iterator[None]:
    """Turn what a user can mend into one line; what the Hub itself gets wrong keeps its traceback."""
    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status not in (401, 403):
            raise
        reason = "it does not accept the token" if status == 401 else "the token may not write there"
        raise UserError(
            f"the Hub refuses {repo_id} ({status}): {reason}: run `hf auth login` or set HF_TOKEN"
        ) from error
    except ValueError as error:
        # What the Hub says to a card before it takes any file, over several lines.
        if "metadata" not in str(error):
            raise
        raise UserError(f"the Hub refuses the card of {repo_id}: {on_one_line(error)}") from error
    except Exception as error:
        # The client library changed its HTTP library between the versions we support, hence no class to name.
        if not (isinstance(error, OSError) or type(error).__module__.startswith("httpx")):
            raise
        raise UserError(f"cannot reach the Hub at {endpoint} ({first_line(error)}): check the network") from error
