"""The layers that both towers, and in part the action expert, are made of."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardwalk.model_praxis.config import AttentionConfig, TowerConfig
from shardwalk.model_praxis.masks import Mask
from shardwalk.moe_ep import MoEConfig


class RotaryTable(NamedTuple):
    """cos and sin of the angles of tokens; float32 [B or 1, tokens, head_dim / 2] each."""

    cos: Tensor
    sin: Tensor


class Modulation(NamedTuple):
    """What moves and scales the normed input of a sub-layer; float32 [B, tokens, dim] each."""

    shift: Tensor
    scale: Tensor


def rotary_table(positions: Tensor, head_dim: int, theta: float) -> RotaryTable:
    """The table of int64 positions [B or 1, tokens]; angles are formed in float64."""
    raise NotImplementedError


def rotate(x: Tensor, table: RotaryTable) -> Tensor:
    """Rotate heads [B, tokens, heads, head_dim], in float32; returns the dtype of `x`."""
    raise NotImplementedError


def modulate(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """x * scale + shift, in float32 or wider; returns the dtype of `x`."""
    raise NotImplementedError


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask | None,
    *, kernel_options: dict[str, int] | None = None,
) -> Tensor:  # fmt: skip
    """Softmax attention, scaled by 1 / sqrt(head_dim).

    Args:
        query: [B, queries, heads, head_dim].
        key: [B, keys, key heads, head_dim]; key heads divide heads.
        value: like `key`.
        mask: of `attention_mask`: a dense one goes to SDPA, a `BlockMask` to flex attention.
        kernel_options: of the flex kernels.

    Returns:
        [B, queries, heads, head_dim].
    """
    raise NotImplementedError


class ZeroCenteredRMSNorm(nn.Module):
    """x / rms(x) * (1 + weight); the weight [dim] starts at 0.

    Args:
        dim: width.
        eps: added to the mean square.
        cast_dtype: what it computes in; None is float32, or wider where the input is.
    """

    def __init__(self, dim: int, eps: float, *, cast_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] to the same shape and dtype."""
        raise NotImplementedError


class GatedAttention(nn.Module):
    """Grouped-query self attention; `q_proj`, `k_proj`, `v_proj`, `gate_proj`, `o_proj`, norms."""

    def __init__(self, dim: int, config: AttentionConfig) -> None:
        super().__init__()
        raise NotImplementedError

    def forward(self, x: Tensor, *, rotary: RotaryTable, mask: Mask | None) -> Tensor:
        """[B, tokens, dim] to the same."""
        raise NotImplementedError


class FeedForward(nn.Module):
    """SwiGLU: down_proj(silu(gate_proj(x)) * up_proj(x)), without biases."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] to the same."""
        raise NotImplementedError


class Block(nn.Module):
    """A block of a tower: `norm1`, `attn`, `norm2`, `ffn`.

    Attributes:
        compute_dtype: what the block casts its hidden states to; None leaves them.

    Args:
        tower: its width, the width of the dense feed-forward, the eps of the norms.
        attention: its attention.
        moe: of a sparse feed-forward; None for a dense one.
        index: of the block in its tower, from 1; the normed inputs are divided by its root.
    """

    compute_dtype: torch.dtype | None = None

    def __init__(
        self, tower: TowerConfig, attention: AttentionConfig, moe: MoEConfig | None, *, index: int
    ) -> None:
        super().__init__()
        raise NotImplementedError

    def forward(
        self, x: Tensor, *, rotary: RotaryTable, mask: Mask | None,
        modulation: Modulation | None = None,
    ) -> Tensor:  # fmt: skip
        """[B, tokens, dim] to the same; the modulation applies to the normed inputs."""
        raise NotImplementedError
