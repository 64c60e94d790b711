"""The stacks against `torch.nn.TransformerEncoder` and `torch.nn.TransformerDecoder` with the same weights."""

import pytest
import torch
from torch import nn

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerModel
from hf_vanilla_transformer.embeddings import sinusoid_table
from hf_vanilla_transformer.layers import AddAndNorm, FeedForward

D, HEADS, PAD = 32, 4, 1


def torch_parameters(attention=None, feed_forward=None, norms=(), cross=None):
    """What `torch.nn`'s layers call the parameters of ours."""
    named = {}
    for name, ours in (("self_attn", attention), ("multihead_attn", cross)):
        if ours is not None:
            projections = (ours.q_proj, ours.k_proj, ours.v_proj)
            named[f"{name}.in_proj_weight"] = [p.weight for p in projections]
            named[f"{name}.in_proj_bias"] = [p.bias for p in projections]
            named[f"{name}.out_proj.weight"] = [ours.out_proj.weight]
            named[f"{name}.out_proj.bias"] = [ours.out_proj.bias]
    for name, linear in (("linear1", feed_forward.fc1), ("linear2", feed_forward.fc2)):
        named |= {f"{name}.weight": [linear.weight], f"{name}.bias": [linear.bias]}
    for index, norm in enumerate(norms, 1):
        named |= {f"norm{index}.weight": [norm.weight], f"norm{index}.bias": [norm.bias]}
    return named


def pairs_of_parameters(model, reference_encoder, reference_decoder):
    """(reference parameter, our parameters that it consists of) for every parameter of the reference."""
    for ours, reference in zip(model.encoder.stack.layers, reference_encoder.layers, strict=True):
        norms = [ours.self_attn_add_norm.norm, ours.feed_forward_add_norm.norm]
        named = torch_parameters(ours.self_attn, ours.feed_forward, norms)
        yield from ((parameter, named[name]) for name, parameter in reference.named_parameters())
    for ours, reference in zip(model.decoder.stack.layers, reference_decoder.layers, strict=True):
        norms = [ours.self_attn_add_norm.norm, ours.encoder_attn_add_norm.norm, ours.feed_forward_add_norm.norm]
        named = torch_parameters(ours.self_attn, ours.feed_forward, norms, cross=ours.encoder_attn)
        yield from ((parameter, named[name]) for name, parameter in reference.named_parameters())
    for stack, reference in ((model.encoder.stack, reference_encoder), (model.decoder.stack, reference_decoder)):
        if reference.norm is not None:
            yield reference.norm.weight, [stack.final_norm.weight]
            yield reference.norm.bias, [stack.final_norm.bias]


def reference_stacks(config):
    pre = config.norm_position == "pre"
    common = {
        "dropout": 0.0,
        "activation": config.activation_function,
        "batch_first": True,
        "norm_first": pre,
        "layer_norm_eps": config.layer_norm_eps,
    }

    def final_norm():
        return nn.LayerNorm(D, config.layer_norm_eps) if pre or config.add_final_layer_norm else None

    encoder_layer = nn.TransformerEncoderLayer(D, HEADS, config.encoder_ffn_dim, **common)
    decoder_layer = nn.TransformerDecoderLayer(D, HEADS, config.decoder_ffn_dim, **common)
    return (
        nn.TransformerEncoder(encoder_layer, config.encoder_layers, final_norm(), enable_nested_tensor=False),
        nn.TransformerDecoder(decoder_layer, config.decoder_layers, final_norm()),
    )


def random_model(norm_position="post", **overrides):
    config = VanillaTransformerConfig.preset(
        "test", vocab_size=20, dropout=0.0, norm_position=norm_position, layer_norm_eps=1e-4, **overrides
    )
    model = VanillaTransformerModel(config)
    with torch.no_grad():  # biases and norms start at 0 and 1, which would hide a mix-up
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


SOURCE = torch.tensor([[5, 6, 7, 8, 3], [9, 10, 3, PAD, PAD], [4, 3, PAD, PAD, PAD]])
TARGET = torch.tensor([[2, 11, 12, 13], [2, 14, 15, PAD], [2, 16, PAD, PAD]])


def embedded(table, ids):
    return nn.functional.embedding(ids, table) * D**0.5 + sinusoid_table(ids.shape[1], D)


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("norm_position", ["post", "pre"])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"encoder_layers": 3, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 24},
        {"activation_function": "gelu"},
        {"add_final_layer_norm": True},
    ],
    ids=["equal", "unequal", "gelu", "final norm"],
)
def test_outputs_and_gradients_equal_torch(norm_position, attn_implementation, shape):
    torch.manual_seed(0)
    model = random_model(norm_position, **shape)
    model.set_attn_implementation(attn_implementation)
    encoder, decoder = reference_stacks(model.config)
    with torch.no_grad():
        for theirs, ours in pairs_of_parameters(model, encoder, decoder):
            theirs.copy_(torch.cat(ours))
    table = model.encoder.embed_tokens.weight.detach().clone().requires_grad_()

    source_padding, target_padding = SOURCE.eq(PAD), TARGET.eq(PAD)
    memory = encoder(embedded(table, SOURCE), src_key_padding_mask=source_padding)
    expected = decoder(
        embedded(table, TARGET),
        memory,
        tgt_mask=torch.ones(TARGET.shape[1], TARGET.shape[1], dtype=torch.bool).triu(1),
        tgt_key_padding_mask=target_padding,
        memory_key_padding_mask=source_padding,
    )
    output = model(
        SOURCE,
        attention_mask=(~source_padding).long(),
        decoder_input_ids=TARGET,
        decoder_attention_mask=(~target_padding).long(),
    )
    torch.testing.assert_close(
        output.encoder_last_hidden_state[~source_padding], memory[~source_padding], atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(
        output.last_hidden_state[~target_padding], expected[~target_padding], atol=1e-5, rtol=1e-5
    )

    direction = torch.randn(expected[~target_padding].shape)
    (expected[~target_padding] * direction).sum().backward()
    (output.last_hidden_state[~target_padding] * direction).sum().backward()
    for theirs, ours in pairs_of_parameters(model, encoder, decoder):
        torch.testing.assert_close(torch.cat([p.grad for p in ours]), theirs.grad, atol=3e-5, rtol=1e-4)
    # the gradient of the one shared table, from both sides
    torch.testing.assert_close(model.encoder.embed_tokens.weight.grad, table.grad, atol=3e-5, rtol=1e-4)


def test_every_parameter_has_a_counterpart():
    """The parity above covers all of the model."""
    model = random_model("pre")
    compared = [p for _, ours in pairs_of_parameters(model, *reference_stacks(model.config)) for p in ours]
    names = {id(p): name for name, p in model.named_parameters()}
    missing = set(names.values()) - {names[id(p)] for p in compared}
    assert missing == {"encoder.embed_tokens.weight"}  # tied: the decoder's is the same tensor


class TestFeedForward:
    def test_equation_2(self):
        network = FeedForward(4, 7, nn.ReLU(), 0.0)
        x = torch.randn(2, 3, 4)
        expected = (x @ network.fc1.weight.T + network.fc1.bias).clamp(min=0) @ network.fc2.weight.T + network.fc2.bias
        torch.testing.assert_close(network(x), expected)

    def test_activation_dropout_only_in_training(self):
        network, x = FeedForward(4, 64, nn.ReLU(), 0.5), torch.randn(2, 3, 4)
        assert not torch.allclose(network(x), network(x))
        network.eval()
        torch.testing.assert_close(network(x), network(x), atol=0, rtol=0)


class TestAddAndNorm:
    def add_and_norm(self, pre_norm, dropout=0.0):
        module = AddAndNorm(4, dropout, 1e-5, pre_norm)
        nn.init.normal_(module.norm.weight)
        nn.init.normal_(module.norm.bias)
        return module

    def test_post_norm(self):
        module, x = self.add_and_norm(False), torch.randn(2, 3, 4)
        torch.testing.assert_close(module(x, lambda states: 3 * states), module.norm(x + 3 * x))

    def test_pre_norm(self):
        module, x = self.add_and_norm(True), torch.randn(2, 3, 4)
        torch.testing.assert_close(module(x, lambda states: 3 * states), x + 3 * module.norm(x))

    @pytest.mark.parametrize("pre_norm", [False, True])
    def test_dropout_acts_on_the_sublayer_and_not_on_the_residual(self, pre_norm):
        module = self.add_and_norm(pre_norm, dropout=1.0)
        x = torch.randn(2, 3, 4)
        expected = x if pre_norm else module.norm(x)
        torch.testing.assert_close(module(x, lambda states: 3 * states), expected)
