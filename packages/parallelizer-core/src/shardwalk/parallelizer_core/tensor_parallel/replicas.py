"""What stays whole on every rank of the tensor-parallel axis, and its gradient.

A parameter that sees whole input has the whole gradient on every rank. One that sees a part of it
(heads, tokens) has a part of the gradient: the parts are summed as the unit's gradients are reduced
in the backward, so that nobody has to ask for it and accumulation needs no care.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor.parallel import ParallelStyle

from shardwalk.parallelizer_core.tensor_parallel.layouts import (
    check_split_sequence,
    check_whole_sequence,
    gather_sequence,
    on_local,
    split_sequence,
)
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
        _replicate_parameters(module, device_mesh)
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
    """A module that sees its whole input on every rank.

    Its gradients are whole on every rank, and equal. By default nothing is exchanged.

    Attributes:
        average_gradients: whether they are averaged over the ranks, for operators whose gradients
            differ in the last bits from run to run, so that the copies cannot drift apart.
    """

    average_gradients: bool = False

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if self.average_gradients:
            _replicate_parameters(module, device_mesh)
            module.forward = _AveragedForward(module, module.forward)
        return module


@dataclass
class _AveragedForward:
    module: nn.Module
    inner: Forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for owner in self.module.modules():
                names = [name for name, _ in owner.named_parameters(recurse=False)]
                values = local_values(owner, dict.fromkeys(names, Partial()))
                ranks = {name: getattr(owner, name).device_mesh.size() for name in values}
                shares = {name: _share_gradient(v, ranks[name]) for name, v in values.items()}
                stack.enter_context(shown(owner, **shares))
            return self.inner(*args, **kwargs)


def _replicate_parameters(module: nn.Module, mesh: DeviceMesh) -> None:
    for owner in module.modules():
        for name, _ in list(owner.named_parameters(recurse=False)):
            distribute_parameter(owner, name, mesh, Replicate())


class _Share(torch.autograd.Function):
    """The same values, whose gradient is divided by a number of ranks."""

    @staticmethod
    def forward(context: Any, x: Tensor, ranks: int) -> Tensor:
        context.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] / context.ranks, None


def _share_gradient(x: Tensor, ranks: int) -> Tensor:
    shared: Tensor = _Share.apply(x, ranks)  # type: ignore[no-untyped-call]
    return shared


@dataclass(kw_only=True)
class TokenParallel(ParallelStyle):
    """A module with whole parameters that works token by token: each rank runs its tokens.

    Its input, the first argument of its forward, is [rows, length, width] and whole on every rank,
    or split over the length already; the output is as the input.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        SplitInput()._apply(module, device_mesh)
        module.forward = _TokenForward(module.forward, device_mesh)
        return module


@dataclass
class _TokenForward:
    inner: Forward
    mesh: DeviceMesh
    place: str = ""

    def __call__(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(input, DTensor):
            return self.inner(input, *args, **kwargs)
        check_whole_sequence(input, self.place)
        return gather_sequence(self.inner(split_sequence(input, self.mesh), *args, **kwargs))
