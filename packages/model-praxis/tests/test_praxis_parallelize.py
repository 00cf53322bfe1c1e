"""Which units the walk over the three stacks makes, what it refuses, and what passes their borders."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from praxis_sharding_toys import BF16, FULL, context, mesh_of
from praxis_toys import tiny_config
from praxis_windows import small_policy
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule

from shardwalk.mesh import get_fsdp_dp_mesh
from shardwalk.model_praxis import PraxisPolicy
from shardwalk.model_praxis.parallelize import (
    PraxisModelParallelizer,
    _block_lists,
    _expert_meshes,
    _moe_of,
    _mp_policy,
    _policy,
    shard_policy,
)
from shardwalk.model_praxis.policy_parts import refuse_shared_blocks
from shardwalk.moe_ep import MoE
from shardwalk.parallelizer_core import describe_units, parallelize_model
from shardwalk.parallelizer_core.layers import find_block_stacks
from shardwalk.parallelizer_core.testing import run_on_ranks

# Elements of each unit of the tiny policy, counted from its configuration.
_ATTENTION = 64 * (4 * 16) + 2 * 64 * (2 * 16) + 64 * 4 + (4 * 16) * 64 + 2 * 16
_DENSE = 2 * 64 + _ATTENTION + 3 * 64 * 96
_SPARSE = 2 * 64 + _ATTENTION + 3 * 64 * 48
_EXPERTS = 8 * (64 * 2 * 32 + 32 * 64)
_ROUTER = 8 * 64
_LAYER = 2 * (32 * 32 + 32) + (32 * 2 * 48 + 2 * 48) + (48 * 32 + 32) + 2 * 32 * 32 + 2 * 16
_CROSS, _SELF = _LAYER + 2 * 64 * 32, _LAYER + 2 * 32 * 32
_ROOT = (
    # encoder: registers, patches in, text in, modulation out
    3 * 64 + (6 * 4 * 64 + 64) + (20 * 40 + 40 + 40 * 64 + 64 + 64) + (64 + 1) * 4 * 2 * 64
    # decoder: registers, cells in, velocity out
    + 2 * 64 + (6 * 64 + 64) + (64 + 64 * 6 + 6)
    # action expert: w1, w2, w3; poses, future tokens; times; norm and head
    + (20 * 32 + 32 + 64 * 32 + 32 + 32 * 32 + 32)
    + (7 * 32 + 32) + 2 * 32 + (16 * 32 + 32 + 32 * 32 + 32) + (32 * 32 + 32) + (32 * 20 + 20)
)  # fmt: skip
_SPARSE_BLOCKS = [f"backbone.encoder.blocks.{i}" for i in (1, 2, 3)] + ["backbone.decoder.blocks.1"]
_TABLE = {
    "": _ROOT,
    "backbone.encoder.blocks.0": _DENSE,
    "backbone.decoder.blocks.0": _DENSE,
    **dict.fromkeys(_SPARSE_BLOCKS, _SPARSE),
    **{f"{block}.ffn.gate": _ROUTER for block in _SPARSE_BLOCKS},
    **{f"{block}.ffn.experts": _EXPERTS for block in _SPARSE_BLOCKS},
    **{f"action_expert.layers.{i}": _SELF if i % 2 else _CROSS for i in range(4)},
}


def table(sizes: dict[str, int]) -> dict[str, tuple[int, str]]:
    with torch.device("meta"):
        policy = PraxisPolicy(tiny_config())
    given = context(sizes)
    shard_policy(policy, get_fsdp_dp_mesh(given.device_mesh), BF16, given.moe_mesh)
    return {unit.name: (unit.parameters, unit.mesh) for unit in describe_units(policy)}


@pytest.mark.parametrize(
    ("ranks", "sizes", "dense", "experts"),
    [
        (2, {}, "dp_shard_cp 2", None),
        (2, {"ep_size": 2}, "dp_shard_cp 2", "ep_shard 1 x ep 2"),
        (4, {"ep_size": 2}, "dp_shard_cp 4", "ep_shard 2 x ep 2"),
        (
            4,
            {"ep_size": 2, "dp_replicate_size": 2},
            "dp_replicate 2 x dp_shard_cp 2",
            "ep_replicate 2 x ep_shard 1 x ep 2",
        ),
    ],
)
def test_units(ranks: int, sizes: dict[str, int], dense: str, experts: str | None) -> None:
    """Each block of the three stacks, the routers, experts where they are spread, and the root."""
    expected = dict(_TABLE)
    for block in _SPARSE_BLOCKS if experts is None else ():
        expected[block] += expected.pop(f"{block}.ffn.experts")
    meshes = {name: experts if name.endswith("experts") else dense for name in expected}
    found = run_on_ranks(ranks, table, sizes)[0]
    assert found == {name: (expected[name], meshes[name]) for name in expected}


def test_defaults() -> None:
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(shard_policy).parameters.items()
        if parameter.default is not parameter.empty
    }
    assert defaults == {
        "moe_mesh": None,
        "activation_checkpointing": True,
        "ignore_router_for_ac": True,
        "reshard_after_forward": True,
        "offload_policy": None,
        "forward_prefetch_depth": 0,
        "backward_prefetch_depth": 0,
    }
    policy = _mp_policy(None)
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    assert not policy.cast_forward_inputs
    assert _mp_policy(FULL) is FULL


def refused_alone(**given: Any) -> tuple[str, bool]:
    policy = small_policy()
    arguments = {"policy": policy, "mesh": mesh_of(), "mp_policy": FULL} | given
    with pytest.raises((TypeError, ValueError)) as error:
        shard_policy(**arguments)
    return f"{type(error.value).__name__}: {error.value}", _is_untouched(policy)


def refused_arguments() -> list[tuple[str, bool]]:
    cases: tuple[dict[str, Any], ...] = (
        {"policy": nn.Linear(2, 2), "mesh": None},
        {"policy": {}},
        {"mesh": 2},
        {"moe_mesh": "ep"},
        {"moe_mesh": mesh_of(1, 1, names=("ep_shard", "data"))},
        {"moe_mesh": DeviceMesh("cpu", [0])},
        {"reshard_after_forward": 1},
        {"ignore_router_for_ac": None},
        {"activation_checkpointing": 1},
        {"activation_checkpointing": None},
    )
    return [refused_alone(**case) for case in cases]


def test_shard_policy_refuses_what_it_cannot_take() -> None:
    found = run_on_ranks(1, refused_arguments)[0]
    starts = (
        "TypeError: Linear holds 0 Praxis policies; shard_policy takes a PraxisPolicy",
        "TypeError: shard_policy takes a PraxisPolicy, or a module that holds one, not {}",
        "TypeError: mesh must be a DeviceMesh, not 2",
        "TypeError: moe_mesh must be a DeviceMesh or None, not 'ep'",
        "ValueError: moe_mesh has the axes ('ep_shard', 'data'), and none is called 'ep'",
        "ValueError: moe_mesh has unnamed axes, and none is called 'ep'",
        "TypeError: reshard_after_forward=1 must be True, False or None",
        "TypeError: ignore_router_for_ac=None must be True or False",
        "TypeError: activation_checkpointing=1 must be",
        "TypeError: activation_checkpointing=None must be",
    )
    for (message, is_untouched), start in zip(found, starts, strict=True):
        assert message.startswith(start)
        assert is_untouched


def test_blocks_with_weights_in_common_are_refused() -> None:
    shared, tied, to_root = small_policy(), small_policy(), small_policy()
    shared.backbone.encoder.blocks[2] = shared.backbone.encoder.blocks[1]
    tied.backbone.decoder.blocks[0].norm1 = tied.backbone.encoder.blocks[0].norm1
    to_root.action_expert.layers[0].attn.q_proj.weight = to_root.action_expert.head.weight
    within = small_policy()
    within.backbone.encoder.blocks[0].norm1 = within.backbone.encoder.blocks[0].norm2
    refuse_shared_blocks(within)
    for policy, places in (
        (shared, ("backbone.encoder.blocks.1.", "backbone.encoder.blocks.2.")),
        (tied, ("backbone.encoder.blocks.0.norm1.", "backbone.decoder.blocks.0.norm1.")),
        (to_root, ("action_expert.layers.0.attn.", "action_expert.head.weight")),
    ):
        with pytest.raises(ValueError, match="are one parameter") as error:
            refuse_shared_blocks(policy)
        assert all(place in str(error.value) for place in places)


def shared_in_context() -> str:
    policy = small_policy()
    policy.backbone.encoder.blocks[2] = policy.backbone.encoder.blocks[1]
    with pytest.raises(ValueError, match="are one parameter"):
        parallelize_model(policy, context())
    return "untouched" if _is_untouched(policy) else "touched"


def test_shared_blocks_are_refused_before_units_are_made() -> None:
    assert run_on_ranks(1, shared_in_context) == ["untouched"]


def test_parts_of_the_policy() -> None:
    policy = small_policy()
    stacks = _block_lists(policy)
    assert [len(stack) for stack in stacks] == [4, 2, 4]
    found = [tuple(block for _, block in stack.blocks) for stack in find_block_stacks(policy)]
    assert found == [tuple(stack) for stack in stacks]  # what checkpointing goes by
    moes = [_moe_of(block) for stack in stacks for block in stack]
    towers = [False, True, True, True, False, True]
    assert [isinstance(moe, MoE) for moe in moes] == [*towers, *[False] * 4]
    assert _moe_of(checkpoint_wrapper(stacks[0][1])) is moes[1]
    assert _policy(policy) is policy
    assert _policy(nn.ModuleDict({"held": policy})) is policy
    with pytest.raises(TypeError, match="holds 0 Praxis policies"):
        _policy(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="holds 2 Praxis policies"):
        _policy(nn.ModuleList([policy, small_policy()]))


class Recording(PraxisModelParallelizer):
    """Writes down every unit, with what it is made with."""

    def __init__(self) -> None:
        self.made: list[tuple[nn.Module, dict[str, Any]]] = []

    def _fully_shard_module(self, module: nn.Module, **kwargs: Any) -> nn.Module:
        self.made.append((module, kwargs))
        return super()._fully_shard_module(module, **kwargs)


class Recorded(PraxisPolicy):
    pass


def made(sizes: dict[str, int], options: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """(reshard_after_forward, cast_forward_inputs, forward prefetch) of every unit."""
    policy = Recorded(tiny_config())
    recording = Recording()
    Recorded.parallelizer = recording
    if "alone" in options:
        shard_policy(policy, mesh_of(), BF16, **options["alone"])
    else:
        parallelize_model(policy, context(sizes, mp_policy=BF16, **options))
    names = {module: name for name, module in policy.named_modules()}
    return {
        names[module]: (
            kwargs["reshard_after_forward"],
            kwargs["mp_policy"].cast_forward_inputs,
            [names[_module_of(s)] for s in module._get_fsdp_state()._states_to_forward_prefetch],
            policy.get_submodule(names[module]).__dict__.get("compute_dtype"),
        )
        for module, kwargs in recording.made
    }


def _module_of(state: Any) -> nn.Module:
    (module, *_) = state._modules
    return module


def test_every_unit_goes_through_the_door_of_the_sidecar() -> None:
    found = run_on_ranks(2, made, {"ep_size": 2}, {})[0]
    assert set(found) == set(_TABLE)
    assert {name for name, (_, casts, *_) in found.items() if casts} == set()
    computes = {name for name, (*_, dtype) in found.items() if dtype is torch.bfloat16}
    assert computes == {name for name in _TABLE if name.rpartition(".")[2].isdigit()}


def test_when_weights_are_freed() -> None:
    """Alone all of them are, as it says; in a context what it says, or all but the last blocks."""
    assert _freed({}, {"alone": {}}) == {True}
    assert _freed({}, {"alone": {"reshard_after_forward": False}}) == {False}
    assert _freed({"ep_size": 2}, {}) == {False}
    assert _freed({"ep_size": 2}, {"moe": {"reshard_after_forward": True}}) == {True}
    assert _freed({"ep_size": 2}, {"reshard_after_forward": True}) == {True}
    by_rule = run_on_ranks(2, made, {}, {})[0]
    assert {name for name, (frees, *_) in by_rule.items() if frees is False} == {
        "backbone.encoder.blocks.3.ffn.gate",
        "backbone.encoder.blocks.3",
        "backbone.decoder.blocks.1.ffn.gate",
        "backbone.decoder.blocks.1",
        "action_expert.layers.3",
    }
    assert by_rule[""][0] is None  # torch's own rule for a root


def _freed(sizes: dict[str, int], options: dict[str, Any]) -> set[Any]:
    return {frees for frees, *_ in run_on_ranks(2, made, sizes, options)[0].values()}


def test_prefetch_depths() -> None:
    options = {"enable_fsdp2_prefetch": True, "fsdp2_forward_prefetch_depth": 2}
    found = run_on_ranks(2, made, {"ep_size": 2}, options)[0]
    blocks = [f"backbone.encoder.blocks.{i}" for i in range(4)]
    parts = ("", ".ffn.gate", ".ffn.experts")
    ahead = [f"{block}{part}" for block in blocks[1:3] for part in parts]
    assert sorted(found[blocks[0]][2]) == sorted(ahead)
    assert found[blocks[3]][2] == []  # the decoder need not run
    assert run_on_ranks(2, made, {}, {"enable_fsdp2_prefetch": False})[0][blocks[0]][2] == []
    alone = run_on_ranks(2, made, {}, {"alone": {"forward_prefetch_depth": 1}})[0]
    assert alone["action_expert.layers.0"][2] == ["action_expert.layers.1"]


def meshes_of_experts() -> list[Any]:
    moe = mesh_of(1, 2, names=("ep_shard", "ep"))
    unused = mesh_of(2, 1, names=("ep_shard", "ep"))
    found = [_expert_meshes(given) for given in (None, moe, unused, mesh_of(names=("ep",)))]
    return [tuple(mesh and mesh.mesh_dim_names for mesh in pair) for pair in found]


def test_meshes_of_experts() -> None:
    found = run_on_ranks(2, meshes_of_experts)[0]
    assert found == [(None, None), (("ep",), None), (None, ("ep_shard",)), (("ep",), None)]


HOOK_OPTIONS: dict[str, Any] = {
    "sequence_parallel": True,
    "tp_shard_plan": {"*": None},
    "enable_async_tensor_parallel": True,
    "enable_compile": True,
    "activation_checkpointing_scope": "vision",
    "frozen_multimodal_sharding": "per_layer",
}
CONTEXTS: dict[str, tuple[int, dict[str, Any], str]] = {
    "tensor parallel": (2, {"sizes": {"tp_size": 2}}, "tp_size=2"),
    "tensor parallel experts": (2, {"sizes": {"tp_size": 2, "ep_size": 2}}, "tp_size=2"),
    "experts that do not divide": (3, {"sizes": {"ep_size": 3}}, "ep_size=3 does not divide"),
    "a head": (2, {"moe": {"lm_head_precision": "float32"}}, "lm_head_precision=torch.float32"),
    "an inner root": (2, {"moe": {"wrap_outer_model": False}}, "wrap_outer_model=False"),
    "a plan": (2, {"tp_plan": {"*": None}}, "tp_shard_plan="),
}


def _is_untouched(policy: nn.Module) -> bool:
    plain = all(type(p) is nn.Parameter for p in policy.parameters())
    units = any(isinstance(module, FSDPModule) for module in policy.modules())
    changed = any("forward" in vars(module) for module in policy.modules())
    return plain and not units and not changed


def refused_by_hook(name: str) -> tuple[str, bool]:
    policy, mesh = small_policy(), context().device_mesh
    with pytest.raises(ValueError) as error:
        PraxisModelParallelizer()._apply(policy, mesh, **{name: HOOK_OPTIONS[name]})
    return str(error.value), _is_untouched(policy)


def test_options_that_mean_nothing_are_refused() -> None:
    for name, value in HOOK_OPTIONS.items():
        for message, is_untouched in run_on_ranks(2, refused_by_hook, name):
            assert message.startswith(f"{name}={value!r} means nothing for a Praxis policy")
            assert is_untouched


def refused_in_context(name: str) -> tuple[str, bool]:
    policy, (_, options, _) = small_policy(), CONTEXTS[name]
    with pytest.raises(ValueError) as error:
        parallelize_model(policy, context(**options, checkpointing="full"))
    return str(error.value), _is_untouched(policy)


@pytest.mark.parametrize("name", CONTEXTS)
def test_contexts_that_cannot_work_are_refused(name: str) -> None:
    ranks, _, expected = CONTEXTS[name]
    for message, is_untouched in run_on_ranks(ranks, refused_in_context, name):
        assert expected in message
        assert is_untouched


def unequal() -> str:
    policy = small_policy(seed=torch.distributed.get_rank())
    with pytest.raises(ValueError) as error:
        parallelize_model(policy, context())
    return str(error.value) if _is_untouched(policy) else "touched"


def test_ranks_must_start_alike() -> None:
    """From other values, or from other options."""
    for message in run_on_ranks(2, unequal):
        assert "has other values on ranks [1]" in message


def refused_modes() -> list[str]:
    policy, messages = small_policy(), []
    moe_mesh = mesh_of(1, 2, names=("ep_shard", "ep"))
    for options in ({"activation_checkpointing": "most"}, {"forward_prefetch_depth": -1}):
        with pytest.raises(ValueError) as error:
            shard_policy(policy, mesh_of(), FULL, moe_mesh, **options)
        messages.append(str(error.value) if _is_untouched(policy) else "touched")
    with pytest.raises(TypeError, match="enable_magic"):
        PraxisModelParallelizer()._apply(policy, context().device_mesh, enable_magic=True)
    return messages


def test_values_that_are_none_are_refused() -> None:
    mode, depth = run_on_ranks(2, refused_modes)[0]
    assert "most" in mode
    assert depth == "forward_prefetch_depth=-1 must be 0 or more"
