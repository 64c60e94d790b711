"""The console command: what it prints, what it writes, and one line for every mistake."""

import errno
import gzip
import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    reporting,
    tokenization_vanilla_transformer,
    translation,
)
from hf_vanilla_transformer.card import NOT_CERTIFIED
from hf_vanilla_transformer.cli import COMMANDS, main
from hf_vanilla_transformer.tokenization_vanilla_transformer import joint_tokenizer, learn_backend

TEXT = ["the old man sleeps", "a dog sees the small cat", "the cat runs", "who sees a dog"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model with a tokenizer and the record that a training would leave."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = joint_tokenizer(learn_backend(TEXT * 3, vocab_size=60))
    torch.manual_seed(0)
    config = VanillaTransformerConfig.preset("test", vocab_size=len(tokenizer))
    model = VanillaTransformerForConditionalGeneration(config)
    model.generation_config.update(num_beams=2, early_stopping=True, max_length=20)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    (path / "run.json").write_text(json.dumps({"source_lang": "en", "target_lang": "de"}))
    return path


def write(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


def complaint(capsys, argv):
    """The one line that a wrong command leaves on standard error."""
    assert main(argv) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("vanilla-transformer")]
    assert len(lines) == 1
    return lines[0]


def test_translate_takes_arguments_files_and_standard_input_alike(folder, tmp_path, capsys, monkeypatch):
    assert main(["translate", str(folder), *TEXT]) == 0
    from_arguments = capsys.readouterr().out
    assert from_arguments.count("\n") == len(TEXT)
    source, output = write(tmp_path / "in.txt", TEXT), tmp_path / "out.txt"
    assert main(["translate", str(folder), "--input", source, "--output", str(output)]) == 0
    assert output.read_text(encoding="utf-8") == from_arguments
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(("\n".join(TEXT)).encode())))
    assert main(["translate", str(folder)]) == 0
    assert capsys.readouterr().out == from_arguments


def test_translate_keeps_empty_lines_and_windows_line_ends(folder, tmp_path, capsys):
    path = tmp_path / "in.txt"
    path.write_bytes(b"\xef\xbb\xbfthe cat runs\r\n\r\n\nthe cat runs")  # as Windows writes it
    assert main(["translate", str(folder), "--input", str(path)]) == 0
    first, *middle, last = capsys.readouterr().out.split("\n")[:-1]
    assert middle == ["", ""]
    assert first == last != ""


def test_compressed_text_is_read_as_in_training(folder, tmp_path, capsys):
    plain, packed = write(tmp_path / "in.txt", TEXT[:2]), tmp_path / "in.txt.gz"
    packed.write_bytes(gzip.compress(Path(plain).read_bytes()))
    printed = []
    for path in (plain, str(packed)):
        assert main(["translate", str(folder), "--input", path]) == 0
        assert main(["score", str(folder), path, path]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]


def test_output_is_as_input(folder, tmp_path, capsys):
    assert main(["translate", str(folder), *TEXT]) == 0
    expected = capsys.readouterr().out
    assert main(["translate", str(folder), *TEXT, "--output", "-"]) == 0
    assert capsys.readouterr().out == expected
    for name in ("plain.de", "packed.de.gz"):
        assert main(["translate", str(folder), *TEXT, "--output", str(tmp_path / name)]) == 0
    assert (tmp_path / "plain.de").read_text(encoding="utf-8") == expected
    assert gzip.decompress((tmp_path / "packed.de.gz").read_bytes()).decode("utf-8") == expected


def test_translate_nbest(folder, capsys):
    assert main(["translate", str(folder), *TEXT[:2], "--nbest", "2", "--num_beams", "3"]) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == ["1", "1", "2", "2"]
    assert float(rows[0][1]) >= float(rows[1][1])


def test_a_long_sentence_is_no_file(folder, capsys):
    found = complaint(capsys, ["translate", str(folder), "the" * 300])
    assert re.search(r"line 1: \d+ tokens, but the model reads at most 64", found)


def test_no_such_device(folder, capsys):
    found = complaint(capsys, ["translate", str(folder), "a", "--device", "gpu"])
    assert "device gpu: Expected one of cpu, cuda" in found
    with pytest.raises(SystemExit):
        main(["translate", str(folder), "a", "--dtype", "float31"])
    assert "invalid choice: 'float31'" in capsys.readouterr().err


def test_translate_samples(folder, capsys):
    outputs = []
    for seed in ("1", "1", "2"):
        argv = ["translate", str(folder), TEXT[0], "--top_k", "5", "--temperature", "2", "--nbest", "3", "--seed", seed]
        assert main(argv) == 0
        outputs.append(capsys.readouterr().out)
    assert [line.split("\t")[0] for line in outputs[0].splitlines()] == ["1", "1", "1"]
    assert outputs[0] == outputs[1] != outputs[2]


def test_export_to_ctranslate2_and_translate_with_it(folder, tmp_path, capsys):
    pytest.importorskip("ctranslate2", reason="needs the extra ctranslate2")
    output = tmp_path / "ct2"
    assert main(["export", str(folder), "--format", "ctranslate2", "--output", str(output)]) == 0
    advice = "to get one, export with --test_file or --dataset_name"
    no_certificate = f"no certificate: whether it translates as the model does was not measured; {advice}"
    assert capsys.readouterr().out == f"{no_certificate}\nthe export is in {output}\n"
    card = (output / "README.md").read_text(encoding="utf-8")
    assert NOT_CERTIFIED in card
    assert "| Weights | float32 |" in card
    assert not (output / "certificate.json").exists()
    search = [*TEXT, "--num_beams", "1"]
    assert main(["translate", str(output), "--engine", "ctranslate2", *search]) == 0
    translations = capsys.readouterr().out
    assert main(["translate", str(folder), *search]) == 0
    assert translations == capsys.readouterr().out
    found = complaint(capsys, ["translate", str(output), "--engine", "ctranslate2", "a", "--length_penalty_type", "wu"])
    assert found.endswith("--engine ctranslate2 does not know --length_penalty_type wu: it ranks by the average")
    settings = output / "generation_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "num_beams": 2, "length_penalty_type": "wu"}))
    found = complaint(capsys, ["translate", str(output), "--engine", "ctranslate2", "a"])
    assert found.endswith("translate with transformers, with one beam, or with the type 'average'")
    search = ["translate", str(output), "--engine", "ctranslate2", "a", "--length_penalty_type", "average"]
    assert main(search) == 0
    assert capsys.readouterr().out.strip()
    found = complaint(capsys, ["export", str(folder), "--format", "onnx", "--output", str(output)])
    assert found.endswith(f"{output}: is not an empty folder: name a new one")
    found = complaint(capsys, ["translate", str(output), "--engine", "ctranslate2", "a", "--dtype", "bfloat16"])
    assert found.endswith("--dtype bfloat16: with CTranslate2 the type is chosen by `export --compute_type`")
    found = complaint(capsys, ["translate", str(output), "--engine", "ctranslate2", "a", "--ensemble", str(output)])
    assert found.endswith("--engine ctranslate2 does not know --ensemble")


def test_many_sentences_get_a_thread_for_each_batch(folder, tmp_path, capsys, monkeypatch):
    module = pytest.importorskip("hf_vanilla_transformer.ctranslate2_export", reason="needs the extra ctranslate2")
    output, asked = tmp_path / "ct2", []

    class Engine(module.CTranslate2Engine):
        def __init__(self, *args, **options):
            asked.append({name: options.get(name) for name in ("threads", "parallel_batches")})
            super().__init__(*args, **options)

    assert main(["export", str(folder), "--format", "ctranslate2", "--output", str(output)]) == 0
    monkeypatch.setattr(module, "CTranslate2Engine", Engine)
    monkeypatch.setattr("os.cpu_count", lambda: 5)
    for words in (TEXT, TEXT * 26, [*TEXT, "--workers", "3"]):
        assert main(["translate", str(output), "--engine", "ctranslate2", *words]) == 0
    own_choice = {"threads": None, "parallel_batches": None}
    assert asked == [own_choice, *({"threads": 1, "parallel_batches": count} for count in (5, 3))]


def test_a_certificate_goes_with_an_export(folder, tmp_path, capsys):
    pytest.importorskip("ctranslate2", reason="needs the extra ctranslate2")
    texts = [write(tmp_path / f"news.{side}", TEXT) for side in ("en", "de")]
    output = tmp_path / "ct2"
    export = ["export", str(folder), "--format", "ctranslate2", "--compute_type", "int8", "--output", str(output)]
    assert main([*export, "--test_file", *texts, "--target_lang", "fr"]) == 0
    printed = capsys.readouterr().out
    assert "| `news` | 4 | greedy | " in printed
    assert "| `news` | 4 | 2 beams | " in printed
    assert printed.endswith(f"\nthe export is in {output}\n")
    card = (output / "README.md").read_text(encoding="utf-8")
    assert printed.removesuffix(f"\nthe export is in {output}\n").strip() in card
    assert "translates `en` into `fr`" in card
    assert "| Weights | int8 |" in card
    certificate = json.loads((output / "certificate.json").read_text(encoding="utf-8"))
    assert [search["num_beams"] for search in certificate["sets"]["news"]["searches"]] == [1, 2]
    assert certificate["ctranslate2"]["bytes"] == (output / "model.bin").stat().st_size
    assert main(["translate", str(output), "--engine", "ctranslate2", TEXT[0]]) == 0


def test_a_failure_to_measure_leaves_the_export_whole(folder, tmp_path, capsys):
    pytest.importorskip("ctranslate2", reason="needs the extra ctranslate2")
    text, output = write(tmp_path / "long.txt", ["dog " * 99]), tmp_path / "ct2"
    export = ["export", str(folder), "--format", "ctranslate2", "--output", str(output), "--test_file", text, text]
    assert "tokens, but the model reads at most 64" in complaint(capsys, export)
    assert NOT_CERTIFIED in (output / "README.md").read_text(encoding="utf-8")
    assert main(["translate", str(output), "--engine", "ctranslate2", TEXT[0]]) == 0


@pytest.mark.parametrize(
    "option",
    [
        ["--compute_type", "int8"],
        ["--test_file", "a", "b"],
        ["--dataset_name", "x"],
        ["--dataset_config_name", "raw"],
        ["--test_splits", "test"],
        ["--streaming"],
        ["--source_lang", "en"],
        ["--target_lang", "de"],
    ],
    ids=lambda option: option[0],
)
@pytest.mark.parametrize("format", ["marian", "onnx"])
def test_options_of_another_format(folder, tmp_path, capsys, format, option):
    output = tmp_path / "out"
    found = complaint(capsys, ["export", str(folder), "--format", format, "--output", str(output), *option])
    assert found.endswith(f"{option[0]} means nothing to --format {format}: only to ctranslate2")
    assert not output.exists()


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("folder", ["--test_file", "a", "--dataset_name", "x"], "--test_file and --dataset_name: give one of them"),
        ("folder", ["--test_splits", "test"], "--test_splits means nothing without --dataset_name"),
        ("folder", ["--streaming", "--test_file", "a", "b"], "--streaming means nothing without --dataset_name"),
        ("folder", ["--dataset_config_name", "tok"], "--dataset_config_name means nothing without --dataset_name"),
        ("bare", ["--test_file", "a", "b"], "no run.json that names its languages: give --source_lang and"),
        ("folder", ["--test_file", "nowhere.en", "nowhere.de"], "nowhere.en"),
    ],
)  # fmt: skip
def test_a_wrong_test_set_is_refused_before_anything_is_written(folder, tmp_path, capsys, model, options, message):
    pytest.importorskip("ctranslate2", reason="needs the extra ctranslate2")
    (tmp_path / "bare").mkdir()
    source, output = {"folder": folder, "bare": tmp_path / "bare"}[model], tmp_path / "out"
    export = ["export", str(source), "--format", "ctranslate2", "--output", str(output), *options]
    assert message in complaint(capsys, export)
    assert not output.exists()


def test_evaluate_wants_one_test_set(folder, capsys):
    for options, message in (
        ([], "what to translate: give --test_file or --dataset_name"),
        (["--test_file", "a", "--dataset_name", "x"], "--test_file and --dataset_name: give one of them"),
        (["--test_file", "a", "--test_splits", "test"], "--test_splits means nothing without --dataset_name"),
    ):
        assert complaint(capsys, ["evaluate", str(folder), *options]).endswith(message)


def test_exports_are_not_models(tmp_path, capsys):
    for file, message in (
        ("model.bin", "is a CTranslate2 model: translate with --engine ctranslate2"),
        ("encoder.onnx", "holds ONNX graphs: name the folder that they were exported from"),
    ):
        (tmp_path / file).mkdir()
        (tmp_path / file / file).touch()
        assert complaint(capsys, ["translate", str(tmp_path / file), "a"]).endswith(f"{file} {message}")


def test_ctranslate2_is_not_installed(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    monkeypatch.delitem(sys.modules, "hf_vanilla_transformer.ctranslate2_export", raising=False)
    advice = "CTranslate2 is not installed: pip install 'hf-vanilla-transformer[ctranslate2]'"
    export = ["export", str(folder), "--format", "ctranslate2", "--output", str(tmp_path / "ct2")]
    assert complaint(capsys, export).endswith(advice)
    assert complaint(capsys, ["translate", str(folder), "--engine", "ctranslate2", "a"]).endswith(advice)


@pytest.mark.slow
def test_export_to_onnx(folder, tmp_path, capsys):
    pytest.importorskip("onnxscript", reason="needs the extra onnx")
    assert main(["export", str(folder), "--format", "onnx", "--output", str(tmp_path / "onnx")]) == 0
    assert {"encoder.onnx", "prefill.onnx", "decode.onnx"} <= {path.name for path in (tmp_path / "onnx").iterdir()}


def test_translate_with_the_papers_length_penalty(folder, capsys):
    """Both rank by log-probability / penalty; with an exponent of 1 the penalties are length and (5 + length) / 6."""
    scores = {}
    for name in ("wu", "average"):
        search = ["--num_beams", "3", "--length_penalty", "1", "--length_penalty_type", name]
        assert main(["translate", str(folder), TEXT[0], "--nbest", "3", *search]) == 0
        rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
        scores[name] = {text: float(score) for _, score, text in rows}
    for text in scores["wu"].keys() & scores["average"].keys():
        ratio = scores["wu"][text] / scores["average"][text]  # 6 n / (5 + n)
        length = 5 * ratio / (6 - ratio)
        assert length > 1.5
        assert length == pytest.approx(round(length), abs=0.02 * length)
    assert scores["wu"].keys() & scores["average"].keys()
    with pytest.raises(SystemExit):
        main(["translate", str(folder), TEXT[0], "--length_penalty_type", "Wu"])
    assert "invalid choice: 'Wu'" in capsys.readouterr().err


def test_score_prints_a_line_for_each_pair_and_the_perplexity(folder, tmp_path, capsys):
    source, target = write(tmp_path / "a.en", TEXT), write(tmp_path / "a.de", TEXT[::-1])
    assert main(["score", str(folder), source, target]) == 0
    printed = capsys.readouterr()
    rows = [line.split("\t") for line in printed.out.splitlines()]
    assert len(rows) == len(TEXT)
    total, tokens = sum(float(row[0]) for row in rows), sum(int(row[1]) for row in rows)
    perplexity = float(printed.err.splitlines()[-1].split()[-1])
    assert perplexity == pytest.approx(2.718281828 ** (-total / tokens), rel=1e-3)


def test_evaluate_writes_scores_and_hypotheses_and_compares(folder, tmp_path, capsys):
    source, target = write(tmp_path / "news.en", TEXT), write(tmp_path / "news.de", TEXT)
    command = ["evaluate", str(folder), "--test_file", source, target, "--num_beams", "1"]
    assert main([*command, "--results", str(tmp_path / "one")]) == 0
    assert "news\tbleu\t" in capsys.readouterr().out
    hypotheses = (tmp_path / "one" / "news.hyp.de").read_text(encoding="utf-8")
    assert hypotheses.count("\n") == len(TEXT)
    record = json.loads((tmp_path / "one" / "run.json").read_text(encoding="utf-8"))
    assert record["source_lang"] == "en"
    assert record["evaluation"]["sets"]["news"]["scores"]["bleu"]["signature"].startswith("nrefs:1|case:mixed")
    assert json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))["sets"]["news"]["n"] == len(TEXT)
    other = [write(tmp_path / f"other.{side}", TEXT[:2]) for side in ("en", "de")]
    assert main(["evaluate", str(folder), "--test_file", *other, "--num_beams", "1"]) == 0
    assert f"the scores are in {folder / 'evaluation.json'}, for the model card" in capsys.readouterr().err
    sets = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))["sets"]
    assert {name: entry["n"] for name, entry in sets.items()} == {"news": len(TEXT), "other": 2}
    assert "any more" not in capsys.readouterr().err
    assert main(["evaluate", str(folder), "--test_file", *other, "--num_beams", "2"]) == 0
    assert "those of news were searched in another way and are not in it any more" in capsys.readouterr().err
    sets = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))["sets"]
    assert set(sets) == {"other"}  # one beam and two are not to be mixed
    perfect = tmp_path / "perfect"
    perfect.mkdir()
    write(perfect / "news.hyp.de", TEXT)
    assert main([*command, "--results", str(tmp_path / "two"), "--against", str(perfect), str(tmp_path / "one")]) == 0
    assert f"news: {perfect} is better than {folder} by" in capsys.readouterr().out
    record = json.loads((tmp_path / "two" / "run.json").read_text(encoding="utf-8"))
    against = record["evaluation"]["against"]
    assert against.keys() == {f"{tmp_path.name}/perfect", f"{tmp_path.name}/one"}
    verdict = against[f"{tmp_path.name}/perfect"]["news"]
    assert verdict["score_a"] == pytest.approx(100)
    assert against[f"{tmp_path.name}/one"]["news"]["difference"] == 0
    assert verdict["score_b"] == record["evaluation"]["sets"]["news"]["scores"]["bleu"]["score"]


def test_a_model_of_several_directions_reads_where_to_translate(folder, tmp_path, monkeypatch, capsys):
    sources, seen = [f"2de {text}" for text in TEXT], []
    monkeypatch.setattr(reporting, "translate", lambda model, tokenizer, text, **_: seen.append(text) or TEXT)
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    several = shutil.copytree(folder, tmp_path / "several")
    record["recipe"] = {"directions": ["en-de", "de-en"]}
    (several / "run.json").write_text(json.dumps(record))
    news = [write(tmp_path / f"news.{side}", TEXT) for side in ("en", "de")]
    assert main(["evaluate", str(several), "--test_file", *news]) == 0
    reverse = ["--source_lang", "de", "--target_lang", "en"]
    assert main(["evaluate", str(several), "--test_file", *news[::-1], *reverse]) == 0
    assert main(["evaluate", str(folder), "--test_file", *news, "--results", str(tmp_path / "one")]) == 0
    assert seen == [sources, [f"2en {text}" for text in TEXT], TEXT]


def test_an_ensemble_leaves_the_scores_of_its_members_alone(folder, tmp_path, capsys):
    test_file = [write(tmp_path / f"news.{side}", TEXT) for side in ("en", "de")]
    command = ["evaluate", str(folder), "--ensemble", str(folder), "--test_file", *test_file]
    (folder / "evaluation.json").unlink(missing_ok=True)
    assert main([*command, "--results", str(tmp_path / "results")]) == 0
    assert not (folder / "evaluation.json").exists()
    record = json.loads((tmp_path / "results" / "run.json").read_text(encoding="utf-8"))
    assert list(record) == ["evaluation"], "no training made an ensemble"
    assert record["evaluation"]["generation"]["models"] == 2
    (tmp_path / "perfect").mkdir()
    write(tmp_path / "perfect" / "news.hyp.de", TEXT)
    against = ["--results", str(tmp_path / "results"), "--against", str(tmp_path / "perfect")]
    capsys.readouterr()
    assert main([*command, *against]) == 0
    assert f"perfect is better than {folder} + {folder} by" in capsys.readouterr().out
    assert record["evaluation"]["sets"]["news"]["n"] == len(TEXT)
    assert "for the model card" not in capsys.readouterr().err
    assert complaint(capsys, command).endswith(
        "an ensemble is not a folder: say with --results where the hypotheses go"
    )
    main(["translate", str(folder), *TEXT])
    alone = capsys.readouterr().out
    assert main(["translate", str(folder), *TEXT, "--ensemble", str(folder), str(folder)]) == 0
    assert capsys.readouterr().out == alone


def test_committed_records_quote_no_sentence_and_name_no_folder_of_this_machine(folder, tmp_path, monkeypatch):
    source, target = write(tmp_path / "news.en", TEXT), write(tmp_path / "news.de", TEXT)
    report = {"examples": {"empty": [{"source": "secret"}]}}
    record = {"source_lang": "en", "target_lang": "de", "data": {"report": report}}
    (folder / "run.json").write_text(json.dumps(record))
    command = ["evaluate", str(folder), "--test_file", source, target, "--results", str(tmp_path / "results")]
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "vanilla-transformer"), *command])
    assert main(command) == 0
    written = (tmp_path / "results" / "run.json").read_text(encoding="utf-8")
    assert "secret" not in written
    assert str(tmp_path) not in written
    assert json.loads(written)["evaluation"]["command"][:4] == [
        "vanilla-transformer", "evaluate", folder.name, "--test_file"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["translate", "{nowhere}", "hello"], "nowhere: no such folder"),
        (["evaluate", "{nowhere}", "--test_file", "{two}", "{two}"], "nowhere: no such folder"),
        (["train", "--model_name_or_path", "{nowhere}", "--train_file", "{two}", "{two}", "--source_lang", "en",
          "--target_lang", "de", "--output_dir", "{nowhere}"], "nowhere: no such folder"),
        (["translate", "{folder}", "A man.", "--input", "{two}"], "what to translate: give sentences or --input"),
        (["translate", "{folder}", "{two}"], "two.txt is a file: translate it with --input"),
        (["evaluate", "{folder}", "--test_file", "{two}", "{two}", "--against", "{bare}"], "evaluate that model first"),
        (["translate", "{folder}", "--input", "{nowhere}"], "nowhere: cannot be read (No such file or directory)"),
        (["translate", "{folder}", "--input", "{latin1}"], "latin1.txt:2: not valid UTF-8"),
        (["translate", "{folder}", "fine", "dog " * 99], "tokens, but the model reads at most 64"),
        (["translate", "{folder}", "hello", "--nbest", "5"], "5 translations of each sentence need at least as many"),
        (["score", "{folder}", "{two}", "{latin1}"], "latin1.txt:2: not valid UTF-8"),
        (["score", "{folder}", "{two}", "{one}"], "2 source sentences but 1 translations"),
        (["evaluate", "{folder}", "--test_file", "{two}", "{one}"], "two.txt has 2 lines but"),
        (["evaluate", "{bare}", "--test_file", "{two}", "{two}"], "bare has no run.json that names its languages"),
        (["evaluate", "user/name", "--test_file", "{two}", "{two}", "--source_lang", "en", "--target_lang", "de"],
         "user/name is not a folder: say with --results"),
        (["publish", "{folder}", "no-user"], "bad repository name 'no-user'"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(folder, tmp_path, capsys, argv, message):
    (tmp_path / "bare").mkdir()
    (tmp_path / "latin1.txt").write_bytes("gut\nschön\n".encode("latin-1"))
    names = {
        "folder": folder,
        "nowhere": tmp_path / "nowhere",
        "latin1": tmp_path / "latin1.txt",
        "bare": tmp_path / "bare",
        "one": write(tmp_path / "one.txt", TEXT[:1]),
        "two": write(tmp_path / "two.txt", TEXT[:2]),
    }
    line = complaint(capsys, [word.format(**names) for word in argv])
    assert line.startswith(f"vanilla-transformer {argv[0]}: ")
    assert message in line


def test_publishing_without_a_login(folder, capsys, monkeypatch):
    monkeypatch.setattr("hf_vanilla_transformer.publishing.get_token", lambda: None)
    assert "not logged in to the Hub: run `hf auth login`" in complaint(capsys, ["publish", str(folder), "user/name"])


def test_output_that_cannot_be_written_is_not_lost(folder, tmp_path, capsys):
    assert main(["translate", str(folder), "the cat runs", "--output", str(tmp_path / "no" / "out.txt")]) == 2
    printed = capsys.readouterr()
    assert printed.out.strip()
    assert "cannot be written (No such file or directory); the result is on standard output" in printed.err


def test_a_disk_that_refuses_is_one_line(folder, tmp_path, capsys, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "locked"))

    monkeypatch.setattr("hf_vanilla_transformer.interchange.export_model", refuse)
    command = ["export", str(folder), "--format", "marian", "--output", str(tmp_path / "locked" / "x")]
    assert complaint(capsys, command).endswith(f"export: {tmp_path / 'locked'}: Permission denied")

    def fail(*_):
        raise OSError(errno.EBADF, "a bug")

    monkeypatch.setattr("hf_vanilla_transformer.interchange.export_model", fail)
    with pytest.raises(OSError, match="a bug"):
        main(command)


def test_an_interrupted_training_says_how_it_goes_on(capsys, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setitem(COMMANDS, "train", (interrupt, ""))
    assert main(["train"]) == 130
    assert capsys.readouterr().err == "vanilla-transformer train: interrupted: go on with --resume_from_checkpoint\n"


def test_scores_of_a_model_in_a_folder_that_cannot_be_written(folder, tmp_path, capsys, monkeypatch):
    locked = shutil.copytree(folder, tmp_path / "locked")
    (locked / "evaluation.json").unlink(missing_ok=True)
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != locked)  # root may write everywhere
    command = [
        "evaluate",
        str(locked),
        "--test_file",
        *(write(tmp_path / f"news.{side}", TEXT) for side in ("en", "de")),
    ]
    assert complaint(capsys, command).endswith("locked cannot be written: name another folder for the results")
    assert main([*command, "--results", str(tmp_path / "results")]) == 0
    printed = capsys.readouterr()
    assert "news\tbleu\t" in printed.out
    assert "locked cannot be written: the model card does not get these scores" in printed.err
    assert not (locked / "evaluation.json").exists()
    assert "news" in json.loads((tmp_path / "results" / "run.json").read_text())["evaluation"]["sets"]


def test_two_test_sets_of_one_name_and_swapped_files_are_announced(folder, tmp_path, capsys):
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        files = [write(tmp_path / place / f"news.{side}", TEXT[place == "there" :]) for side in ("en", "de")]
        assert main(["evaluate", str(folder), "--test_file", *files, "--num_beams", "1"]) == 0
        said = capsys.readouterr().err
        assert ("they replace those of another test set that was called news, too" in said) == (place == "there")
        assert "the endings contradict" not in said
    assert main(["evaluate", str(folder), "--test_file", *files[::-1], "--results", str(tmp_path / "results")]) == 0
    assert "news.de news.en: the endings contradict en to de; the source file comes first" in capsys.readouterr().err


def test_an_unknown_command_is_explained(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["trane"])
    assert stopped.value.code == 2
    assert "invalid choice: 'trane'" in capsys.readouterr().err


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("train", "translate", "score", "evaluate", "publish", "demo"))


def test_a_damaged_record_is_named(folder, tmp_path, capsys):
    text = write(tmp_path / "a.txt", TEXT[:1])
    kept = (folder / "run.json").read_text()
    (folder / "run.json").write_text("{")
    try:
        line = complaint(capsys, ["evaluate", str(folder), "--test_file", text, text])
    finally:
        (folder / "run.json").write_text(kept)
    assert "run.json: is not valid JSON" in line


def test_an_output_folder_that_is_a_file(folder, tmp_path, capsys):
    text = write(tmp_path / "a.txt", TEXT[:1])
    flags = ["--train_file", text, text, "--source_lang", "en", "--target_lang", "de", "--output_dir", text]
    message = f"{text} is a file: name another folder"
    assert message in complaint(capsys, ["train", *flags])
    below = f"{text}/below"
    assert message in complaint(capsys, ["train", *flags[:-1], below])
    assert message in complaint(capsys, ["demo", "--output_dir", below])
    assert message in complaint(capsys, ["evaluate", str(folder), "--test_file", text, text, "--results", below])
    for format, output in (("marian", below), ("torch", f"{below}.pt"), ("ctranslate2", below)):
        assert message in complaint(capsys, ["export", str(folder), "--format", format, "--output", output])


SEARCH = ["--num_beams", "3", "--length_penalty", "0.6", "--length_penalty_type", "wu", "--max_tokens_per_batch", "99"]
WANTED = {"num_beams": 3, "length_penalty": 0.6, "length_penalty_type": "wu", "max_tokens_per_batch": 99}


def test_options_of_evaluate_reach_the_test_sets_and_the_search(folder, monkeypatch):
    read, searched, one = {}, {}, reporting.TestSet("a", TEXT, TEXT)
    monkeypatch.setattr(reporting, "read_test_sets", lambda **options: read.update(options) or [one])
    monkeypatch.setattr(reporting, "evaluate_model", lambda *_, **options: searched.update(options) or {"sets": {}})
    data = ["--dataset_name", "x", "--dataset_config_name", "tok", "--test_splits", "one", "two", "--streaming"]
    assert main(["evaluate", str(folder), *data, *SEARCH]) == 0
    asked = {"dataset": "x", "config_name": "tok", "splits": ["one", "two"], "streaming": True}
    assert read.items() >= asked.items()
    assert searched.items() >= WANTED.items()


@pytest.mark.parametrize(("trained_on", "read_as"), [("tok", "tok"), ("raw", "raw"), ("de-en", None), (None, None)])
def test_a_model_of_one_form_of_multi30k_is_evaluated_with_that_form(
    folder, tmp_path, monkeypatch, trained_on, read_as
):
    seen, one = [], reporting.TestSet("a", TEXT, TEXT)
    monkeypatch.setattr(reporting, "read_test_sets", lambda **options: seen.append(options["config_name"]) or [one])
    monkeypatch.setattr(reporting, "evaluate_model", lambda *_, **options: {"sets": {}})
    own = shutil.copytree(folder, tmp_path / "own")
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    (own / "run.json").write_text(json.dumps({**record, "data": {"config": trained_on}}))
    (tmp_path / "multi30k" / "task1").mkdir(parents=True)
    command = ["evaluate", str(own), "--dataset_name", str(tmp_path / "multi30k")]
    assert main(command) == main([*command, "--dataset_config_name", "raw"]) == 0
    assert main(["evaluate", str(own), "--dataset_name", "someone/else"]) == 0
    assert seen == [read_as, "raw", None]


def test_scores_with_case_of_a_model_without_it_are_announced(folder, monkeypatch, capsys):
    one, warning = reporting.TestSet("a", TEXT, TEXT), "the model writes lower case"
    monkeypatch.setattr(reporting, "read_test_sets", lambda **options: [one])
    monkeypatch.setattr(reporting, "evaluate_model", lambda *_, **options: {"sets": {}})
    command = ["evaluate", str(folder), "--dataset_name", "x"]
    assert main(command) == 0
    assert warning not in capsys.readouterr().err
    monkeypatch.setattr(tokenization_vanilla_transformer, "writes_lower_case", lambda tokenizer: True)
    assert main(command) == 0
    assert warning in capsys.readouterr().err


@pytest.mark.parametrize("command", ["translate", "evaluate", "score"])
def test_a_model_that_is_not_whole_is_not_used(folder, tmp_path, capsys, command):
    """transformers would fill the gap with random numbers."""
    broken, text = shutil.copytree(folder, tmp_path / "broken"), write(tmp_path / "text", TEXT)
    weights, name = load_file(broken / "model.safetensors"), "model.decoder.stack.layers.0.encoder_attn.q_proj.weight"
    rest = {"translate": ["a"], "evaluate": ["--test_file", text, text], "score": [text, text]}[command]
    save_file({**weights, name: weights[name][:3].clone()}, broken / "model.safetensors", metadata={"format": "pt"})
    assert "broken: no model to load (" in complaint(capsys, [command, str(broken), *rest])
    del weights[name]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    problem = f"broken: the weights do not fit the configuration: missing keys: {name}"
    assert problem in complaint(capsys, [command, str(broken), *rest])


def test_translations_are_utf8_whatever_the_terminal_is(folder, monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(translation, "translate", lambda *_, **options: ["žluťoučký kůň"])
    assert main(["translate", str(folder), "a"]) == 0
    assert terminal.buffer.getvalue().decode("utf-8") == "žluťoučký kůň\n"


def test_options_of_translate_reach_the_search(folder, monkeypatch):
    asked = {}
    monkeypatch.setattr(translation, "translate", lambda *_, **options: asked.update(options) or ["x"])
    assert main(["translate", str(folder), "a", *SEARCH]) == 0
    assert asked.items() >= WANTED.items()
