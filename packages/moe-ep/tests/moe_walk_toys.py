"""Contexts and models that the tests of the expert-parallel walk share."""

from __future__ import annotations

from typing import Any

import torch
from moe_layer_toys import MoEDecoder
from torch import Tensor, nn
from torch.nn import functional as F

from shardwalk.mesh import (
    DistributedSetup,
    FSDP2Config,
    MeshContext,
    MoEParallelizerConfig,
    ParallelismSizes,
)
from shardwalk.parallelizer_core import parallelize_model
from shardwalk.parallelizer_core.testing import cached

FULL = {"param_dtype": None, "reduce_dtype": None}


def context(
    *,
    sizes: dict[str, int] | None = None,
    moe: dict[str, Any] | None = None,
    activation_checkpointing: Any = False,
    **strategy: Any,
) -> MeshContext:
    """A context over all ranks, its meshes made once per process; fp32 unless a policy is given."""
    given = {"ep_size": 2} if sizes is None else sizes

    def make() -> MeshContext:
        return DistributedSetup.build(
            "fsdp2", parallelism_sizes=ParallelismSizes(**given), moe_parallel_config={}
        ).mesh_context

    made = cached(("moe_walk_toys", tuple(given.items())), make)
    strategy.setdefault("mp_policy", FULL)
    return MeshContext.from_meshes(
        made.device_mesh,
        made.moe_mesh,
        strategy_config=FSDP2Config(**strategy),
        moe_parallel_config=None if moe is None else MoEParallelizerConfig(**moe),
        activation_checkpointing=activation_checkpointing,
    )


def sharded(model: Any = MoEDecoder, /, **options: Any) -> nn.Module:
    """The seeded model, parallelized over all ranks."""
    torch.manual_seed(7)
    return parallelize_model(model(), context(**options))


class CommonCall(nn.Module):
    """Experts with the call that transformers' share."""

    def __init__(self, num_experts: int = 4, width: int = 8, inner: int = 12) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate_up_proj = nn.Parameter(torch.randn(num_experts, 2 * inner, width) / 4)
        self.down_proj = nn.Parameter(torch.randn(num_experts, width, inner) / 4)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, slot = (top_k_index == expert).nonzero(as_tuple=True)
            gate, up = F.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2, -1)
            made = F.linear(F.silu(gate) * up, self.down_proj[expert])
            out = out.index_add(0, token, made * top_k_weights[token, slot, None])
        return out


class Router(nn.Module):
    def __init__(self, num_experts: int = 4, width: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_experts, width))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(tokens, self.weight).softmax(-1)
        weights, index = scores.topk(2)
        return weights, index


class CommonLayer(nn.Module):
    def __init__(self, experts: type[nn.Module] = CommonCall) -> None:
        super().__init__()
        self.gate = Router()
        self.experts = experts()

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, index = self.gate(tokens)
        return self.experts(tokens, index, weights).view(x.shape)


class CommonBlock(nn.Module):
    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mlp = layer()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class CommonDecoder(nn.Module):
    """Embedding, blocks with experts of the common call, norm, head."""

    def __init__(self, layer: type[nn.Module] = CommonLayer) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.layers = nn.ModuleList([CommonBlock(layer) for _ in range(2)])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 13, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Wrapped(nn.Module):
    """An inner model and a head around it."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.model = CommonDecoder()
        self.model.head = nn.Identity()
        self.lm_head = nn.Linear(8, 13, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.lm_head(self.model(input_ids))
