"""A decoder that drops out wherever it can, and records or replays which elements."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, HEAD_DIM, INNER, WORDS, SHARE = 16, 4, 4, 24, 29, 0.25


class Dropout(nn.Dropout):
    """Dropout that writes its mask down, or takes one that is given."""

    recorded: ClassVar[dict[str, list[Tensor]]] = {}
    given: ClassVar[dict[str, list[Tensor]]] = {}

    def __init__(self, name: str) -> None:
        super().__init__(SHARE)
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return drop(x, self.name, self.training)


def drop(x: Tensor, name: str, training: bool) -> Tensor:
    """`F.dropout` of x, which the caller knows by `name`."""
    if not training:
        return x
    if Dropout.given:
        return x * Dropout.given[name].pop(0) / (1 - SHARE)
    out = F.dropout(x, SHARE, training=True)
    mask = F.dropout(torch.ones_like(x), 0.0)  # of x's kind
    mask = torch.where(out == 0, torch.zeros_like(mask), mask)
    Dropout.recorded.setdefault(name, []).append(mask.detach())
    return out


class Attention(nn.Module):
    """Eager attention that drops weights by a function, and its output by a module."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path, self.heads, self.head_dim = path, HEADS, HEAD_DIM
        self.attention_dropout = SHARE
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states: Tensor) -> Tensor:
        shape = (*hidden_states.shape[:2], self.heads, self.head_dim)
        q = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        k = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        weights = (q @ k.transpose(2, 3) / 2).softmax(-1)
        weights = drop(weights, f"{self.path}.weights", self.training)
        mixed = (weights @ v).transpose(1, 2).flatten(2)
        out: Tensor = self.o_proj(mixed)
        return out


class FeedForward(nn.Module):
    def __init__(self, path: str) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.inner, self.outer = Dropout(f"{path}.inner"), Dropout(f"{path}.outer")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(self.down_proj(self.inner(F.gelu(self.up_proj(x)))))
        return out


class Block(nn.Module):
    def __init__(self, path: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(path), FeedForward(path)
        self.residual = Dropout(f"{path}.residual")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.residual(self.attention(self.norm1(x)))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(WORDS, WIDTH), Dropout("embedding")
        self.layers = nn.ModuleList(Block(str(index)) for index in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.embed(ids))
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def made() -> Decoder:
    torch.manual_seed(7)
    return Decoder()


def rows(count: int = 2, length: int = 5) -> Tensor:
    """Ids of a length that two ranks cut unevenly."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(WORDS, (count, length), generator=generator)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def taken() -> dict[str, list[Tensor]]:
    """What was recorded since the last call."""
    found = dict(Dropout.recorded)
    Dropout.recorded.clear()
    return found


def whole_mask(name: str, parts: list[Tensor], *, sequence_parallel: bool) -> Tensor:
    """The mask of all ranks together, and proof that parts are independent and wholes equal."""
    dims: dict[str, int] = {"weights": 1, "inner": -1}
    if sequence_parallel:
        dims |= {"outer": 1, "residual": 1}
    kind = name.rpartition(".")[2]
    if kind in dims:
        first, second = parts
        shared = [min(a, b) for a, b in zip(first.shape, second.shape, strict=True)]
        region: Any = tuple(slice(size) for size in shared)
        for mine, other in zip(first[region], second[region], strict=True):
            assert not torch.equal(mine, other), name
        return torch.cat(parts, dims[kind])
    assert torch.equal(parts[0], parts[1]), name
    return parts[0]
