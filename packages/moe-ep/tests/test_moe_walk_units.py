"""Which units the walk makes of a model with experts, on which mesh, with which options."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from moe_layer_toys import MoEDecoder, token_ids
from moe_walk_toys import CommonBlock, CommonDecoder, Router, Wrapped, context, sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from shardwalk.moe_ep.expert_units import expert_mesh_of
from shardwalk.parallelizer_core import ModelParallelizer, describe_units, parallelize_model
from shardwalk.parallelizer_core.testing import cached, run_on_ranks

BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}


def units(model: Any, options: dict[str, Any]) -> dict[str, str]:
    return {unit.name: unit.mesh for unit in describe_units(sharded(model, **options))}


def test_experts_are_units_of_their_own_on_their_mesh() -> None:
    found = run_on_ranks(4, units, MoEDecoder, {})[0]
    assert found["layers.0.mlp.experts"] == "ep_shard 2 x ep 2"
    assert found["layers.0.mlp.gate"] == found["layers.0"] == "dp_shard_cp 4"
    assert "layers.0.mlp" not in found


def test_a_shard_axis_of_one_rank_makes_units_too() -> None:
    found = run_on_ranks(2, units, CommonDecoder, {})[0]
    assert found["layers.1.mlp.experts"] == "ep_shard 1 x ep 2"
    assert found["layers.1"] == "dp_shard_cp 2"


def test_replicas_of_experts() -> None:
    options = {"sizes": {"ep_size": 2, "dp_replicate_size": 2}}
    found = run_on_ranks(4, units, CommonDecoder, options)[0]
    assert found["layers.0.mlp.experts"] == "ep_replicate 2 x ep_shard 1 x ep 2"
    assert found["layers.0"] == "dp_replicate 2 x dp_shard_cp 2"


def mesh_without_shards() -> list[Any]:
    moe_mesh = cached("ep alone", lambda: init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))
    mesh = expert_mesh_of(moe_mesh, data_ranks=2)
    return [mesh.ep.size(), mesh.shards.size(), mesh.gradient_factor]


def test_a_moe_mesh_may_have_the_ep_axis_alone() -> None:
    assert run_on_ranks(2, mesh_without_shards) == [[2, 1, 0.5]] * 2


def placements() -> list[tuple[Any, ...]]:
    model = sharded(CommonDecoder)
    experts = model.layers[0].mlp.experts
    local = experts.gate_up_proj.to_local()
    return [experts.gate_up_proj.placements, tuple(local.shape), model.training]


def test_experts_lie_in_blocks_over_ep_and_in_shards_of_dimension_1() -> None:
    for found, shape, _ in run_on_ranks(4, placements):
        assert found == (Shard(1), Shard(0))
        assert shape == (2, 12, 8)


def own_experts() -> list[bool]:
    torch.manual_seed(7)
    whole = CommonDecoder().layers[1].mlp.experts.down_proj.detach()
    mesh_context = context(sizes={"ep_size": 2})
    model = sharded(CommonDecoder)
    rank = mesh_context.moe_mesh.get_local_rank("ep")
    shard = mesh_context.moe_mesh.get_local_rank("ep_shard")
    mine = model.layers[1].mlp.experts.down_proj.to_local()
    return [torch.equal(mine, whole[2 * rank : 2 * rank + 2, 4 * shard : 4 * shard + 4])]


def test_a_rank_holds_a_contiguous_block_of_experts() -> None:
    assert run_on_ranks(4, own_experts) == [[True]] * 4


class Recording(ModelParallelizer):
    """Writes down every unit, with what it is made with."""

    def __init__(self) -> None:
        self.made: list[tuple[nn.Module, dict[str, Any]]] = []

    def _fully_shard_module(self, module: nn.Module, **kwargs: Any) -> nn.Module:
        self.made.append((module, kwargs))
        return super()._fully_shard_module(module, **kwargs)


def made(model: Any, options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    torch.manual_seed(7)
    built = model()
    recording, cls = Recording(), type(built)
    cls.parallelizer = recording
    try:
        parallelize_model(built, context(**options))
    finally:
        del cls.parallelizer
    names = {module: name for name, module in built.named_modules()}
    keep = ("mp_policy", "reshard_after_forward", "offload_policy")
    return {names[m]: {key: kwargs[key] for key in keep} for m, kwargs in recording.made}


def test_every_unit_goes_through_the_door_of_the_sidecar() -> None:
    found = run_on_ranks(2, made, CommonDecoder, {})[0]
    blocks = [f"layers.{i}" for i in range(2)]
    experts = [f"layers.{i}.mlp.experts" for i in range(2)]
    assert set(found) == {*experts, *blocks, "embed", "head", ""}


def test_rows_reach_experts_in_the_dtype_in_which_they_travelled() -> None:
    options = {"mp_policy": {**BF16, "cast_forward_inputs": True}}
    found = run_on_ranks(2, made, CommonDecoder, options)[0]
    assert not found["layers.0.mlp.experts"]["mp_policy"].cast_forward_inputs
    assert found["layers.0.mlp.experts"]["mp_policy"].param_dtype == torch.bfloat16
    assert found["layers.0"]["mp_policy"].cast_forward_inputs


@pytest.mark.parametrize(
    ("strategy", "moe", "expected"),
    [
        (None, None, False),
        (None, {"reshard_after_forward": True}, True),
        (True, {"reshard_after_forward": False}, True),
        (False, {"reshard_after_forward": True}, False),
    ],
)
def test_p14_the_strategy_says_when_weights_are_freed_and_else_the_config_for_experts(
    strategy: bool | None, moe: Any, expected: bool
) -> None:
    options = {"reshard_after_forward": strategy, "moe": moe}
    found = run_on_ranks(2, made, CommonDecoder, options)[0]
    assert found["layers.0.mlp.experts"]["reshard_after_forward"] is expected
    assert found["layers.0"]["reshard_after_forward"] is expected


def test_the_policy_for_experts_replaces_the_one_of_the_strategy() -> None:
    options = {"mp_policy": {"param_dtype": None}, "moe": {"mp_policy": BF16}}
    found = run_on_ranks(2, made, CommonDecoder, options)[0]
    assert {each["mp_policy"].param_dtype for each in found.values()} == {torch.bfloat16}


def test_offload_holds_for_experts_too() -> None:
    found = run_on_ranks(2, made, CommonDecoder, {"offload_policy": {"pin_memory": False}})[0]
    assert not found["layers.0.mlp.experts"]["offload_policy"].pin_memory


def prefetched() -> list[list[str]]:
    model = sharded(MoEDecoder, enable_fsdp2_prefetch=True)
    names = {module: name for name, module in model.named_modules()}
    state = model.layers[0]._get_fsdp_state()
    return [[names[_module_of(s)] for s in state._states_to_forward_prefetch]]


def _module_of(state: Any) -> nn.Module:
    (module, *_) = state._modules
    return module


def test_p14_prefetch_covers_the_routers_and_experts_of_a_block() -> None:
    found = run_on_ranks(2, prefetched)[0][0]
    assert set(found) == {"layers.1", "layers.1.mlp.gate", "layers.1.mlp.experts"}


def head(options: dict[str, Any]) -> tuple[Any, ...]:
    model = sharded(Wrapped, mp_policy=BF16, **options)
    seen: list[torch.dtype] = []
    model.model.norm.register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    out = model(token_ids())
    out.float().sum().backward()
    return (
        [unit.name for unit in describe_units(model)],
        out.dtype,
        seen,
        isinstance(model, FSDPModule),
        all(p.grad is not None for p in model.parameters()),
        all(isinstance(p, DTensor) for p in model.parameters()),
    )


def test_a_head_in_fp32_is_a_unit_with_fp32_outputs() -> None:
    names, dtype, inner, *_ = run_on_ranks(2, head, {"moe": {"lm_head_precision": "float32"}})[0]
    assert "lm_head" in names
    assert dtype == torch.float32
    assert inner == [torch.bfloat16]
    assert run_on_ranks(2, head, {"moe": {}})[0][1] == torch.bfloat16


def test_the_inner_model_as_the_root() -> None:
    names, _, _, is_unit, *done = run_on_ranks(2, head, {"moe": {"wrap_outer_model": False}})[0]
    assert not is_unit
    assert names[:1] == ["model"]
    assert "lm_head" in names
    assert done == [True, True]
    names, _, _, is_unit, *_ = run_on_ranks(2, head, {"moe": {"wrap_outer_model": True}})[0]
    assert is_unit
    assert names[0] == ""


def resharded_after_eval() -> list[bool]:
    model = sharded(Wrapped, moe={"wrap_outer_model": False})
    with torch.no_grad():
        model(token_ids())
    return [isinstance(p, DTensor) and p.to_local().numel() < p.numel() for p in model.parameters()]


def test_an_inner_root_frees_its_weights_after_a_forward_without_gradients() -> None:
    assert all(run_on_ranks(2, resharded_after_eval)[0])


def router_in_recompute(moe: dict[str, Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = sharded(CommonDecoder, moe=moe, activation_checkpointing="full")
    model(token_ids()).sum().backward()
    return [str(each.message) for each in caught if "ignore_router_for_ac" in str(each.message)]


def test_routing_anew_in_recomputes_is_warned_of() -> None:
    assert run_on_ranks(2, router_in_recompute, {"ignore_router_for_ac": True})[0] == []
    (message,) = run_on_ranks(2, router_in_recompute, {"ignore_router_for_ac": False})[0]
    assert "recomputes route tokens anew" in message


class TippingRouter(Router):
    """Chooses experts 0 and 1 when it is called first, and then others."""

    then = torch.tensor([1, 0])
    calls = 0

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        index = (self.then if self.calls else torch.tensor([0, 1])).expand(len(tokens), 2)
        self.calls += 1
        scores = torch.nn.functional.linear(tokens.detach(), self.weight).softmax(-1)
        return scores.gather(1, index), index


class TippingFarther(TippingRouter):
    then = torch.tensor([1, 2])


def gradients_of(router: type[Router], checkpointing: Any) -> dict[str, torch.Tensor]:
    model = sharded(partial(_with_routers, router), activation_checkpointing=checkpointing)
    model(token_ids()).square().sum().backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def _with_routers(router: type[Router]) -> nn.Module:
    model = CommonDecoder()
    for layer in model.layers:
        assert isinstance(layer, CommonBlock)
        layer.mlp.gate = router()
    return model


@pytest.mark.parametrize("router", [TippingRouter, TippingFarther])
def test_a_choice_that_tips_in_the_recompute_is_that_of_the_forward(router: type[Router]) -> None:
    """Gradients of weights go to the experts that were chosen, in whatever order they come."""
    kept = run_on_ranks(2, gradients_of, router, False)[0]
    recomputed = run_on_ranks(2, gradients_of, router, "full")[0]
    for name, gradient in kept.items():
        if router is TippingRouter or "gate" not in name:
            torch.testing.assert_close(recomputed[name], gradient, msg=name)
