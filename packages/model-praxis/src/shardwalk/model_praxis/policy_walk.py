"""One walk over a policy: experts, recomputation, blocks of the three stacks, the root last.

What is done to experts, to blocks that are recomputed and to units of more than one dtype is
moe-ep's and core's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from shardwalk.model_praxis.policy_parts import (
    block_lists,
    expert_meshes,
    moe_of,
    policy_in,
    refuse_shared_blocks,
)
from shardwalk.model_praxis.walk_options import (
    DenseOptions,
    mp_policy_or_default,
    refuse_moe_mesh,
    refuse_surroundings,
)
from shardwalk.moe_ep import replicate_router_biases
from shardwalk.moe_ep.expert_units import expert_mesh_of
from shardwalk.moe_ep.spreading import ExpertOptions, ExpertSpread
from shardwalk.parallelizer_core import (
    ModelParallelizer,
    apply_activation_checkpointing,
    check_equal_start,
)
from shardwalk.parallelizer_core.fp32_pins import pin_fp32_parameters
from shardwalk.parallelizer_core.fsdp2.prefetch import chain_prefetch
from shardwalk.parallelizer_core.fsdp2.root import watch_root
from shardwalk.parallelizer_core.fsdp2.walk import UnitOptions, reshards_after_forward
from shardwalk.parallelizer_core.model_tensors import unwrapped

if TYPE_CHECKING:  # the policy's class carries the sidecar
    from shardwalk.model_praxis.model import PraxisPolicy


@dataclass(frozen=True, kw_only=True)
class PolicyWalk:
    """One walk over a policy.

    Attributes:
        sidecar: makes every unit, by its `_fully_shard_module`.
        mesh: 1-D (sharded) or 2-D (replicated, sharded).
        mp_policy, offload_policy, reshard_after_forward: of the units, as in `shard_policy`.
        moe_mesh: spreads the experts where its ep axis has more than one rank.
        activation_checkpointing: False, "full" (or True) or "selective".
        ignore_router_for_ac: whether recomputes take the routes of the forward.
        forward_prefetch_depth, backward_prefetch_depth: 0 leaves it to torch.
    """

    sidecar: ModelParallelizer
    mesh: DeviceMesh
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy | None
    activation_checkpointing: bool | str
    reshard_after_forward: bool | None
    forward_prefetch_depth: int
    backward_prefetch_depth: int
    moe_mesh: DeviceMesh | None = None
    ignore_router_for_ac: bool = True

    @classmethod
    def of(cls, options: DenseOptions, sidecar: ModelParallelizer, mesh: DeviceMesh) -> PolicyWalk:
        """The walk that the arguments of a dense path ask for."""
        return cls(
            sidecar=sidecar,
            mesh=mesh,
            mp_policy=mp_policy_or_default(options.mp_policy),
            offload_policy=options.offload_policy,
            activation_checkpointing=options.activation_checkpointing,
            reshard_after_forward=options.reshard_after_forward,
            forward_prefetch_depth=options.forward_prefetch_depth,
            backward_prefetch_depth=options.backward_prefetch_depth,
        )

    def plan(self, policy: nn.Module) -> ExpertSpread | None:
        """How the experts will lie, None where they stay in their blocks; changes nothing.

        Raises:
            ValueError: for experts that the ep axis cannot hold, or a moe mesh over other ranks.
        """
        ep, shards = expert_meshes(self.moe_mesh)
        if ep is None or self.moe_mesh is None:
            return None
        refuse_moe_mesh(ep, shards, self.mesh)
        mesh = expert_mesh_of(self.moe_mesh, data_ranks=self.mesh.size())
        return ExpertSpread.plan(policy, mesh)

    def run(
        self, policy: PraxisPolicy, spread: ExpertSpread | None, before_units: Callable[[], None]
    ) -> None:
        """Change the policy: experts, recomputation, then units from the blocks to the root."""
        pin_fp32_parameters(policy)
        door, no_cast = self.sidecar._fully_shard_module, self._without_casts()
        if spread is not None:
            spread.apply(self._for_experts(no_cast), door=door)
        self._tell_blocks(policy)
        apply_activation_checkpointing(
            policy,
            self.activation_checkpointing,
            whole_layers=self.sidecar._use_full_layer_activation_checkpointing(policy),
        )
        before_units()
        self._make_units(policy, no_cast)
        replicate_router_biases(policy, self.mesh)

    def _tell_blocks(self, policy: PraxisPolicy) -> None:
        """Say what each block casts its hidden states to, and whether routes are taken again."""
        for block in chain(*block_lists(policy)):
            inner: Any = unwrapped(block)  # of those who checkpoint by hand
            inner.compute_dtype = self.mp_policy.param_dtype
            moe = moe_of(block)
            if moe is not None:
                moe.gate.replay_routing = self.ignore_router_for_ac

    def _make_units(self, policy: PraxisPolicy, mp_policy: MixedPrecisionPolicy) -> None:
        door, reshard = self.sidecar._fully_shard_module, self.reshard_after_forward
        options = UnitOptions(
            mesh=self.mesh, mp_policy=mp_policy, offload_policy=self.offload_policy
        )
        for stack in block_lists(policy):
            for index, block in enumerate(stack):
                frees = reshards_after_forward(index, len(stack), reshard)
                door(block, **options.for_unit(reshard_after_forward=frees))
        door(policy, **options.for_unit(reshard_after_forward=reshard, is_root=True))
        for stack in block_lists(policy):
            chain_prefetch(list(stack), self.forward_prefetch_depth, self.backward_prefetch_depth)

    def _without_casts(self) -> MixedPrecisionPolicy:
        return replace(self.mp_policy, cast_forward_inputs=False)

    def _for_experts(self, mp_policy: MixedPrecisionPolicy) -> ExpertOptions:
        return ExpertOptions(
            mp_policy=mp_policy,
            offload_policy=self.offload_policy,
            reshard_after_forward=self.reshard_after_forward,
            activation_checkpointing=self.activation_checkpointing,
            replays_routing=self.ignore_router_for_ac,
        )


def walk_policy(
    model: nn.Module,
    device_mesh: DeviceMesh,
    walk: PolicyWalk,
    reapply_trainability: Callable[[nn.Module], None] | None,
) -> nn.Module:
    """Refuse, compare the starts of the ranks, then change the policy in `model`."""
    policy = policy_in(model)
    refuse_surroundings(policy, model)
    refuse_shared_blocks(policy)
    spread = walk.plan(policy)

    def reapply() -> None:
        if reapply_trainability is not None:
            reapply_trainability(model)

    reapply()
    check_equal_start(
        model,
        device_mesh,
        {
            "activation_checkpointing": walk.activation_checkpointing,
            "ignore_router_for_ac": walk.ignore_router_for_ac,
            "mp_policy": walk.mp_policy,
            "reshard_after_forward": walk.reshard_after_forward,
        },
    )
    walk.run(policy, spread, reapply)
    if policy is not model:  # whoever called this watches the module that it passed
        watch_root(policy, walk.mp_policy)
    return model
