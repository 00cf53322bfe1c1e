"""Gradients and norms right after `parallelize_model`, without a second call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moe_layer_toys import MoEDecoder
from moe_walk_toys import CommonDecoder, context
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from shardwalk.moe_ep import SplitTokens
from shardwalk.parallelizer_core import (
    clip_grad_norm_,
    get_total_norm,
    parallelize_model,
    sync_gradients_on_last,
)
from shardwalk.parallelizer_core.testing import run_on_ranks

MESHES = {
    "ep 2": (2, {"ep_size": 2}),
    "ep 2 x shard 2": (4, {"ep_size": 2}),
    "ep 4": (4, {"ep_size": 4}),
    "hsdp 2x2, ep 4": (4, {"ep_size": 4, "dp_replicate_size": 2}),
}
MODELS = {"own": MoEDecoder, "common call": CommonDecoder}
meshes = pytest.mark.parametrize("mesh", MESHES)
models = pytest.mark.parametrize("model", MODELS)
ROWS, LENGTH = 8, 5


def rows(micro_batches: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = (micro_batches, ROWS, LENGTH + 1)
    return list(torch.randint(13, shape, generator=generator).unbind(0))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The mean over all tokens, of which every rank has as many."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def build(model: str) -> nn.Module:
    torch.manual_seed(7)
    return MODELS[model]()


def one_process(model: str, micro_batches: int) -> tuple[dict[str, torch.Tensor], nn.Module]:
    reference = build(model)
    for tokens in rows(micro_batches):
        (loss_of(reference, tokens) / micro_batches).backward()
    gradients = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    return gradients, reference


def subject(model: str, sizes: dict[str, int], micro_batches: int, **options: Any) -> nn.Module:
    mesh_context = context(sizes=sizes, **options)
    parallel = parallelize_model(build(model), mesh_context)
    rank, count = mesh_context.data_rank, mesh_context.data_world_size
    for tokens in sync_gradients_on_last(parallel, rows(micro_batches)):
        part = tokens.tensor_split(count)[rank]
        (loss_of(parallel, part) / micro_batches).backward()
    return parallel


def gradient_ratios(
    model: str, sizes: dict[str, int], micro_batches: int, **options: Any
) -> dict[str, float]:
    expected, reference = one_process(model, micro_batches)
    parallel = subject(model, sizes, micro_batches, **options)
    ratios = {}
    for name, parameter in parallel.named_parameters():
        gradient = full(parameter.grad)
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-7)
        ratios[name] = float(gradient.norm() / expected[name].norm())
    parallel_step = torch.optim.SGD(parallel.parameters(), lr=0.5)
    reference_step = torch.optim.SGD(reference.parameters(), lr=0.5)
    parallel_step.step()
    reference_step.step()
    for name, parameter in parallel.named_parameters():
        torch.testing.assert_close(full(parameter), reference.get_parameter(name))
    return ratios


@meshes
@models
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_b07_p6_gradients_of_experts_have_the_scale_of_dense_ones(
    model: str, mesh: str, micro_batches: int
) -> None:
    """Experts see the tokens of all their ranks, but average over fewer: a factor of ep."""
    world_size, sizes = MESHES[mesh]
    ratios = run_on_ranks(world_size, gradient_ratios, model, sizes, micro_batches)[0]
    assert any("experts" in name for name in ratios)
    assert all(abs(ratio - 1) < 1e-4 for ratio in ratios.values()), ratios


@pytest.mark.parametrize("ep_size", [1, 2], ids=["whole experts", "ep 2"])
def test_a_plan_may_split_the_tokens_of_layers_of_experts(ep_size: int) -> None:
    """Each tp rank sees a part of the tokens, so that the gradients of what is whole are summed."""
    sizes, plan = {"tp_size": 2, "ep_size": ep_size}, {"layers.*.mlp": SplitTokens()}
    for ratios in run_on_ranks(4, gradient_ratios, "own", sizes, 2, tp_plan=plan):
        assert all(abs(ratio - 1) < 1e-4 for ratio in ratios.values()), ratios


def sum_of_losses(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


def gradients_of_one_row(model: str) -> None:
    tokens = rows(1)[0][:1]
    reference = build(model)
    sum_of_losses(reference, tokens).backward()
    mesh_context = context(sizes={"ep_size": 2})
    parallel = parallelize_model(build(model), mesh_context)
    part = tokens.tensor_split(4)[mesh_context.data_rank]
    (sum_of_losses(parallel, part) * 4).backward()
    for name, parameter in parallel.named_parameters():
        expected = reference.get_parameter(name).grad
        torch.testing.assert_close(full(parameter.grad), expected, rtol=1e-4, atol=1e-6)


@models
def test_b47_ranks_that_share_experts_of_which_one_gets_no_token(model: str) -> None:
    """Its weights have gradients all the same: what the two reduce is of one size."""
    run_on_ranks(4, gradients_of_one_row, model)


def clipped(model: str, sizes: dict[str, int]) -> dict[str, Any]:
    expected, _ = one_process(model, 1)
    norm = torch.stack([g.double().norm() for g in expected.values()]).norm()
    parallel = subject(model, sizes, 1)
    found = clip_grad_norm_(parallel, 0.01)
    assert type(found) is torch.Tensor
    torch.testing.assert_close(found.double(), norm, rtol=1e-5, atol=0)
    for name, parameter in parallel.named_parameters():
        torch.testing.assert_close(
            full(parameter.grad), expected[name] * float(0.01 / norm), rtol=1e-4, atol=1e-8
        )
    dense = full(parallel.head.weight.grad)
    return {"norm": float(found), "dense": dense, "again": float(get_total_norm(parallel))}


@meshes
@models
def test_b21_all_ranks_clip_by_the_norm_of_one_process(model: str, mesh: str) -> None:
    """A norm per expert group would clip the dense weights by different factors."""
    world_size, sizes = MESHES[mesh]
    first, *others = run_on_ranks(world_size, clipped, model, sizes)
    assert first["again"] <= 0.01 * (1 + 1e-5)
    for other in others:
        assert other["norm"] == first["norm"]
        assert torch.equal(other["dense"], first["dense"])


class WithPlainParameter(MoEDecoder):
    """A scalar that stands bare beside weights of another dtype: it stays whole on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids) * self.scale


MODELS["a whole parameter"] = WithPlainParameter


def steps(kind: dict[str, bool]) -> float:
    parallel = subject("a whole parameter", {"ep_size": 2}, 1)
    norm = clip_grad_norm_(parallel, 0.5)
    torch.optim.AdamW(parallel.parameters(), lr=0.1, **kind).step()
    assert all(full(p).isfinite().all() for p in parallel.parameters())
    expected, _ = one_process("a whole parameter", 1)
    total = torch.stack([g.double().norm() for g in expected.values()]).norm()
    torch.testing.assert_close(norm.double(), total, rtol=1e-5, atol=0)
    return float(norm)


@pytest.mark.parametrize("kind", [{"foreach": True}, {"fused": True}, {}], ids=str)
def test_b51_clipping_and_fused_steps_over_parameters_of_several_meshes(kind: Any) -> None:
    norms = run_on_ranks(4, steps, kind)
    assert len(set(norms)) == 1
