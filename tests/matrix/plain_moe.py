"""A decoder whose blocks hold a layer of experts, for the parity tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwalk.moe_ep.config import MoEConfig
from shardwalk.moe_ep.layers import MoE
from shardwalk.moe_ep.router import find_gates
from shardwalk.parallelizer_core.testing.models import Rotary
from tests.matrix.plain_stack import Attention, FeedForward

VOCABULARY = 61
DIM = 16


def moe_config(**options: Any) -> MoEConfig:
    sizes = {"hidden_size": DIM, "intermediate_size": 12, "num_experts": 8, "top_k": 3}
    return MoEConfig(**{**sizes, **options})


class MoEStackBlock(nn.Module):
    """Pre-norm attention and experts, or in a dense block a feed-forward."""

    def __init__(self, config: MoEConfig | None) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(DIM)
        self.attention = Attention(DIM, 4, 2, 4)
        self.ffn_norm = nn.RMSNorm(DIM)
        self.mlp = FeedForward(DIM, 20) if config is None else MoE(config)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        """Map x, [rows, length, dim], to the same shape."""
        x = x + self.attention(self.attention_norm(x), rotary)
        out: Tensor = x + self.mlp(self.ffn_norm(x))
        return out


class MoEStack(nn.Module):
    """Embedding, a dense block, blocks with experts, norm, head.

    Args:
        layers: blocks with experts.
        frozen: parameters with one of these words in their names do not train.
        options: those of `MoEConfig`.
    """

    def __init__(self, layers: int = 2, *, frozen: tuple[str, ...] = (), **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.rotary = Rotary(4)
        config = moe_config(**options)
        self.layers = nn.ModuleList([
            MoEStackBlock(None),
            *(MoEStackBlock(config) for _ in range(layers)),
        ])
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)
        self._fill()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not any(word in name for word in frozen))

    @torch.no_grad()
    def _fill(self) -> None:
        """Choices far from ties, and correction biases that shift some of them."""
        for gate in find_gates(self):
            gate.weight.mul_(4)
            if gate.e_score_correction_bias is not None:
                gate.e_score_correction_bias.uniform_(-0.2, 0.2)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits, [rows, length, vocabulary], of int64 input_ids, [rows, length]."""
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, self.rotary)
        logits: Tensor = self.head(self.norm(x))
        return logits
