"""Translate test sets, score them, and leave scores, signatures and hypotheses where others can check them."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .corpus import is_multi30k, read_pairs
from .ensemble import Ensemble
from .errors import UserError, require_folder_path
from .evaluation import PairedBootstrap, p1_bleu, p1_tokens, paired_bootstrap, score
from .int8 import computing_type
from .provenance import EVALUATION_RECORD, RUN_RECORD, provenance, read_record, write_record
from .translation import beams_for, translate

VALIDATION = "validation"  # the split's name in Multi30k and most data sets of the Hub
FORMS = {"raw": "raw detokenised", "tok": "lower-cased tokenised"}  # how records name them


@dataclass(frozen=True)
class TestSet:
    """Sentences to translate and their references.

    Attributes:
        name: of the file or split.
        sources: what the model reads.
        references: what its output is compared with, in the same form.
        form: "raw" text, or "tok": lower-cased and tokenised as in Multi30k's `task1/tok`.
        p1_references: the references of the P1 protocol of Multi30k; None for other test sets.
    """

    __test__ = False  # not a test class, whatever its name tells pytest

    name: str
    sources: list[str]
    references: list[str]
    form: str = "raw"
    p1_references: list[str] | None = None


def read_test_sets(
    *,
    files: Sequence[str] = (),
    dataset: str | None = None,
    config_name: str | None = None,
    splits: Sequence[str] = ("test",),
    source_lang: str,
    target_lang: str,
    streaming: bool = False,
) -> list[TestSet]:
    """One test set from files, or one from each split of a data set; see `corpus.read_pairs` for the formats.

    Raises:
        UserError: as `read_pairs`.
    """
    languages = {"source_lang": source_lang, "target_lang": target_lang}
    if files:
        pairs = list(read_pairs(files=files, **languages))
        name = Path(files[0]).name.removesuffix(".gz").rsplit(".", 1)[0]
        return [TestSet(name, [pair.source for pair in pairs], [pair.target for pair in pairs])]
    in_two_forms = is_multi30k(dataset)
    sets = []
    for split in splits:
        pairs = list(
            read_pairs(dataset=dataset, config_name=config_name, split=split, streaming=streaming, **languages)
        )
        p1_references = None
        if in_two_forms:
            tokenised = read_pairs(dataset=dataset, config_name="tok", split=split, **languages)
            p1_references = [pair.target for pair in tokenised]
        sets.append(
            TestSet(
                name=split,
                sources=[pair.source for pair in pairs],
                references=[pair.target for pair in pairs],
                form="tok" if in_two_forms and config_name == "tok" else "raw",
                p1_references=p1_references,
            )
        )
    return sets


def score_test_set(test_set: TestSet, hypotheses: Sequence[str], target_lang: str) -> dict[str, Any]:
    """BLEU, chrF2 and TER of raw text, and P1 where the test set has it: {metric: {"score", "signature"}}.

    Tokenised text has no sacreBLEU: its scores would be those of another tokenizer than the signature says.
    """
    scores = {}
    if test_set.form == "raw":
        scores = score(hypotheses, test_set.references, target_lang=target_lang)
    if test_set.p1_references is not None:
        raw = test_set.form == "raw"
        scores["p1"] = p1_bleu(hypotheses, test_set.p1_references, raw=raw, language=target_lang)
    return {metric: {"score": found["score"], "signature": found["signature"]} for metric, found in scores.items()}


def evaluate_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    test_sets: Sequence[TestSet],
    *,
    folder: Path | None,
    target_lang: str,
    num_beams: int | None = None,
    length_penalty: float | None = None,
    length_penalty_type: str | None = None,
    max_tokens_per_batch: int = 16384,
    results: Path | None = None,
) -> dict[str, Any]:
    """Translate and score test sets.

    Args:
        model, tokenizer: what is evaluated.
        test_sets: from `read_test_sets`.
        folder: the model's; `evaluation.json` goes there, which the model card is filled from. Other test sets that
            are in it stay if they were searched in the same way, with where they come from. A folder that cannot be
            written keeps what it has. None for an ensemble, which needs `results`.
        target_lang: names the files with the hypotheses, and the tokenizer of P1.
        num_beams, length_penalty, length_penalty_type, max_tokens_per_batch: as in `translation.translate`.
        results: where `<test set>.hyp.<language>` and a `run.json` that joins training and scores go, to be
            committed or shared; None leaves the hypotheses in `folder`. What it says of the same model stays as in
            `folder`, and so do its comparisons while the translations are the same.

    Returns:
        the scores of these test sets, as in `evaluation.json`.

    Raises:
        UserError: `results` is the folder of a model; nothing can be written; what `translate` raises.
    """
    generation = model.generation_config
    penalised = length_penalty is not None or length_penalty_type is not None
    beams = beams_for(1, num_beams, generation, penalised=penalised)
    target = results or folder
    require_folder_path(target)
    if results is not None and (results / "config.json").exists():
        raise UserError(f"{results} is the folder of a model: name another one for the results")
    target.mkdir(parents=True, exist_ok=True)
    for path in (target, *target.glob(f"*.hyp.{target_lang}")):
        if not os.access(path, os.W_OK):  # or the translations would be lost
            raise UserError(f"{path} cannot be written: name another folder for the results")
    search: dict[str, Any] = {"num_beams": beams, "dtype": computing_type(model)}
    if isinstance(model, Ensemble):
        search["models"] = len(model.members)
    if beams > 1:
        penalty = generation.length_penalty if length_penalty is None else length_penalty
        search["length_penalty"] = 1.0 if penalty is None else penalty
        stored = getattr(generation, "length_penalty_type", None)
        search["length_penalty_type"] = length_penalty_type or stored or "average"
    origin = provenance(device=model.device)
    record: dict[str, Any] = {"sets": {}, "generation": search, "weights_sha256": _weights_fingerprint(model), **origin}
    same = True
    for test_set in test_sets:
        hypotheses = translate(
            model,
            tokenizer,
            test_set.sources,
            num_beams=beams,
            length_penalty=length_penalty,
            length_penalty_type=length_penalty_type,
            max_tokens_per_batch=max_tokens_per_batch,
            progress=True,
        )
        path = target / f"{test_set.name}.hyp.{target_lang}"
        text = "".join(f"{line}\n" for line in hypotheses)
        same = same and (not path.exists() or path.read_text(encoding="utf-8") == text)
        path.write_text(text, encoding="utf-8")
        record["sets"][test_set.name] = {
            "n": len(hypotheses),
            "text": FORMS[test_set.form],
            "references_sha256": _fingerprint(test_set),
            "scores": score_test_set(test_set, hypotheses, target_lang),
        }
    if results is not None:
        evaluation = _with_earlier(read_record(results / RUN_RECORD).get("evaluation", {}), record, origin, same)
        write_record({**_training_record(folder), "evaluation": evaluation}, results / RUN_RECORD)
    if folder and folder.is_dir() and os.access(folder, os.W_OK):
        earlier = read_record(folder / EVALUATION_RECORD)
        write_record(_with_earlier(earlier, record, origin, same), folder / EVALUATION_RECORD)
    return record


def _with_earlier(
    earlier: dict[str, Any], record: dict[str, Any], origin: dict[str, Any], same: bool
) -> dict[str, Any]:
    """The record with what was evaluated before, by the same search of the same weights.

    Args:
        earlier, record: both as in `evaluation.json`; the first may be empty.
        origin: the part of `record` that says where it comes from. Test sets of `earlier` keep theirs.
        same: whether no translation has changed, and comparisons still hold.
    """
    if any(earlier.get(key) != record[key] for key in ("generation", "weights_sha256")):
        return record
    known = {key: earlier[key] for key in origin}
    sets = {name: {"provenance": known, **found} for name, found in earlier["sets"].items()}
    comparisons = {"against": earlier["against"]} if same and "against" in earlier else {}
    return {**record, **comparisons, "sets": {**sets, **record["sets"]}}


def _weights_fingerprint(model: PreTrainedModel) -> str:
    """The same for the same parameters; those that are packed or sharded are left out."""
    digest = sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if type(tensor) is Tensor:
            digest.update(name.encode())
            digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _training_record(folder: Path | None) -> dict[str, Any]:
    """How the model was trained, without the sentences that the cleaning report quotes; empty where nothing says it."""
    training = read_record(folder / RUN_RECORD) if folder else {}
    report = training.get("data", {}).get("report", {})
    for part in (report, report.get("back_translations", {})):
        part.pop("examples", None)
    return training


def read_hypotheses(folder: Path, test_set: TestSet, target_lang: str) -> list[str]:
    """What `evaluate_model` wrote for a test set.

    Raises:
        UserError: no such file, not one line for each sentence, or they are of another test set of that name.
    """
    path = folder / f"{test_set.name}.hyp.{target_lang}"
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}): evaluate that model first") from error
    if len(lines) != len(test_set.sources):
        raise UserError(f"{path} has {len(lines)} lines, the test set {len(test_set.sources)}")
    if _entry(folder, test_set).get("references_sha256", _fingerprint(test_set)) != _fingerprint(test_set):
        raise UserError(f"{path} was scored with other references than those of this {test_set.name}")
    return lines


def _fingerprint(test_set: TestSet) -> str:
    """Of its references; the same for both forms of a Multi30k test set."""
    return sha256("\n".join(test_set.p1_references or test_set.references).encode()).hexdigest()


def _entry(folder: Path, test_set: TestSet) -> dict[str, Any]:
    """What the records in a folder say of a test set; empty where they say nothing."""
    for name in (EVALUATION_RECORD, RUN_RECORD):
        record = read_record(folder / name)
        if found := record.get("evaluation", record).get("sets", {}).get(test_set.name):
            return found
    return {}


def form_of_hypotheses(folder: Path, test_set: TestSet) -> str:
    """As the record beside them says: a system may have read other text than `test_set` is of. Else as the test set."""
    said = _entry(folder, test_set).get("text")
    return next((form for form, text in FORMS.items() if text == said), test_set.form)


def compare(
    folder_a: Path, folder_b: Path, test_sets: Sequence[TestSet], target_lang: str, samples: int = 1000
) -> dict[str, PairedBootstrap]:
    """Is B better than A? Paired bootstrap on each test set, and on all of them pooled where there are several.

    A set of the name "validation" is not pooled: choices were made on it.

    Args:
        folder_a, folder_b: with the hypotheses of the two systems.
        test_sets: the same for both; where every one of them has P1 references, P1 is compared, else BLEU.
        target_lang: as in `evaluate_model`.
        samples: resampled corpora.

    Raises:
        UserError: hypotheses that are missing or do not fit, or tokens where raw text is compared.
    """
    folders = folder_a, folder_b
    metric = "p1" if all(test_set.p1_references is not None for test_set in test_sets) else "bleu"
    how = {"metric": metric, "samples": samples, "target_lang": target_lang}
    pooled: tuple[list[str], list[str], list[str]] = ([], [], [])
    verdicts = {}
    for test_set in test_sets:
        lines = [read_hypotheses(folder, test_set, target_lang) for folder in folders]
        forms = [form_of_hypotheses(folder, test_set) for folder in folders]
        references = test_set.references
        if metric == "p1":
            references = test_set.p1_references
            lines = [p1_tokens(s, target_lang) if form == "raw" else s for s, form in zip(lines, forms, strict=True)]
        elif forms != ["raw", "raw"]:
            raise UserError(f"{test_set.name}: {FORMS['tok']} translations have no BLEU to compare")
        verdicts[test_set.name] = paired_bootstrap(*lines, references, **how)
        if test_set.name != VALIDATION:
            for pool, part in zip(pooled, (*lines, references), strict=True):
                pool.extend(part)
    if sum(test_set.name != VALIDATION for test_set in test_sets) > 1:
        verdicts["all of them"] = paired_bootstrap(*pooled, **how)
    return verdicts


def keep_comparison(results: Path, against: Path, verdicts: dict[str, PairedBootstrap]) -> None:
    """Add what `compare` found to the record that `evaluate_model` left in `results`."""
    record = read_record(results / RUN_RECORD)
    other = "/".join(against.parts[-2:])  # the disk is private
    record["evaluation"].setdefault("against", {})[other] = {name: asdict(found) for name, found in verdicts.items()}
    write_record(record, results / RUN_RECORD)
