"""Clipping that crashes on mixed gradients, misses some, or scales a copy of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwalk.parallelizer_core import clip_grad_norm_, get_total_norm
from shardwalk.parallelizer_core.parallel_state import unwrap_model
from shardwalk.parallelizer_core.testing import run_on_ranks
from tests.matrix.case_models import (
    FULL,
    VOCABULARY,
    assert_equal,
    gradients,
    mean_loss,
    mine,
    parallel,
    seeded,
    tokens,
    whole,
)
from tests.matrix.tiny_transformers import MODELS

ORDERS = [1.0, 2.0, math.inf]
SHARDED = [("fsdp", 1), ("fsdp", 2), ("fsdp", 4), ("hsdp", 4)]
PLACES = [
    *((*sharding, offload) for sharding in SHARDED for offload in (False, True)),
    ("ddp", 2, False),
]


class Mixture(nn.Module):
    """Sharded, pinned and bare, scalar, tied, frozen and unused parameters in one model."""

    _keep_in_fp32_modules_strict = ("decay",)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.layers = nn.ModuleList(MixtureBlock() for _ in range(3))
        self.layers[1].requires_grad_(False)
        self.unused = nn.Linear(6, 6)
        self.head = nn.Linear(6, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class MixtureBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 5)
        self.down = nn.Linear(5, 6, bias=False)
        self.decay = nn.Parameter(torch.linspace(0.1, 1.0, 6))
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.decay + self.down(torch.tanh(self.up(x))) * self.scale


def llama() -> nn.Module:
    return MODELS["llama"](True)


def one_process_norm(model: nn.Module, order: float) -> float:
    flat = [p.grad.flatten().double() for p in model.parameters() if p.grad is not None]
    return torch.linalg.vector_norm(torch.cat(flat), order).item()


def clipped(make: Any, kind: str, offload: bool) -> Any:
    options: dict[str, Any] = {"offload_policy": {"pin_memory": False}} if offload else {}
    if kind == "ddp":
        options = {"find_unused_parameters": True}
    model = parallel(seeded(make), kind, **options)
    mean_loss(model, mine(tokens())).backward()
    measured = [get_total_norm(model, order) for order in ORDERS]
    norm = clip_grad_norm_(model, 0.05)
    clipped_gradients = gradients(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    torch.optim.AdamW(trained, lr=1e-2, eps=1e-4).step()
    after = clip_grad_norm_(model, 0.05)
    assert all(type(value) is Tensor and value.ndim == 0 for value in [*measured, norm, after])
    weights = {n: whole(p) for n, p in unwrap_model(model).named_parameters()}
    return [m.item() for m in measured], norm.item(), after.item(), clipped_gradients, weights


def unused_as_none(grads: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """DDP gives parameters that nothing used a gradient of zeros, or leaves them without."""
    return {name: grad if grad is not None and grad.any() else None for name, grad in grads.items()}


@pytest.mark.parametrize(("kind", "world", "offload"), PLACES)
@pytest.mark.parametrize("make", [llama, Mixture])
def test_the_norm_and_the_clipped_gradients_are_those_of_one_process(
    make: Any, kind: str, world: int, offload: bool
) -> None:
    """B51, B55, P29: a plain scalar, the same on every rank; then the optimizer steps."""
    reference = seeded(make)
    mean_loss(reference, tokens()).backward()
    norms = [one_process_norm(reference, order) for order in ORDERS]
    nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
    expected = gradients(reference)
    trained = [p for p in reference.parameters() if p.requires_grad]
    torch.optim.AdamW(trained, lr=1e-2, eps=1e-4).step()
    results = run_on_ranks(world, clipped, make, kind, offload)
    assert len({(*measured, norm, after) for measured, norm, after, *_ in results}) == 1
    for measured, norm, after, found, weights in results:
        assert measured == pytest.approx(norms, rel=1e-5)
        assert norm == measured[1]
        assert after <= 0.05 * (1 + 1e-5)
        assert_equal(unused_as_none(found), unused_as_none(expected))
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-5, atol=1e-6)


def clip_narrow(kind: str, dtype: torch.dtype) -> tuple[float, float, set[torch.dtype], bool]:
    model = parallel(seeded(llama).to(dtype), kind, mp_policy=FULL)
    mean_loss(model, mine(tokens())).backward()
    stored = [p.grad for p in model.parameters()]
    kept = [g.to_local().data_ptr() if isinstance(g, DTensor) else g.data_ptr() for g in stored]
    before = clip_grad_norm_(model, 0.01).item()
    now = [p.grad.to_local().data_ptr() for p in model.parameters()]
    after = torch.cat([whole(p.grad).flatten().double() for p in model.parameters()]).norm().item()
    return before, after, {p.grad.dtype for p in model.parameters()}, kept == now


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("kind", "world"), [("fsdp", 2), ("hsdp", 4)])
def test_the_stored_gradient_is_what_gets_smaller(
    kind: str, world: int, dtype: torch.dtype
) -> None:
    """P1: whatever its dtype, in place, not a cast copy of it."""
    for before, after, dtypes, in_place in run_on_ranks(world, clip_narrow, kind, dtype):
        assert dtypes == {dtype}
        assert before > 0.1
        assert after == pytest.approx(0.01, rel=2e-2)
        assert in_place
