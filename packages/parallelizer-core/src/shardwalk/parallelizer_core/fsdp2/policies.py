"""The precision policy that each kind of unit gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwalk.parallelizer_core.fsdp2.nested import map_tensors, tensors_in

_Hook = Callable[..., tuple[tuple[Any, ...], dict[str, Any]] | None]


@dataclass(frozen=True)
class BlockPolicy(MixedPrecisionPolicy):
    """The policy of a block of a stack.

    `cast_forward_inputs` means its stream: see `stream_cast`. Whoever takes the policy for torch's
    has every input cast, as torch does.
    """


def inner_policy(policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """`policy` for a unit below the root: only the root casts its output.

    A cast after every inner unit would change the residual stream between a norm and the head.
    """
    return replace(policy, output_dtype=None)


def block_policy(policy: MixedPrecisionPolicy) -> BlockPolicy:
    """`policy` for a block: as `inner_policy`, and other inputs than its stream may stay wider."""
    values = {field.name: getattr(policy, field.name) for field in fields(MixedPrecisionPolicy)}
    return BlockPolicy(**{**values, "output_dtype": None})


def torch_policy(policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """What torch is given of a policy: no casts where `stream_cast` does them."""
    if isinstance(policy, BlockPolicy) and policy.cast_forward_inputs:
        return replace(policy, cast_forward_inputs=False)
    return policy


def stream_cast(policy: MixedPrecisionPolicy) -> _Hook | None:
    """The hook that casts the inputs of a block; None where the policy casts none, or torch does.

    The first floating input of a block is its hidden states. Where they have the compute dtype
    already, as in a model that is in this dtype as a whole, the others are what the model made of
    them, such as rotary tables in fp32, and none is cast. Else all are.
    """
    dtype = policy.param_dtype
    if not isinstance(policy, BlockPolicy) or not policy.cast_forward_inputs or dtype is None:
        return None
    cast = cast_floats(dtype)

    def cast_unless_computed(module: nn.Module, args: Any, kwargs: Any) -> Any:
        floats = (t for t in tensors_in([args, kwargs]) if t.is_floating_point())
        first = next(floats, None)
        return None if first is None or first.dtype == dtype else cast(module, args, kwargs)

    return cast_unless_computed


def cast_floats(dtype: torch.dtype) -> _Hook:
    """A forward pre-hook with keywords that casts every floating input to `dtype`."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def hook(module: nn.Module, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return map_tensors(cast, args), map_tensors(cast, kwargs)

    return hook


def pinned_policy(dtype: torch.dtype) -> MixedPrecisionPolicy:
    """The policy of a unit whose parameters compute in `dtype` whatever surrounds them.

    Its inputs are cast up, so that a module pinned to fp32 sees fp32 activations in a bf16 model.
    """
    return MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=dtype, cast_forward_inputs=True, output_dtype=None
    )
