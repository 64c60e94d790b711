"""The console command `vanilla-transformer`: parses, calls, prints.

What a command needs is imported when it runs, so that `--help` answers at once.
"""

import argparse
import errno
import gzip
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from .errors import UserError
from .length_penalty import LENGTH_PENALTY_TYPES
from .provenance import EVALUATION_RECORD, RUN_RECORD, read_record

OF_THE_DISK = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
DTYPES = ("auto", "float32", "bfloat16", "float16", "int8")
ENGINE_FORMATS = {
    "onnx": "ONNX graphs for ONNX Runtime: encoder, first step, further steps",
    "ctranslate2": "CTranslate2, for fast translation on CPUs, also in int8",
}


def _train(argv: Sequence[str]) -> None:
    from .arguments import parse_arguments
    from .evaluation import score
    from .training import train

    def validation_scores(hypotheses: list[str], references: list[str]) -> dict[str, float]:
        results = score(hypotheses, references, metrics=("bleu", "chrf"), target_lang=target_lang)
        return {name: result["score"] for name, result in results.items()}

    arguments = parse_arguments(argv)
    target_lang = arguments[1].target_lang
    folder = train(arguments, validation_scores)
    if os.environ.get("RANK", "0") == "0":
        print(f"the model is in {folder}")


def _at_least(lowest: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if int(text) < lowest:
            raise argparse.ArgumentTypeError(f"{text} is below {lowest}")
        return int(text)

    return number


def _model_parser(command: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"vanilla-transformer {command}",
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("model", help="a folder with a trained model, or user/name on the Hub")
    parser.add_argument("--device", help="such as cuda or cpu; by default a GPU if there is one, for CTranslate2 a CPU")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="auto: as saved; int8: on a CPU")
    parser.add_argument(
        "--max_tokens_per_batch",
        type=_at_least(1),
        default=16384,
        help="sentences of a batch, times the longest, times beams",
    )
    parser.add_argument("--trust_remote_code", action="store_true", help="run the code that lies beside the weights")
    return parser


def _load(options: argparse.Namespace):
    from .translation import load_ensemble, load_model

    how = {name: getattr(options, name) for name in ("device", "dtype", "trust_remote_code")}
    if getattr(options, "ensemble", None):
        return load_ensemble([options.model, *options.ensemble], **how)
    return load_model(options.model, **how)


def _add_search_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ensemble", nargs="+", metavar="MODEL", help="models of the same tokenizer that search along")
    parser.add_argument("--num_beams", type=int, help="beams; by default those of generation_config.json")
    parser.add_argument("--length_penalty", type=float, help="exponent of the length in the beam score")
    parser.add_argument(
        "--length_penalty_type",
        choices=LENGTH_PENALTY_TYPES,
        help="score = log-probability / length^penalty (average), or / ((5 + length) / 6)^penalty, the paper's (wu)",
    )


def _read_lines(path: str) -> list[str]:
    """Lines of a text file, compressed or not, or of standard input for "-"."""
    from .corpus import text_lines

    return [line.rstrip("\r\n") for line in text_lines(Path(path), sys.stdin.buffer if path == "-" else None)]


def _write_lines(lines: Sequence[str], path: str | None) -> None:
    text = "".join(f"{line}\n" for line in lines)
    if path in (None, "-"):
        _print_text(text)
        return
    opener = gzip.open if path.lower().endswith(".gz") else open
    try:
        with opener(path, "wt", encoding="utf-8", newline="\n") as file:
            file.write(text)
    except OSError as error:
        _print_text(text)  # what has been computed is not lost with the file
        raise UserError(f"{path}: cannot be written ({error.strerror}); the result is on standard output") from error


def _print_text(text: str) -> None:
    """In UTF-8, as text is read, whatever the terminal's encoding is."""
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode("utf-8"))
    sys.stdout.buffer.flush()


def _translate(argv: Sequence[str]) -> None:
    from transformers import set_seed

    from .translation import translate, translate_nbest
    from .workers import Workers

    parser = _model_parser("translate", "Translate sentences, one per line; an empty line stays empty.")
    parser.add_argument("sentences", nargs="*", help="what to translate; by default the lines of --input")
    parser.add_argument("--input", help="a text file, plain or .gz; by default, or for -, standard input")
    parser.add_argument("--output", help="a text file, plain or .gz; by default, or for -, standard output")
    parser.add_argument("--nbest", type=int, help="write so many translations: line number, score, text, tab-separated")
    parser.add_argument(
        "--engine",
        choices=("transformers", "ctranslate2"),
        default="transformers",
        help="what translates; ctranslate2 needs a folder that `export --format ctranslate2` wrote",
    )
    parser.add_argument(
        "--workers",
        type=int,
        help="on a CPU: so many processes translate at the same time, by default one; with ctranslate2 threads, by "
        "default all for more than 100 sentences",
    )
    _add_search_options(parser)
    parser.add_argument(
        "--top_k",
        type=int,
        help="draw each token from the so many most probable ones (0: from all) instead of searching; with --nbest so "
        "many samples",
    )
    parser.add_argument("--temperature", type=float, help="of the probabilities that --top_k draws from; by default 1")
    parser.add_argument(
        "--seed", type=_at_least(0), default=42, help="of the samples; ctranslate2 repeats them with one worker"
    )
    options = parser.parse_intermixed_args(argv)
    if len(options.sentences) == 1 and os.path.isfile(options.sentences[0]):  # a sentence may be too long for a Path
        raise UserError(f"{options.sentences[0]} is a file: translate it with --input {options.sentences[0]}")
    workers = 1 if options.workers is None else options.workers
    if workers < 1:
        raise UserError(f"--workers {workers} is below 1")
    if options.sentences and options.input:
        raise UserError("what to translate: give sentences or --input")
    sentences = options.sentences or _read_lines(options.input or "-")
    search = {
        "num_beams": options.num_beams,
        "length_penalty": options.length_penalty,
        "top_k": options.top_k,
        "temperature": options.temperature,
        "max_tokens_per_batch": options.max_tokens_per_batch,
    }
    scored = options.nbest is not None
    if scored:
        search["nbest"] = options.nbest
    if options.engine == "transformers":
        search.update(length_penalty_type=options.length_penalty_type, progress=len(sentences) > 100)
    set_seed(options.seed)
    with ExitStack() as stack:
        if options.engine == "ctranslate2":
            engine = _load_engine(options, many=len(sentences) > 100)
            run = engine.translate_nbest if scored else engine.translate
        elif workers > 1:
            engine = stack.enter_context(Workers(*_load(options), workers))
            run = engine.translate_nbest if scored else engine.translate
        else:
            run = partial(translate_nbest if scored else translate, *_load(options))
        results = run(sentences, **search)
    if scored:
        results = [
            f"{number}\t{hypothesis.score:.4f}\t{hypothesis.text}"
            for number, hypotheses in enumerate(results, start=1)
            for hypothesis in hypotheses
        ]
    _write_lines(results, options.output)


def _load_engine(options: argparse.Namespace, many: bool):
    """The model in `options.model` on CTranslate2, on a CPU with a thread for each batch if there are `many`.

    Raises:
        UserError: an option that it does not know.
    """
    if options.length_penalty_type == "wu":
        raise UserError("--engine ctranslate2 does not know --length_penalty_type wu: it ranks by the average")
    if options.ensemble:
        raise UserError("--engine ctranslate2 does not know --ensemble")
    if options.dtype != "auto":
        raise UserError(f"--dtype {options.dtype}: with CTranslate2 the type is chosen by `export --compute_type`")
    engine, _ = _ctranslate2()
    device = options.device or "cpu"
    workers = options.workers or (os.cpu_count() if many and device == "cpu" else None)
    threads = {"threads": 1, "parallel_batches": workers} if workers else {}
    loaded = engine(options.model, device=device, seed=options.seed, **threads)
    if options.length_penalty_type:
        loaded.generation_config.length_penalty_type = options.length_penalty_type
    return loaded


def _score(argv: Sequence[str]) -> None:
    from math import exp

    from .translation import TOKENS_WITH_LOGITS, score_pairs

    parser = _model_parser("score", "A line for each pair: natural log-probability of the translation, its tokens.")
    parser.add_argument("source", help="text file, one sentence per line")
    parser.add_argument("target", help="text file, the translations")
    parser.add_argument("--output", help="a text file; by default standard output")
    parser.set_defaults(max_tokens_per_batch=TOKENS_WITH_LOGITS)
    options = parser.parse_args(argv)
    sources, targets = _read_lines(options.source), _read_lines(options.target)
    model, tokenizer = _load(options)
    scores = score_pairs(
        model,
        tokenizer,
        sources,
        targets,
        max_tokens_per_batch=options.max_tokens_per_batch,
        progress=len(sources) > 100,
    )
    _write_lines([f"{score.log_probability:.4f}\t{score.tokens}" for score in scores], options.output)
    total, tokens = sum(score.log_probability for score in scores), sum(score.tokens for score in scores)
    if tokens:
        print(f"{tokens} target tokens, perplexity {exp(-total / tokens):.3f}", file=sys.stderr)


def _add_test_set_options(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--test_file", nargs="+", help="two aligned text files, or one table")
    parser.add_argument("--dataset_name", help="a Hub id, a saved folder, or a Multi30k folder")
    parser.add_argument(
        "--dataset_config_name",
        help="the data set's configuration; for Multi30k raw or tok, by default that of the training, else raw",
    )
    parser.add_argument("--test_splits", nargs="+", help="splits of the data set; by default test")
    parser.add_argument("--streaming", action="store_true", help="read a Hub data set without downloading it first")
    parser.add_argument("--source_lang", help="by default that of the model's run.json")
    parser.add_argument("--target_lang", help="by default that of the model's run.json")


def _read_test_sets(folder: Path, options: argparse.Namespace) -> list:
    """None at all where none is named. Raises UserError for options that need another one, or exclude it."""
    from dataclasses import replace

    from .corpus import is_multi30k, tagged, warning_of_swapped_endings
    from .reporting import FORMS, read_test_sets

    if options.test_file and options.dataset_name:
        raise UserError("--test_file and --dataset_name: give one of them")
    for name in ("dataset_config_name", "test_splits", "streaming"):
        if getattr(options, name) and not options.dataset_name:
            raise UserError(f"--{name} means nothing without --dataset_name")
    if not (options.test_file or options.dataset_name):
        return []
    source_lang, target_lang = _languages(folder, options)
    if warning := warning_of_swapped_endings(options.test_file or [], source_lang, target_lang):
        print(warning, file=sys.stderr)
    trained = read_record(folder / RUN_RECORD)
    config_name, trained_on = options.dataset_config_name, trained.get("data", {}).get("config")
    if config_name is None and is_multi30k(options.dataset_name) and trained_on in FORMS:
        config_name = trained_on
    test_sets = read_test_sets(
        files=options.test_file or (),
        dataset=options.dataset_name,
        config_name=config_name,
        splits=options.test_splits or ("test",),
        source_lang=source_lang,
        target_lang=target_lang,
        streaming=options.streaming,
    )
    if trained.get("recipe", {}).get("directions"):
        test_sets = [replace(one, sources=[tagged(text, target_lang) for text in one.sources]) for one in test_sets]
    return test_sets


def _evaluate(argv: Sequence[str]) -> None:
    from .reporting import compare, evaluate_model, keep_comparison, read_hypotheses
    from .tokenization_vanilla_transformer import writes_lower_case
    from .weight_files import require_folder_or_hub_id

    parser = _model_parser("evaluate", "Translate test sets; BLEU, chrF, TER with signatures, P1 for Multi30k.")
    _add_test_set_options(parser)
    parser.add_argument("--results", help="folder for the hypotheses and a run.json with training and scores")
    parser.add_argument(
        "--against",
        nargs="+",
        default=[],
        help="folders with the hypotheses of other systems, for paired bootstraps; --results keeps what they found",
    )
    _add_search_options(parser)
    options = parser.parse_args(argv)
    folder = Path(options.model)
    require_folder_or_hub_id(folder)
    test_sets = _read_test_sets(folder, options)
    if not test_sets:
        raise UserError("what to translate: give --test_file or --dataset_name")
    _, target_lang = _languages(folder, options)
    results = Path(options.results) if options.results else None
    if results is None and (options.ensemble or not folder.is_dir()):
        what = "an ensemble" if options.ensemble else options.model
        raise UserError(f"{what} is not a folder: say with --results where the hypotheses go")
    for against in options.against:
        for test_set in test_sets:
            read_hypotheses(Path(against), test_set, target_lang)  # or else it would fail after the translating
    model, tokenizer = _load(options)
    if writes_lower_case(tokenizer):
        print("the model writes lower case: scores of case:mixed count every capital as an error", file=sys.stderr)
    before = read_record(folder / EVALUATION_RECORD).get("sets", {})
    record = evaluate_model(
        model,
        tokenizer,
        test_sets,
        folder=None if options.ensemble else folder,
        target_lang=target_lang,
        num_beams=options.num_beams,
        length_penalty=options.length_penalty,
        length_penalty_type=options.length_penalty_type,
        max_tokens_per_batch=options.max_tokens_per_batch,
        results=results,
    )
    _print_scores(record)
    if folder.is_dir() and not options.ensemble:
        _say_what_the_card_gets(folder, before, record["sets"])
    for against in options.against:
        verdicts = compare(Path(against), results or folder, test_sets, target_lang)
        for name, verdict in verdicts.items():
            system = " + ".join([options.model, *(options.ensemble or [])])
            print(f"{name}: {verdict.in_words(a=against, b=system)}")
        if results:
            keep_comparison(results, Path(against), verdicts)


def _say_what_the_card_gets(folder: Path, before: Mapping[str, Mapping], found: Mapping[str, Mapping]) -> None:
    if not os.access(folder, os.W_OK):
        print(f"{folder} cannot be written: the model card does not get these scores", file=sys.stderr)
        return
    print(f"the scores are in {folder / EVALUATION_RECORD}, for the model card", file=sys.stderr)
    for name in before.keys() & found.keys():
        references = found[name]["references_sha256"]
        if before[name].get("references_sha256", references) != references:
            print(f"they replace those of another test set that was called {name}, too", file=sys.stderr)
    if gone := sorted(before.keys() - read_record(folder / EVALUATION_RECORD).get("sets", {}).keys()):
        print(f"those of {', '.join(gone)} were searched in another way and are not in it any more", file=sys.stderr)


def _print_scores(record: dict) -> None:
    for name, found in record["sets"].items():
        for metric, entry in found["scores"].items():
            print(f"{name}\t{metric}\t{entry['score']:.2f}\t{entry['signature']}")


def _languages(folder: Path, options: argparse.Namespace) -> tuple[str, str]:
    """Source and target language: from the flags, else from the record of the training."""
    trained = read_record(folder / RUN_RECORD)
    found = [getattr(options, key) or trained.get(key) for key in ("source_lang", "target_lang")]
    if None in found:
        raise UserError(f"{folder} has no run.json that names its languages: give --source_lang and --target_lang")
    return found[0], found[1]


def _publish(argv: Sequence[str]) -> None:
    from .publishing import export_folder, publish

    parser = argparse.ArgumentParser(
        prog="vanilla-transformer publish",
        description="Upload a trained model with its code, tokenizer and model card; publishing again updates it.",
    )
    parser.add_argument("folder", help="the output folder of a training")
    parser.add_argument("repo_id", help="user/name on the Hub")
    parser.add_argument("--license", help="the licence of the weights as the Hub names it, such as cc-by-4.0")
    parser.add_argument("--private", action="store_true", help="hide the repository from others")
    parser.add_argument("--output", help="write the folder here instead of uploading it")
    options = parser.parse_args(argv)
    if options.output:
        export_folder(options.folder, options.output, repo_id=options.repo_id, license=options.license)
        print(f"what would be uploaded is in {options.output}")
        return
    print(publish(options.folder, options.repo_id, private=options.private, license=options.license))


def _import(argv: Sequence[str]) -> None:
    from dataclasses import fields
    from typing import get_args

    from .interchange import import_folder
    from .weight_layout import LayoutOptions

    parser = _format_parser(
        "import",
        "Make a folder of ours from the weights of another library; the same logits, the same translations.",
        engines={},
    )
    parser.add_argument("source", help="a file of weights (.safetensors, .npz, torch), or a folder that holds one")
    parser.add_argument("--output", required=True, help="a new folder")
    group = parser.add_argument_group(
        "what weights do not tell", "by default what the source says, or else the default of the library it comes from"
    )
    for option in fields(LayoutOptions):
        kind = get_args(option.type)[0]
        parse = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind}
        group.add_argument(f"--{option.name}", help=option.metadata["help"], **parse)
    options = vars(parser.parse_args(argv))
    source, format, output = (options.pop(name) for name in ("source", "format", "output"))
    for note in import_folder(source, format, output, LayoutOptions(**options)):
        print(note)
    print(f"the model is in {output}")


def _export(argv: Sequence[str]) -> None:
    from .interchange import export_model
    from .weight_files import require_new_folder

    parser = _format_parser(
        "export",
        "Write one of our models in the layout of another library; the same logits, the same translations.",
        ENGINE_FORMATS,
    )
    parser.add_argument("folder", help="a folder with a model of ours")
    parser.add_argument(
        "--output",
        required=True,
        help="marian, onnx, ctranslate2: a new folder; otherwise a new file, .pt, .safetensors or .npz",
    )
    group = parser.add_argument_group(
        "ctranslate2", "with a test set, the export is compared with the model: certificate.json and README.md say how"
    )
    group.add_argument("--compute_type", help="float32 (the default), float16, bfloat16, int8 ...")
    _add_test_set_options(group)
    options = parser.parse_args(argv)
    given = [action.dest for action in group._group_actions if getattr(options, action.dest)]
    if given and options.format != "ctranslate2":
        raise UserError(f"--{given[0]} means nothing to --format {options.format}: only to ctranslate2")
    if options.format == "ctranslate2":
        notes = _export_ctranslate2(options)
    elif options.format == "onnx":
        notes = _export_onnx(Path(options.folder), require_new_folder(options.output))
    else:
        notes = export_model(options.folder, options.format, options.output)
    print(*notes, f"the export is in {options.output}", sep="\n")


def _export_ctranslate2(options: argparse.Namespace) -> list[str]:
    """Write the folder and measure it; what the user should know."""
    _, export_ctranslate2 = _ctranslate2()
    from .certificate import certificate_text, certify, write_card
    from .tokenization_vanilla_transformer import load_tokenizer
    from .weight_files import load_own_folder, require_new_folder

    source, output = Path(options.folder), require_new_folder(options.output)
    compute_type = options.compute_type or "float32"
    test_sets = _read_test_sets(source, options)  # what is wrong with them is said before anything is written
    model = load_own_folder(source)
    export_ctranslate2(model, load_tokenizer(source), output, compute_type)
    languages = {key: getattr(options, key) for key in ("source_lang", "target_lang") if getattr(options, key)}

    def write(certificate: dict | None) -> None:
        write_card(model, source, output, compute_type=compute_type, languages=languages, certificate=certificate)

    write(None)  # or a failure to measure would leave a folder that says nothing of itself
    if not test_sets:
        return [
            "no certificate: whether it translates as the model does was not measured; to get one, export with "
            "--test_file or --dataset_name"
        ]
    target_lang = _languages(source, options)[1]
    certificate = certify(source, output, test_sets, target_lang=target_lang, progress=True)
    write(certificate)
    return [certificate_text(certificate), ""]


def _export_onnx(folder: Path, output: Path) -> list[str]:
    from .onnx_export import export_onnx
    from .tokenization_vanilla_transformer import load_tokenizer
    from .weight_files import load_own_folder

    export_onnx(load_own_folder(folder), output)
    try:
        load_tokenizer(folder).save_pretrained(output)
    except UserError as error:  # the graphs are whole without it
        return [str(error)]
    return []


def _ctranslate2() -> tuple[type, Callable]:
    """`CTranslate2Engine` and `export_ctranslate2`.

    Raises:
        UserError: CTranslate2 is not installed.
    """
    try:
        from .ctranslate2_export import CTranslate2Engine, export_ctranslate2
    except ImportError as error:
        raise UserError("CTranslate2 is not installed: pip install 'hf-vanilla-transformer[ctranslate2]'") from error
    return CTranslate2Engine, export_ctranslate2


def _format_parser(command: str, description: str, engines: Mapping[str, str]) -> argparse.ArgumentParser:
    from .interchange import FORMATS

    formats = {**{name: layout.description for name, layout in FORMATS.items()}, **engines}
    parser = argparse.ArgumentParser(
        prog=f"vanilla-transformer {command}",
        description=description,
        epilog="formats:\n" + "\n".join(f"  {name:<18}{text}" for name, text in formats.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--format", required=True, choices=formats, metavar="NAME", help="one of those below")
    return parser


def _demo(argv: Sequence[str]) -> None:
    from .demo import run_demo

    parser = argparse.ArgumentParser(
        prog="vanilla-transformer demo",
        description="The main job in minutes on an embedded corpus, offline: train, score, look inside, publish.",
    )
    parser.add_argument("--output_dir", default="runs/demo", help="where everything goes")
    run_demo(Path(parser.parse_args(argv).output_dir))


COMMANDS = {
    "train": (_train, "train a translation model from parallel text"),
    "translate": (_translate, "translate sentences, files or standard input"),
    "score": (_score, "log-probability of given translations"),
    "evaluate": (_evaluate, "BLEU, chrF, TER and P1 on test sets; compare two systems"),
    "publish": (_publish, "make the Hub folder of a model and upload it"),
    "import": (_import, "make a model of ours from the weights of another library"),
    "export": (_export, "write a model in the layout of another library"),
    "demo": (_demo, "all of it in minutes on an embedded corpus"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; a mistake in the input, or a disk that refuses, is one line on standard error and the exit
    status 2.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="vanilla-transformer",
        description="The Transformer of 'Attention Is All You Need', at home in Hugging Face.",
        epilog="commands:\n" + "\n".join(f"  {name:<12}{text}" for name, (_, text) in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="command", help="one of those below; each has --help")
    command = parser.parse_args(argv[:1]).command
    disable_progress_bar()  # of loading and saving, which take no time; training and translating show their own
    try:
        COMMANDS[command][0](argv[1:])
    except UserError as error:
        print(f"vanilla-transformer {command}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in OF_THE_DISK:
            raise
        where = f"{error.filename}: " if error.filename else ""
        print(f"vanilla-transformer {command}: {where}{error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        hint = ": go on with --resume_from_checkpoint" if command == "train" else ""
        print(f"vanilla-transformer {command}: interrupted{hint}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
