"""Buffers outside the state dict come back as constructed, or not at all (B04, B35)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest
import state_toys as toys
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from shardwalk.parallelizer_core.materialize import materialize
from shardwalk.parallelizer_core.testing import run_on_ranks


@pytest.fixture(autouse=True)
def nan_in_new_memory() -> Iterator[None]:
    """Makes any read of memory that was never written show as NaN."""
    with toys.nan_in_new_memory():
        yield


class Rotary(nn.Module):
    """Constructor arguments under their own names; one buffer derived from another."""

    def __init__(self, dim: int, base: float = 10000.0, device: torch.device | None = None) -> None:
        super().__init__()
        self.dim = dim
        self.base = base
        inv_freq = base ** -(torch.arange(0, dim, 2, device=device).float() / dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("copy", inv_freq.clone(), persistent=False)
        self.plain = inv_freq * 2  # neither parameter nor buffer

    def forward(self, positions: Tensor) -> Tensor:
        return torch.outer(positions.float(), self.inv_freq).cos()  # type: ignore[arg-type]


class Masked(nn.Module):
    """Parameters, children and a buffer in one module, as attention with a causal mask has."""

    def __init__(self, width: int, *, length: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.width, self.length = width, length
        self.proj = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer("mask", torch.ones(length, length).tril(), persistent=False)
        self.rotary = Rotary(width, base=500.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x) * self.scale + self.mask[: x.shape[-2], :1]


class Doubling(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = 2 * size
        self.register_buffer("table", torch.arange(self.size), persistent=False)


class Forgetful(nn.Module):
    def __init__(self, width: int, base: float = 10000.0) -> None:
        super().__init__()
        self.width = width
        self.register_buffer("table", base ** torch.arange(width), persistent=False)


class Hooked(Forgetful):
    def __init__(self, width: int, base: float = 10000.0) -> None:
        super().__init__(width, base)
        self.secret = base

    def compute_buffers(self, device: torch.device) -> Mapping[str, Tensor]:
        return {"table": self.secret ** torch.arange(self.width, device=device)}


class Catchall(nn.Module):
    def __init__(self, *sizes: int, **options: float) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(sizes), persistent=False)


def ones(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    tensor.fill_(1.0)


def rebuilt(bf16: bool) -> tuple[dict[str, Tensor], list[Any], bool]:
    with toys.nan_in_new_memory():
        with torch.device("meta"):
            model = nn.Sequential(*[Masked(6, length=5), Hooked(4, base=3.0), Rotary(8)])
        if bf16:
            model = model.to(torch.bfloat16)
        mesh = toys.mesh_of(2, names=("shard",))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        state = torch.get_rng_state()
        materialize(model, init=ones)
        kinds = [type(module).__name__ for module in model]
        return toys.buffers(model), kinds, torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("bf16", [False, True])
def test_every_buffer_equals_the_constructed_one(bf16: bool) -> None:
    """B04, B35: bit for bit, in the dtype of construction, in units whose class was swapped too."""
    expected = toys.buffers(nn.Sequential(*[Masked(6, length=5), Hooked(4, base=3.0), Rotary(8)]))
    for found, kinds, untouched in run_on_ranks(2, rebuilt, bf16):
        assert kinds == ["FSDPMasked", "Hooked", "Rotary"]
        assert untouched
        assert found.keys() == expected.keys()
        for name, buffer in expected.items():
            assert found[name].dtype == buffer.dtype, name
            assert torch.equal(found[name], buffer), name


def test_far_positions_are_right_in_a_bf16_model() -> None:
    """B35: cos at position 8191 is that of fp32 frequencies."""
    with torch.device("meta"):
        model = Rotary(64).to(torch.bfloat16)
    materialize(model, init=ones)
    positions = torch.arange(8192)
    frequencies = 10000.0 ** -(torch.arange(0, 64, 2).double() / 64)
    expected = torch.outer(positions.double(), frequencies).cos()
    assert (model(positions).double() - expected).abs()[8191].max() < 1e-3
    assert torch.equal(model(positions), Rotary(64)(positions))


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Forgetful, "0.table .no attribute of Forgetful holds its constructor's base"),
        (Doubling, "its constructor turns size=6 into 12"),
        (Catchall, r"no attribute of Catchall holds its constructor's \*sizes, \*options"),
    ],
)
def test_what_nobody_can_rebuild_is_named(module: type[nn.Module], reason: str) -> None:
    """B04: a default is never assumed; nothing is written before the error."""
    with torch.device("meta"):
        model = nn.Sequential(module(3), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=f"cannot rebuild what no checkpoint.*{reason}"):
        materialize(model, init=ones)
    assert model[1].weight.is_meta


class WrongHook(Hooked):
    def compute_buffers(self, device: torch.device) -> Mapping[str, Tensor]:
        return {"table": torch.ones(2), "other": torch.ones(1)}


def test_a_hook_that_gives_another_shape_is_an_error() -> None:
    with torch.device("meta"):
        model = WrongHook(4)
    with pytest.raises(ValueError, match=r"table .*the shape \[2\] instead of \[4\]"):
        materialize(model, init=ones)


class Initialized(nn.Module):
    """Keeps its argument under another name, but its model's initializer knows."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.kept = value
        self.register_buffer("value", torch.tensor(value), persistent=False)


class InitializingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Initialized(3.25)
        self.shared = self.part

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Initialized):
            nn.init.constant_(module.value, module.kept)  # type: ignore[arg-type]


def test_the_models_initializer_is_the_last_source() -> None:
    with torch.device("meta"):
        model = InitializingModel().to(torch.bfloat16)
    materialize(model, init=ones)
    assert model.part.value.item() == 3.25  # type: ignore[operator]
    assert model.part.value.dtype == torch.float32


class Aliased(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("table", torch.arange(float(size)), persistent=False)
        self.same = self.table
        self.child = nn.Module()
        self.child.register_buffer("table", self.table, persistent=False)


def test_aliases_stay_aliases() -> None:
    with torch.device("meta"):
        model = Aliased(3)
    materialize(model, init=ones)
    assert torch.equal(model.table, torch.arange(3.0))  # type: ignore[arg-type]
    assert model.child.table is model.table is model.same


def test_real_buffers_are_left_alone() -> None:
    model = Rotary(4)
    model.inv_freq.fill_(5.0)  # type: ignore[operator]
    materialize(model, init=ones)
    assert torch.equal(model.inv_freq, torch.full((2,), 5.0))  # type: ignore[arg-type]


class Recording(nn.Module):
    """Its constructor is expensive: it must not spend memory on parameters."""

    made: ClassVar[list[str]] = []

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.linear = nn.Linear(width, width)
        self.made.append(self.linear.weight.device.type)
        self.register_buffer("table", torch.arange(width), persistent=False)


def test_rebuilding_makes_no_parameters() -> None:
    with torch.device("meta"):
        model = Recording(3)
    materialize(model, init=ones)
    assert Recording.made == ["meta", "meta"]


class FromParameters(nn.Module):
    """Its buffer comes from values that an empty parameter does not have."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        scratch = torch.empty(width)
        scratch.copy_(torch.arange(width))
        self.register_buffer("table", scratch, persistent=False)


def test_constructors_that_fill_empty_memory() -> None:
    with torch.device("meta"):
        model = FromParameters(3)
    materialize(model, init=ones)
    assert torch.equal(model.table, torch.arange(3.0))  # type: ignore[arg-type]
