"""The dense walk: blocks become units bottom up, then the embedding tables, the root last."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy

from shardwalk.mesh import FrozenMultimodalSharding
from shardwalk.mesh.policies import default_mp_policy
from shardwalk.parallelizer_core._torch_compat import guard_fsdp_units
from shardwalk.parallelizer_core.fp32_pins import pin_fp32_parameters
from shardwalk.parallelizer_core.fsdp2.multimodal import (
    keep_whole,
    parameters_kept_whole,
    pass_gradients_through,
)
from shardwalk.parallelizer_core.fsdp2.policies import block_policy, inner_policy
from shardwalk.parallelizer_core.fsdp2.prefetch import chain_prefetch
from shardwalk.parallelizer_core.fsdp2.replicated_parameters import average_replicated_gradients
from shardwalk.parallelizer_core.fsdp2.root import watch_root
from shardwalk.parallelizer_core.fsdp2.zero_grad import clear_shards_in_every_unit
from shardwalk.parallelizer_core.layers import BlockStack, find_block_stacks, frozen_towers
from shardwalk.parallelizer_core.ties import SharedParameters

logger = logging.getLogger(__name__)

Door = Callable[..., nn.Module]
EmbeddingPass = Callable[
    [nn.Module, DeviceMesh, MixedPrecisionPolicy | None, OffloadPolicy | None, bool], None
]


@dataclass(frozen=True, kw_only=True)
class UnitOptions:
    """What every unit of one walk shares.

    Attributes:
        mesh: 1-D (sharded) or 2-D (replicated, sharded) data-parallel mesh.
        mp_policy: precision of the parameters and reductions; None is bf16 with fp32 reduction.
        offload_policy: where shards rest; None is on the device.
        reshard_after_forward: True or False for every unit, None for the rule of
            `reshards_after_forward`.
        ignored_params: parameters that no unit may take.
    """

    mesh: DeviceMesh
    mp_policy: MixedPrecisionPolicy | None = None
    offload_policy: OffloadPolicy | None = None
    reshard_after_forward: bool | None = None
    ignored_params: set[nn.Parameter] = field(default_factory=set)

    def for_unit(
        self,
        *,
        reshard_after_forward: bool | None,
        is_root: bool = False,
        is_block: bool = False,
    ) -> dict[str, object]:
        """The keyword arguments of `fully_shard` for one unit."""
        policy = self.mp_policy or default_mp_policy()
        if not is_root:
            policy = block_policy(policy) if is_block else inner_policy(policy)
        return {
            "mesh": self.mesh,
            "mp_policy": policy,
            "offload_policy": self.offload_policy or OffloadPolicy(),
            "reshard_after_forward": reshard_after_forward,
            "ignored_params": set(self.ignored_params),
        }


def walk_dense(
    model: nn.Module,
    options: UnitOptions,
    *,
    door: Door,
    embedding_pass: EmbeddingPass,
    frozen_sharding: FrozenMultimodalSharding = "root",
    forward_prefetch_depth: int = 0,
    backward_prefetch_depth: int = 0,
) -> None:
    """Turn `model` into units in place.

    Args:
        model: the whole model, or the part of it that one pipeline stage holds.
        options: what the units share.
        door: makes one unit of one module (a sidecar's `_fully_shard_module`).
        embedding_pass: makes the units of untied tables.
        frozen_sharding: where frozen vision and audio towers go: to the root unit, into units of
            their blocks, or into none ("replicate").
        forward_prefetch_depth, backward_prefetch_depth: blocks gathered ahead; 0 leaves it to
            torch.
    """
    pin_fp32_parameters(model)
    whole = parameters_kept_whole(model, frozen_sharding, options.ignored_params)
    options = replace(options, ignored_params=whole)
    stacks = blocks_to_shard(model, frozen_sharding)
    frozen = _modules_of_frozen_towers(model)
    for stack in stacks:
        for index, (_, block) in enumerate(stack.blocks):
            count = len(stack.blocks) + (block in frozen)  # no backward starts with its last one
            reshard = reshards_after_forward(index, count, options.reshard_after_forward)
            door(block, **options.for_unit(reshard_after_forward=reshard, is_block=True))
    embedding_pass(
        model,
        options.mesh,
        options.mp_policy,
        options.offload_policy,
        options.reshard_after_forward is not False,
    )
    door(
        model, **options.for_unit(reshard_after_forward=options.reshard_after_forward, is_root=True)
    )
    pass_gradients_through(model, (named for stack in stacks for named in stack.blocks))
    keep_whole(model, whole, options.mesh, options.mp_policy or default_mp_policy())
    for stack in stacks:
        chain_prefetch(
            [block for _, block in stack.blocks], forward_prefetch_depth, backward_prefetch_depth
        )


def finish_units(model: nn.Module, mp_policy: MixedPrecisionPolicy | None) -> None:
    """Install what every sharded model needs, whoever made its units: guards and hooks."""
    guard_fsdp_units(model)
    average_replicated_gradients(model)
    clear_shards_in_every_unit(model)
    if isinstance(model, FSDPModule):
        watch_root(model, mp_policy or default_mp_policy())


def blocks_to_shard(
    model: nn.Module, frozen_sharding: FrozenMultimodalSharding = "root"
) -> list[BlockStack]:
    """The stacks whose blocks become units, which those of frozen towers do with "per_layer" only.

    Tied blocks stay in the root.
    """
    in_root = set() if frozen_sharding == "per_layer" else _modules_of_frozen_towers(model)
    shared = SharedParameters(model)
    stacks = []
    for stack in find_block_stacks(model):
        own = tuple(
            (name, block)
            for name, block in stack.blocks
            if block not in in_root and not isinstance(block, FSDPModule)
        )
        free = tuple((name, block) for name, block in own if not shared.leave(block))
        if len(free) < len(own):
            logger.info(
                "%s: blocks whose weights are tied to others stay in the root unit", stack.name
            )
        stacks.append(BlockStack(stack.name, free))
    return stacks


def _modules_of_frozen_towers(model: nn.Module) -> set[nn.Module]:
    return {module for _, tower in frozen_towers(model) for module in tower.modules()}


def reshards_after_forward(index: int, count: int, override: bool | None) -> bool:
    """Whether block `index` of a stack of `count` frees its gathered weights after its forward.

    The last one keeps them, since the backward starts there. Pipeline stages pass `override=False`:
    each of their micro-batches would gather every block anew.
    """
    return index < count - 1 if override is None else override
