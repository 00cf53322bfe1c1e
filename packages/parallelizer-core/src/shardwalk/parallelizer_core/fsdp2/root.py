"""What the root unit does around its forward, beyond what torch's own hooks do."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from shardwalk.parallelizer_core._torch_compat import (
    forget_interrupted_forward,
    forward_was_interrupted,
)
from shardwalk.parallelizer_core.fsdp2.nested import tensors_in
from shardwalk.parallelizer_core.late_parameters import late_parameters_note
from shardwalk.parallelizer_core.parallel_state import fsdp_units


def watch_root(root: nn.Module, mp_policy: MixedPrecisionPolicy) -> None:
    """Leave `root` resharded after a forward that no backward follows, and after a failed one.

    torch keeps the root's weights gathered after a forward, for the backward to come. Where none
    comes, weights changed in the meantime (an EMA swap, a weight sync) would not be the ones the
    next forward uses.
    """
    root.register_forward_hook(_after_forward(mp_policy), with_kwargs=True, always_call=True)


def reshard_all(root: nn.Module) -> None:
    """Reshard every unit in `root`; a unit that is sharded stays as it is."""
    for unit in fsdp_units(root):
        unit.reshard()


def _after_forward(mp_policy: MixedPrecisionPolicy) -> Any:
    def hook(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        assert isinstance(root, FSDPModule)
        error = sys.exc_info()[1]
        _explain_missing_values(error, root)
        # A tool that replaces torch's own hooks makes them run after this one; without an error an
        # open iteration says no more than that.
        if error is not None and forward_was_interrupted(root):
            forget_interrupted_forward(root)
            _explain_late_parameters(error, root)
            _explain_dtype_error(error, mp_policy, args, kwargs)
        elif not _leads_to_a_backward(output):
            reshard_all(root)

    return hook


def _leads_to_a_backward(output: Any) -> bool:
    """Whether gradients may flow back: not where they are disabled, nor if all is frozen."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in([output]))


def _explain_missing_values(error: BaseException | None, root: nn.Module) -> None:
    """Name the call that gives weights on meta their values, where torch names another."""
    if isinstance(error, Exception) and any(p.is_meta for p in root.parameters()):
        error.add_note(
            "The weights of this model are on the meta device: call materialize(model, "
            "checkpoint=...) or materialize(model, init=...) before the model is called"
        )


def _explain_late_parameters(error: BaseException, root: nn.Module) -> None:
    """Name adapters that took their sizes from weights which were shards already."""
    note = late_parameters_note(root)
    if note is not None and isinstance(error, Exception):
        error.add_note(note)


def _explain_dtype_error(
    error: BaseException,
    policy: MixedPrecisionPolicy,
    args: Iterable[Any],
    kwargs: dict[str, Any],
) -> None:
    """Name the option that casts inputs, where the model failed on an input of another dtype."""
    if (
        policy.param_dtype is None
        or policy.cast_forward_inputs
        or not isinstance(error, RuntimeError)
    ):
        return
    others = {t.dtype for t in tensors_in([*args, *kwargs.values()]) if t.is_floating_point()}
    others.discard(policy.param_dtype)
    if others:
        given = ", ".join(sorted(str(dtype) for dtype in others))
        error.add_note(
            f"The model was called with {given} inputs while its weights compute in "
            f"{policy.param_dtype}, and "
            f"mp_policy.cast_forward_inputs is False: cast the inputs, or set "
            f"cast_forward_inputs=True"
        )
