"""How Beam is sharded: units of one dtype, and blocks that leave fp32 inputs as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from shardwalk.mesh import FrozenMultimodalSharding
from shardwalk.model_beam.layers import Block
from shardwalk.model_beam.tensor_parallel import beam_tp_plan, refuse_uneven_heads
from shardwalk.parallelizer_core import ModelParallelizer
from shardwalk.parallelizer_core.fp32_pins import PIN_ATTRIBUTE, pin_parameters_below
from shardwalk.parallelizer_core.fsdp2.dtype_units import fully_shard_by_dtype, shard_unit
from shardwalk.parallelizer_core.model_tensors import unwrapped


class BeamModelParallelizer(ModelParallelizer):
    """Shards Beam with the router in an fp32 unit, and with rotary tables that stay fp32."""

    def _apply_fsdp_sharding(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        mp_policy: MixedPrecisionPolicy | None,
        offload_policy: OffloadPolicy | None = None,
        enable_fsdp2_prefetch: bool = True,
        fsdp2_backward_prefetch_depth: int = 2,
        fsdp2_forward_prefetch_depth: int = 1,
        reshard_after_forward: bool | None = None,
        frozen_multimodal_sharding: FrozenMultimodalSharding = "root",
        ignored_multimodal_params: set[nn.Parameter] | None = None,
    ) -> None:
        """Take the shared walk, in which every block becomes units of one dtype each."""
        walk = _DenseBlockParallelizer(self, _fp32_compute_module_names(module))
        walk._apply_fsdp_sharding(
            module,
            mesh,
            mp_policy,
            offload_policy,
            enable_fsdp2_prefetch=enable_fsdp2_prefetch,
            fsdp2_backward_prefetch_depth=fsdp2_backward_prefetch_depth,
            fsdp2_forward_prefetch_depth=fsdp2_forward_prefetch_depth,
            reshard_after_forward=reshard_after_forward,
            frozen_multimodal_sharding=frozen_multimodal_sharding,
            ignored_multimodal_params=ignored_multimodal_params,
        )

    def _fully_shard_module(self, module: nn.Module, **kwargs: Any) -> nn.Module:
        """Make one unit of `module` by `beam_fully_shard_unit`."""
        return beam_fully_shard_unit(module, door=self._fully_shard_module, **kwargs)

    def _validate_tp_mesh(self, model: nn.Module, tp_mesh: DeviceMesh) -> None:
        """Refuse adapters, dropout and heads that do not divide over the axis."""
        super()._validate_tp_mesh(model, tp_mesh)
        refuse_uneven_heads(model, tp_mesh.size())

    def _tp_plan(self, model: nn.Module, sequence_parallel: bool) -> Mapping[str, Any]:
        """The plan of `beam_tp_plan`."""
        return beam_tp_plan(model, sequence_parallel)


class _DenseBlockParallelizer(ModelParallelizer):
    """The shared walk, with Beam blocks split into units of one dtype each.

    Args:
        unit_parallelizer: makes every unit by its `_fully_shard_module`.
        fp32_compute_module_names: what stands below one of these dotted names in a block computes
            in fp32 in a unit of its own, trainable or frozen.
    """

    def __init__(
        self,
        unit_parallelizer: BeamModelParallelizer,
        fp32_compute_module_names: tuple[str, ...],
    ) -> None:
        self.unit_parallelizer = unit_parallelizer
        self.fp32_compute_module_names = fp32_compute_module_names

    def _fully_shard_module(self, module: nn.Module, **kwargs: Any) -> nn.Module:
        """Split a block into its units; make one unit of any other module."""
        door = self.unit_parallelizer._fully_shard_module
        if not is_beam_block(module):
            return door(module, **kwargs)
        pin_parameters_below(module, self.fp32_compute_module_names)
        return fully_shard_by_dtype(module, door, **kwargs)


def is_beam_block(module: nn.Module) -> bool:
    """Whether it is a Beam `Block`: sharded or not, also in a wrapper of torch."""
    return isinstance(unwrapped(module), Block)


def beam_fully_shard_unit(
    module: nn.Module,
    mp_policy: MixedPrecisionPolicy | None = None,
    *,
    door: Callable[..., nn.Module] | None = None,
    **kwargs: Any,
) -> nn.Module:
    """Make one unit of `module`, that of a Beam block without a cast of its inputs.

    A block then casts its hidden states itself, and leaves the rotary tables and query scales that
    come with them in fp32. Without a policy, or with one that casts nothing, nothing changes.

    Args:
        module: a block, which torch's checkpoint wrapper may be around, or anything else.
        mp_policy: precision of the unit; anything but a block gets it as it is.
        door: makes the units of parts of another dtype, if there are some; None is this function.
        kwargs: further arguments of torch's `fully_shard`.

    Returns:
        `module`.
    """
    block = unwrapped(module)
    if mp_policy is not None and mp_policy.param_dtype is not None and isinstance(block, Block):
        mp_policy = replace(mp_policy, cast_forward_inputs=False)
        block.compute_dtype = mp_policy.param_dtype
    if mp_policy is not None:
        kwargs["mp_policy"] = mp_policy
    return shard_unit(module, door or beam_fully_shard_unit, **kwargs)


def _fp32_compute_module_names(model: nn.Module) -> tuple[str, ...]:
    names = getattr(model, PIN_ATTRIBUTE, None) or ()
    return tuple(name.removesuffix(".weight") for name in names)


PARALLELIZER = BeamModelParallelizer()
