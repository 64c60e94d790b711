"""The two stacks of Figure 1: section 3.1 of "Attention Is All You Need".

Difference from the paper: a stack can end in one more layer norm. With pre-norm layers it has to, because nothing else
would normalise its output.

Shapes: B batch, T target length, S source length, D d_model.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from .attention import scaled_dot_product_attention


class _Stack(nn.Module):
    """N layers.

    Args:
        layers: the layers, first to last.
        final_norm: a layer norm, or `nn.Identity` for none.
    """

    def __init__(self, layers: Sequence[nn.Module], final_norm: nn.Module):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.final_norm = final_norm


class EncoderStack(_Stack):
    """N encoder layers, one after the other."""

    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        attend: Callable = scaled_dot_product_attention,
    ) -> Tensor:
        """Embedded source (B, S, D) -> memory (B, S, D)."""
        for layer in self.layers:
            hidden_states = layer(hidden_states, mask, attend)
        return self.final_norm(hidden_states)


class DecoderStack(_Stack):
    """N decoder layers, one after the other."""

    def forward(
        self,
        hidden_states: Tensor,
        memory: Tensor,
        mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        past_key_values: Any = None,
        attend: Callable = scaled_dot_product_attention,
    ) -> Tensor:
        """Embedded target (B, T, D) and memory (B, S, D) -> (B, T, D)."""
        for layer in self.layers:
            hidden_states = layer(
                hidden_states, memory, mask, memory_mask, past_key_values=past_key_values, attend=attend
            )
        return self.final_norm(hidden_states)
