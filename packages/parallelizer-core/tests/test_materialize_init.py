"""Initial weights from meta: the same on every mesh, replicas alike, ties kept (B03, B10)."""

from __future__ import annotations

from typing import Any

import pytest
import state_toys as toys
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardwalk.parallelizer_core.materialize import materialize
from shardwalk.parallelizer_core.testing import run_on_ranks


def normal(name: str, tensor: Tensor, generator: torch.Generator) -> Tensor:
    assert type(tensor) is Tensor
    return nn.init.normal_(tensor, generator=generator)


INITS: dict[str, Any] = {"normal": normal, "reset_parameters": "reset_parameters"}


def on_meta(**kwargs: Any) -> toys.ToyLM:
    with torch.device("meta"):
        return toys.toy(**kwargs)


def initialized(sharding: str, init: str, tied: bool = False) -> dict[str, Tensor]:
    with torch.device("meta"):
        model: nn.Module = toys.ToyLM(tied=tied)
    if sharding != "ddp":
        model = toys.SHARDINGS[sharding](model)
    torch.manual_seed(torch.distributed.get_rank())  # must not matter
    state = torch.get_rng_state()
    with toys.Reductions() as reductions:
        materialize(model, init=INITS[init], seed=5)
    assert reductions.count == 0
    assert torch.equal(torch.get_rng_state(), state)
    if sharding == "ddp":
        model = toys.ddp(model)  # type: ignore[arg-type]
    return {toys.bare_name(n): toys.whole(t) for n, t in model.state_dict().items()}


def world_1(init: str, tied: bool = False) -> dict[str, Tensor]:
    model = on_meta(tied=tied)
    materialize(model, init=INITS[init], seed=5)
    return model.state_dict()


@pytest.mark.parametrize("init", list(INITS))
@pytest.mark.parametrize(
    ("sharding", "world"), [("fsdp", 2), ("tp", 2), ("ddp", 2), ("hsdp", 4), ("fsdp_tp", 4)]
)
def test_values_do_not_depend_on_the_mesh(sharding: str, world: int, init: str) -> None:
    """B10: full tensors equal those of one process bit for bit, so replicas are identical."""
    expected = world_1(init)
    for state in run_on_ranks(world, initialized, sharding, init):
        assert state.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(state[name], tensor), name


def test_tensors_differ_from_each_other_and_by_seed() -> None:
    """B10: no two parameters, and no two halves of one, hold the same numbers."""
    state = world_1("normal")
    ups = [state[f"blocks.{i}.up.weight"] for i in range(2)]
    assert not torch.equal(*ups)
    assert not torch.equal(*ups[0].chunk(2))
    other = on_meta()
    materialize(other, init=normal, seed=6)
    assert not torch.equal(other.state_dict()["embed.weight"], state["embed.weight"])


def test_reset_parameters_has_the_distribution_of_the_modules() -> None:
    state = world_1("reset_parameters")
    assert torch.equal(state["blocks.0.norm.weight"], torch.ones(toys.WIDTH))
    bound = toys.WIDTH**-0.5
    up = state["blocks.0.up.weight"]
    assert up.abs().max() <= bound
    assert up.std() > bound / 3


def tied_start(order: str) -> tuple[bool, int, dict[str, Tensor], dict[str, Tensor]]:
    with torch.device("meta"):
        model: nn.Module = toys.ToyLM(tied=True)
    if order == "shard first":
        toys.fsdp(model)  # type: ignore[arg-type]
    materialize(model, init=normal)
    if order == "materialize first":
        toys.fsdp(model)  # type: ignore[arg-type]
    is_tied = model.head.weight is model.embed.weight  # type: ignore[union-attr]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients: dict[str, Tensor] = {}
    for _ in range(3):
        toys.mean_loss(model, *toys.my_rows("fsdp", *toys.batch())).backward()
        gradients = gradients or toys.whole_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: toys.whole(p) for name, p in model.named_parameters()}
    return is_tied, len(list(model.parameters())), gradients, weights


@pytest.mark.parametrize("order", ["shard first", "materialize first"])
def test_ties_survive_in_either_order(order: str) -> None:
    """B03: one tensor under both names; its gradient and weights are those of one process."""
    expected = on_meta(tied=True)
    materialize(expected, init=normal)
    count = len(list(expected.parameters()))
    assert expected.head.weight is expected.embed.weight
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    first: dict[str, Tensor] = {}
    for _ in range(3):
        toys.mean_loss(expected, *toys.batch()).backward()
        first = first or toys.whole_gradients(expected)
        optimizer.step()
        optimizer.zero_grad()
    for is_tied, parameters, gradients, weights in run_on_ranks(2, tied_start, order):
        assert is_tied
        assert parameters == count
        for name, gradient in first.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-6)
        for name, parameter in expected.named_parameters():
            torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-5, atol=1e-6)


class Zoo(nn.Module):
    """Initializers of several manners, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(3)
        self.attention = nn.MultiheadAttention(4, 2)
        self.lstm = nn.LSTM(3, 2)
        self.conv = nn.Conv1d(3, 2, 1)
        self.own = nn.Parameter(torch.empty(3))
        self.frozen = nn.Parameter(torch.empty(2), requires_grad=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.own.data.normal_()
        self.frozen.data.fill_(7.0)


class Rescaled(nn.Module):
    """A parent that changes what its child drew."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(5, 5)
        self.right = nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.empty(1))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        with torch.no_grad():
            self.left.weight.mul_(100.0)
            nn.init.normal_(self.right.weight, std=1e-3)


def test_many_kinds_of_modules() -> None:
    with torch.device("meta"):
        model = Zoo().eval()
    hooked: list[int] = []
    model.own.register_post_accumulate_grad_hook(lambda parameter: hooked.append(id(parameter)))
    model.own.note = "kept"  # type: ignore[attr-defined]
    identity = id(model.own)
    materialize(model, init="reset_parameters")
    state = model.state_dict()
    assert all(bool(tensor.isfinite().all()) for tensor in state.values())
    assert torch.equal(state["batch_norm.running_var"], torch.ones(3))
    assert state["batch_norm.num_batches_tracked"].item() == 0
    assert torch.equal(state["frozen"], torch.full((2,), 7.0))
    assert not model.frozen.requires_grad
    assert not model.training
    assert model.lstm(torch.zeros(1, 1, 3))[0].isfinite().all()
    model.own.sum().backward()
    assert hooked == [identity] == [id(model.own)]
    assert model.own.note == "kept"  # type: ignore[attr-defined]


def test_parents_that_write_to_their_children() -> None:
    with torch.device("meta"):
        model = Rescaled()
    materialize(model, init="reset_parameters")
    assert model.left.weight.abs().max() > 5
    assert 0 < model.right.weight.abs().max() < 0.01
    assert model.right.bias.abs().max() > 0.05


class Grouped(nn.Module):
    grouped_parameters = ("experts",)

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.empty(4, 3, 2))


def grouped(drawn: list[str] | None = None) -> tuple[Tensor, int]:
    with torch.device("meta"):
        model = Grouped()
    mesh = toys.mesh_of(2, names=("ep",))
    model.experts = nn.Parameter(
        distribute_tensor(model.experts, mesh, [Shard(0)], src_data_rank=None)
    )
    shapes: list[torch.Size] = []

    def init(name: str, tensor: Tensor, generator: torch.Generator) -> None:
        shapes.append(tensor.shape)
        normal(name, tensor, generator)

    materialize(model, init=init)
    assert set(shapes) == {torch.Size([3, 2])}
    assert isinstance(model.experts, DTensor)
    return toys.whole(model.experts), len(shapes)


def test_grouped_parameters_are_drawn_one_by_one_and_only_local_ones() -> None:
    with torch.device("meta"):
        model = Grouped()
    materialize(model, init=normal)
    for whole, drawn in run_on_ranks(2, grouped):
        assert drawn == 2
        assert torch.equal(whole, model.experts)
    assert not torch.equal(model.experts[0], model.experts[1])


def test_real_models_are_initialized_in_place() -> None:
    model = toys.toy()
    parameter = model.head.weight
    materialize(model, init=normal, seed=5)
    assert model.head.weight is parameter
    assert torch.equal(parameter, world_1("normal")["head.weight"])


def test_several_models() -> None:
    models = [on_meta(), on_meta()]
    materialize(models, init=normal, seed=5)
    assert torch.equal(models[1].head.weight, world_1("normal")["head.weight"])


class Stubborn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.free = nn.Parameter(torch.empty(3))
        self.linear = nn.Linear(2, 2)


def test_parameters_nobody_initializes_are_named_before_anything_is_written() -> None:
    with torch.device("meta"):
        model = Stubborn()
    with pytest.raises(ValueError, match="writes free; define one, or pass init= a function"):
        materialize(model, init="reset_parameters")
    assert model.linear.weight.is_meta


def leave_the_last_row(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    tensor[:-1].zero_()


def test_values_left_unset_are_an_error() -> None:
    with pytest.raises(ValueError, match="init left values of 'embed.weight' unset or NaN"):
        materialize(on_meta(), init=leave_the_last_row)
    with pytest.raises(TypeError, match="another tensor for 'embed.weight'"):
        materialize(on_meta(), init=lambda name, tensor, generator: torch.zeros_like(tensor))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "a checkpoint or init, got neither"),
        ({"init": normal, "checkpoint": "x"}, "got both checkpoint and init"),
        ({"init": "xavier"}, "init must be a function .* or 'reset_parameters', got 'xavier'"),
        ({"init": normal, "device": "meta"}, "device='meta' does not fit the model"),
        ({"init": normal, "ignore": ("x",)}, "ignore= names what to leave unread"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        materialize(on_meta(), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init": normal, "seed": "x"}, "seed must be an integer, got 'x'"),
        ({"init": normal, "seed": True}, "seed must be an integer, got True"),
        ({"checkpoint": 3}, "checkpoint must be a path .* or a CheckpointReader, got 3"),
    ],
)
def test_options_of_another_type(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        materialize(on_meta(), **options)


class Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.empty(0, 4))
        self.linear = nn.Linear(2, 2)


def test_a_parameter_of_no_elements_needs_no_initializer() -> None:
    with torch.device("meta"):
        model = Empty()
    materialize(model, init="reset_parameters")
    assert (model.none.shape, model.none.is_meta) == ((0, 4), False)
    assert model.linear.weight.isfinite().all()


def test_meta_tensors_in_containers_are_an_error() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
        model.cache = [torch.empty(2)]  # type: ignore[assignment]
    with pytest.raises(ValueError, match="cannot be filled: cache"):
        materialize(model, init=normal)
