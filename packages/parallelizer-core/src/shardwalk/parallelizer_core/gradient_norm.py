"""The norm of all gradients of a model, over any mixture of meshes, and clipping by it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from shardwalk.mesh import MeshContext
from shardwalk.parallelizer_core._torch_compat import foreach_norms, foreach_scale_
from shardwalk.parallelizer_core.model_sequences import (
    Models,
    as_models,
    reshard,
    shared_mesh_context,
    unique_parameters,
)

# torch's CPU kernel adds float32 squares one after the other: 1.6e-3 off over 28 million elements.
# Norms of rows this long, joined in float64, are exact to float32 and just as fast.
_CPU_ROW = 4096


@torch.no_grad()
def clip_grad_norm_(
    model_or_models: Models,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    mesh_context: MeshContext | None = None,
) -> Tensor:
    """Scale the stored gradients so that their global norm is at most `max_norm`.

    The norm is that of the one-process gradients: shards are summed over the axes that hold them,
    replicas and tied parameters count once. Gradients change in place, whatever their dtype and
    device. All ranks of the model call this together.

    Args:
        model_or_models: the model, or the pipeline stages of this rank.
        max_norm: the largest norm allowed; ``math.inf`` only measures.
        norm_type: p of the p-norm, any number above 0, ``math.inf`` included.
        error_if_nonfinite: raise when the norm is infinite or NaN, before a gradient changes.
        mesh_context: the context of the models; by default the one they were parallelized with.

    Returns:
        The norm before clipping: a plain 0-dim float32 tensor, the same on every rank.

    Raises:
        TypeError: for an `error_if_nonfinite` that is not a bool.
        ValueError: for a `max_norm` or `norm_type` that is not a number above 0.
        RuntimeError: for a norm that is not finite, with `error_if_nonfinite`, on every rank.
    """
    _check_positive("max_norm", max_norm)
    models = as_models(model_or_models)
    total = get_total_norm(
        models, norm_type, error_if_nonfinite=error_if_nonfinite, mesh_context=mesh_context
    )
    if max_norm != math.inf:
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        _scale(_local_gradients(models), factor)
    return total


@torch.no_grad()
def get_total_norm(
    model_or_models: Models,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    mesh_context: MeshContext | None = None,
) -> Tensor:
    """The global norm of all gradients; arguments, result and errors as in `clip_grad_norm_`."""
    _check_positive("norm_type", norm_type)
    if not isinstance(error_if_nonfinite, bool):
        raise TypeError(f"error_if_nonfinite must be True or False, got {error_if_nonfinite!r}")
    models = as_models(model_or_models)
    reshard(models)
    context = shared_mesh_context(models, mesh_context)
    norm = _Norm(float(norm_type))
    device = _result_device(models, context)
    parts = [table.total(norm) for table in _tables(models, norm)]
    total = norm.join([part.to(device) for part in parts]) if parts else norm.zero(device)
    total = _over_pipeline_stages(total, norm, context)
    total = norm.root(total).to(torch.float32)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the gradient norm of order {norm_type} is {total.item()}; pass "
            "error_if_nonfinite=False to scale by it all the same"
        )
    return total


@dataclass(frozen=True)
class _Norm:
    """How parts of a p-norm join: sums of p-th powers, or maxima for p = inf.

    Powers are kept in float64, where the square of any float32 norm is finite.
    """

    order: float

    @property
    def operation(self) -> dist.ReduceOp.RedOpType:
        return dist.ReduceOp.MAX if self.order == math.inf else dist.ReduceOp.SUM

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        stacked = torch.stack(list(parts))
        return stacked.amax(0) if self.order == math.inf else stacked.sum(0)

    def root(self, total: Tensor) -> Tensor:
        return total if self.order == math.inf else total.pow(1.0 / self.order)

    def zero(self, device: torch.device) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=device)

    def of(self, tensors: Iterable[Tensor], device: torch.device) -> Tensor:
        """The part that these local tensors contribute, on `device`."""
        parts = [self.zero(device)]
        for group in _by_device_and_dtype(tensors).values():
            norms = _norms_of_pieces(group, self.order).to(torch.float64)
            powers = norms if self.order == math.inf else norms.pow(self.order)
            parts.append(self.join(powers.unbind()).to(device))
        return self.join(parts)


@dataclass
class _MeshTable:
    """The gradients that live on one mesh, by the axes which split them."""

    mesh: DeviceMesh | None
    by_split_axes: dict[tuple[int, ...], list[Tensor]] = field(default_factory=dict)

    def total(self, norm: _Norm) -> Tensor:
        """The part of the whole mesh, the same on each of its ranks."""
        device = self._device()
        keys = list(self.by_split_axes)
        parts = torch.stack([norm.of(self.by_split_axes[key], device) for key in keys])
        for axis in range(self.mesh.ndim if self.mesh is not None else 0):
            rows = [row for row, key in enumerate(keys) if axis in key]
            if self.mesh is not None and rows and self.mesh.size(axis) > 1:
                split = parts[rows]
                dist.all_reduce(split, norm.operation, group=self.mesh.get_group(axis))
                parts[rows] = split
        return norm.join(parts.unbind())

    def _device(self) -> torch.device:
        """Where collectives of the mesh work; gradients themselves may be offloaded."""
        if self.mesh is not None:
            return torch.device(self.mesh.device_type)
        tensors = [tensor for group in self.by_split_axes.values() for tensor in group]
        return tensors[0].device if tensors else torch.device("cpu")


def _tables(models: Sequence[nn.Module], norm: _Norm) -> list[_MeshTable]:
    """One table per mesh, in the same order on every rank.

    Built from the parameters, so that a gradient missing on one rank only changes no collective.
    """
    tables: dict[DeviceMesh | None, _MeshTable] = {}
    for parameter in unique_parameters(models):
        if not parameter.requires_grad:
            continue
        layout = parameter.grad if isinstance(parameter.grad, DTensor) else parameter
        mesh = layout.device_mesh if isinstance(layout, DTensor) else None
        table = tables.setdefault(mesh, _MeshTable(mesh))
        tensors = table.by_split_axes.setdefault(_split_axes(layout), [])
        if parameter.grad is not None:
            tensors.append(_without_partial_sums(parameter.grad))
    return list(tables.values())


def _split_axes(tensor: Tensor) -> tuple[int, ...]:
    """The axes of the tensor's mesh whose ranks hold different parts of it."""
    if not isinstance(tensor, DTensor):
        return ()
    return tuple(axis for axis, placement in enumerate(tensor.placements) if _splits(placement))


def _splits(placement: object) -> bool:
    return not isinstance(placement, Replicate | Partial)


def _without_partial_sums(gradient: Tensor) -> Tensor:
    """The local part of a gradient, with what ranks still have to add up added up."""
    if not isinstance(gradient, DTensor):
        return gradient
    if any(isinstance(placement, Partial) for placement in gradient.placements):
        resolved = [Replicate() if isinstance(p, Partial) else p for p in gradient.placements]
        gradient = gradient.redistribute(placements=resolved)
    return gradient.to_local()


def _norms_of_pieces(tensors: Sequence[Tensor], order: float) -> Tensor:
    """The norms, fp32 or wider, of pieces that together make up the tensors."""
    if tensors[0].device.type != "cpu":
        return torch.stack(foreach_norms(tensors, order, _norm_dtype(tensors[0])))
    return torch.cat([_row_norms(rows, order) for tensor in tensors for rows in _rows(tensor)])


def _rows(tensor: Tensor) -> Iterator[Tensor]:
    flat = tensor.reshape(-1)
    whole_rows = flat.numel() // _CPU_ROW * _CPU_ROW
    if whole_rows:
        yield flat[:whole_rows].view(-1, _CPU_ROW)
    if whole_rows < flat.numel():
        yield flat[whole_rows:].view(1, -1)


def _row_norms(rows: Tensor, order: float) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(rows, order, dim=1, dtype=_norm_dtype(rows))
    return norms


def _norm_dtype(tensor: Tensor) -> torch.dtype:
    """float32 for anything narrower: a norm cannot be taken in less than its input has."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _local_gradients(models: Sequence[nn.Module]) -> list[Tensor]:
    """The stored local gradients themselves; scaling a partial sum scales its total."""
    gradients = [parameter.grad for parameter in unique_parameters(models)]
    return [
        gradient.to_local() if isinstance(gradient, DTensor) else gradient
        for gradient in gradients
        if gradient is not None
    ]


def _scale(gradients: Iterable[Tensor], factor: Tensor) -> None:
    for (device, _), group in _by_device_and_dtype(gradients).items():
        foreach_scale_(group, factor.to(device))


def _by_device_and_dtype(
    tensors: Iterable[Tensor],
) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Group what one fused call can take; empty tensors have no norm and nothing to scale."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.numel() > 0:
            groups[tensor.device, tensor.dtype].append(tensor)
    return groups


def _over_pipeline_stages(total: Tensor, norm: _Norm, context: MeshContext | None) -> Tensor:
    """Stages hold different parameters, so their parts join like shards."""
    if context is not None and context.device_mesh is not None and context.pp_size > 1:
        dist.all_reduce(total, norm.operation, group=context.device_mesh.get_group("pp"))
    return total


def _result_device(models: Sequence[nn.Module], context: MeshContext | None) -> torch.device:
    """The device of the mesh where there is one, else that of the parameters."""
    if context is not None and context.device_mesh is not None:
        return torch.device(context.device_mesh.device_type)
    for parameter in unique_parameters(models):
        if isinstance(parameter, DTensor):
            return torch.device(parameter.device_mesh.device_type)
    return next((parameter.device for parameter in unique_parameters(models)), torch.device("cpu"))


def _check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{name} must be a number above 0 (math.inf included), got {value!r}")
