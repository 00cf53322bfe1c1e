"""What stays whole on every rank of the tensor-parallel axis, and its gradient.

A parameter that sees whole input has the whole gradient on every rank. One that sees a part of it
(heads, tokens) has a part of the gradient: the parts are summed as the unit's gradients are reduced
in the backward, so that nobody has to ask for it and accumulation needs no care.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor.parallel import ParallelStyle

from shardwalk.parallelizer_core.tensor_parallel.layouts import check_split_sequence, on_local
from shardwalk.parallelizer_core.tensor_parallel.local_parameters import (
    Forward,
    distribute_parameter,
    local_values,
    shown,
)


@dataclass(kw_only=True)
class SplitInput(ParallelStyle):
    """A module with whole parameters that sees one part of its input on each rank.

    Norms of the queries and keys of local heads are such, and the norms of a block that is split
    over the sequence. It must work on each head or token by itself.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for owner in module.modules():
            for name, _ in list(owner.named_parameters(recurse=False)):
                distribute_parameter(owner, name, device_mesh, Replicate())
        module.forward = _SplitInputForward(module, module.forward)
        return module


@dataclass
class _SplitInputForward:
    module: nn.Module
    inner: Forward
    place: str = ""

    def __call__(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(input, DTensor):
            check_split_sequence(input, self.place)
        with ExitStack() as stack:
            for owner in self.module.modules():
                gradients: dict[str, Placement] = {
                    name: Partial() for name, _ in owner.named_parameters(recurse=False)
                }
                stack.enter_context(shown(owner, **local_values(owner, gradients)))
            if isinstance(input, DTensor):
                return on_local(lambda x: self.inner(x, *args, **kwargs), input)
            return self.inner(input, *args, **kwargs)


@dataclass(kw_only=True)
class WholeInput(ParallelStyle):
    """A module that sees its whole input on every rank: nothing in it changes."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return module
