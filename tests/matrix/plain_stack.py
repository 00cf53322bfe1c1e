"""A plain stack of Llama-shaped blocks: no config, head counts as attributes, biases everywhere."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwalk.parallelizer_core.testing.models import Rotary


class Attention(nn.Module):
    """Causal attention with grouped keys and values, and a norm of each head."""

    def __init__(self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, head_dim
        self.wq = nn.Linear(dim, n_heads * head_dim)
        self.wk = nn.Linear(dim, n_kv_heads * head_dim)
        self.wv = nn.Linear(dim, n_kv_heads * head_dim)
        self.wo = nn.Linear(n_heads * head_dim, dim)
        self.q_norm = nn.LayerNorm(head_dim)
        self.k_norm = nn.RMSNorm(head_dim)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        """Map x, [rows, length, dim], to the same shape."""
        rows, length, _ = x.shape
        q = self.q_norm(self.wq(x).view(rows, length, self.n_heads, self.head_dim))
        k = self.k_norm(self.wk(x).view(rows, length, self.n_kv_heads, self.head_dim))
        v = self.wv(x).view(rows, length, self.n_kv_heads, self.head_dim)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(
            rotary(q), rotary(k), v, is_causal=True, enable_gqa=True
        )
        out: Tensor = self.wo(mixed.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """A feed-forward without a gate, with biases."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(dim, inner)
        self.down_proj = nn.Linear(inner, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map x, [..., dim], to the same shape."""
        out: Tensor = self.down_proj(F.gelu(self.up_proj(x)))
        return out


class StackBlock(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, inner: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, n_heads, n_kv_heads, head_dim)
        self.ffn_norm = nn.RMSNorm(dim)
        self.feed_forward = FeedForward(dim, inner)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        """Map x, [rows, length, dim], to the same shape."""
        x = x + self.attention(self.attention_norm(x), rotary)
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class PlainStack(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(
        self,
        *,
        tied: bool = False,
        vocabulary: int = 61,
        dim: int = 18,
        n_heads: int = 4,
        n_kv_heads: int = 4,
        head_dim: int = 6,
        inner: int = 40,
        layers: int = 3,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.rotary = Rotary(head_dim)
        self.layers = nn.ModuleList(
            StackBlock(dim, n_heads, n_kv_heads, head_dim, inner) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self._fill()

    def _fill(self) -> None:
        """Biases and norms away from 0 and 1, where a fault in them could hide."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1 and not parameter.is_meta:
                shift = 0.5 if name.endswith("bias") else -0.5
                nn.init.uniform_(parameter, 0 - shift, 1 - shift)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits, [rows, length, vocabulary], of int64 input_ids, [rows, length]."""
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, self.rotary)
        logits: Tensor = self.head(self.norm(x))
        return logits


def plain_stack(tied: bool) -> nn.Module:
    return PlainStack(tied=tied)


def uniform_weights(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """An init function: norms around one, biases around zero, everything else small."""
    if tensor.ndim == 1:
        shift = 0.5 if name.endswith("bias") else -0.5
        tensor.uniform_(0 - shift, 1 - shift, generator=generator)
    else:
        tensor.normal_(0.0, 0.3, generator=generator)
