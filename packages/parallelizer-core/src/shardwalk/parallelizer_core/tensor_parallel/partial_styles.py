"""Parallel styles of modules whose own parameters or outputs are parts: bare ones, sums, tails."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ParallelStyle

from shardwalk.parallelizer_core.tensor_parallel.layouts import copy_to_parts, sum_parts
from shardwalk.parallelizer_core.tensor_parallel.local_parameters import (
    Forward,
    distribute_parameter,
    local_values,
    shown,
)


@dataclass(kw_only=True)
class LocalParameters(ParallelStyle):
    """A module with bare parameters of which each rank's forward sees its part.

    It says nothing of the modules in it, nor of parameters that it does not name.

    Attributes:
        cuts: the dimension along which each of the module's own parameters is cut, by its name.
    """

    cuts: Mapping[str, int]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, dim in self.cuts.items():
            distribute_parameter(module, name, device_mesh, Shard(dim))
        module.forward = _LocalParametersForward(self, module, module.forward)
        return module


@dataclass
class _LocalParametersForward:
    style: LocalParameters
    module: nn.Module
    inner: Forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cuts = {name: Shard(dim) for name, dim in self.style.cuts.items()}
        with shown(self.module, **local_values(self.module, cuts)):
            return self.inner(*args, **kwargs)


@dataclass(kw_only=True)
class SumOutput(ParallelStyle):
    """A module that makes a part of a sum on each rank: its output is summed over the ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.forward = _SumForward(module.forward, device_mesh)
        return module


@dataclass
class _SumForward:
    inner: Forward
    mesh: DeviceMesh
    place: str = ""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        output = self.inner(*args, **kwargs)
        if not isinstance(output, Tensor):
            raise TypeError(
                f"SumOutput() at {self.place or 'a module'} sums a tensor over the ranks, and the "
                f"module returned a {type(output).__name__}; give the style to the module inside "
                f"it that returns the tensor"
            )
        return sum_parts(output, self.mesh)


@dataclass(kw_only=True)
class SharedTail(ParallelStyle):
    """A whole layer whose last output features go to the heads of each rank as they are.

    The other features go into column-cut layers, which sum their gradient; that of the last ones is
    summed here.

    Attributes:
        features: how many of the last output features.
    """

    features: int

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.forward = _SharedTailForward(self, module.forward, device_mesh)
        return module


@dataclass
class _SharedTailForward:
    style: SharedTail
    inner: Forward
    mesh: DeviceMesh

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = self.inner(*args, **kwargs)
        tail = self.style.features
        head, last = output.split([output.shape[-1] - tail, tail], dim=-1)
        return torch.cat([head, copy_to_parts(last, self.mesh)], dim=-1)
