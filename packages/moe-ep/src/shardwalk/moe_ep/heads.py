"""What the config for experts asks of the head and of the model around the inner model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from shardwalk.mesh import MoEParallelizerConfig
from shardwalk.mesh.policies import default_mp_policy
from shardwalk.parallelizer_core import ModelParallelizer
from shardwalk.parallelizer_core.fp32_pins import PIN_ATTRIBUTE
from shardwalk.parallelizer_core.fsdp2.root import watch_root
from shardwalk.parallelizer_core.fsdp2.walk import UnitOptions
from shardwalk.parallelizer_core.layers import find_block_stacks, has_forward

_INNER = "model"


def pin_head(model: nn.Module, config: MoEParallelizerConfig) -> None:
    """Let the head compute in the precision that `check_head` allowed."""
    if config.lm_head_precision == torch.float32:
        path, _ = find_head(model, torch.float32)
        pins = getattr(model, PIN_ATTRIBUTE, None) or ()
        pins = [pins] if isinstance(pins, str) else list(pins)
        vars(model)[PIN_ATTRIBUTE] = [*pins, path]


def check_head(
    model: nn.Module, config: MoEParallelizerConfig, policy: MixedPrecisionPolicy
) -> None:
    """Refuse a precision of the head that it cannot have.

    Raises:
        ValueError: no head, or a tied one; a head stored in fewer bits; a dtype that is neither
            fp32 nor what the rest computes in.
    """
    precision = config.lm_head_precision
    if precision is None:
        return
    path, head = find_head(model, precision)
    if _shared_with_rest(model, head):
        raise ValueError(
            f"lm_head_precision={precision}, but {path} shares its weight with another module, "
            f"which would compute in that dtype too; untie them, or leave lm_head_precision unset"
        )
    for name, parameter in head.named_parameters():
        compute = policy.param_dtype or parameter.dtype
        if precision not in (torch.float32, compute):
            raise ValueError(
                f"lm_head_precision={precision} is neither torch.float32 nor {compute}, in which "
                f"the rest computes; use one of these"
            )
        stored = parameter.dtype
        if precision == torch.float32 and not parameter.is_meta and stored != torch.float32:
            raise ValueError(
                f"lm_head_precision={precision}, but {path}.{name} is stored in {stored}, so its "
                f"low bits are lost; build or load the head in float32"
            )


def find_head(model: nn.Module, precision: object) -> tuple[str, nn.Module]:
    """The path and the module of the head: what the model calls so, or the one linear layer.

    Raises:
        ValueError: there is none, or several linear layers could be it.
    """
    found = list(_heads(model))
    if len(found) != 1:
        raise ValueError(
            f"lm_head_precision={precision}, but {type(model).__name__} has {len(found)} modules "
            f"that could be its head; let its get_output_embeddings() return the head, or leave "
            f"lm_head_precision unset"
        )
    return found[0]


def _heads(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    named = getattr(model, "get_output_embeddings", lambda: None)()
    rows = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    in_blocks = {
        module
        for stack in find_block_stacks(model)
        for _, block in stack.blocks
        for module in block.modules()
    }
    for path, module in model.named_modules():
        is_linear = isinstance(module, nn.Linear) and module.out_features in rows
        if module is named or (named is None and is_linear and module not in in_blocks):
            yield path, module


def _shared_with_rest(model: nn.Module, part: nn.Module) -> bool:
    own = {id(parameter) for parameter in part.parameters()}
    inside = set(part.modules())
    return any(
        id(parameter) in own
        for module in model.modules()
        if module not in inside
        for parameter in module.parameters(recurse=False)
    )


@dataclass(frozen=True)
class InnerRoot:
    """The sharding of a model whose inner model is the root unit, with what is around it apart.

    Attributes:
        shard: `_apply_fsdp_sharding` of the model's sidecar.
        door: its `_fully_shard_module`.
    """

    shard: Callable[..., None]
    door: Callable[..., nn.Module]

    def __call__(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        mp_policy: MixedPrecisionPolicy | None,
        offload_policy: OffloadPolicy | None = None,
        **options: Any,
    ) -> None:
        """Shard the inner model of `module`, then each other child."""
        self.shard(inner_model(module), mesh, mp_policy, offload_policy, **options)
        units = UnitOptions(mesh=mesh, mp_policy=mp_policy, offload_policy=offload_policy)
        policy = mp_policy or default_mp_policy()
        for child in (inner_model(module), *parts_around(module)):
            if child is not inner_model(module):
                # The backward starts with it.
                self.door(child, **units.for_unit(reshard_after_forward=False, is_root=True))
            watch_root(child, policy)


def root_inside(sidecar: ModelParallelizer) -> ModelParallelizer:
    """A copy of `sidecar` that makes the inner model the root unit."""
    inside = copy.copy(sidecar)
    shard = InnerRoot(sidecar._apply_fsdp_sharding, sidecar._fully_shard_module)
    vars(inside)["_apply_fsdp_sharding"] = shard
    return inside


def has_inner_model(model: nn.Module) -> bool:
    """Whether `model` holds an inner model as its child `model`."""
    return isinstance(getattr(model, _INNER, None), nn.Module)


def inner_model(model: nn.Module) -> nn.Module:
    """The inner model of `model`."""
    return model.get_submodule(_INNER)


def parts_around(model: nn.Module) -> list[nn.Module]:
    """The other children with parameters, each once."""
    inner = inner_model(model)
    return [
        child
        for child in dict.fromkeys(model.children())
        if child is not inner and any(True for _ in child.parameters())
    ]


def check_inner_root(model: nn.Module) -> None:
    """Refuse a model whose inner model cannot be the root unit.

    Raises:
        ValueError: a parameter around it that no unit would hold, or that is shared with it.
    """
    inner = inner_model(model)
    bare = [name for name, _ in model.named_parameters(recurse=False)]
    uncalled = [type(part).__name__ for part in parts_around(model) if not has_forward(part)]
    if bare or uncalled:
        raise ValueError(
            f"wrap_outer_model=False makes {_INNER!r} the root unit, which leaves "
            f"{', '.join(bare or uncalled)} of {type(model).__name__} without a unit; use "
            f"wrap_outer_model=True"
        )
    if any(_shared_with_rest(model, part) for part in (inner, *parts_around(model))):
        raise ValueError(
            f"wrap_outer_model=False makes units of {_INNER!r} and of what is around it, and they "
            f"share a weight; untie them, or use wrap_outer_model=True"
        )
