"""The layers of Beam: what a block computes, in the dtype of its hidden states but for its islands.

Norms, rotary angles, query scales, the router and the product of gate and up are float32 inside,
and each is rounded once to the dtype of what came in.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwalk.model_beam.config import BeamConfig
from shardwalk.model_beam.rotary import RotaryTable, rotate
from shardwalk.moe_ep import MoE, MoEConfig


class RMSNorm(nn.Module):
    """Divides by the root mean square over the last dimension (arXiv:1910.07467), in float32.

    The weight multiplies before the one rounding to the dtype of the input.

    Args:
        size: of the last dimension.
        eps: added to the mean square.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same shape and dtype."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * normed).to(x.dtype)

    def extra_repr(self) -> str:
        """Size and eps, for `print`."""
        return f"{self.weight.shape[0]}, eps={self.eps}"


class BeamAttention(nn.Module):
    """Grouped-query attention (arXiv:2305.13245) with normed queries and keys and gated outputs.

    Each head's output is multiplied by a sigmoid of a projection of the layer's input and of
    ``gate_bias`` [heads].

    Args:
        config: its sizes, ``attention_bias``, ``attention_dropout`` and ``rms_norm_eps``.
    """

    def __init__(self, config: BeamConfig) -> None:
        super().__init__()
        hidden, dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        queries = config.num_attention_heads * dim
        keys = config.num_key_value_heads * dim
        self.head_dim = dim
        self.dropout = config.attention_dropout
        self.q_proj = nn.Linear(hidden, queries, bias=bias)
        self.k_proj = nn.Linear(hidden, keys, bias=bias)
        self.v_proj = nn.Linear(hidden, keys, bias=bias)
        self.gate_proj = nn.Linear(hidden, queries, bias=False)
        self.o_proj = nn.Linear(queries, hidden, bias=bias)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(dim, config.rms_norm_eps)
        self.gate_bias = nn.Parameter(torch.empty(config.num_attention_heads))
        nn.init.zeros_(self.gate_bias)

    def forward(
        self,
        x: Tensor,
        *,
        rotary: RotaryTable | None = None,
        query_scale: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Mix tokens.

        Args:
            x: [B, S, H].
            rotary: fp32 tables of queries and keys; None leaves positions out of them.
            query_scale: fp32 [B, S], multiplies queries.
            mask: bool, broadcast to [B, heads, S, S], True where a query sees a key; None is
                causal.

        Returns:
            [B, S, H].
        """
        q = self.q_norm(self._heads(self.q_proj(x))).transpose(1, 2)
        k = self.k_norm(self._heads(self.k_proj(x))).transpose(1, 2)
        v = self._heads(self.v_proj(x)).transpose(1, 2)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        if query_scale is not None:
            q = (q * query_scale[:, None, :, None]).to(q.dtype)
        mixed = _attend(q, k, v, mask, self.dropout if self.training else 0.0)
        gate = self._heads(self.gate_proj(x)) + self.gate_bias[:, None]
        gated = mixed.transpose(1, 2) * torch.sigmoid(gate)
        out: Tensor = self.o_proj(gated.flatten(-2))
        return out

    def _heads(self, projected: Tensor) -> Tensor:
        heads: Tensor = projected.unflatten(-1, (-1, self.head_dim))
        return heads


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """Queries [B, heads, S, D] over keys and values of as many heads or fewer, causal or masked.

    On GPUs the flash kernel shares heads and takes no mask, and the memory-efficient one takes a
    mask and shares no heads; for both at once torch may fall back to holding all scores.
    """
    is_causal = mask is None
    if not is_causal:
        k, v = (_for_each_query_head(heads, q.shape[1]) for heads in (k, v))
    mixed: Tensor = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal, enable_gqa=is_causal
    )
    return mixed


def _for_each_query_head(shared: Tensor, heads: int) -> Tensor:
    group = heads // shared.shape[1]
    return shared[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) if group > 1 else shared


class BeamMLP(nn.Module):
    """A gated feed-forward layer whose activation and product are float32.

    Args:
        config: its ``hidden_size``, ``intermediate_size`` and ``hidden_act``.
    """

    def __init__(self, config: BeamConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.activation = config.gated_activation
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to [..., H]."""
        out: Tensor = self.down_proj(self.activation.product(self.gate_proj(x), self.up_proj(x)))
        return out


class BeamMoE(MoE):
    """A layer of experts whose sum is scaled after it was rounded, as Beam was trained.

    Args:
        config: of the layer; its ``scaling_factor`` is 1.
        routed_scaling_factor: multiplies what the experts give.
    """

    def __init__(self, config: MoEConfig, *, routed_scaling_factor: float) -> None:
        super().__init__(config)
        self.routed_scaling_factor = routed_scaling_factor

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> Tensor:
        """As `MoE.forward`: [..., H] to [..., H]."""
        return super().forward(x, token_mask) * self.routed_scaling_factor


class Block(nn.Module):
    """One decoder layer: attention and a feed-forward part between norms, depth-scaled residuals.

    The n-th addition of the model (embeddings are the first contribution) weighs the new part by
    1 / sqrt(n) and the residual by sqrt((n - 1) / n), so that hidden states keep their variance.

    Attributes:
        layer_type: "sliding_attention" or "full_attention".
        is_sparse: whether it has experts.
        compute_dtype: None, or what hidden states are cast to, and nothing else that comes in: set
            where the unit around the block casts no inputs.

    Args:
        config: of the model.
        index: of the layer in the whole model, from 0.
        moe: what a sparse layer is made of; None is a dense layer.
    """

    def __init__(self, config: BeamConfig, index: int, moe: MoEConfig | None) -> None:
        super().__init__()
        self.index = index
        self.layer_type = config.layer_types[index]
        self.compute_dtype: torch.dtype | None = None
        self.is_sparse = moe is not None
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn = BeamAttention(config)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.pre_feedforward_layernorm = RMSNorm(hidden, eps)
        self.mlp = (
            BeamMLP(config)
            if moe is None
            else BeamMoE(moe, routed_scaling_factor=config.routed_scaling_factor)
        )
        self.post_feedforward_layernorm = RMSNorm(hidden, eps)

    def forward(
        self,
        x: Tensor,
        *,
        rotary: RotaryTable | None = None,
        query_scale: Tensor | None = None,
        mask: Tensor | None = None,
        token_mask: Tensor | None = None,
    ) -> Tensor:
        """Map hidden states, [B, S, H], to the same shape.

        Args:
            x: floating point; cast to `compute_dtype` where that is set.
            rotary, query_scale, mask: as in `BeamAttention.forward`.
            token_mask: bool [B, S], False for padding, which no expert sees.
        """
        x = x if self.compute_dtype is None else x.to(self.compute_dtype)
        mixed = self.self_attn(
            self.input_layernorm(x), rotary=rotary, query_scale=query_scale, mask=mask
        )
        x = scaled_add(self.post_attention_layernorm(mixed), x, 2 * self.index + 2)
        fed = self.pre_feedforward_layernorm(x)
        fed = self.mlp(fed, token_mask) if self.is_sparse else self.mlp(fed)
        return scaled_add(self.post_feedforward_layernorm(fed), x, 2 * self.index + 3)


def scaled_add(new: Tensor, residual: Tensor, count: int) -> Tensor:
    """The `count`-th contribution to a mean that keeps its variance: both of the same shape."""
    return new * (1 / math.sqrt(count)) + residual * math.sqrt((count - 1) / count)
