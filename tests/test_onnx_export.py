"""ONNX files against the model that they were made from, on ONNX Runtime alone: numpy in, numpy out."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, GenerationConfig
from transformers.exporters import exporter_onnx
from transformers.exporters.exporter_onnx import OnnxExporter

from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.onnx_export import export_onnx
from tiny_models import BOS, EOS, PAD, SEPARATE, SOURCE, TARGET, random_model

MASK = SOURCE.ne(PAD).long()
GRAPHS = ("encoder", "prefill", "decode")
VARIANTS = {
    "joint": {"seed": 2, "lm_head_bias": True},
    "separate": {
        "seed": 4,
        **SEPARATE,
        "tie_word_embeddings": False,
        "norm_position": "pre",
        "position_embedding_type": "learned",
    },
}


class TestMistakes:
    def test_a_missing_package(self, tmp_path, monkeypatch):
        def lacking(self):
            raise ImportError("To use OnnxExporter, please install onnx.")

        monkeypatch.setattr(OnnxExporter, "validate_environment", lacking)
        monkeypatch.setattr(OnnxExporter, "save_program", None, raising=False)
        with pytest.raises(UserError, match=r"please install onnx. Or: pip install 'hf-vanilla-transformer\[onnx\]'"):
            export_onnx(random_model(), tmp_path)

    def test_an_old_transformers(self, tmp_path, monkeypatch):
        class OldExporter:
            pass

        monkeypatch.setattr(exporter_onnx, "OnnxExporter", OldExporter)
        with pytest.raises(UserError, match=r"exporting to ONNX needs transformers 5.23 or newer: this is 5\.\d"):
            export_onnx(random_model(), tmp_path)


class Sessions:
    """The three graphs as functions from named arrays to named arrays."""

    def __init__(self, folder):
        runtime = pytest.importorskip("onnxruntime", reason="needs the extra `onnx`")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = 1
        self.sessions = {name: runtime.InferenceSession(folder / f"{name}.onnx", options) for name in GRAPHS}

    def run(self, graph, **inputs):
        session = self.sessions[graph]
        assert {node.name for node in session.get_inputs()} == set(inputs)
        names = [node.name for node in session.get_outputs()]
        return dict(zip(names, session.run(None, inputs), strict=True))

    def steps(self, source):
        """Generator: send the next token of each sentence, (B, 1), get logits (B, V)."""
        mask = (source != PAD).astype(np.int64)
        memory = self.run("encoder", input_ids=source, attention_mask=mask)["last_hidden_state"]
        common = {"attention_mask": mask, "encoder_outputs.last_hidden_state": memory}
        outputs = self.run("prefill", decoder_input_ids=(yield), **common)
        while True:
            cache = {
                f"input.{name.removeprefix('output.')}": array
                for name, array in outputs.items()
                if "past_key_values" in name
            }
            outputs = self.run("decode", decoder_input_ids=(yield outputs["logits"][:, 0]), **common, **cache)

    def greedy(self, source, max_length):
        """As `generate()` does it: finished sentences are padded, and it ends when all are finished."""
        step = self.steps(source)
        next(step)
        sequences = np.full((len(source), 1), BOS)
        finished = np.zeros(len(source), dtype=bool)
        while sequences.shape[1] < max_length and not finished.all():
            best = step.send(sequences[:, -1:]).argmax(-1)
            sequences = np.column_stack([sequences, np.where(finished, PAD, best)])
            finished |= best == EOS
        return sequences


@pytest.fixture(scope="module", params=VARIANTS)
def exported(request, tmp_path_factory):
    """A model whose settings must not become part of a graph, and the folder of its graphs."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason="needs the extra `onnx`")
    if not hasattr(OnnxExporter, "save_program"):
        pytest.skip("needs a newer transformers")
    model = random_model(**VARIANTS[request.param], dropout=0.5)
    if model.lm_head.bias is not None:
        model.lm_head.bias.data[EOS] += 5  # some sentences should end early
    model.generation_config.update(num_beams=3, length_penalty=0.6, early_stopping=True, use_cache=False)
    settings = model.generation_config.to_dict()
    folder = tmp_path_factory.mktemp("onnx") / "new"
    assert export_onnx(model.train(), folder) == folder
    assert model.training
    assert model.generation_config.to_dict() == settings
    return model.eval(), folder


@pytest.mark.slow
class TestGraphs:
    def test_files(self, exported):
        model, folder = exported
        graphs = [f"{name}.onnx{suffix}" for name in GRAPHS for suffix in ("", ".data")]
        files = [*graphs, "config.json", "export.json", "generation_config.json"]
        assert {path.name for path in folder.iterdir()} == set(files)
        assert AutoConfig.from_pretrained(folder).encoder_vocab_size == model.config.encoder_vocab_size
        assert GenerationConfig.from_pretrained(folder).num_beams == 3
        assert set(json.loads((folder / "export.json").read_text())["components"]) == set(GRAPHS)

    def test_no_folder_of_this_machine(self, exported):
        here = str(Path(export_onnx.__code__.co_filename).parent).encode()
        for path in exported[1].iterdir():
            assert here not in path.read_bytes(), path.name
            assert not re.search(rb"modeling_vanilla_transformer\.py", path.read_bytes()), path.name

    @torch.no_grad()
    def test_encoder(self, exported):
        model, folder = exported
        sessions = Sessions(folder)
        for source in (SOURCE, SOURCE[1:2, :3], torch.randint(4, 20, (2, 64)), torch.tensor([[5]])):
            mask = source.ne(PAD).long()
            ours = sessions.run("encoder", input_ids=source.numpy(), attention_mask=mask.numpy())
            expected = model.get_encoder()(source, attention_mask=mask).last_hidden_state
            np.testing.assert_allclose(ours["last_hidden_state"], expected, atol=1e-4)

    @torch.no_grad()
    def test_decoder_steps(self, exported):
        model, folder = exported
        step = Sessions(folder).steps(SOURCE.numpy())
        next(step)
        expected = model(SOURCE, attention_mask=MASK, decoder_input_ids=TARGET).logits
        for position in range(TARGET.shape[1]):
            logits = step.send(TARGET[:, position : position + 1].numpy())
            np.testing.assert_allclose(logits, expected[:, position], atol=1e-4)

    def test_greedy_search(self, exported):
        model, folder = exported
        sessions = Sessions(folder)
        torch.manual_seed(3)
        sources = (SOURCE, SOURCE[1:2, :3], torch.randint(4, 20, (7, 20)))
        found = set()
        for source in sources:
            expected = model.generate(
                source, max_length=30, num_beams=1, early_stopping=False, length_penalty=1.0, use_cache=True
            )
            sequences = sessions.greedy(source.numpy(), max_length=30)
            assert sequences.tolist() == expected.tolist()
            found |= {tuple(row) for row in sequences.tolist()}
        assert len(found) > 3
        assert {EOS in row for row in found} == {False, True}

    def test_beyond_the_table_of_positions(self, exported):
        """An error, not a wrong translation."""
        source = np.full((1, 65), 5)
        with pytest.raises(Exception, match="indices element out of data bounds"):
            Sessions(exported[1]).run("encoder", input_ids=source, attention_mask=np.ones_like(source))

    def test_the_runner_of_transformers(self, exported):
        from transformers.exporters.base import ExportedModel

        model, folder = exported
        runners = ExportedModel.from_pretrained(folder).runners
        memory = runners["encoder"](input_ids=SOURCE, attention_mask=MASK)
        common = {"encoder_outputs": memory, "attention_mask": MASK}
        output = runners["prefill"](decoder_input_ids=TARGET[:, :1], **common)
        output = runners["decode"](decoder_input_ids=TARGET[:, 1:2], past_key_values=output.past_key_values, **common)
        expected = model(SOURCE, attention_mask=MASK, decoder_input_ids=TARGET).logits
        torch.testing.assert_close(output.logits[:, 0], expected[:, 1], atol=1e-4, rtol=1e-4)
