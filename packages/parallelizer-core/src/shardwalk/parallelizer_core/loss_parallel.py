"""The cross-entropy of logits that stay split over the vocabulary.

A head that tensor parallelism cuts makes a part of the logits on each rank. Gathered, they are the
largest tensor of a training step; here the ranks exchange three numbers per token instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from shardwalk.parallelizer_core.parallel_state import mesh_context_of, unwrap_model
from shardwalk.parallelizer_core.split_logit_calls import guard_calls, release_calls
from shardwalk.parallelizer_core.tensor_parallel.split_heads import split_head_forwards

Reduction = Literal["none", "sum", "mean"]


def keep_logits_split(model: nn.Module, enabled: bool = True) -> None:
    """Let the output heads of a parallelized model leave their logits split over the vocabulary.

    They are then DTensors, `Shard` along the last dimension over the tensor-parallel axis, for
    `parallel_cross_entropy` (or torch's `loss_parallel`); code in the model that works on each
    logit by itself goes on working. A loss that the model makes of labels works if it knows of
    such logits; otherwise the call is a ValueError, and so is one of `generate`. Without tensor
    parallelism nothing is split, and `parallel_cross_entropy` takes whole logits too.

    Args:
        model: what `parallelize_model` returned.
        enabled: False lets the heads gather their logits again, for generation say.

    Raises:
        ValueError: the model is split over a tensor-parallel axis, and no head in it over the
            vocabulary; or it was not parallelized.
    """
    context = mesh_context_of(model)
    if context is None:
        raise ValueError("keep_logits_split needs a model that parallelize_model returned")
    heads = split_head_forwards(unwrap_model(model))
    if context.tp_size > 1 and not heads:
        raise ValueError(
            f"the tensor-parallel plan of {type(unwrap_model(model)).__name__} cuts no output head "
            f"over the vocabulary, so its logits are whole on every rank: give the head "
            f"ColumnParallel(gather_output=True) in tp_plan, or leave keep_logits_split out"
        )
    for forward in heads:
        forward.keeps_split = enabled
    (guard_calls if enabled and heads else release_calls)(unwrap_model(model))


def parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """The cross-entropy of logits that are split over the vocabulary, or whole.

    It computes in fp32 (fp64 for fp64 logits); gradients have the dtype of the logits. Beside the
    logits, a backward needs a few numbers per token and memory for their gradient.

    Args:
        logits: [..., vocabulary]; a DTensor split along its last dimension alone, evenly or not, or
            a plain tensor.
        labels: int64 of the logits' shape without the last dimension, whole and equal on every rank
            of the tensor-parallel axis; shifted by the caller.
        ignore_index: the label of tokens that do not count.
        reduction: "mean" over the tokens that count, "sum", or "none", which gives the shape of
            `labels`, with 0 for tokens that do not count.
        label_smoothing: as of `torch.nn.functional.cross_entropy`.

    Returns:
        A plain tensor, the same on every rank of the tensor-parallel axis.

    Raises:
        ValueError: another layout or shape, another reduction or smoothing, and on the CPU a label
            outside the vocabulary; on an accelerator such a label makes the loss NaN.
        TypeError: labels of another dtype.
    """
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"reduction={reduction!r} is not allowed; use 'none', 'sum' or 'mean'")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing={label_smoothing} must lie between 0 and 1")
    if isinstance(labels, DTensor) or labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels of {tuple(labels.shape)} must be a plain tensor of the shape of logits "
            f"{tuple(logits.shape)} without the vocabulary"
        )
    if labels.dtype != torch.int64:
        raise TypeError(f"labels are {labels.dtype} and must be torch.int64; use labels.long()")
    losses = _losses(logits, labels, ignore_index, label_smoothing)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (labels != ignore_index).sum()


def _losses(logits: Tensor, labels: Tensor, ignore_index: int, smoothing: float) -> Tensor:
    """The loss of every token, in the shape of `labels`."""
    if not isinstance(logits, DTensor):
        rows = logits.flatten(0, -2)
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        flat = F.cross_entropy(
            wide,
            labels.flatten(),
            ignore_index=ignore_index,
            reduction="none",
            label_smoothing=smoothing,
        )
        return flat.view_as(labels)
    place = (Shard(logits.ndim - 1),)
    if tuple(logits.placements) != place:
        raise ValueError(
            f"logits are placed as {tuple(logits.placements)} and must be {place}, split over the "
            f"vocabulary alone; keep_logits_split(model) makes such"
        )
    split = _Split.of(logits)
    _check_labels(labels, logits.shape[-1], ignore_index)
    part = logits.to_local().flatten(0, -2)
    losses: Tensor = _SplitCrossEntropy.apply(  # type: ignore[no-untyped-call]
        part, labels.flatten(), split, ignore_index, smoothing
    )
    return losses.view_as(labels)


def _check_labels(labels: Tensor, vocabulary: int, ignore_index: int) -> None:
    """Refuse labels outside the vocabulary where looking at them stalls no accelerator."""
    if labels.device.type != "cpu":
        return
    wrong = labels[((labels < 0) | (labels >= vocabulary)) & (labels != ignore_index)]
    if wrong.numel():
        raise ValueError(
            f"label {int(wrong[0])} lies outside the vocabulary of {vocabulary} and is not "
            f"ignore_index={ignore_index}"
        )


@dataclass(frozen=True, kw_only=True)
class _Split:
    """Which part of the vocabulary this rank has.

    Attributes:
        first: the id of its first logit.
        vocabulary: the logits of all ranks.
    """

    mesh: DeviceMesh
    first: int
    vocabulary: int

    @classmethod
    def of(cls, logits: DTensor) -> _Split:
        mesh, vocabulary = logits.device_mesh, logits.shape[-1]
        size = -(-vocabulary // mesh.size())
        first = min(mesh.get_local_rank() * size, vocabulary)
        return cls(mesh=mesh, first=first, vocabulary=vocabulary)

    def reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        """`x` with its sum or maximum over the ranks, in place."""
        dist.all_reduce(x, op, group=self.mesh.get_group())
        return x

    def own(self, labels: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Each label's column in this rank's part, and whether it has one."""
        columns = labels - self.first
        is_own = (columns >= 0) & (columns < width)
        return columns.masked_fill(~is_own, 0), is_own


class _SplitCrossEntropy(torch.autograd.Function):
    """Losses [tokens] of this rank's logits [tokens, part of the vocabulary]."""

    @staticmethod
    def forward(
        context: Any, part: Tensor, labels: Tensor, split: _Split, ignored: int, smoothing: float
    ) -> Tensor:
        wide = part.to(torch.promote_types(part.dtype, torch.float32))
        largest = split.reduce(wide.amax(-1), dist.ReduceOp.MAX)
        columns, is_own = split.own(labels, part.shape[-1])
        below = wide - largest.unsqueeze(-1)  # rounds as one process does, whatever the size
        picked = below.gather(-1, columns.unsqueeze(-1)).squeeze(-1).masked_fill(~is_own, 0)
        rows = [picked, is_own.to(wide.dtype)]
        rows += [below.sum(-1)] if smoothing else []
        sums = split.reduce(torch.stack([below.exp_().sum(-1), *rows]), dist.ReduceOp.SUM)
        logs = sums[0].log()
        losses = logs - sums[1]
        if smoothing:
            losses = torch.lerp(losses, logs - sums[3] / split.vocabulary, smoothing)
        counts = labels != ignored
        losses = losses.masked_fill(sums[2] == 0, torch.nan)  # no rank has the label
        context.save_for_backward(part, largest, logs, columns, is_own & counts, counts)
        context.smoothing, context.vocabulary = smoothing, split.vocabulary
        return losses.masked_fill(~counts, 0)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        part, largest, logs, columns, is_own, counts = context.saved_tensors
        smoothing = context.smoothing
        gradient = part.to(logs.dtype, copy=True)
        gradient.sub_(largest.unsqueeze(-1)).sub_(logs.unsqueeze(-1)).exp_()
        if smoothing:
            gradient.sub_(smoothing / context.vocabulary)
        share = is_own.to(logs.dtype).mul_(smoothing - 1).unsqueeze(-1)
        gradient.scatter_add_(-1, columns.unsqueeze(-1), share)
        scale = gradients[0].to(logs.dtype).masked_fill(~counts, 0)
        gradient.mul_(scale.unsqueeze(-1))
        return gradient.to(part.dtype), None, None, None, None
