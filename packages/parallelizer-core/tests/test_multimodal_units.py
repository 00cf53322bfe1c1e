"""Frozen towers in the root, in units, or in none; what blocks are called with under casts."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from walk_toys import BF16, FULL, Decoder, context, full_gradients, ids, unit_names

from shardwalk.mesh import DistributedSetup, ParallelismSizes
from shardwalk.parallelizer_core import ModelParallelizer, parallelize_model
from shardwalk.parallelizer_core.fsdp2.nested import map_tensors, tensors_in
from shardwalk.parallelizer_core.testing import cached, run_on_ranks


class Layer(nn.Module):
    """Adds a table in fp32, whatever the hidden states are, and keeps their dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return x + (self.up(x).float() * table).to(x.dtype)


class Tower(nn.Module):
    """A scale and a norm in fp32, an integer table, two blocks."""

    _keep_in_fp32_modules_strict = ("norm", "scale")

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.norm = nn.LayerNorm(6)
        self.codes = nn.Parameter(torch.arange(6), requires_grad=False)
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, image: Tensor) -> Tensor:
        assert self.norm.weight.dtype == self.scale.dtype == torch.float32
        x = (self.norm(image) * self.scale).to(image.dtype) + self.codes.to(image.dtype)
        for layer in self.layers:
            x = layer(x, torch.linspace(0.1, 1.0, 6))
        return x


class Seeing(Decoder):
    def __init__(self, *, frozen: bool = True) -> None:
        super().__init__(blocks=2)
        self.vision_tower = Tower()
        self.projector = nn.Linear(6, 6)
        self.projector.requires_grad_(not frozen)
        for parameter in self.vision_tower.parameters():
            parameter.requires_grad_(not frozen and parameter.is_floating_point())

    def forward(self, tokens: Tensor, image: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        if image is not None:
            x = x + self.projector(self.vision_tower(image))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def seeing(sharding: str = "root", policy: Any = FULL, **kwargs: Any) -> Any:
    torch.manual_seed(7)
    options = {"mp_policy": policy, "multimodal": {"frozen_sharding": sharding}}
    return parallelize_model(Seeing(**kwargs), context(**options))


def placed() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for sharding in ("root", "per_layer", "replicate"):
        model = seeing(sharding)
        plain = [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]
        found[sharding] = unit_names(model), plain
    model = seeing("per_layer")
    model(ids(), torch.ones(2, 5, 6))  # no backward comes to the tower's last block either
    assert all(isinstance(p, DTensor) for p in model.vision_tower.layers.parameters())
    assert not any(isinstance(p, DTensor) for p in model.layers[1].parameters())
    return found


def test_where_the_parameters_of_a_frozen_tower_are() -> None:
    """What can be in no unit with the rest is whole beside a tower that ranks may skip."""
    found = run_on_ranks(2, placed)[0]
    language = {"", "embed", "head", "layers.0", "layers.1"}
    tower = [n for n, _ in Seeing().named_parameters() if n.startswith("vision_tower")]
    apart = [n for n in tower if "layers" not in n]
    assert set(found["root"][0]) == language
    assert found["root"][1] == apart
    assert set(found["replicate"][0]) == language
    assert found["replicate"][1] == [*tower, "projector.weight", "projector.bias"]
    blocks = {f"vision_tower.layers.{index}" for index in range(2)}
    assert language | blocks < set(found["per_layer"][0])


def image_on_one_rank(sharding: str, policy: Any) -> tuple[Tensor, dict[str, Any]]:
    model = seeing(sharding, policy)
    image = torch.linspace(-1, 1, 60).view(2, 5, 6) if dist.get_rank() == 0 else None
    logits = model(ids(), image)
    logits.float().pow(2).mean().backward()
    assert "weight" not in vars(model.vision_tower.layers[0].up)
    assert model.vision_tower.layers[0].up.weight.dtype == torch.float32
    return logits.detach(), full_gradients(model)


@pytest.mark.parametrize("policy", [FULL, BF16])
def test_a_tower_computes_the_same_wherever_it_is_and_may_be_skipped(policy: Any) -> None:
    """B44, with parameters pinned to fp32, integers, and fp32 inputs of its blocks."""
    first = run_on_ranks(2, image_on_one_rank, "root", policy, timeout=20)
    second = run_on_ranks(2, image_on_one_rank, "replicate", policy, timeout=20)
    for (logits, grads), (others, same) in zip(first, second, strict=True):
        assert torch.equal(logits, others)
        assert all(value is same[n] or torch.equal(value, same[n]) for n, value in grads.items())
        assert all(v is None for n, v in grads.items() if n.startswith(("vision", "projector")))


def refused() -> None:
    model = Seeing(frozen=False)
    weight = model.projector.weight
    with pytest.raises(ValueError, match=r"holds projector\.weight, which is trainable"):
        ModelParallelizer()._apply_fsdp_sharding(
            model,
            context().device_mesh["dp_shard"],
            None,
            ignored_multimodal_params={weight},
        )
    assert model.projector.weight is weight
    with pytest.raises(ValueError, match="frozen_multimodal_sharding='roots' must be one of"):
        ModelParallelizer()._apply(model, context().device_mesh, frozen_multimodal_sharding="roots")
    model = seeing("replicate")
    model.projector.requires_grad_(True)
    with pytest.raises(ValueError, match="weight of Linear is whole on every rank"):
        model(ids())


def test_a_parameter_that_nobody_would_reduce_is_refused() -> None:
    run_on_ranks(2, refused)


def given() -> list[str]:
    model = Seeing()
    ModelParallelizer()._apply_fsdp_sharding(
        model,
        context().device_mesh["dp_shard"],
        None,
        ignored_multimodal_params={model.projector.weight},
    )
    return [
        n
        for n, p in model.named_parameters()
        if not isinstance(p, DTensor) and not n.startswith("vision_tower")
    ]


def test_parameters_given_by_a_sidecar_stay_whole() -> None:
    assert run_on_ranks(2, given) == [["projector.weight"]] * 2


class Planning(ModelParallelizer):
    def _tp_plan(self, model: nn.Module, sequence_parallel: bool) -> Any:
        raise ValueError(f"planned for a trainable tower: {model.vision_tower.scale.requires_grad}")


def planned() -> None:
    setup = cached("tp", lambda: DistributedSetup.build("fsdp2", ParallelismSizes(tp_size=2)))
    assert setup.mesh_context.device_mesh is not None
    with pytest.raises(ValueError, match="planned for a trainable tower: False"):
        Planning()._apply(
            Seeing(frozen=False),
            setup.mesh_context.device_mesh,
            reapply_trainability=lambda model: model.requires_grad_(False),
        )


def test_trainability_is_reapplied_before_a_plan_leaves_frozen_towers_whole() -> None:
    run_on_ranks(2, planned)


# Casts


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Record:
    value: Any
    other: Any = None


def test_tensors_are_mapped_in_their_containers_and_others_stay_the_same_objects() -> None:
    one, two = torch.ones(1), torch.zeros(1)
    nested = {"a": [one, Pair(one, 3)], "b": Record(two), "c": OrderedDict(d=(one,))}
    assert list(tensors_in([nested])) == [one, one, two, one]
    made = map_tensors(lambda t: two if t is one else t, nested)
    assert made["a"] == [two, Pair(two, 3)]
    assert made["b"] is nested["b"]
    assert made["c"]["d"] == (two,)
    assert map_tensors(lambda t: t, nested) is nested


class Watching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)
        self.seen: list[Any] = []

    def forward(self, x: Tensor, tables: tuple[Tensor, ...] = (), *, bias: Any = None) -> Tensor:
        self.seen = [t.dtype for t in tensors_in([x, tables, bias])]
        return x + self.up(x.to(self.up.weight.dtype))


def seen(hidden: torch.dtype, cast: bool) -> list[Any]:
    class Calling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Watching()])

        def forward(self, x: Tensor) -> Tensor:
            tables = (torch.ones(6), torch.arange(6))
            out: Tensor = self.layers[0](x.to(hidden), tables, bias={"b": torch.ones(6)})
            return out

    policy = {**BF16, "cast_forward_inputs": cast}
    model = parallelize_model(Calling(), context(mp_policy=policy))
    model(torch.ones(2, 6)).float().sum().backward()
    found: list[Any] = model.layers[0].seen
    return found


def test_a_block_keeps_wider_inputs_where_its_hidden_states_need_no_cast() -> None:
    """Where they do, all floating inputs are cast, as torch does; without the option, none."""
    half, wide, integer = torch.bfloat16, torch.float32, torch.int64
    assert run_on_ranks(1, seen, half, True)[0] == [half, wide, integer, wide]
    assert run_on_ranks(1, seen, wide, True)[0] == [half, half, integer, half]
    assert run_on_ranks(1, seen, wide, False)[0] == [wide, wide, integer, wide]
