"""What a sharded policy computes: dtypes at its units' borders, adapters, biases, meshes alone."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from praxis_sharding_toys import BF16, FULL, context, mesh_of, whole, whole_gradients
from praxis_toys import tiny_config
from praxis_windows import small_inputs, small_policy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from shardwalk.model_praxis import LoraSettings, MoeTrainingSettings, PraxisPolicy, apply_lora
from shardwalk.model_praxis.parallelize import (
    PraxisModelParallelizer,
    _block_lists,
    replicate_router_biases,
    shard_policy,
)
from shardwalk.moe_ep import update_router_biases
from shardwalk.moe_ep.router import find_gates
from shardwalk.parallelizer_core import materialize, parallelize_model, sync_gradients_on_last
from shardwalk.parallelizer_core._torch_compat import gathered_parameters
from shardwalk.parallelizer_core.fsdp2 import walk
from shardwalk.parallelizer_core.testing import RankError, run_on_ranks

CASTING = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BLOCKS = ("backbone.encoder.blocks.1", "backbone.decoder.blocks.1", "action_expert.layers.0")


class LeavesCastsOn(PraxisModelParallelizer):
    """Units whose inputs are cast, as torch's own default has it."""

    def _fully_shard_module(self, module: nn.Module, **kwargs: Any) -> nn.Module:
        casting = replace(kwargs["mp_policy"], cast_forward_inputs=True)
        return super()._fully_shard_module(module, **{**kwargs, "mp_policy": casting})


class CastPolicy(PraxisPolicy):
    parallelizer = LeavesCastsOn()


def borders(policy_class: type[PraxisPolicy]) -> tuple[set[str], list[bool]]:
    """Dtypes of what comes into blocks beside hidden states, and whether outputs are the same."""
    policy = policy_class(tiny_config())
    policy.load_state_dict(small_policy().state_dict())
    in_one = copy.deepcopy(policy)
    for name, parameter in in_one.named_parameters():
        if not name.endswith("gate.weight"):
            parameter.data = parameter.data.bfloat16()
    shard_policy(policy, mesh_of(), CASTING, activation_checkpointing=False)
    seen: set[str] = set()

    def look(module: nn.Module, args: Any, kwargs: Any) -> None:
        for name in ("rotary", "memory_rotary", "modulation"):
            seen.update(f"{name} {part.dtype}" for part in kwargs.get(name) or ())

    def look_at_times(module: nn.Module, args: Any) -> None:
        seen.add(f"times {args[0].dtype}")

    def look_at_router(module: nn.Module, args: Any) -> None:
        seen.add(f"router {module.weight.dtype}")

    for name in BLOCKS:
        policy.get_submodule(name).register_forward_pre_hook(look, with_kwargs=True)
    policy.backbone.encoder.time_proj.register_forward_pre_hook(look_at_times)
    for gate in find_gates(policy):
        gate.register_forward_pre_hook(look_at_router)
    inputs = small_inputs(policy.config, windows=2)
    pairs = zip(policy(**inputs), in_one(**inputs), strict=True)
    return seen, [torch.equal(ours, theirs) for ours, theirs in pairs]


def test_fp32_passes_the_borders_of_units() -> None:
    """Whatever the policy says of casts: outputs are those of the bf16 model in one process."""
    names = ("rotary", "memory_rotary", "modulation", "times", "router")
    for seen, same in run_on_ranks(2, borders, PraxisPolicy):
        assert seen == {f"{name} torch.float32" for name in names}
        assert same == [True, True]


def test_casts_of_inputs_would_round_what_passes() -> None:
    for seen, same in run_on_ranks(2, borders, CastPolicy):
        assert {"rotary torch.bfloat16", "modulation torch.bfloat16"} <= seen
        assert same == [False, False]


@contextlib.contextmanager
def guards(*, enabled: bool) -> Iterator[None]:
    original = walk.guard_fsdp_units
    if not enabled:
        walk.guard_fsdp_units = lambda model: None
    try:
        yield
    finally:
        walk.guard_fsdp_units = original


def adapted_steps(*, guarded: bool, alone: bool) -> dict[str, Any]:
    """Three micro-steps with adapters, of which the last one communicates."""
    policy = apply_lora(small_policy(), LoraSettings(rank=3, alpha=6.0))
    with guards(enabled=guarded):
        if alone:
            shard_policy(policy, mesh_of(), BF16)
        else:
            parallelize_model(policy, context(mp_policy=BF16, checkpointing="full"))
    ran: list[object] = []
    policy.backbone.decoder.register_forward_pre_hook(lambda *_: ran.append(None))
    windows = [small_inputs(policy.config, seed=10 * i + dist.get_rank()) for i in range(3)]
    for inputs in sync_gradients_on_last(policy, windows):
        policy(**inputs, decode=False).action_velocity.square().mean().backward()
    decoder = policy.backbone.decoder.blocks
    return {
        "decoder ran": bool(ran),
        "decoder was gathered": bool(list(gathered_parameters(decoder))),
        "decoder is sharded": all(
            isinstance(p, DTensor) and p.to_local().numel() < p.numel()
            for p in decoder.parameters()
        ),
        "trained": {name for name, g in whole_gradients(policy).items() if g is not None},
    }


@pytest.mark.parametrize("alone", [False, True])
def test_adapters_accumulate_beside_a_decoder_that_never_runs(alone: bool) -> None:
    for found in run_on_ranks(2, adapted_steps, guarded=True, alone=alone):
        assert not found["decoder ran"]
        assert not found["decoder was gathered"]
        assert found["decoder is sharded"]
        assert all(".lora_" in name for name in found["trained"])
        assert len(found["trained"]) > 20


def test_torch_still_fails_at_units_that_never_ran_without_the_guard() -> None:
    with pytest.raises(RankError, match="AttributeError.*_unsharded_param"):
        run_on_ranks(2, adapted_steps, guarded=False, alone=True)


TRAINING = MoeTrainingSettings(
    balance_loss_weight=0.1, balance_loss_scope="micro_batch", bias_update_speed=0.01
)


def training_policy() -> PraxisPolicy:
    policy = PraxisPolicy(tiny_config(), training=TRAINING)
    policy.load_state_dict(small_policy().state_dict())
    return policy


def step(policy: PraxisPolicy, windows: dict[str, Any]) -> None:
    out = policy(**windows)
    (out.velocity.square().mean() + out.action_velocity.square().mean()).backward()


def trained_on_meshes_alone(names: tuple[str, ...], sizes: tuple[int, ...]) -> list[str]:
    """What differs from one process after a step: gradients, and then biases."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    windows = small_inputs(tiny_config(), windows=ranks)
    in_one, policy = training_policy(), training_policy()
    step(in_one, windows)
    update_router_biases(in_one)
    moe_mesh = mesh_of(*sizes, names=names) if names else None
    shard_policy(policy, mesh_of(), FULL, moe_mesh)
    step(
        policy,
        {name: value[rank : rank + 1] for name, value in windows.items() if value is not None},
    )
    update_router_biases(policy)
    expected = whole_gradients(in_one)
    scale = max(float(g.abs().max()) for g in expected.values() if g is not None)
    found = whole_gradients(policy)
    wrong = [n for n, g in expected.items() if not torch.allclose(found[n], g, 1e-4, 1e-6 * scale)]
    pairs = zip(find_gates(policy), find_gates(in_one), strict=True)
    biases = [
        torch.equal(whole(a.e_score_correction_bias), b.e_score_correction_bias) for a, b in pairs
    ]
    return wrong + [f"bias {i}" for i, same in enumerate(biases) if not same]


@pytest.mark.parametrize(
    ("ranks", "names", "sizes"),
    [(1, (), ()), (2, ("ep",), (2,)), (2, ("ep_shard", "ep"), (2, 1))],
)
def test_meshes_alone_are_enough(
    ranks: int, names: tuple[str, ...], sizes: tuple[int, ...]
) -> None:
    """With recomputed blocks, balance over a micro-batch of all ranks, biases by all loads."""
    assert run_on_ranks(ranks, trained_on_meshes_alone, names, sizes) == [[]] * ranks


def biases_by(replicated: bool) -> list[Tensor]:
    policy = training_policy()
    if replicated:
        replicate_router_biases(policy, mesh_of())
    step(policy, small_inputs(policy.config, seed=dist.get_rank()))
    update_router_biases(policy)
    return [whole(gate.e_score_correction_bias) for gate in find_gates(policy)]


def test_biases_follow_the_loads_of_all_ranks_only_where_they_are_replicated() -> None:
    first, second = run_on_ranks(2, biases_by, True)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    first, second = run_on_ranks(2, biases_by, False)
    assert not all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def refused_meshes() -> tuple[str, str]:
    policy, messages = small_policy(), []
    pairs = mesh_of(2, 2, names=("dp", "ep"))
    with pytest.raises(ValueError) as error:
        shard_policy(policy, mesh_of(), FULL, pairs["ep"])
    messages.append(str(error.value))
    shard_policy(policy, mesh_of(), FULL)
    with pytest.raises(ValueError) as error:
        shard_policy(policy, mesh_of(), FULL)
    return messages[0], str(error.value)


def test_meshes_that_do_not_fit_are_refused() -> None:
    for other_ranks, again in run_on_ranks(4, refused_meshes):
        assert "moe_mesh has 2 x 1 ranks" in other_ranks
        assert "parallelized already" in again


def routes(options: dict[str, bool]) -> tuple[set[bool], set[bool], list[str]]:
    """Whether recomputes replay routes, whether blocks are recomputed, and what is warned of."""
    policy = small_policy()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shard_policy(policy, mesh_of(), FULL, **options)
    replays = {gate.replay_routing for gate in find_gates(policy)}
    blocks = {"forward" in vars(block) for stack in _block_lists(policy) for block in stack}
    return replays, blocks, [str(warning.message) for warning in caught]


def test_routes_of_recomputes() -> None:
    assert run_on_ranks(1, routes, {})[0] == ({True}, {True}, [])
    replays, _, (message,) = run_on_ranks(1, routes, {"ignore_router_for_ac": False})[0]
    assert replays == {False}
    assert message.startswith("ignore_router_for_ac=False: recomputes route tokens anew")
    kept = {"activation_checkpointing": False, "ignore_router_for_ac": False}
    assert run_on_ranks(1, routes, kept)[0][1:] == ({False}, [])


class Holder(nn.Module):
    """A module around a policy, such as a recipe has."""

    parallelizer = PraxisModelParallelizer()

    def __init__(self, *, extra: bool = False) -> None:
        super().__init__()
        self.policy = small_policy()
        self.extra = nn.Linear(2, 2) if extra else None

    def forward(self, **inputs: Any) -> Any:
        return self.policy(**inputs)


def freeze_backbone(model: nn.Module) -> None:
    model.policy.backbone.requires_grad_(False)


def held() -> dict[str, bool]:
    model = parallelize_model(Holder(), context(reapply=freeze_backbone))
    inputs = small_inputs(model.policy.config)
    with torch.no_grad():
        out = model(**inputs)
    is_freed = all(isinstance(p, DTensor) for p in model.parameters())
    expected = small_policy()(**inputs)
    with pytest.raises(ValueError, match="Holder holds extra.weight outside of its policy"):
        parallelize_model(Holder(extra=True), context())
    return {
        "the policy is the root": isinstance(model.policy, FSDPModule)
        and not isinstance(model, FSDPModule),
        "freed after a forward without gradients": is_freed,
        "same outputs": all(
            torch.allclose(a, b, 1e-4, 1e-5) for a, b in zip(out, expected, strict=True)
        ),
        "trainability was applied": not any(
            p.requires_grad for p in model.policy.backbone.parameters()
        ),
    }


def test_a_policy_in_a_wrapper() -> None:
    for found in run_on_ranks(2, held):
        assert found == dict.fromkeys(found, True)


def from_meta(sizes: dict[str, int]) -> dict[str, Tensor | None]:
    with torch.device("meta"):
        policy = apply_lora(PraxisPolicy(tiny_config()), LoraSettings(rank=2))
    parallelize_model(policy, context(sizes))
    materialize(policy, init="reset_parameters", seed=3)
    tensors = (*policy.named_parameters(), *policy.named_buffers())
    return {name: whole(tensor) for name, tensor in tensors}


def test_a_start_on_meta_has_the_same_values_on_every_mesh() -> None:
    expected = run_on_ranks(1, from_meta, {})[0]
    assert expected["action_expert.layers.0.attn.q_proj.lora_a"].any()
    for ranks, sizes in ((2, {}), (2, {"ep_size": 2}), (4, {"ep_size": 2})):
        for found in run_on_ranks(ranks, from_meta, sizes):
            assert all(torch.equal(found[name], value) for name, value in expected.items())
