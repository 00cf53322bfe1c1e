"""Which units the sidecar of Beam makes, with which policies, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from beam_sharding_toys import BF16, FULL, build, context, full, rows_of_rank, sharded, train
from beam_toys import tiny_beam, token_ids
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwalk.mesh import DDPConfig, DistributedSetup, get_fsdp_dp_mesh
from shardwalk.model_beam import BeamForCausalLM
from shardwalk.model_beam.parallelization import (
    PARALLELIZER,
    BeamModelParallelizer,
    _DenseBlockParallelizer,
    beam_fully_shard_unit,
    is_beam_block,
)
from shardwalk.parallelizer_core import describe_units, parallelize_model
from shardwalk.parallelizer_core.testing import run_on_ranks
from shardwalk.parallelizer_core.testing.collectives import CountCollectives

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def test_blocks_are_known_in_wrappers_and_nothing_else_is() -> None:
    model = tiny_beam()
    block = model.model.layers[1]
    assert is_beam_block(block)
    assert is_beam_block(checkpoint_wrapper(block))
    assert is_beam_block(checkpoint_wrapper(checkpoint_wrapper(block)))
    others = [model, model.model, model.model.layers, block.mlp, block.self_attn, nn.Linear(1, 1)]
    assert not any(is_beam_block(other) for other in others)
    assert not is_beam_block(checkpoint_wrapper(block.mlp))


def blocks_known_after_sharding(wrapped: str | None) -> list[bool]:
    model = sharded(wrapped=wrapped)
    layers = list(model.model.layers.children())
    return [is_beam_block(block) and type(block).__name__ != "Block" for block in layers]


@pytest.mark.parametrize("wrapped", [None, "inside", "outside"])
def test_blocks_are_known_after_sharding(wrapped: str | None) -> None:
    assert run_on_ranks(2, blocks_known_after_sharding, wrapped)[0] == [True] * 6


def units(built: dict[str, Any], options: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    found = describe_units(sharded(built=built, **options))
    return {unit.name: (unit.mesh, *unit.dtypes) for unit in found}


def layer_units(mesh: str, dtype: str, layers: str = "model.layers.") -> dict[str, Any]:
    """The units that hold blocks and routers: the first block is dense, five have experts."""
    blocks = {f"{layers}{i}": (mesh, dtype) for i in range(6)}
    routers = {f"{layers}{i}.mlp.gate": (mesh, "float32") for i in range(1, 6)}
    return blocks | routers


@pytest.mark.parametrize("frozen", [None, "mlp.gate."])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_units_of_the_dense_path(dtype: torch.dtype, frozen: str | None) -> None:
    mesh, name = "dp_shard_cp 2", str(dtype).removeprefix("torch.")
    tables = dict.fromkeys(("model.embed_tokens", "lm_head", ""), (mesh, name))
    found = run_on_ranks(2, units, {"dtype": dtype, "frozen": frozen}, {})[0]
    assert found == {**layer_units(mesh, name), **tables}


def test_the_units_of_blocks_in_a_dict() -> None:
    mesh = "dp_shard_cp 2"
    found = run_on_ranks(2, units, {"in_dict": True}, {})[0]
    blocks = layer_units(mesh, "float32", "model.layers.block_")
    assert blocks.items() <= found.items()


def test_the_units_of_the_path_with_experts_apart() -> None:
    mesh = "dp_shard_cp 2"
    experts = {f"model.layers.{i}.mlp.experts" for i in range(1, 6)}
    found = run_on_ranks(2, units, {"dtype": torch.bfloat16}, {"sizes": {"ep_size": 2}})[0]
    assert {name: found.pop(name) for name in experts} == dict.fromkeys(
        experts, ("ep_shard 1 x ep 2", "bfloat16")
    )
    tables = dict.fromkeys(("model.embed_tokens", "lm_head", ""), (mesh, "bfloat16"))
    assert found == {**layer_units(mesh, "bfloat16"), **tables}


def policies(options: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """What each unit casts: its parameters, reductions, inputs and outputs."""
    model = sharded(mp_policy={**BF16, "output_dtype": "float32"}, **options)
    return {
        name: (policy.param_dtype, policy.reduce_dtype, policy.cast_forward_inputs)
        for name, module in model.named_modules()
        if (policy := policy_of(module)) is not None
    }


def policy_of(module: nn.Module) -> MixedPrecisionPolicy | None:
    state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
    return None if state is None else state._mp_policy


@pytest.mark.parametrize("options", [{}, {"sizes": {"ep_size": 2}}], ids=["dense path", "ep 2"])
def test_only_units_of_blocks_leave_their_inputs_as_they_are(options: dict[str, Any]) -> None:
    found = run_on_ranks(2, policies, options)[0]
    half, wide = torch.bfloat16, torch.float32
    for i in range(6):
        assert found.pop(f"model.layers.{i}") == (half, wide, False)
        assert found.pop(f"model.layers.{i}.mlp.gate", (wide, wide, True)) == (wide, wide, True)
        assert found.pop(f"model.layers.{i}.mlp.experts", (half, wide, False)) == (
            half,
            wide,
            False,
        )
    assert found == dict.fromkeys(("model.embed_tokens", "lm_head", ""), (half, wide, True))


def mesh_of_all() -> DeviceMesh:
    return get_fsdp_dp_mesh(context().device_mesh)


def block_unit(policy: MixedPrecisionPolicy | None, wrap: bool) -> tuple[Any, ...]:
    block = tiny_beam().model.layers[0]
    module = checkpoint_wrapper(block) if wrap else block
    assert beam_fully_shard_unit(module, policy, mesh=mesh_of_all()) is module
    return block.compute_dtype, policy_of(module)


@pytest.mark.parametrize("wrap", [False, True])
def test_a_block_casts_its_hidden_states_itself_where_the_policy_casts(wrap: bool) -> None:
    kept = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    assert run_on_ranks(2, block_unit, HALF, wrap)[0] == (torch.bfloat16, kept)
    assert HALF.cast_forward_inputs
    reduced = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    assert run_on_ranks(2, block_unit, reduced, wrap)[0] == (None, reduced)
    assert run_on_ranks(2, block_unit, None, wrap)[0] == (None, MixedPrecisionPolicy())


def other_unit() -> MixedPrecisionPolicy | None:
    norm = tiny_beam().model.norm
    return policy_of(beam_fully_shard_unit(norm, HALF, mesh=mesh_of_all()))


def test_other_modules_get_the_policy_as_it_is() -> None:
    assert run_on_ranks(2, other_unit)[0] == HALF


class AlsoNorms(BeamModelParallelizer):
    """Computes one norm of each block in fp32 too."""

    def _apply_fsdp_sharding(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        names = ("post_feedforward_layernorm", "mlp.gate")
        _DenseBlockParallelizer(self, names)._apply_fsdp_sharding(module, *args, **kwargs)


class WithNorms(BeamForCausalLM):
    parallelizer = AlsoNorms()


def norms_in_fp32(frozen: str | None) -> tuple[Any, ...]:
    model = sharded(WithNorms, built={"frozen": frozen})
    seen: set[torch.dtype] = set()
    for block in model.model.blocks:
        block.post_feedforward_layernorm.register_forward_pre_hook(
            lambda module, args: seen.update({module.weight.dtype, args[0].dtype})
        )
    train(model)
    names = {name for name, module in model.named_modules() if policy_of(module) is not None}
    return seen, names, [block.compute_dtype for block in model.model.blocks]


@pytest.mark.parametrize("frozen", [None, "post_feedforward_layernorm"])
def test_what_stands_below_the_names_given_computes_in_fp32(frozen: str | None) -> None:
    seen, names, dtypes = run_on_ranks(2, norms_in_fp32, frozen)[0]
    assert seen == {torch.float32}
    assert {f"model.layers.{i}.post_feedforward_layernorm" for i in range(6)} <= names
    assert dtypes == [torch.bfloat16] * 6


class WithPinnedOutputs(BeamForCausalLM):
    @property
    def _keep_in_fp32_modules_strict(self) -> list[str]:
        return ["self_attn.o_proj.weight"]


def size_of_unit(name: str) -> int:
    found = describe_units(sharded(WithPinnedOutputs, built={"attention_bias": True}))
    return {unit.name: unit.parameters for unit in found}[name]


def test_the_names_are_those_that_the_model_pins_with_all_that_their_modules_hold() -> None:
    assert run_on_ranks(2, size_of_unit, "model.layers.2.self_attn.o_proj")[0] == 64 * 64 + 64


def embeddings_in_fp32(cast: bool) -> list[Any]:
    """A model that is called with fp32 embeddings, which no unit above the blocks casts."""
    model = sharded(mp_policy={**BF16, "cast_forward_inputs": cast})
    seen = []
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((args[0].dtype, kwargs["rotary"][0].dtype)),
        with_kwargs=True,
    )
    embeddings = torch.randn(2, 8, 64)
    model(inputs_embeds=embeddings).logits.sum().backward()
    return seen


@pytest.mark.parametrize("cast", [True, False])
def test_embeddings_that_come_in_fp32_are_cast_by_the_blocks(cast: bool) -> None:
    assert run_on_ranks(2, embeddings_in_fp32, cast)[0] == [(torch.bfloat16, torch.float32)]


def refusal_of_heads(sizes: dict[str, int], heads: dict[str, int]) -> tuple[str, int]:
    mesh_context = context(sizes=sizes, mp_policy=FULL)
    model = build(**heads)
    before = dict(model.named_parameters())
    with CountCollectives() as counted, pytest.raises(ValueError, match="tp_size") as refused:
        parallelize_model(model, mesh_context)
    assert all(before[name] is p for name, p in model.named_parameters())
    return str(refused.value), counted.calls.total()


@pytest.mark.parametrize("ep_size", [1, 2], ids=["dense path", "ep 2"])
def test_heads_that_do_not_divide_are_refused_before_any_collective(ep_size: int) -> None:
    sizes = {"tp_size": 4, "ep_size": ep_size}
    for message, collectives in run_on_ranks(4, refusal_of_heads, sizes, {}):
        assert "tp_size=4 does not divide num_key_value_heads=2" in message
        assert message.endswith("use one of [1, 2]")
        assert collectives == 0
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6}
    for message, _ in run_on_ranks(4, refusal_of_heads, sizes, heads):
        assert "num_attention_heads=6 and num_key_value_heads=6" in message
        assert message.endswith("use one of [1, 2, 3, 6]")


def ddp_difference() -> float:
    setup = DistributedSetup.build(DDPConfig())
    model = parallelize_model(build(), setup.mesh_context)
    train(model)
    reference = build()
    rows = [token_ids(2, 32, seed=10 + rank) for rank in range(2)]
    for each in rows:
        (reference(each, labels=each).loss / 2).backward()
    pairs = zip(model.module.parameters(), reference.parameters(), strict=True)
    return max(float((a.grad - b.grad).abs().max()) for a, b in pairs)


def test_ddp_has_the_mean_gradients() -> None:
    assert max(run_on_ranks(2, ddp_difference)) < 1e-6


def one_rank(options: dict[str, Any]) -> tuple[float, bool]:
    model = sharded(mp_policy=FULL, **options)
    rows = rows_of_rank()
    model(rows, labels=rows).loss.backward()
    reference = build()
    reference(rows, labels=rows).loss.backward()
    pairs = list(zip(model.parameters(), reference.parameters(), strict=True))
    worst = max(float((full(a.grad) - b.grad).abs().max()) for a, b in pairs)
    return worst, policy_of(model) is not None


@pytest.mark.parametrize("options", [{}, {"moe": {}}], ids=["dense path", "experts apart"])
def test_one_rank_has_units_too(options: dict[str, Any]) -> None:
    worst, is_unit = run_on_ranks(1, one_rank, options)[0]
    assert worst < 1e-6
    assert is_unit


def test_the_model_carries_its_sidecar() -> None:
    assert BeamForCausalLM.parallelizer is PARALLELIZER
