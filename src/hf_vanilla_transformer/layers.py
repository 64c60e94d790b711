"""Encoder and decoder layers: sections 3.1, 3.3 and 5.4 of "Attention Is All You Need".

Differences from the paper: the layer norm can stand before each sub-layer instead of after the residual sum; the
feed-forward network can have another activation, and dropout after it.

Shapes: B batch, T target length, S source length, D d_model.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention import MultiHeadAttention, scaled_dot_product_attention
from .dropout import Dropout


class FeedForward(nn.Module):
    """Section 3.3, equation 2: FFN(x) = max(0, x W1 + b1) W2 + b2, the same at every position."""

    def __init__(self, d_model: int, d_ff: int, activation: nn.Module, activation_dropout: float):
        super().__init__()
        self.fc1 = nn.Linear(d_model, d_ff)
        self.activation = activation
        self.dropout = Dropout(activation_dropout)
        self.fc2 = nn.Linear(d_ff, d_model)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        return self.fc2(self.dropout(self.activation(self.fc1(hidden_states))))


class AddAndNorm(nn.Module):
    """ "Add & Norm" of Figure 1 with the dropout of section 5.4.

    Post-norm, the paper's order: LayerNorm(x + Dropout(Sublayer(x))).
    Pre-norm: x + Dropout(Sublayer(LayerNorm(x))).

    The sub-layer comes as a plain function: accelerate's hooks would move an argument that is a module, and with it
    weights that are meant to stay on the disk.
    """

    def __init__(self, d_model: int, dropout: float, eps: float, pre_norm: bool):
        super().__init__()
        self.norm = nn.LayerNorm(d_model, eps=eps)
        self.dropout = Dropout(dropout)
        self.pre_norm = pre_norm

    def forward(self, hidden_states: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        if self.pre_norm:
            return hidden_states + self.dropout(sublayer(self.norm(hidden_states)))
        return self.norm(hidden_states + self.dropout(sublayer(hidden_states)))


class EncoderLayer(GradientCheckpointingLayer):
    """Figure 1, left: self-attention, then feed-forward.

    Args:
        self_attn: attention over the layer's own input.
        feed_forward: the position-wise network.
        add_and_norm: makes the wrapper of one sub-layer.
    """

    def __init__(
        self,
        self_attn: MultiHeadAttention,
        feed_forward: FeedForward,
        add_and_norm: Callable[[], AddAndNorm],
    ):
        super().__init__()
        self.self_attn = self_attn
        self.self_attn_add_norm = add_and_norm()
        self.feed_forward = feed_forward
        self.feed_forward_add_norm = add_and_norm()

    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        attend: Callable = scaled_dot_product_attention,
    ) -> Tensor:
        """(B, S, D) -> (B, S, D); masks as in `attention`."""
        hidden_states = self.self_attn_add_norm(
            hidden_states, lambda states: self.self_attn(states, mask=mask, attend=attend)[0]
        )
        return self.feed_forward_add_norm(hidden_states, lambda states: self.feed_forward(states))


class DecoderLayer(GradientCheckpointingLayer):
    """Figure 1, right: masked self-attention, attention over the encoder's output, then feed-forward.

    Args:
        self_attn: causal attention over the layer's own input.
        encoder_attn: attention over the encoder's output ("encoder-decoder attention", section 3.2.3).
        feed_forward: the position-wise network.
        add_and_norm: makes the wrapper of one sub-layer.
    """

    def __init__(
        self,
        self_attn: MultiHeadAttention,
        encoder_attn: MultiHeadAttention,
        feed_forward: FeedForward,
        add_and_norm: Callable[[], AddAndNorm],
    ):
        super().__init__()
        self.self_attn = self_attn
        self.self_attn_add_norm = add_and_norm()
        self.encoder_attn = encoder_attn
        self.encoder_attn_add_norm = add_and_norm()
        self.feed_forward = feed_forward
        self.feed_forward_add_norm = add_and_norm()

    def forward(
        self,
        hidden_states: Tensor,
        memory: Tensor,
        mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        past_key_values: Any = None,
        attend: Callable = scaled_dot_product_attention,
    ) -> Tensor:
        """(B, T, D), memory (B, S, D) -> (B, T, D); masks, cache and beams as in `attention`."""
        hidden_states = self.self_attn_add_norm(
            hidden_states,
            lambda states: self.self_attn(states, mask=mask, past_key_values=past_key_values, attend=attend)[0],
        )
        hidden_states = self.encoder_attn_add_norm(
            hidden_states,
            lambda states: self.encoder_attn(states, memory, memory_mask, past_key_values, attend)[0],
        )
        return self.feed_forward_add_norm(hidden_states, lambda states: self.feed_forward(states))
