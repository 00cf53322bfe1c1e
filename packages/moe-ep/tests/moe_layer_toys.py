"""Small models with mixture-of-experts layers that the tests of this package share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwalk.moe_ep.config import MoEConfig
from shardwalk.moe_ep.layers import MoE

VOCABULARY = 13
WIDTH = 8


def moe_config(**options) -> MoEConfig:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 12, "num_experts": 4, "top_k": 2}
    return MoEConfig(**{**sizes, **options})


class MoEBlock(nn.Module):
    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.mlp = MoE(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.mix(x))
        return x + self.mlp(self.norm(x))


class MoEDecoder(nn.Module):
    """Embedding, blocks with experts, norm, head."""

    def __init__(self, blocks: int = 2, **options) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([MoEBlock(moe_config(**options)) for _ in range(blocks)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def token_ids(rows: int = 2, length: int = 5, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (rows, length), generator=generator)
