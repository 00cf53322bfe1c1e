"""One layer, several ways to bring its tokens to the ranks of their experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import (  # noqa: PLC2701
    all_to_all_single_autograd,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

from shardwalk.moe_ep.config import MoEConfig
from shardwalk.moe_ep.dispatcher import AllToAllDispatcher
from shardwalk.moe_ep.experts import GroupedExperts
from shardwalk.parallelizer_core.testing import cached

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Sizes of the layer.

    Attributes:
        hidden: width of a token.
        experts: of all ranks.
        tokens: of each rank.
        top_k: experts of a token.
        inner: width of an expert; by default 3/8 of a token's, as large fine-grained models have.
    """

    hidden: int
    experts: int
    tokens: int
    top_k: int = 8
    inner: int | None = None

    @property
    def width(self) -> int:
        """The width of an expert."""
        return self.inner or self.hidden * 3 // 8

    def weights(self) -> tuple[Tensor, Tensor]:
        """Weights of all experts: [E, 2 I, H] and [E, H, I], the same in every process."""
        generator = torch.Generator().manual_seed(0)
        first = torch.randn(self.experts, 2 * self.width, self.hidden, generator=generator)
        down = torch.randn(self.experts, self.hidden, self.width, generator=generator)
        return first * self.hidden**-0.5, down * self.width**-0.5

    def batch(self) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's tokens, uniform random routing, and weights that sum to 1."""
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        x = torch.randn(self.tokens, self.hidden, generator=generator)
        scores = torch.rand(self.tokens, self.experts, generator=generator)
        weights, experts = scores.topk(self.top_k)
        return x, experts, weights.softmax(-1)


class Side:
    """One way: a module with this rank's weights, and what it makes of tokens.

    Attributes:
        module: the experts.
        forward: tokens, experts and weights to results.
        batch: what each step computes; tokens and weights get gradients.
    """

    def __init__(self, variant: Variant, make: Callable[[Variant], tuple[nn.Module, Forward]]):
        self.module, self.forward = make(variant)
        self.batch = variant.batch()
        for each in (self.batch[0], self.batch[2]):
            each.requires_grad_()
        self.upstream = torch.randn(self.batch[0].shape, generator=torch.Generator().manual_seed(9))

    def step(self) -> Tensor:
        """Forward and backward from fresh gradients; the result."""
        self.module.zero_grad()
        self.batch[0].grad = self.batch[2].grad = None
        result = self.forward(*self.batch)
        result.backward(self.upstream)
        return result.detach()

    def numbers(self) -> list[Tensor]:
        """Result and all gradients of a step, to compare sides by."""
        result = self.step()
        gradients = [each.grad for each in (self.batch[0], self.batch[2], *self._parameters())]
        return [result, *(_local(each) for each in gradients if each is not None)]

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in sorted(self.module.named_parameters())]


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def ours(variant: Variant) -> tuple[nn.Module, Forward]:
    """This repository's dispatcher and experts."""
    experts = _local_experts(variant)
    dispatcher = AllToAllDispatcher(variant.experts, _mesh()["ep"])

    def forward(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        rows, metadata = dispatcher.dispatch(x, chosen, weights)
        return dispatcher.combine(experts(rows, metadata.counts), metadata)

    return experts, forward


def per_expert_grouped(variant: Variant) -> tuple[nn.Module, Forward]:
    """A row for every expert, and grouped products."""
    return _per_expert(variant, _grouped)


def per_expert_loop(variant: Variant) -> tuple[nn.Module, Forward]:
    """A row for every expert, and a loop over the experts."""
    return _per_expert(variant, _loop)


def transformers_ep(variant: Variant) -> tuple[nn.Module, Forward]:
    """The expert parallelism of transformers, on the experts of one of its models."""
    from transformers import Qwen3MoeConfig
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=variant.hidden,
        num_experts=variant.experts,
        moe_intermediate_size=variant.width,
    )
    config._experts_implementation = "grouped_mm"  # noqa: SLF001
    model = nn.Module()
    model.experts = Qwen3MoeExperts(config)
    with torch.no_grad():
        for parameter, value in zip(_two(model.experts), variant.weights(), strict=True):
            parameter.copy_(value)
    plan = {
        "experts.gate_up_proj": "grouped_gemm",
        "experts.down_proj": "grouped_gemm",
        "experts": "ep_dispatch_experts",
    }
    mesh = _mesh()
    apply_expert_parallelism(model, mesh["ep"], mesh["tp"], plan)
    return model.experts, model.experts


SIDES = {
    "ours": ours,
    "per_expert_grouped": per_expert_grouped,
    "per_expert_loop": per_expert_loop,
    "transformers": transformers_ep,
}


def _mesh() -> DeviceMesh:
    shape = (dist.get_world_size(), 1)
    mesh: DeviceMesh = cached(
        "mesh", lambda: init_device_mesh("cpu", shape, mesh_dim_names=("ep", "tp"))
    )
    return mesh


def _local_experts(variant: Variant) -> GroupedExperts:
    config = MoEConfig(
        hidden_size=variant.hidden,
        intermediate_size=variant.width,
        num_experts=variant.experts // dist.get_world_size(),
        top_k=1,
    )
    experts = GroupedExperts(config)
    with torch.no_grad():
        for parameter, value in zip(_two(experts), variant.weights(), strict=True):
            parameter.copy_(value.chunk(dist.get_world_size())[dist.get_rank()])
    return experts


def _two(experts: Any) -> tuple[nn.Parameter, nn.Parameter]:
    return experts.gate_up_proj, experts.down_proj


Compute = Callable[[Tensor, Tensor, list[int], nn.Parameter, nn.Parameter], Tensor]


def _per_expert(variant: Variant, compute: Compute) -> tuple[nn.Module, Forward]:
    experts = _local_experts(variant)
    ranks = dist.get_world_size()
    here = variant.experts // ranks

    def forward(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=variant.experts).view(ranks, here)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        sent, received = torch.stack((counts.sum(1), arriving.sum(1))).tolist()
        rows = x[order // variant.top_k]
        arrived = all_to_all_single_autograd(rows, received, sent, dist.group.WORLD)
        ids = torch.arange(here).repeat(ranks).repeat_interleave(arriving.flatten())
        by_expert = ids.argsort(stable=True)
        sizes = arriving.sum(0)
        outputs = compute(arrived[by_expert], sizes, sizes.tolist(), *_two(experts))
        outputs = outputs[by_expert.argsort()]
        back = all_to_all_single_autograd(outputs, sent, received, dist.group.WORLD)
        slots = back[order.argsort()].view(*chosen.shape, -1)
        return (slots * weights[..., None]).sum(1)

    return experts, forward


def _grouped(
    rows: Tensor, sizes: Tensor, counts: list[int], first: nn.Parameter, down: nn.Parameter
) -> Tensor:
    ends = sizes.cumsum(0).int()
    gate, up = F.grouped_mm(rows, first.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    return F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)


def _loop(
    rows: Tensor, sizes: Tensor, counts: list[int], first: nn.Parameter, down: nn.Parameter
) -> Tensor:
    outputs = []
    for piece, up_matrix, down_matrix in zip(
        rows.split(counts), first.unbind(0), down.unbind(0), strict=True
    ):
        gate, up = F.linear(piece, up_matrix).chunk(2, dim=-1)
        outputs.append(F.linear(F.silu(gate) * up, down_matrix))
    return torch.cat(outputs)
