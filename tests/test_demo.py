"""`demo`: every step of the first minute, small; and, slowly, what the README says of it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hf_vanilla_transformer.demo import SETTINGS, run_demo
from hf_vanilla_transformer.errors import UserError

README = Path(__file__).resolve().parents[1] / "README.md"
SMALL = ["--preset", "test", "--num_train_epochs", "1", "--generation_max_length", "12", "--vocab_size", "500"]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "demo"
    settings = [*SETTINGS, *SMALL, "--config_overrides", "dropout=0.0"]
    for _ in range(2):  # the second one replaces the first
        scores = run_demo(folder, train_pairs=300, settings=settings)
    return folder, scores


def test_it_leaves_what_it_promises(demo):
    folder, scores = demo
    assert set(scores) == {"model", "cross-attention", "positions"}
    pictures = {path.name for path in (folder / "pictures").iterdir()}
    assert pictures == {"learning_curve.png", "learning_rate.png", "positions.png", "cross_attention.png"}
    model = {path.name for path in (folder / "model").iterdir()}
    assert {"model.safetensors", "tokenizer.json", "README.md", "modeling_vanilla_transformer.py"} <= model
    assert "user/vanilla-transformer-demo" in (folder / "model" / "README.md").read_text(encoding="utf-8")


def test_the_ten_lines_of_the_readme_run_on_its_folder(demo):
    folder, _ = demo
    [code] = re.findall(r"```python\n(.*?runs/demo/model.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    code = code.replace('"runs/demo/model"', repr(str(folder / "model")))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2


@pytest.mark.parametrize("name", ["corpus", "training", "model", "pictures"])
def test_what_no_demo_has_left_is_not_deleted(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "mine.txt").touch()
    with pytest.raises(UserError, match=f"{name} is not of an earlier demo: choose another --output_dir"):
        run_demo(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name / "mine.txt").exists()


@pytest.mark.slow
def test_the_demo_translates_and_its_crippled_models_do_not(tmp_path):
    scores = run_demo(tmp_path / "demo")
    assert scores["model"] >= 90
    assert scores["cross-attention"] < 10
    assert scores["positions"] < 70
