"""Moves of activations between layouts over the tensor-parallel axis, each with its backward.

A whole tensor is a plain tensor that every rank of the axis holds alike. A tensor split over the
sequence is a DTensor cut along dimension 1, so that its global length goes with it where lengths do
not divide by the axis. One without any token is a DTensor that every rank holds alike: torch takes
no view of a dimension that is cut and empty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from shardwalk.parallelizer_core._torch_compat import as_own_tensor

SEQUENCE_DIM = 1


def check_whole_sequence(x: Tensor, place: str) -> None:
    """Raise ValueError unless `x` is a whole [rows, length, width], to be split over its length."""
    if isinstance(x, DTensor) or x.ndim != 3:
        raise _misplaced(x, place)


def check_split_sequence(x: DTensor, place: str) -> None:
    """Raise ValueError unless `x` is a [rows, length, width] that is split over its length."""
    if x.ndim != 3 or tuple(x.placements) != (_over_sequence(x),):
        raise _misplaced(x, place)


def _misplaced(x: Tensor, place: str) -> ValueError:
    layout = f"placed as {tuple(x.placements)}" if isinstance(x, DTensor) else "that is whole"
    return ValueError(
        f"sequence_parallel=True splits hidden states of [rows, length, width] over their length, "
        f"and {place or 'a layer'} gets a tensor of {tuple(x.shape)} {layout}: the code around it "
        f"flattens the hidden states or works over their length; use sequence_parallel=False"
    )


def copy_to_parts(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The same tensor, whose gradient is the sum of those that the parts of a layer leave."""
    return _from_local(x, mesh, Replicate()).to_local(grad_placements=[Partial()])


def sum_parts(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum over the axis; every rank gets the whole gradient."""
    return _whole(_from_local(x, mesh, Partial()))


def sum_parts_over_sequence(x: Tensor, mesh: DeviceMesh) -> DTensor:
    """The sum over the axis, [rows, length, ...], of which every rank keeps its tokens."""
    return _from_local(x, mesh, Partial()).redistribute(placements=[_over_sequence(x)])


def split_sequence(x: Tensor, mesh: DeviceMesh) -> DTensor:
    """This rank's tokens of a whole tensor [rows, length, ...]."""
    return _from_local(x, mesh, Replicate()).redistribute(placements=[_over_sequence(x)])


def gather_sequence(x: DTensor) -> Tensor:
    """The whole tensor, for a layer that every rank runs alike."""
    return _whole(x)


def gather_sequence_to_parts(x: DTensor) -> Tensor:
    """The whole tensor, whose gradient is summed over the axis and split again."""
    return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def gather_features(x: Tensor, mesh: DeviceMesh, features: int) -> Tensor:
    """The whole tensor of one that is split along its last dimension, `features` in all."""
    return _whole(mark_features(x, mesh, features))


def mark_features(x: Tensor, mesh: DeviceMesh, features: int) -> DTensor:
    """A tensor that is split along its last dimension, `features` in all, as what it is."""
    return _of_shape(x, mesh, Shard(x.ndim - 1), (*x.shape[:-1], features))


def split_features(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's part of the last dimension of a whole tensor; every rank gets the gradient."""
    return _from_local(x, mesh, Replicate()).redistribute(placements=[Shard(x.ndim - 1)]).to_local()


def on_local(function: Callable[[Tensor], Tensor], x: DTensor) -> DTensor:
    """`function`, which works token by token, on this rank's tokens of `x`."""
    local = function(x.to_local())
    shape = (*x.shape[:2], *local.shape[2:])
    return _of_shape(local, x.device_mesh, _over_sequence(x), shape)


def map_sequence_tensors(function: Callable[[DTensor], Any], values: Any) -> Any:
    """`values`, a tensor or a tuple or list, with `function` of those split over the sequence."""
    if isinstance(values, DTensor):
        return function(values)
    if type(values) in (tuple, list):
        return type(values)(map_sequence_tensors(function, value) for value in values)
    return values


def _over_sequence(x: Tensor) -> Placement:
    """How a tensor [rows, length, ...] of that global shape lies when it is split."""
    return Shard(SEQUENCE_DIM) if x.shape[SEQUENCE_DIM] else Replicate()


def _from_local(x: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    return DTensor.from_local(x, mesh, [placement], run_check=False)


def _of_shape(x: Tensor, mesh: DeviceMesh, placement: Placement, shape: tuple[int, ...]) -> DTensor:
    """A DTensor of that global shape, which uneven parts would not tell."""
    whole = x.new_empty(shape, device="meta")
    return DTensor.from_local(
        x, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _whole(x: DTensor) -> Tensor:
    return as_own_tensor(x.redistribute(placements=[Replicate()]).to_local())
