"""Parallel styles: how one module computes its part of a layer.

They compute on plain local tensors; only parameters and what is split over the sequence are
DTensors. One collective stands where the sum of Megatron-LM's f and g stands (arXiv:1909.08053,
section 3; over the sequence arXiv:2205.05198, section 4). Any length, vocabulary and feature size
may be uneven over the ranks.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from shardwalk.parallelizer_core._torch_compat import is_persistent_buffer
from shardwalk.parallelizer_core.tensor_parallel.components import part_of_components
from shardwalk.parallelizer_core.tensor_parallel.layouts import (
    check_split_sequence,
    check_whole_sequence,
    copy_to_parts,
    gather_features,
    gather_sequence,
    gather_sequence_to_parts,
    map_sequence_tensors,
    mark_features,
    on_local,
    split_features,
    split_sequence,
    sum_parts,
    sum_parts_over_sequence,
)
from shardwalk.parallelizer_core.tensor_parallel.local_parameters import (
    Forward,
    distribute_parameter,
    local_values,
    shown,
)


@dataclass(kw_only=True)
class ColumnParallel(ParallelStyle):
    """A linear layer cut along its output features.

    Attributes:
        gather_output: whether every rank gets all features (an output head).
        shared_input: whether a `SharedInput` above already sees to the input.
        components: the sizes of what its features hold one after the other (query, key and value;
            gate and up), of each of which every rank computes its part; empty for one component.
    """

    gather_output: bool = False
    shared_input: bool = False
    components: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.gather_output and self.components:
            raise ValueError(
                f"ColumnParallel(gather_output=True, components={self.components}): features that "
                f"every rank gets whole need no components; leave one of the two out"
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear = _plain_linear(module, type(self).__name__)
        distribute_parameter(linear, "weight", device_mesh, Shard(0))
        distribute_parameter(linear, "bias", device_mesh, Shard(0))
        set_forward(linear, _ColumnForward(self, linear, linear.forward, device_mesh))
        return linear


@dataclass
class _ColumnForward:
    style: ColumnParallel
    linear: nn.Linear
    inner: Forward
    mesh: DeviceMesh
    place: str = ""
    keeps_split: bool = False

    def __call__(self, input: Tensor) -> Tensor:
        if not self.style.shared_input or isinstance(input, DTensor):
            input = enter_parts(input, self.mesh, self.place)
        cuts = {"weight": Shard(0), "bias": Shard(0)}
        values = local_values(self.linear, cuts)
        if self.style.components:
            sizes = self.style.components
            values = {n: part_of_components(v, self.mesh, sizes) for n, v in values.items()}
        with shown(self.linear, **values):
            output: Tensor = self.inner(input)
        if self.style.gather_output:
            leave = mark_features if self.keeps_split else gather_features
            output = leave(output, self.mesh, self.linear.out_features)
        return output


@dataclass(kw_only=True)
class RowParallel(ParallelStyle):
    """A linear layer cut along its input features; its output is summed over the ranks.

    Attributes:
        sequence_parallel: whether each rank keeps its tokens of the sum instead of all.
        split_input: whether the input is whole, and each rank takes its features of it.
        components: the sizes of what its input features hold one after the other, of each of which
            every rank has its part; empty for one component.
    """

    sequence_parallel: bool = False
    split_input: bool = False
    components: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.split_input and self.components:
            raise ValueError(
                f"RowParallel(split_input=True, components={self.components}): an input that is "
                f"whole needs no components; leave one of the two out"
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear = _plain_linear(module, type(self).__name__)
        distribute_parameter(linear, "weight", device_mesh, Shard(1))
        distribute_parameter(linear, "bias", device_mesh, Replicate())
        set_forward(linear, _RowForward(self, linear, linear.forward, device_mesh))
        return linear


@dataclass
class _RowForward:
    style: RowParallel
    linear: nn.Linear
    inner: Forward
    mesh: DeviceMesh
    place: str = ""

    def __call__(self, input: Tensor) -> Tensor:
        if self.style.sequence_parallel:
            check_whole_sequence(input, self.place)
        bias_gradient = Partial() if self.style.sequence_parallel else Replicate()
        bias = local_values(self.linear, {"bias": bias_gradient}).get("bias")
        weight = local_values(self.linear, {"weight": Shard(1)})["weight"]
        if self.style.components:
            weight = part_of_components(weight, self.mesh, self.style.components, dim=1)
        if self.style.split_input:
            input = split_features(input, self.mesh)
        with shown(self.linear, bias=None, weight=weight):
            parts = self.inner(input)
        if self.style.sequence_parallel:
            split = sum_parts_over_sequence(parts, self.mesh)
            return split if bias is None else on_local(lambda x: x + bias, split)
        output = sum_parts(parts, self.mesh)
        return output if bias is None else output + bias


@dataclass(kw_only=True)
class SharedInput(ParallelStyle):
    """A module that hands its input to several column-parallel layers: one collective for all.

    The input is the first argument of its forward, which must go to these layers alone.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        first = _first_argument(module)
        set_forward(module, _SharedInputForward(first, module.forward, device_mesh))
        return module


@dataclass
class _SharedInputForward:
    first: str | None
    inner: Forward
    mesh: DeviceMesh
    place: str = ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _with_first(
            self.first, lambda x: enter_parts(x, self.mesh, self.place), args, kwargs
        )
        return self.inner(*args, **kwargs)


@dataclass(kw_only=True)
class SequenceBoundary(ParallelStyle):
    """Where a stack of blocks that is split over the sequence begins or ends.

    Attributes:
        enter: whether the block's input, the first argument of its forward, is split.
        leave: whether the block's output is gathered.
    """

    enter: bool = False
    leave: bool = False

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        first = _first_argument(module)
        set_forward(module, _BoundaryForward(self, first, module.forward, device_mesh))
        return module


@dataclass
class _BoundaryForward:
    style: SequenceBoundary
    first: str | None
    inner: Forward
    mesh: DeviceMesh
    place: str = ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.style.enter:
            args, kwargs = _with_first(self.first, self._split, args, kwargs)
        output = self.inner(*args, **kwargs)
        return map_sequence_tensors(gather_sequence, output) if self.style.leave else output

    def _split(self, x: Tensor) -> Tensor:
        check_whole_sequence(x, self.place)
        return split_sequence(x, self.mesh)


@dataclass(kw_only=True)
class LocalCounts(ParallelStyle):
    """A module whose forward reads counts (of heads) from its own attributes.

    Attributes:
        names: the integer attributes that become those of one rank. One that begins with
            `config.` stands in the module's config, of which the module then has a copy.
    """

    names: tuple[str, ...]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, _ in module.named_buffers(recurse=False):
            if not is_persistent_buffer(module, name):
                raise ValueError(
                    f"LocalCounts changes {', '.join(self.names)} of a {type(module).__name__}, "
                    f"from which its buffer {name} is made; move the buffer to a module of its own"
                )
        if any(name.startswith("config.") for name in self.names):
            module.config = copy.copy(module.config)
        for name in self.names:
            owner, _, attribute = name.rpartition(".")
            holder = getattr(module, owner) if owner else module
            count, ranks = getattr(holder, attribute), device_mesh.size()
            if count % ranks:
                raise ValueError(f"{name}={count} does not divide by tp_size={ranks}")
            setattr(holder, attribute, count // ranks)
        return module


def set_forward(module: nn.Module, forward: Forward) -> None:
    """Let `module` run `forward`, which knows the one before, instead of its class's."""
    module.forward = forward


def enter_parts(x: Tensor, mesh: DeviceMesh, place: str = "") -> Tensor:
    """The input of column-parallel layers: whole, with a gradient that is summed over the ranks.

    Raises:
        ValueError: it is split otherwise than over the sequence; names `place`, the module's path.
    """
    if not isinstance(x, DTensor):
        return copy_to_parts(x, mesh)
    check_split_sequence(x, place)
    return gather_sequence_to_parts(x)


def _first_argument(module: nn.Module) -> str | None:
    """The name of the first argument of the class's forward, None where it has none."""
    _, *named = inspect.signature(type(module).forward).parameters.values()
    is_named = named and named[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    return named[0].name if is_named else None


def _with_first(
    name: str | None,
    function: Callable[[Tensor], Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with `function` of the first one, given by place or by name."""
    if args:
        return (function(args[0]), *args[1:]), kwargs
    if name not in kwargs:
        raise ValueError(f"the hidden states, {name or 'the first argument'}, are missing")
    assert name is not None
    return args, {**kwargs, name: function(kwargs[name])}


def _plain_linear(module: nn.Module, style: str) -> nn.Linear:
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        raise TypeError(f"{style} cuts an nn.Linear with its own forward, not a {type(module)}")
    return module
