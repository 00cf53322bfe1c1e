"""FSDP2 policies given as objects or as dicts. torch's FSDP is imported when one is made."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from shardwalk.mesh.validation import check_boolean, parse_dtype, unknown_keys

if TYPE_CHECKING:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

__all__ = ["default_mp_policy", "parse_mp_policy", "parse_offload_policy"]


def default_mp_policy() -> "MixedPrecisionPolicy":
    """bf16 parameters, fp32 gradient reduction, outputs and inputs left as they are."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        output_dtype=None,
        cast_forward_inputs=False,
    )


def parse_mp_policy(option: str, value: object) -> "MixedPrecisionPolicy":
    """Return the policy that ``value`` is, or that a dict of its fields describes.

    A field which the dict leaves out has torch's default for it. Names of dtypes become dtypes, in
    a policy object too. Raises ValueError for unknown keys, targets or dtypes, TypeError for other
    types.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if isinstance(value, Mapping):
        value = MixedPrecisionPolicy(**_options(option, value, MixedPrecisionPolicy))
    if not isinstance(value, MixedPrecisionPolicy):
        raise TypeError(
            f"{option}={value!r} must be a MixedPrecisionPolicy, a dict of its fields or None"
        )
    check_boolean(f"{option}.cast_forward_inputs", value.cast_forward_inputs)
    dtypes: dict[str, Any] = {
        name: parse_dtype(f"{option}.{name}", getattr(value, name))
        for name in ("param_dtype", "reduce_dtype", "output_dtype")
    }
    return dataclasses.replace(value, **dtypes)


def parse_offload_policy(option: str, value: object) -> "CPUOffloadPolicy":
    """Return the policy that ``value`` is, or that a dict such as ``{"pin_memory": False}`` is."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    if isinstance(value, Mapping):
        value = CPUOffloadPolicy(**_options(option, value, CPUOffloadPolicy))
    if not isinstance(value, CPUOffloadPolicy):
        raise TypeError(
            f"{option}={value!r} must be a CPUOffloadPolicy, a dict of its fields or None"
        )
    check_boolean(f"{option}.pin_memory", value.pin_memory)
    return value


def _options(option: str, given: Mapping[str, Any], cls: type) -> dict[str, Any]:
    options = dict(given)
    target = options.pop("_target_", cls)
    path = f"torch.distributed.fsdp.{cls.__name__}"
    if target not in (cls, cls.__name__, path):
        raise ValueError(f"{option}: _target_={target!r} must be {path} or {cls.__name__}")
    unknown_keys(option, options, [field.name for field in dataclasses.fields(cls)])
    return options
