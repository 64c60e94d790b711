"""torch.compile: one graph without breaks, few of them, and the numbers of the uncompiled model.

Graph breaks and recompilations do not depend on what compiles the graphs, so the tests take the cheapest backend.
"""

import shutil

import pytest
import torch
from transformers.cache_utils import EncoderDecoderCache, StaticCache

from tiny_models import LABELS, PAD, SEPARATE, SOURCE, TARGET, losses, random_model, trained

MASK = SOURCE.ne(PAD).long()
VARIANTS = {
    "as in the paper": {},
    "separate vocabularies": SEPARATE,
    "pre-norm": {"norm_position": "pre", "lm_head_bias": True},
    "learned positions": {"position_embedding_type": "learned"},
}
slow = pytest.mark.slow
inductor = pytest.param(
    "inductor",
    marks=[slow, pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")],
)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


class Graphs:
    """A backend that runs what it is given and counts it."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, inputs):
        self.count += 1
        return graph


def check_training_step(model, backend):
    model.train()
    expected = model(SOURCE, attention_mask=MASK, labels=LABELS).loss
    expected.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    loss = torch.compile(model, backend=backend, fullgraph=True)(SOURCE, attention_mask=MASK, labels=LABELS).loss
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-5, rtol=1e-4)


class TestTraining:
    @pytest.mark.parametrize("name", [n if n == "pre-norm" else pytest.param(n, marks=slow) for n in VARIANTS])
    @pytest.mark.parametrize("attn_implementation", ["sdpa", pytest.param("eager", marks=slow)])
    def test_a_step(self, attn_implementation, name):
        model = random_model(**VARIANTS[name])
        model.set_attn_implementation(attn_implementation)
        check_training_step(model, "aot_eager")

    @slow
    @pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated")
    def test_a_step_with_recomputed_activations(self):
        model = random_model()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        check_training_step(model, "aot_eager")

    @pytest.mark.parametrize("backend", [inductor])
    def test_a_step_in_machine_code(self, backend):
        check_training_step(random_model(), backend)

    @slow
    def test_batches_of_all_shapes_share_two_graphs(self):
        """The first shape is taken as it is, the second makes a graph for any shape."""
        model, graphs = random_model().train(), Graphs()
        compiled = torch.compile(model, backend=graphs, fullgraph=True)
        for rows, length in ((3, 6), (4, 7), (5, 9), (2, 8), (6, 5)):
            source = torch.randint(4, 20, (rows, length))
            labels = torch.randint(4, 20, (rows, length + 3))
            loss = compiled(source, attention_mask=torch.ones_like(source), labels=labels).loss
            torch.testing.assert_close(loss, model(source, labels=labels).loss)
        assert graphs.count == 2


@slow
def test_the_trainer_compiles(tmp_path):
    """`TrainingArguments(torch_compile=True)`: the curve of the uncompiled model."""
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    curves = [losses(trained(random_model(), tmp_path, **options)) for options in ({}, compiled)]
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)


def static_cache(model, length):
    pair = (StaticCache(config=model.config, max_cache_len=size) for size in (length, SOURCE.shape[1]))
    return EncoderDecoderCache(*pair)


class TestGeneration:
    @torch.no_grad()
    def test_one_graph_for_every_position(self):
        """As `_can_compile_fullgraph` promises."""
        model, graphs = random_model(), Graphs()
        memory = model.get_encoder()(SOURCE)
        expected = model(encoder_outputs=memory, attention_mask=MASK, decoder_input_ids=TARGET).logits
        options = {"encoder_outputs": memory, "attention_mask": MASK, "past_key_values": static_cache(model, 12)}
        model(decoder_input_ids=TARGET[:, :1], **options)  # the first step fills the cross-attention cache
        step = torch.compile(model, fullgraph=True, backend=graphs)
        for position in range(1, TARGET.shape[1]):
            logits = step(decoder_input_ids=TARGET[:, position : position + 1], **options).logits
            torch.testing.assert_close(logits[:, 0], expected[:, position], atol=1e-5, rtol=1e-4)
        assert graphs.count == 1

    @slow
    @pytest.mark.parametrize("backend", [None, inductor])
    @pytest.mark.parametrize("num_beams", [1, 3])
    def test_generate_with_a_compiled_forward(self, num_beams, backend):
        """One graph fills the caches, one takes a step; a longer translation needs no third."""
        model, graphs = random_model(seed=3), Graphs()
        options = {"cache_implementation": "static", "num_beams": num_beams, "do_sample": False}
        lengths = (8, 14)
        expected = [model.generate(SOURCE, max_length=length, **options).tolist() for length in lengths]
        assert len({tuple(row) for row in expected[-1]}) > 1
        model.forward = torch.compile(model.forward, fullgraph=True, backend=backend or graphs)
        assert [model.generate(SOURCE, max_length=length, **options).tolist() for length in lengths] == expected
        if backend is None:
            assert graphs.count == 2
