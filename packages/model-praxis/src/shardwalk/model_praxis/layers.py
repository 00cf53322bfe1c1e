"""The layers that both towers, and in part the action expert, are made of.

Norms, rotations and modulation compute in float32 whatever surrounds them, and give back the dtype
they got.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from shardwalk.model_praxis.config import AttentionConfig, TowerConfig
from shardwalk.model_praxis.masks import Mask
from shardwalk.moe_ep import MoE, MoEConfig


class RotaryTable(NamedTuple):
    """cos and sin of the angles of tokens; float32 [B or 1, tokens, head_dim / 2] each."""

    cos: Tensor
    sin: Tensor


class Modulation(NamedTuple):
    """What moves and scales the normed input of a sub-layer; float32 [B, tokens, dim] each."""

    shift: Tensor
    scale: Tensor


def rotary_table(positions: Tensor, head_dim: int, theta: float) -> RotaryTable:
    """The table of int64 positions [B or 1, tokens].

    Positions go into the millions, where float32 angles would be off by tenths of a radian, so that
    they are formed in float64.
    """
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device)
    angles = positions[..., None] * theta ** (-pairs / head_dim)
    return RotaryTable(angles.cos().float(), angles.sin().float())


def rotate(x: Tensor, table: RotaryTable) -> Tensor:
    """Turn pairs of coordinates, half a head apart, by the angles of their token.

    Args:
        x: [B, tokens, heads, head_dim].
        table: of its tokens.

    Returns:
        The shape and dtype of `x`.
    """
    wide = _wide(x)
    cos, sin = (part.to(wide.dtype)[:, :, None] for part in table)
    first, second = wide.chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned, dim=-1).to(x.dtype)


def modulate(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """x * scale + shift, the scale as it is; returns the dtype of `x`."""
    return (_wide(x) * _wide(scale) + _wide(shift)).to(x.dtype)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | None,
    *,
    kernel_options: dict[str, int] | None = None,
) -> Tensor:
    """Softmax attention, scaled by 1 / sqrt(head_dim).

    Args:
        query: [B, queries, heads, head_dim].
        key: [B, keys, key heads, head_dim]; key heads divide heads.
        value: like `key`.
        mask: of `attention_mask`: a dense one goes to SDPA, a `BlockMask` to flex attention, which
            has no backward on the CPU. None hides nothing.
        kernel_options: of the flex kernels.

    Returns:
        [B, queries, heads, head_dim].
    """
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    out: Tensor
    if isinstance(mask, BlockMask):
        flex: Any = _compiled_flex() if query.is_cuda else flex_attention
        options = kernel_options or None
        out = flex(query, key, value, block_mask=mask, enable_gqa=True, kernel_options=options)
    else:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2)


class ZeroCenteredRMSNorm(nn.Module):
    """x / rms(x) * (1 + weight); the weight [dim] starts at 0.

    Args:
        dim: width.
        eps: added to the mean square.
        cast_dtype: what it computes in; None is float32, or wider where the input is.
    """

    def __init__(self, dim: int, eps: float, *, cast_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.eps, self.cast_dtype = eps, cast_dtype
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Let it scale nothing."""
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] to the same shape and dtype."""
        wide = _wide(x) if self.cast_dtype is None else x.to(self.cast_dtype)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * (1 + self.weight.to(wide.dtype))).to(x.dtype)


class GatedAttention(nn.Module):
    """Grouped-query self attention, each head of which is weighed by a sigmoid of its own.

    `q_proj`, `k_proj`, `v_proj`, `gate_proj` (one logit per head) and `o_proj` have no biases;
    `q_norm` and `k_norm` act on heads.
    """

    def __init__(self, dim: int, config: AttentionConfig) -> None:
        super().__init__()
        heads, keys, width = config.num_heads, config.num_kv_heads, config.head_dim
        self.head_dim, self.rotate_before_norm = width, config.rotate_before_norm
        self.q_proj = nn.Linear(dim, heads * width, bias=False)
        self.k_proj = nn.Linear(dim, keys * width, bias=False)
        self.v_proj = nn.Linear(dim, keys * width, bias=False)
        self.gate_proj = nn.Linear(dim, heads, bias=False)
        self.o_proj = nn.Linear(heads * width, dim, bias=False)
        self.q_norm = ZeroCenteredRMSNorm(width, config.qk_norm_eps)
        self.k_norm = ZeroCenteredRMSNorm(width, config.qk_norm_eps)

    def forward(self, x: Tensor, *, rotary: RotaryTable, mask: Mask | None) -> Tensor:
        """[B, tokens, dim] to the same."""
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_dim))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query = self._placed(query, self.q_norm, rotary)
        key = self._placed(key, self.k_norm, rotary)
        heads = attend(query, key, value, mask)
        gates = self.gate_proj(x).sigmoid()
        out: Tensor = self.o_proj((heads * gates[..., None]).flatten(-2))
        return out

    def _placed(self, heads: Tensor, norm: nn.Module, rotary: RotaryTable) -> Tensor:
        """Rotated and normed, in float32 from one to the other."""
        wide = _wide(heads)
        out = norm(rotate(wide, rotary)) if self.rotate_before_norm else rotate(norm(wide), rotary)
        return out.to(heads.dtype)


class FeedForward(nn.Module):
    """SwiGLU: down_proj(silu(gate_proj(x)) * up_proj(x)), without biases."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, inner, bias=False)
        self.up_proj = nn.Linear(dim, inner, bias=False)
        self.down_proj = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] to the same."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """A block of a tower: x + attn(n1(x) * s), then x + ffn(n2(x) * s), s = 1 / sqrt(index).

    With a modulation, n1(x) and n2(x) are modulated.

    Attributes:
        norm1, attn: of the first half.
        norm2, ffn: of the second half; the feed-forward is a `FeedForward` or an `MoE`.
        compute_dtype: what the block casts its hidden states to; None leaves them. Sharded units
            need it where they do not cast inputs: tables and modulation stay float32.

    Args:
        tower: its width, the width of the dense feed-forward, the eps of the norms.
        attention: its attention.
        moe: of a sparse feed-forward; None for a dense one.
        index: of the block in its tower, from 1.
    """

    compute_dtype: torch.dtype | None = None

    def __init__(
        self, tower: TowerConfig, attention: AttentionConfig, moe: MoEConfig | None, *, index: int
    ) -> None:
        super().__init__()
        assert index >= 1
        self.input_scale = 1 / math.sqrt(index)
        self.norm1 = ZeroCenteredRMSNorm(tower.dim, tower.norm_eps)
        self.attn = GatedAttention(tower.dim, attention)
        self.norm2 = ZeroCenteredRMSNorm(tower.dim, tower.norm_eps)
        self.ffn: nn.Module = FeedForward(tower.dim, tower.ffn_dim) if moe is None else MoE(moe)

    def forward(
        self,
        x: Tensor,
        *,
        rotary: RotaryTable,
        mask: Mask | None,
        modulation: Modulation | None = None,
    ) -> Tensor:
        """[B, tokens, dim] to the same."""
        if self.compute_dtype is not None:
            x = x.to(self.compute_dtype)
        normed = self._input(self.norm1(x), modulation)
        x = x + self.attn(normed, rotary=rotary, mask=mask)
        out: Tensor = x + self.ffn(self._input(self.norm2(x), modulation))
        return out

    def _input(self, normed: Tensor, modulation: Modulation | None) -> Tensor:
        if modulation is not None:
            normed = modulate(normed, modulation.scale, modulation.shift)
        return normed * self.input_scale


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


@cache
def _compiled_flex() -> Callable[..., Any]:
    """Flex attention as kernels; uncompiled it holds all scores."""
    return torch.compile(flex_attention)
