"""Publishing to a Hub on the loopback interface: what arrives loads where this package is not installed."""

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import hf_vanilla_transformer
from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.card import NOT_EVALUATED
from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.publishing import export_folder, publish
from hf_vanilla_transformer.tokenization_vanilla_transformer import (
    SeparateVocabularyTokenizer,
    joint_tokenizer,
    learn_backend,
    load_tokenizer,
)
from hub_server import loopback_hub

REPO = "user/tiny-en-de"
SOURCE = ["a man rides a horse .", "two women walk in the park .", "a dog runs ."]
TARGET = ["ein mann reitet ein pferd .", "zwei frauen gehen im park .", "ein hund rennt ."]
MODEL_CODE = {
    f"{name}.py"
    for name in (
        "attention",
        "attention_backends",
        "autocast",
        "cpu_attention",
        "configuration_vanilla_transformer",
        "embeddings",
        "errors",
        "layers",
        "loss",
        "modeling_vanilla_transformer",
        "pipeline_vanilla_transformer",
        "beam_search",
        "dropout",
        "length_penalty",
        "transformer",
    )
}
TOKENIZER_CODE = {"errors.py", "tokenization_vanilla_transformer.py"}
DATA = {
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer_config.json",
}
# For a process of its own: this package cannot be imported there, and memory that nobody filled is NaN.
WITHOUT_PACKAGE = """
import sys
import torch

class Blocker:
    def find_spec(self, name, *_):
        if name.split(".")[0] == "hf_vanilla_transformer":
            raise ImportError("not installed here")

sys.meta_path.insert(0, Blocker())
torch.use_deterministic_algorithms(True)
torch.set_num_threads(1)
"""
USE_ALL_CLASSES = """
import contextlib, io, json
from transformers import AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer

found = {}
for name, usage in usages.items():
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(usage, {})
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
    model = AutoModelForSeq2SeqLM.from_pretrained(name, trust_remote_code=True)
    base = AutoModel.from_pretrained(name, trust_remote_code=True)
    model.save_pretrained("saved")
    again = AutoModelForSeq2SeqLM.from_pretrained("saved", trust_remote_code=True)
    batch = tokenizer(source, text_target=target, padding=True, return_tensors="pt")
    labels = batch.pop("labels")
    found[name] = {
        "saved": sorted(again.config.to_dict().keys() & {"auto_map", "custom_pipelines"}),
        "usage": printed.getvalue(),
        "input_ids": batch["input_ids"].tolist(),
        "labels": labels.tolist(),
        "logits": model(**batch, labels=labels).logits.tolist(),
        "greedy": model.generate(**batch, num_beams=1, length_penalty=1.0).tolist(),
        "beam": model.generate(**batch).tolist(),
        "modules": [type(part).__module__ for part in (model, base)],
        "base": type(base).__name__,
    }
print(json.dumps(found))
"""
WITH_PACKAGE = """
from transformers import AutoModelForSeq2SeqLM
from hf_vanilla_transformer.publishing import UserError, publish

exec(usage)
print(type(model).__module__)
try:
    publish(folder, "user/not-logged-in")
except UserError as error:
    print(error)
"""


def make_folder(folder, run_record, evaluation_record, separate=False):
    """What a training run leaves behind, with random weights."""
    if separate:
        files = [folder / "source_tokenizer.json", folder / "target_tokenizer.json"]
        for file, texts, size in zip(files, (SOURCE, TARGET), (40, 50), strict=True):
            learn_backend(texts, vocab_size=size).save(str(file))
        tokenizer = SeparateVocabularyTokenizer(*map(str, files))
        sizes = {"vocab_size": tokenizer.target_vocab_size, "encoder_vocab_size": len(tokenizer)}
        sizes["share_encoder_decoder_embeddings"] = False
    else:
        tokenizer = joint_tokenizer(learn_backend(SOURCE + TARGET, vocab_size=60))
        sizes = {"vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    config = VanillaTransformerConfig.preset("test", **sizes)
    model = VanillaTransformerForConditionalGeneration(config)
    model.generation_config.update(max_length=12, num_beams=2, length_penalty=0.6)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "run.json").write_text(json.dumps(run_record))
    (folder / "evaluation.json").write_text(json.dumps(evaluation_record))
    (folder / "optimizer.pt").write_bytes(b"state")
    (folder / "training_args.bin").write_bytes(b"arguments")
    shutil.copytree(folder, folder / "checkpoint-10")
    return folder


@pytest.fixture(scope="module")
def joint_folder(tmp_path_factory, run_record, evaluation_record):
    return make_folder(tmp_path_factory.mktemp("joint"), run_record, evaluation_record)


@pytest.fixture(scope="module")
def separate_folder(tmp_path_factory, run_record, evaluation_record):
    return make_folder(tmp_path_factory.mktemp("separate"), run_record, evaluation_record, separate=True)


@pytest.fixture(scope="module", params=["joint", "separate"])
def either_folder(request):
    return request.getfixturevalue(f"{request.param}_folder")


@pytest.fixture
def folder(joint_folder, tmp_path):
    """A copy that a test may damage."""
    return Path(shutil.copytree(joint_folder, tmp_path / "run"))


@pytest.fixture(scope="module")
def server():
    with loopback_hub() as hub:
        yield hub


@pytest.fixture
def hub(server):
    """An empty Hub: stopping a server takes half a second, emptying it nothing."""
    server.repositories.clear()
    server.requests.clear()
    return server


def push(folder, hub, repo_id=REPO, **options):
    return publish(folder, repo_id, token=hub.token, endpoint=hub.endpoint, **options)


def rewrite(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def run_python(code, tmp_path, hub, **environment):
    """What `code` prints in a new process that knows no Hub but `hub` and has an empty cache."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING", "PYTHON"))}
    process = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **inherited,
            "NO_PROXY": "127.0.0.1",
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(tmp_path / "home"),
            **environment,
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.fixture(scope="module")
def exported(either_folder, tmp_path_factory):
    return export_folder(either_folder, tmp_path_factory.mktemp("exported"), repo_id=REPO)


class TestExport:
    def test_folder_holds_what_is_needed_and_nothing_else(self, either_folder, exported):
        separate = (either_folder / "target_tokenizer.json").exists()
        vocabularies = {"source_tokenizer.json", "target_tokenizer.json"} if separate else {"tokenizer.json"}
        code = MODEL_CODE | TOKENIZER_CODE if separate else MODEL_CODE
        assert {path.name for path in exported.iterdir()} == code | DATA | vocabularies

    def test_auto_map_names_all_auto_classes(self, either_folder, exported):
        modeling = "modeling_vanilla_transformer"
        assert json.loads((exported / "config.json").read_text())["auto_map"] == {
            "AutoConfig": "configuration_vanilla_transformer.VanillaTransformerConfig",
            "AutoModel": f"{modeling}.VanillaTransformerModel",
            "AutoModelForSeq2SeqLM": f"{modeling}.VanillaTransformerForConditionalGeneration",
        }
        tokenizer_map = json.loads((exported / "tokenizer_config.json").read_text()).get("auto_map")
        if (either_folder / "target_tokenizer.json").exists():
            assert "SeparateVocabularyTokenizer" in str(tokenizer_map["AutoTokenizer"])
        else:
            assert tokenizer_map is None

    def test_weights_tokenizer_and_generation_settings_are_those_of_the_run(self, either_folder, exported):
        before, after = load_file(either_folder / "model.safetensors"), load_file(exported / "model.safetensors")
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        for path in [either_folder / "generation_config.json", *either_folder.glob("*tokenizer.json")]:
            assert (exported / path.name).read_text() == path.read_text()

    def test_card_speaks_of_this_run(self, either_folder, exported):
        parameters = VanillaTransformerForConditionalGeneration.from_pretrained(either_folder).num_parameters()
        card = (exported / "README.md").read_text()
        assert f"| Parameters | {parameters:,} |" in card
        assert all(words in card for words in (REPO, "| Steps | 12,000 |", "| 41.23 |", "`length_penalty=0.6`"))

    @pytest.mark.parametrize("fails", [False, True], ids=["after success", "after failure"])
    def test_checkpoints_saved_later_carry_no_code(self, joint_folder, tmp_path, fails, monkeypatch):
        if fails:
            monkeypatch.setattr(
                VanillaTransformerConfig,
                "to_json_file",
                lambda *_, **__: (_ for _ in ()).throw(OSError("full")),
            )
            with pytest.raises(OSError, match="full"):
                export_folder(joint_folder, tmp_path / "hub", repo_id=REPO)
            monkeypatch.undo()
        else:
            export_folder(joint_folder, tmp_path / "hub", repo_id=REPO)
        model = VanillaTransformerForConditionalGeneration.from_pretrained(joint_folder)
        model.save_pretrained(tmp_path / "later")
        assert not list((tmp_path / "later").glob("*.py"))
        assert "auto_map" not in json.loads((tmp_path / "later" / "config.json").read_text())

    def test_a_checkpoint_of_a_published_model_names_no_code_that_is_not_there(self, exported, tmp_path):
        for cls in (AutoModelForSeq2SeqLM, AutoTokenizer):
            cls.from_pretrained(exported).save_pretrained(tmp_path / "later")
        assert not list((tmp_path / "later").glob("*.py"))
        for name in ("config.json", "tokenizer_config.json"):
            saved = json.loads((tmp_path / "later" / name).read_text())
            assert saved.keys().isdisjoint({"auto_map", "custom_pipelines"}), name

    @pytest.mark.parametrize(
        ("damage", "named"),
        [
            (lambda model: model.get_output_embeddings().weight.data.zero_(), "weight"),
            (lambda model: setattr(model.config, "label_smoothing", 0.5), r"config\.json"),
        ],
    )
    def test_what_was_written_is_read_back(self, joint_folder, tmp_path, monkeypatch, damage, named):
        save = VanillaTransformerForConditionalGeneration.save_pretrained

        def save_another(model, output):
            other = copy.deepcopy(model)
            damage(other)
            save(other, output)

        monkeypatch.setattr(VanillaTransformerForConditionalGeneration, "save_pretrained", save_another)
        with pytest.raises(RuntimeError, match=rf"does not hold the model that was saved there: .*{named}"):
            export_folder(joint_folder, tmp_path / "hub", repo_id=REPO)

    def test_the_same_run_gives_the_same_files(self, joint_folder, tmp_path):
        once = export_folder(joint_folder, tmp_path / "once", repo_id=REPO)
        twice = export_folder(joint_folder, tmp_path / "twice", repo_id=REPO)
        assert {p.name: p.read_bytes() for p in once.iterdir()} == {p.name: p.read_bytes() for p in twice.iterdir()}

    def test_a_folder_without_scores_has_a_card_that_says_so(self, folder, tmp_path):
        (folder / "evaluation.json").unlink()
        output = export_folder(folder, tmp_path / "hub", repo_id=REPO)
        assert NOT_EVALUATED in (output / "README.md").read_text()

    def test_used_output_folder(self, joint_folder, tmp_path):
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(UserError, match=r"is not an empty folder: name a new one"):
            export_folder(joint_folder, tmp_path, repo_id=REPO)

    @pytest.mark.parametrize("repo_id", ["name", "a/b/c", "user/", "user/na me", "user/na--me", ""])
    def test_bad_repository_name(self, joint_folder, tmp_path, repo_id):
        with pytest.raises(UserError, match=f"bad repository name '{repo_id}': write it as 'user/name'"):
            export_folder(joint_folder, tmp_path / "hub", repo_id=repo_id)


class TestUnpublishableFolders:
    def test_no_model(self, tmp_path):
        with pytest.raises(UserError, match=r"nowhere/config.json: is missing: name the output folder of"):
            export_folder(tmp_path / "nowhere", tmp_path / "hub", repo_id=REPO)

    def test_another_model(self, folder, tmp_path):
        rewrite(folder / "config.json", lambda config: config.update(model_type="marian"))
        with pytest.raises(UserError, match=r"config.json: model_type is 'marian', not 'vanilla_transformer'"):
            export_folder(folder, tmp_path / "hub", repo_id=REPO)

    @pytest.mark.parametrize("name", [*sorted(DATA - {"README.md", "model.safetensors"}), "run.json"])
    def test_missing_file(self, folder, tmp_path, name):
        (folder / name).unlink()
        with pytest.raises(UserError, match=rf"/{name}: is missing: name the output folder"):
            export_folder(folder, tmp_path / "hub", repo_id=REPO)
        assert not (tmp_path / "hub").exists()

    def test_missing_weights(self, folder, tmp_path):
        (folder / "model.safetensors").unlink()
        with pytest.raises(UserError, match=r"model.safetensors: is missing: name the output folder"):
            export_folder(folder, tmp_path / "hub", repo_id=REPO)

    def test_missing_target_vocabulary(self, separate_folder, tmp_path):
        folder = shutil.copytree(separate_folder, tmp_path / "run")
        (folder / "target_tokenizer.json").unlink()
        with pytest.raises(UserError, match=r"target_tokenizer.json: is missing"):
            export_folder(folder, tmp_path / "hub", repo_id=REPO)

    @pytest.mark.parametrize(
        ("kind", "name", "field"),
        [
            ("joint", "tokenizer.json", "vocab_size=60"),
            ("separate", "source_tokenizer.json", r"encoder_vocab_size=\d+"),
            ("separate", "target_tokenizer.json", r"vocab_size=\d+"),
        ],
    )
    def test_tokenizer_of_another_model(self, request, tmp_path, kind, name, field):
        folder = shutil.copytree(request.getfixturevalue(f"{kind}_folder"), tmp_path / "run")
        learn_backend(["other words"], tokenizer_type="byte-level", vocab_size=300).save(str(folder / name))
        message = rf"/run: the tokenizer does not fit the model: \d+ tokens, but {field}: put the tokenizer there"
        with pytest.raises(UserError, match=message):
            export_folder(folder, tmp_path / "hub", repo_id=REPO)

    @pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "run.json", "evaluation.json"])
    def test_damaged_file(self, folder, tmp_path, name):
        (folder / name).write_text('{"seed": ')
        with pytest.raises(UserError, match=rf"/{name}: is not valid JSON \(.*\): restore the file or train again"):
            export_folder(folder, tmp_path / "hub", repo_id=REPO)

    def test_record_of_another_kind(self, folder, tmp_path):
        (folder / "run.json").write_text("[]")
        with pytest.raises(UserError, match=r"run.json: holds no JSON object: restore the file or train again"):
            export_folder(folder, tmp_path / "hub", repo_id=REPO)

    def test_damaged_weights(self, folder, tmp_path):
        (folder / "model.safetensors").write_bytes(b"not a safetensors file")
        with pytest.raises(UserError, match=r"the weights cannot be read \(.+\)"):
            export_folder(folder, tmp_path / "hub", repo_id=REPO)

    @pytest.mark.parametrize(
        ("problem", "change"),
        [
            ("missing keys", lambda weights, name: weights.pop(name)),
            ("unexpected keys", lambda weights, name: weights.update(stray=torch.zeros(1))),
            ("mismatched keys", lambda weights, name: weights.update({name: weights[name][:1].clone()})),
        ],
    )
    def test_weights_of_another_shape(self, folder, tmp_path, problem, change):
        weights = load_file(folder / "model.safetensors")
        change(weights, next(name for name in weights if name.endswith("fc1.weight")))
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UserError, match=f"the weights do not fit the configuration: {problem}: "):
            export_folder(folder, tmp_path / "hub", repo_id=REPO)


class TestPublish:
    def test_everything_arrives(self, joint_folder, hub):
        assert push(joint_folder, hub, commit_message="First model") == f"{hub.endpoint}/{REPO}"
        repository = hub.repositories[REPO]
        assert repository.files.keys() == MODEL_CODE | DATA | {"tokenizer.json"}
        assert repository.files["model.safetensors"][8:9] == b"{"
        assert (repository.commits, repository.private) == (["First model"], False)

    def test_private(self, joint_folder, hub):
        push(joint_folder, hub, private=True)
        assert hub.repositories[REPO].private
        assert HfApi(endpoint=hub.endpoint, token=False).repo_exists(REPO) is False
        push(joint_folder, hub, private=True)

    def test_what_is_public_is_not_taken_for_private(self, joint_folder, hub):
        push(joint_folder, hub)
        commits = list(hub.repositories[REPO].commits)
        with pytest.raises(UserError, match=f"{REPO} is there already and public: hide it on the Hub first, or leave"):
            push(joint_folder, hub, private=True)
        assert hub.repositories[REPO].commits == commits

    def test_again_without_a_change_commits_nothing(self, joint_folder, hub):
        push(joint_folder, hub)
        push(joint_folder, hub)
        assert len(hub.repositories[REPO].commits) == 1

    def test_again_with_new_scores_updates_the_card(self, folder, hub):
        scores = (folder / "evaluation.json").read_text()
        (folder / "evaluation.json").unlink()
        push(folder, hub)
        before = dict(hub.repositories[REPO].files)
        (folder / "evaluation.json").write_text(scores)
        push(folder, hub, license="mit")
        after = hub.repositories[REPO].files
        assert {name for name in after if before.get(name) != after[name]} == {"README.md"}
        assert "41.23" in after["README.md"].decode()

    def test_bad_repository_name(self, joint_folder, hub):
        with pytest.raises(UserError, match="bad repository name 'tiny': write it as 'user/name'"):
            publish(joint_folder, "tiny", token=hub.token, endpoint=hub.endpoint)
        assert hub.requests == []

    def test_folder_that_is_no_model(self, tmp_path, hub):
        with pytest.raises(UserError, match=r"config.json: is missing"):
            push(tmp_path, hub)
        assert hub.requests == []

    def test_token_that_the_hub_does_not_know(self, joint_folder, hub):
        with pytest.raises(UserError, match=rf"the Hub refuses {REPO} \(401\): it does not accept the token: run"):
            publish(joint_folder, REPO, token="hf_other", endpoint=hub.endpoint)
        assert hub.repositories == {}

    def test_name_of_somebody_else(self, joint_folder, hub):
        with pytest.raises(UserError, match=r"the Hub refuses other/tiny \(403\): the token may not write there"):
            publish(joint_folder, "other/tiny", token=hub.token, endpoint=hub.endpoint)
        assert hub.repositories == {}

    def test_card_that_the_hub_does_not_take(self, joint_folder, hub):
        with pytest.raises(
            UserError, match=rf"the Hub refuses the card of {REPO}: .*license.* must be one of"
        ) as caught:
            push(joint_folder, hub, license="mine")
        assert "\n" not in str(caught.value)
        assert hub.repositories[REPO].files == {}

    def test_hub_out_of_reach(self, joint_folder):
        with loopback_hub() as gone:
            pass
        with pytest.raises(UserError, match=rf"cannot reach the Hub at {gone.endpoint} \(.+\): check the network"):
            push(joint_folder, gone)


def usages(hub, repo_id):
    """The Python examples of a card."""
    card = hub.repositories[repo_id].files["README.md"].decode()
    return re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)


@pytest.fixture(scope="module")
def elsewhere(server, joint_folder, separate_folder, tmp_path_factory):
    """What one process without this package found out about both kinds of models."""
    folders = {"user/joint": joint_folder, "user/separate": separate_folder}
    for repo_id, folder in folders.items():
        push(folder, server, repo_id)
    given = {repo_id: usages(server, repo_id)[1] for repo_id in folders}
    code = f"{WITHOUT_PACKAGE}\nusages, source, target = {given!r}, {SOURCE!r}, {TARGET!r}\n{USE_ALL_CLASSES}"
    return json.loads(run_python(code, tmp_path_factory.mktemp("elsewhere"), server))


@pytest.mark.parametrize("kind", ["joint", "separate"])
class TestLoadingWithoutThePackage:
    @pytest.fixture
    def there(self, elsewhere, kind):
        return elsewhere[f"user/{kind}"]

    @pytest.fixture
    def here(self, request, kind):
        folder = request.getfixturevalue(f"{kind}_folder")
        return VanillaTransformerForConditionalGeneration.from_pretrained(folder), load_tokenizer(folder)

    def test_same_tokens_and_logits(self, there, here):
        model, tokenizer = here
        batch = tokenizer(SOURCE, text_target=TARGET, padding=True, return_tensors="pt")
        labels = batch.pop("labels")
        assert there["input_ids"] == batch["input_ids"].tolist()
        assert there["labels"] == labels.tolist()
        logits = model(**batch, labels=labels).logits
        torch.testing.assert_close(torch.tensor(there["logits"]), logits, rtol=0, atol=1e-5)

    def test_same_translations(self, there, here):
        model, tokenizer = here
        batch = tokenizer(SOURCE, padding=True, return_tensors="pt")
        assert there["greedy"] == model.generate(**batch, num_beams=1, length_penalty=1.0).tolist()
        assert there["beam"] == model.generate(**batch).tolist()

    def test_classes_come_from_the_hub(self, there, kind):
        assert there["base"] == "VanillaTransformerModel"
        assert all(re.match(rf"transformers_modules\..*{kind}.*\.modeling", module) for module in there["modules"])

    def test_a_model_saved_there_names_no_pipeline_that_is_not_there(self, there):
        assert there["saved"] == ["auto_map"]

    def test_usage_of_the_card_runs_as_it_stands(self, there, here):
        model, tokenizer = here
        batch = tokenizer(["Put your en sentence here."], return_tensors="pt")
        generated = tokenizer.batch_decode(model.generate(**batch), skip_special_tokens=True)
        assert there["usage"] == f"{generated}\n"


def test_with_the_package_but_without_a_login(joint_folder, hub, tmp_path):
    """One process for both: the card's last example takes no code from the Hub; publishing asks for a login."""
    push(joint_folder, hub)
    hub.requests.clear()
    code = f"usage, folder = {usages(hub, REPO)[2]!r}, {str(joint_folder)!r}\n{WITH_PACKAGE}"
    source = str(Path(hf_vanilla_transformer.__file__).parents[1])
    printed = run_python(code, tmp_path, hub, PYTHONPATH=source)
    assert printed.splitlines() == [
        "hf_vanilla_transformer.modeling_vanilla_transformer",
        "not logged in to the Hub: run `hf auth login` or set HF_TOKEN",
    ]
    assert any("model.safetensors" in request for request in hub.requests)
    assert not any(request.endswith(".py") or "api/repos" in request for request in hub.requests)
