"""Initial weights that depend on the mesh: replicas that differ, shards that repeat."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwalk.parallelizer_core import materialize
from shardwalk.parallelizer_core.parallel_state import unwrap_model
from shardwalk.parallelizer_core.testing import TinyDecoder, run_on_ranks
from tests.matrix.case_models import context, mean_loss, on_meta, parallel, tokens, whole
from tests.matrix.tiny_transformers import MODELS, normal_weights


def llama() -> nn.Module:
    return MODELS["llama"](False)


INITS: dict[str, tuple[Any, Any]] = {
    "a function": (TinyDecoder, normal_weights),
    "the modules' own": (TinyDecoder, "reset_parameters"),
    "the model's own": (llama, "reset_parameters"),
}


def initialized(name: str, kind: str) -> tuple[dict[str, Tensor], list[bool]]:
    make, init = INITS[name]
    if dist.is_initialized():
        torch.manual_seed(100 + dist.get_rank())  # what users do per rank must not matter
    model = on_meta(make)
    if kind == "ddp":
        materialize(model, init=init, seed=5)
    if dist.is_initialized():
        model = parallel(model, kind)
    if kind != "ddp":
        materialize(model, init=init, seed=5)
    state = {n: whole(p) for n, p in unwrap_model(model).named_parameters()}
    return state, replicas_agree(model, kind) if dist.is_initialized() else []


def replicas_agree(model: nn.Module, kind: str) -> list[bool]:
    """Whether this rank's local parts are bit for bit those of its first replica."""
    mesh = context(kind).device_mesh
    assert mesh is not None
    if mesh["dp_replicate"].size() == 1:
        return []
    group = mesh["dp_replicate"].get_group()
    agree = []
    for parameter in model.parameters():
        local = parameter.to_local().detach()
        peers = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(peers, local.contiguous(), group=group)
        agree.append(all(torch.equal(local, peer) for peer in peers))
    return agree


@pytest.mark.parametrize(
    ("kind", "world"), [("fsdp", 1), ("fsdp", 2), ("fsdp", 4), ("hsdp", 2), ("hsdp", 4), ("ddp", 2)]
)
@pytest.mark.parametrize("name", INITS)
def test_initial_weights_are_those_of_one_process(name: str, kind: str, world: int) -> None:
    """B10: bit for bit on every mesh, replicas included; no two halves are alike."""
    expected, _ = initialized(name, "none")
    for state, agree in run_on_ranks(world, initialized, name, kind):
        assert state.keys() == expected.keys()
        for parameter, value in expected.items():
            assert torch.equal(state[parameter], value), parameter
        assert all(agree)
        assert agree or kind != "hsdp"
    matrices = [value for value in expected.values() if value.ndim == 2]
    for first in matrices:
        assert not torch.equal(*first[: first.shape[0] // 2 * 2].chunk(2))
    same = [
        a
        for a in matrices
        for b in matrices
        if a is not b and a.shape == b.shape and torch.equal(a, b)
    ]
    assert same == []


def ddp_from_other_weights() -> dict[str, Tensor]:
    torch.manual_seed(dist.get_rank())
    model = parallel(TinyDecoder(), "ddp")
    mean_loss(model, tokens()).backward()
    return {n: whole(p) for n, p in unwrap_model(model).named_parameters()}


def test_ddp_starts_from_the_first_ranks_weights() -> None:
    """B10: replicas built from a seed of their own are made equal."""
    first, second = run_on_ranks(2, ddp_from_other_weights)
    assert all(torch.equal(first[name], second[name]) for name in first)


def from_other_weights(kind: str, meta: bool) -> str:
    torch.manual_seed(dist.get_rank())
    model = TinyDecoder()
    if not meta:
        with pytest.raises(ValueError, match="embed.weight") as error:
            parallel(model, kind)
        return str(error.value)
    parallel(on_meta(TinyDecoder), kind)
    return "meta"


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize(("kind", "world"), [("fsdp", 2), ("hsdp", 4), ("hsdp", 2)])
def test_real_weights_that_differ_over_the_ranks_are_refused(
    kind: str, world: int, meta: bool
) -> None:
    """B10: neither replicas that stay different nor a model whose halves come from two models."""
    assert len(set(run_on_ranks(world, from_other_weights, kind, meta))) == 1
