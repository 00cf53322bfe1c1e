"""The precision policy that each kind of unit gets."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy


def inner_policy(policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """`policy` for a unit below the root: only the root casts its output.

    A cast after every inner unit would change the residual stream between a norm and the head.
    """
    return replace(policy, output_dtype=None)


def pinned_policy(policy: MixedPrecisionPolicy, dtype: torch.dtype) -> MixedPrecisionPolicy:
    """`policy` for a unit whose parameters compute in `dtype` whatever surrounds them.

    Its inputs are cast up, so that a module pinned to fp32 sees fp32 activations in a bf16 model.
    """
    return replace(
        policy, param_dtype=dtype, reduce_dtype=dtype, cast_forward_inputs=True, output_dtype=None
    )
