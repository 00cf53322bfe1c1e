"""A tiny decoder whose sizes divide by nothing, for tests of sidecars and of the walk."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwalk.parallelizer_core.testing.parity_case import ParityCase, TokenBatches


class Rotary(nn.Module):
    """Rotary frequencies, kept in a non-persistent fp32 buffer."""

    frequencies: Tensor

    def __init__(self, dim: int, base: float = 100.0) -> None:
        super().__init__()
        self.dim, self.base = dim, base  # by these `materialize` can construct it again
        frequencies = base ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rotate x, [rows, heads, length, dim], by position."""
        positions = torch.arange(x.shape[-2], dtype=torch.float32, device=x.device)
        angles = torch.outer(positions, self.frequencies)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Block(nn.Module):
    """Pre-norm causal attention and a gated feed-forward."""

    def __init__(self, dim: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim)
        self.ffn_norm = nn.RMSNorm(dim)
        self.gate = nn.Linear(dim, ffn, bias=False)
        self.up = nn.Linear(dim, ffn, bias=False)
        self.down = nn.Linear(ffn, dim, bias=False)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        """Map x, [rows, length, dim], to the same shape."""
        x = x + self._attention(self.attention_norm(x), rotary)
        h = self.ffn_norm(x)
        out: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return out

    def _attention(self, x: Tensor, rotary: Rotary) -> Tensor:
        rows, length, dim = x.shape
        qkv = self.qkv(x).view(rows, length, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotary(q), rotary(k), v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(rows, length, dim))
        return out


class TinyDecoder(nn.Module):
    """Embedding, blocks, norm, head: `embed`, `layers`, `norm`, `head`, and a `rotary` buffer.

    Args:
        vocabulary: rows of the embedding.
        dim: width; `heads` divides it into an even size.
        heads: attention heads.
        ffn: inner width of the feed-forward.
        layers: number of blocks.
        tied: whether the head's weight is the embedding's.
    """

    def __init__(
        self,
        *,
        vocabulary: int = 61,
        dim: int = 18,
        heads: int = 3,
        ffn: int = 37,
        layers: int = 3,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.rotary = Rotary(dim // heads)
        self.layers = nn.ModuleList(Block(dim, heads, ffn) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits, [rows, length, vocabulary], of int64 input_ids, [rows, length]."""
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, self.rotary)
        logits: Tensor = self.head(self.norm(x))
        return logits


def tiny_decoder_case(*, tied: bool = False, micro_batches: int = 1, rows: int = 8) -> ParityCase:
    """A parity case of `TinyDecoder` with unequal token counts."""
    return ParityCase(
        model=functools.partial(TinyDecoder, tied=tied),
        batches=TokenBatches(vocabulary=61, rows=rows, micro_batches=micro_batches),
        init="reset_parameters",
    )
