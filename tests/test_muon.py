"""Muon and AdamW as one optimiser, against PyTorch's two used apart."""

import copy
import re

import pytest
import torch

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration, muon
from hf_vanilla_transformer.arguments import parse_arguments
from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.muon import Muon, MuonWithAdamW, matrices_of_layers, orthogonalized
from hf_vanilla_transformer.training import train
from word_reversal import corpus, exact_matches, flags

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.98), "eps": 1e-9}
OF_LAYERS = re.compile(r"\.layers\.\d+\.")


def toy_model(**overrides):
    torch.manual_seed(0)
    settings = {"vocab_size": 40, "dropout": 0.0, **overrides}
    return VanillaTransformerForConditionalGeneration(VanillaTransformerConfig.preset("test", **settings))


def no_decay(model):
    return {name for name, parameter in model.named_parameters() if parameter.ndim == 1}


def backward(model, seed):
    ids = torch.randint(4, 40, (16, 9), generator=torch.Generator().manual_seed(seed))
    model.zero_grad()
    model(input_ids=ids, labels=ids.flip(1)).loss.backward()


@pytest.mark.parametrize(
    "overrides",
    [{}, {"encoder_vocab_size": 50, "share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}],
    ids=["one table", "three tables"],
)
def test_the_matrices_are_those_of_the_layers(overrides):
    model = toy_model(position_embedding_type="learned", **overrides)
    expected = {name for name, parameter in model.named_parameters() if parameter.ndim == 2 and OF_LAYERS.search(name)}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[id(matrix)] for matrix in matrices_of_layers(model)} == expected
    assert len(expected) == 2 * (4 + 2) + 2 * (8 + 2)


def test_frozen_matrices_stay_out():
    model = toy_model()
    model.model.encoder.requires_grad_(False)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert all(names[id(matrix)].startswith("model.decoder.") for matrix in matrices_of_layers(model))
    optimizer = MuonWithAdamW(model, set(), **SETTINGS)
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert {id(parameter) for parameter in trained} == {id(p) for p in model.parameters() if p.requires_grad}


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="PyTorch's Muon came with 2.9")
@pytest.mark.parametrize("stacked", [1, 2**20], ids=["one by one", "together"])
def test_the_steps_are_those_of_both_optimisers_apart(stacked, monkeypatch):
    """Five steps with a falling learning rate; every parameter belongs to exactly one of the two."""
    monkeypatch.setattr(muon, "STACKED", stacked)
    ours, theirs = toy_model(), toy_model()
    optimizer = MuonWithAdamW(ours, no_decay(ours), **SETTINGS)
    named = dict(theirs.named_parameters())
    matrices = [p for name, p in named.items() if p.ndim == 2 and OF_LAYERS.search(name)]
    tables = [p for name, p in named.items() if p.ndim == 2 and not OF_LAYERS.search(name)]
    vectors = [p for p in named.values() if p.ndim == 1]
    adamw = {name: SETTINGS[name] for name in ("lr", "betas", "eps")}
    apart = [
        torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(tables, weight_decay=0.1, **adamw, fused=True),
        torch.optim.AdamW(vectors, weight_decay=0.0, **adamw, fused=True),
    ]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(part, 0.8) for part in (optimizer, *apart)]
    for step in range(5):
        for model in (ours, theirs):
            backward(model, step)
        for part in (optimizer, *apart):
            part.step()
        for schedule in schedules:
            schedule.step()
    start = dict(toy_model().named_parameters())
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, named[name]), name
        assert not torch.equal(parameter, start[name]), name


@pytest.mark.parametrize("shape", [(16, 16), (16, 48), (48, 16)])
def test_orthogonalized_against_the_singular_value_decomposition(shape):
    """The singular vectors stay; the singular values, here from 0.1 to 5, all come near one."""
    torch.manual_seed(0)
    left, _, right = torch.linalg.svd(torch.randn(3, *shape), full_matrices=False)
    found = orthogonalized(left * torch.linspace(5, 0.1, 16) @ right).float()
    values = left.mT @ found @ right.mT
    assert values.diagonal(dim1=1, dim2=2).sub(1).abs().max() < 0.4
    assert (values - torch.diag_embed(values.diagonal(dim1=1, dim2=2))).abs().max() < 0.1


def test_a_parameter_without_gradient_stays():
    model = toy_model()
    optimizer = MuonWithAdamW(model, no_decay(model), **SETTINGS)
    backward(model, 0)
    matrix, other = matrices_of_layers(model)[:2]
    matrix.grad = None
    before = matrix.detach().clone(), other.detach().clone()
    optimizer.step()
    assert torch.equal(matrix, before[0])
    assert not torch.equal(other, before[1])


def test_a_gradient_of_zeros_moves_nothing():
    matrix = torch.nn.Parameter(torch.ones(4, 6))
    optimizer = Muon([matrix], lr=0.1, weight_decay=0.0)
    assert not optimizer.state[matrix]  # reading it is not a momentum
    matrix.grad = torch.zeros(4, 6)
    optimizer.step()
    assert torch.equal(matrix, torch.ones(4, 6))


def test_vectors_are_refused():
    with pytest.raises(ValueError, match="matrices only"):
        Muon([torch.nn.Parameter(torch.ones(4))], lr=0.1, weight_decay=0.0)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="PyTorch's Muon came with 2.9")
def test_it_goes_on_from_pytorchs_muon():
    """Checkpoints of earlier versions hold its state."""
    torch.manual_seed(0)
    gradients = torch.randn(4, 6, 8)
    before, after = (torch.nn.Parameter(torch.ones(6, 8)) for _ in range(2))
    theirs = torch.optim.Muon([before], lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for gradient in gradients[:2]:
        before.grad = gradient.clone()
        theirs.step()
    after.data = before.detach().clone()
    ours = Muon([after], lr=1.0, weight_decay=0.0)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for gradient in gradients[2:]:
        for matrix, optimizer in ((before, theirs), (after, ours)):
            matrix.grad = gradient.clone()
            optimizer.step()
    assert torch.equal(before, after)


def test_a_step_is_as_large_as_one_of_adamw():
    """Root mean square of about 0.2 learning rates (Liu et al. 2025, section 2.2), whatever the shape of the matrix."""
    model = toy_model()
    optimizer = MuonWithAdamW(model, no_decay(model), **{**SETTINGS, "weight_decay": 0.0})
    before = [matrix.detach().clone() for matrix in matrices_of_layers(model)]
    backward(model, 0)
    optimizer.step()
    for old, new in zip(before, matrices_of_layers(model), strict=True):
        assert (new - old).square().mean().sqrt().item() == pytest.approx(0.2 * 0.01, rel=0.3)


def test_a_saved_optimizer_goes_on():
    model = toy_model()
    optimizer = MuonWithAdamW(model, no_decay(model), **SETTINGS)
    for step in range(2):
        backward(model, step)
        optimizer.step()
    other = copy.deepcopy(model)
    resumed = MuonWithAdamW(other, no_decay(other), **{**SETTINGS, "lr": 1.0})
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(2, 4):
        for either, part in ((model, optimizer), (other, resumed)):
            backward(either, step)
            part.step()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_copy_goes_on_by_itself():
    model = toy_model()
    optimizer = MuonWithAdamW(model, no_decay(model), **SETTINGS)
    backward(model, 0)
    optimizer.step()
    before = [parameter.clone() for parameter in model.parameters()]
    twin, twins_optimizer = copy.deepcopy((model, optimizer))
    backward(twin, 1)
    twins_optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
    backward(model, 1)
    optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize(
    "of",
    [lambda model: MuonWithAdamW(model, set(), **SETTINGS), lambda model: Muon(matrices_of_layers(model), 0.01, 0.1)],
)
def test_a_step_can_compute_the_loss(of):
    model, twin = toy_model(), toy_model()

    def closure():
        backward(model, 0)
        return torch.tensor(5.0)

    assert of(model).step(closure) == 5
    backward(twin, 0)
    assert of(twin).step() is None
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), twin.parameters(), strict=True))


def test_training_uses_it(tmp_path):
    """The checkpoint has a momentum for each matrix of the layers and AdamW's two moments for the rest."""
    options = {**corpus(tmp_path), "muon": True, "max_steps": 3, "save_steps": 3, "weight_decay": 0.1}
    options |= {"learning_rate": 0.01, "adam_beta1": 0.8, "adam_epsilon": 1e-7}
    output = train(parse_arguments(flags(tmp_path / "out", **options, save_strategy="steps")), exact_matches)
    saved = torch.load(output / "checkpoint-3" / "optimizer.pt", weights_only=True)
    kinds = [set(state) for state in saved["state"].values()]
    assert kinds.count({"momentum_buffer"}) == len(saved["param_groups"][0]["params"]) == 32
    assert kinds.count({"step", "exp_avg", "exp_avg_sq"}) == len(kinds) - 32
    assert [group["weight_decay"] for group in saved["param_groups"]] == [0.1, 0.1, 0.0]
    assert {group["initial_lr"] for group in saved["param_groups"]} == {0.01}
    assert {(*group["betas"], group["eps"]) for group in saved["param_groups"][1:]} == {(0.8, 0.98, 1e-7)}


def test_another_optimizer_is_refused(tmp_path):
    for option in ({"optim": "adafactor"}, {"optim_args": "a=b"}):
        with pytest.raises(UserError, match=rf"^{next(iter(option))} and muon exclude each other"):
            parse_arguments(flags(tmp_path, **corpus(tmp_path), muon=True, **option))


def test_resuming_with_another_optimizer_is_one_line(tmp_path):
    options = {**corpus(tmp_path), "max_steps": 2, "save_steps": 2, "save_strategy": "steps", "eval_strategy": "no"}
    train(parse_arguments(flags(tmp_path / "out", **options, muon=True)), exact_matches)
    options |= {"max_steps": 4, "resume_from_checkpoint": "true"}
    with pytest.raises(UserError, match=r"checkpoint-2 is another one .*: resume with the --muon and the --optim"):
        train(parse_arguments(flags(tmp_path / "out", **options)), exact_matches)


def test_matrices_alone_can_be_trained():
    model = toy_model()
    matrices = {id(matrix) for matrix in matrices_of_layers(model)}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in matrices)
    optimizer = MuonWithAdamW(model, set(), **SETTINGS)
    before = matrices_of_layers(model)[0].detach().clone()
    backward(model, 0)
    optimizer.step()
    assert len(optimizer.param_groups) == 1
    assert not torch.equal(before, matrices_of_layers(model)[0])


def test_nothing_to_train_is_one_line():
    model = toy_model()
    for matrix in matrices_of_layers(model):
        matrix.requires_grad_(False)
    with pytest.raises(UserError, match=r"^muon: no matrix of the layers is trained"):
        MuonWithAdamW(model, set(), **SETTINGS)
