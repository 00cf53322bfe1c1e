"""Buffers that a forward updates: once per forward, whatever is recomputed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from walk_toys import Decoder, context, full_gradients, ids

from shardwalk.mesh import DDPConfig, DistributedSetup, MeshContext
from shardwalk.parallelizer_core import (
    apply_activation_checkpointing,
    is_recomputing,
    parallelize_model,
)
from shardwalk.parallelizer_core.testing import cached, run_on_ranks

modes = pytest.mark.parametrize("mode", ["full", "selective"])


class Normalized(nn.Module):
    """Batch normalization: running statistics, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.BatchNorm1d(6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(self.norm(x.flatten(0, 1)).view_as(x)).sin()


class Averaging(nn.Module):
    """Divides by a running average that it updates: the recompute must see that of the forward."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)
        self.register_buffer("mean", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.up(x / self.mean.clone()).sin()
        self.update(y.detach().abs().mean((0, 1)))
        return y.sin()  # its backward needs y, so that a recompute comes this far

    def update(self, now: Tensor) -> None:
        self.mean.mul_(0.5).add_(now)


class ThroughData(Averaging):
    """A write that no version counter counts."""

    def update(self, now: Tensor) -> None:
        self.mean.data.mul_(0.5).add_(now)


class Replacing(Averaging):
    """Another tensor in the buffer's place."""

    def update(self, now: Tensor) -> None:
        self.mean = self.mean / 2 + now


class Shared(Averaging):
    """One tensor under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Module()
        self.other.register_buffer("mean", self.mean)

    def update(self, now: Tensor) -> None:
        self.other.mean.mul_(0.5).add_(now)


class Late(nn.Module):
    """Buffers that are none, and that are not there, before the first forward."""

    seen: Tensor | None
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)
        self.register_buffer("seen", None)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.zeros(()) if self.seen is None else self.seen
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.arange(6.0) + self.seen)
        self.seen.add_(1)
        self.table.mul_(0.9)
        return x + self.up(x * self.table.clone() * self.seen.clone()).sin()


BLOCKS = [Normalized, Averaging, ThroughData, Replacing, Shared, Late]
blocks = pytest.mark.parametrize("block", BLOCKS)

State = dict[str, Tensor]


def step(model: nn.Module, tokens: Tensor, *, thread: bool = False) -> Tensor:
    """Two forwards before one backward."""
    loss = model(tokens).pow(2).mean() + model(tokens.flip(0)).sin().mean()
    if thread:
        worker = threading.Thread(target=loss.backward)
        worker.start()
        worker.join()
    else:
        loss.backward()
    return loss.detach()


def buffers_of(model: nn.Module) -> State:
    return {name: buffer.clone() for name, buffer in model.named_buffers(remove_duplicate=False)}


def assert_same(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=name)


@modes
@blocks
def test_buffers_and_gradients_are_those_of_no_checkpointing(
    block: Callable[[], nn.Module], mode: str
) -> None:
    results = []
    for asked in (False, mode):
        torch.manual_seed(7)
        model = Decoder(block=block)
        apply_activation_checkpointing(model, asked)
        for _ in range(3):
            step(model, ids())
        results.append((buffers_of(model), full_gradients(model)))
    assert_same(results[1][0], results[0][0])
    assert_same(results[1][1], results[0][1])


def ddp_context(mode: Any) -> MeshContext:
    made = cached("buffers ddp", lambda: DistributedSetup.build("ddp").mesh_context)
    return MeshContext.from_meshes(
        made.device_mesh, strategy_config=DDPConfig(activation_checkpointing=mode)
    )


def on_ranks(block: Callable[[], nn.Module], mode: str, strategy: str, thread: bool) -> None:
    rows = ids(rows=4).tensor_split(2)[torch.distributed.get_rank()]
    results = []
    for asked in (False, mode):
        torch.manual_seed(7)
        mesh_context = (
            ddp_context(asked) if strategy == "ddp" else context(activation_checkpointing=asked)
        )
        model = parallelize_model(Decoder(block=block), mesh_context)
        for _ in range(2):
            step(model, rows, thread=thread)
        results.append((buffers_of(model), full_gradients(model)))
    assert_same(results[1][0], results[0][0])
    assert_same(results[1][1], results[0][1])


@modes
@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
def test_buffers_on_ranks(strategy: str, mode: str) -> None:
    blocks = [Normalized, Averaging] if strategy == "fsdp2" else [Normalized]
    for block in blocks:
        run_on_ranks(2, on_ranks, block, mode, strategy, strategy == "fsdp2")


def test_a_recompute_that_fails_leaves_the_buffers() -> None:
    class Failing(Averaging):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x).sin()
            if is_recomputing():
                raise KeyError("mine")
            return y.sin()

    model = nn.ModuleList([Failing()])
    apply_activation_checkpointing(model, "full")
    loss = model[0](torch.ones(2, 3, 6)).sum()
    found, mean = buffers_of(model), model[0].mean
    with pytest.raises(KeyError, match="mine"):
        loss.backward()
    assert model[0].mean is mean
    assert_same(buffers_of(model), found)


def test_a_kept_graph_recomputes_from_the_same_buffers_again() -> None:
    model = nn.ModuleList([Averaging()])
    apply_activation_checkpointing(model, "full")
    loss = model[0](torch.ones(2, 3, 6)).sum()
    found = buffers_of(model)
    loss.backward(retain_graph=True)
    first = {name: grad.clone() for name, grad in full_gradients(model).items()}  # type: ignore[union-attr]
    model.zero_grad()
    loss.backward()
    assert_same(full_gradients(model), first)
    assert_same(buffers_of(model), found)


def test_parts_of_a_block_keep_their_buffers_too() -> None:
    class Parted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.mlp = Averaging(), Normalized()

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(self.attn(x))

    results = []
    for asked in (False, "full"):
        torch.manual_seed(7)
        model = nn.ModuleList([Parted()])
        apply_activation_checkpointing(model, asked, whole_layers=False)
        model[0](torch.ones(2, 3, 6).cumsum(1)).sum().backward()
        results.append((buffers_of(model), full_gradients(model)))
    assert_same(results[1][0], results[0][0])
    assert_same(results[1][1], results[0][1])
