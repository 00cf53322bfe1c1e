"""Activation checkpointing on every mesh: the numbers of one process without it."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwalk.mesh import (
    DDPConfig,
    DistributedSetup,
    FSDP2Config,
    MeshContext,
    ParallelismSizes,
)
from shardwalk.parallelizer_core import parallelize_model
from shardwalk.parallelizer_core.testing import (
    Bf16,
    ParityCase,
    TokenBatches,
    assert_parity,
    cached,
    run_on_ranks,
    tiny_decoder_case,
)
from shardwalk.parallelizer_core.testing.collectives import CountCollectives
from tests.matrix.case_models import (
    BF16,
    FULL,
    assert_equal,
    gradients,
    mean_loss,
    mine,
    parallel,
    tokens,
)
from tests.matrix.case_models import seeded as seeded_decoder
from tests.matrix.tiny_transformers import MODELS, SIZES, gemma3n, normal_weights

MESHES = {
    "one rank": (1, ParallelismSizes()),
    "fsdp 4": (4, ParallelismSizes()),
    "hsdp 2x2": (4, ParallelismSizes(dp_replicate_size=2)),
    "ddp 2": (2, ParallelismSizes()),
    "tp 2 x fsdp 2": (4, ParallelismSizes(tp_size=2)),
}


def build(name: str, tied: bool) -> nn.Module:
    return MODELS[name](tied)


def case(name: str, *, tied: bool = True, micro_batches: int = 1) -> ParityCase:
    if name == "plain":
        return tiny_decoder_case(tied=tied, micro_batches=micro_batches)
    return ParityCase(
        model=partial(build, name, tied),
        batches=TokenBatches(vocabulary=61, micro_batches=micro_batches),
        init=normal_weights,
    )


def run(parity_case: ParityCase, mesh: str, mode: str, policy: Any = FULL, **options: Any) -> None:
    world_size, sizes = MESHES[mesh]
    strategy: Any = DDPConfig(activation_checkpointing=mode)
    if mesh != "ddp 2":
        options.setdefault("unit", {})
        strategy = FSDP2Config(
            activation_checkpointing=mode, mp_policy=policy, **options.pop("unit")
        )
    assert_parity(
        parity_case,
        world_size=world_size,
        strategy=strategy,
        parallelism_sizes=sizes,
        optimizers=("sgd",),
        **options,
    )


# A spread: each mode with each mesh, each model and each precision

FP32 = [
    ("full", "fsdp 4", "llama", True),
    ("selective", "fsdp 4", "gemma3", False),
    ("full", "hsdp 2x2", "qwen3", False),
    ("selective", "hsdp 2x2", "plain", True),
    ("full", "ddp 2", "gemma3", True),
    ("selective", "ddp 2", "llama", False),
    ("full", "one rank", "plain", True),
    ("selective", "one rank", "qwen3", True),
]


@pytest.mark.parametrize(("mode", "mesh", "name", "tied"), FP32)
def test_training_has_the_numbers_of_one_process(
    mode: str, mesh: str, name: str, tied: bool
) -> None:
    run(case(name, tied=tied), mesh, mode)


@pytest.mark.parametrize(
    ("mode", "mesh", "name"),
    [
        ("full", "fsdp 4", "gemma3"),
        ("selective", "hsdp 2x2", "llama"),
        ("selective", "one rank", "plain"),
    ],
)
def test_bf16_compute_with_fp32_reduction(mode: str, mesh: str, name: str) -> None:
    run(case(name), mesh, mode, policy=None, bf16=Bf16())


@pytest.mark.parametrize(
    ("mode", "mesh", "name"),
    [
        ("full", "hsdp 2x2", "llama"),
        ("selective", "fsdp 4", "plain"),
        ("selective", "ddp 2", "plain"),
    ],
)
def test_three_micro_batches_with_unequal_token_counts(mode: str, mesh: str, name: str) -> None:
    run(case(name, micro_batches=3), mesh, mode, clip=0.5)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_prefetch_and_resharding_do_not_change_the_numbers(mode: str) -> None:
    unit = {"enable_fsdp2_prefetch": True, "fsdp2_forward_prefetch_depth": 2}
    run(case("plain", micro_batches=2), "fsdp 4", mode, unit=unit)
    run(case("plain", micro_batches=2), "fsdp 4", mode, unit={"reshard_after_forward": True})
    run(case("plain"), "fsdp 4", mode, meta_start="checkpoint")


# Tensor parallelism


@pytest.mark.parametrize(
    ("mode", "name", "sequence_parallel"),
    [
        ("full", "llama", False),
        ("selective", "qwen3", True),
        ("selective", "gemma3", False),
        ("full", "qwen3", True),
    ],
)
def test_tensor_parallel(mode: str, name: str, sequence_parallel: bool) -> None:
    run(case(name), "tp 2 x fsdp 2", mode, unit={"sequence_parallel": sequence_parallel})


def tiny_llama() -> nn.Module:
    torch.manual_seed(3)
    return MODELS["llama"](True)


def tp_steps(sequence_parallel: bool) -> list[dict[str, int]]:
    """The collectives of a bf16 step in each mode, whose gradients agree bit for bit."""
    sizes = ParallelismSizes(tp_size=2)
    setup = cached("tp steps", lambda: DistributedSetup.build("fsdp2", parallelism_sizes=sizes))
    found, grads = [], []
    for mode in (False, "selective", "full"):
        config = FSDP2Config(
            activation_checkpointing=mode, sequence_parallel=sequence_parallel, mp_policy=BF16
        )
        mesh = setup.mesh_context.device_mesh
        model = parallelize_model(
            tiny_llama(), MeshContext.from_meshes(mesh, strategy_config=config)
        )
        loss = mean_loss(model, tokens())
        with CountCollectives() as counted:
            loss.backward()
        found.append(dict(counted.calls))
        grads.append(gradients(model))
    for others in grads[1:]:
        assert all(torch.equal(value, others[name]) for name, value in grads[0].items())  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_selective_repeats_no_collective_of_tensor_parallelism(sequence_parallel: bool) -> None:
    """Full repeats those of a block that come before its last saved tensor, in three blocks.

    That is the sum after attention; with split sequences two gathers and the scatter between.
    """
    for off, selective, full in run_on_ranks(2, tp_steps, sequence_parallel):
        assert selective == off
        assert sum(full.values()) - sum(off.values()) == 3 * (3 if sequence_parallel else 1)


# Units inside a checkpointed block


class Pinned(nn.Module):
    """A block with fp32 norms beside bf16 products: four units, three of them in the first.

    Its last saved tensor is no norm's, so a recompute finds norms that nothing gathered yet.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.LayerNorm(width) for width in (18, 18, 37))
        self.up, self.down = nn.Linear(18, 37), nn.Linear(37, 18)

    def forward(self, x: Tensor, rotary: nn.Module) -> Tensor:
        x = x + self.second(self.first(x.float())).to(x.dtype)
        h = self.third(self.up(x).float()).to(x.dtype)
        return (x + self.down(h)).sin()


def pinned() -> nn.Module:
    model = seeded_decoder()
    model.layers = nn.ModuleList([Pinned() for _ in range(3)])
    model._keep_in_fp32_modules_strict = ["first", "second", "third"]
    return model


def gather_ahead(model: nn.Module) -> None:
    """Every block gathers all units of its neighbours, forward and backward."""
    units = [[m for m in b.modules() if isinstance(m, FSDPModule)] for b in model.layers]
    assert [len(each) for each in units] == [4, 4, 4]
    for before, after in itertools.pairwise(units):
        before[0].set_modules_to_forward_prefetch(after)
        after[0].set_modules_to_backward_prefetch(before)
    model.set_modules_to_forward_prefetch(units[0])  # type: ignore[operator]


def nested_units(mode: str | bool, prefetch: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    model = parallel(
        pinned(),
        activation_checkpointing=mode,
        mp_policy=BF16,
        enable_fsdp2_prefetch=prefetch == "walk",
        **options,
    )
    if prefetch == "units":
        gather_ahead(model)
    grads = []
    for seed in range(2):
        mean_loss(model, mine(tokens(seed=seed))).backward()
        grads.append(gradients(model))
        model.zero_grad()
    return grads


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize(
    ("prefetch", "reshard"), [("torch", None), ("walk", None), ("units", True)]
)
def test_units_inside_a_checkpointed_block(prefetch: str, reshard: bool | None, mode: str) -> None:
    """What a recompute gathers may differ from what its forward gathered."""
    options = {"reshard_after_forward": reshard}
    off = run_on_ranks(2, nested_units, False, prefetch, options)
    on = run_on_ranks(2, nested_units, mode, prefetch, options)
    for expected, found in zip(off, on, strict=True):
        for before, after in zip(expected, found, strict=True):
            assert_equal(after, before, tolerance=0.0)


# What transformers passes in training


@pytest.mark.parametrize(("mode", "mesh"), [("full", "fsdp 4"), ("selective", "ddp 2")])
def test_layers_that_share_keys_and_values(mode: str, mesh: str) -> None:
    shared = ParityCase(model=gemma3n, batches=TokenBatches(vocabulary=61), init=normal_weights)
    run(shared, mesh, mode)


def cached_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "use_cache": True}))


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_cache_that_transformers_passes_in_training_is_left_out(mode: str) -> None:
    plain = cached_llama()
    mean_loss(plain, tokens()).backward()
    model = parallelize_model(cached_llama(), MeshContext(activation_checkpointing=mode))
    with pytest.warns(UserWarning, match="LlamaForCausalLM passes a cache"):
        loss = mean_loss(model, tokens())
    loss.backward()
    assert_equal(gradients(model), gradients(plain), tolerance=0.0)
    with torch.no_grad():
        assert model(tokens()).past_key_values.get_seq_length() == 8
