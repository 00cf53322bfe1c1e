"""A loss that asks the router to spread its tokens, whose strength does not depend on the mesh.

Over some tokens, f_i is E / k times the share of their slots that went to expert i, P_i its mean
score, and the loss is coefficient x sum_i f_i P_i (arXiv:2101.03961 and, per sequence,
arXiv:2412.19437). With scope "sequence" the tokens are those of one sequence and the losses of all
sequences of a step are averaged; with "micro_batch" they are one micro-batch of all data-parallel
ranks, and the micro-batches are averaged.

f is a count, so that the gradient comes through P alone, which is a sum over tokens: every rank
adds the part of its own tokens, and only the counts are summed over ranks that share a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwalk.mesh import MeshContext
from shardwalk.moe_ep._torch_compat import in_backward
from shardwalk.moe_ep.config import BalanceLossScope
from shardwalk.moe_ep.gate_groups import GateGroups, sum_over
from shardwalk.parallelizer_core import TokenNormalizer, is_recomputing, record_or_replay

Models = nn.Module | Sequence[nn.Module]


@dataclass(frozen=True, kw_only=True)
class BalanceScale:
    """What the losses of one step are weighed with.

    Attributes:
        per_sequence: dp x cp / the sequences of the step over all ranks.
        micro_batches: the micro-batches of the step.
    """

    per_sequence: float
    micro_batches: int


class BalanceLoss:
    """The balance loss of one router.

    Attributes:
        scale: what `normalize_balance_loss` set; None weighs a call as if it were the whole step
            of this rank, and all ranks had as many sequences.
        last: what the last training forward added to the loss of this rank, detached; None before.
            Its sum over the micro-batches, averaged over dp x cp, is that of the step.
    """

    def __init__(self, coefficient: float, scope: BalanceLossScope) -> None:
        self.coefficient, self.scope = coefficient, scope
        self.scale: BalanceScale | None = None
        self.last: Tensor | None = None

    def attach(
        self, weights: Tensor, probabilities: Tensor, tokens: SequencesOfTokens, groups: GateGroups
    ) -> Tensor:
        """`weights`, through whose backward the loss's gradient comes, whatever the loss is.

        Args:
            weights: the routing weights, fp32 [T, k].
            probabilities: the scores, normalized over the experts, fp32 [T, E]; 0 where a token is
                masked.
            tokens: which sequence each token belongs to, and what the experts got of each.
            groups: the ranks that share sequences or micro-batches.
        """
        if self.scope == "sequence":
            over = groups.sequence
            default = 1 / max(tokens.sequences, 1)
            scale = default if self.scale is None else self.scale.per_sequence
        else:
            tokens, over = tokens.as_one(), groups.stage
            scale = groups.data_ranks / (1 if self.scale is None else self.scale.micro_batches)
        counts = record_or_replay("balance counts", lambda: sum_over(over, tokens.counts.clone()))
        loss = _sum_of_losses(probabilities, tokens, counts) * (self.coefficient * scale)
        if not (is_recomputing() or in_backward()):
            self.last = loss.detach()
        added: Tensor = _AddsLoss.apply(weights, loss)  # type: ignore[no-untyped-call]
        return added


@dataclass(frozen=True, kw_only=True)
class SequencesOfTokens:
    """How tokens fall into sequences.

    Attributes:
        sequences: their number, S.
        ids: the sequence of each token, int64 [T]; None for sequences of equal length in order.
        counts: this rank's slots by sequence and expert, int64 [S, E].
        top_k: slots of a token.
    """

    sequences: int
    ids: Tensor | None
    counts: Tensor
    top_k: int

    def as_one(self) -> SequencesOfTokens:
        """The same tokens as one sequence."""
        counts = self.counts.sum(0, keepdim=True)
        return replace(self, sequences=1, ids=None, counts=counts)

    def sums(self, values: Tensor) -> Tensor:
        """The sum of [T, E] values over the tokens of each sequence, [S, E]."""
        if self.ids is not None:
            zeros = values.new_zeros(self.sequences, values.shape[1])
            return zeros.index_add(0, self.ids, values)
        length = len(values) // max(self.sequences, 1)
        return values.view(self.sequences, length, values.shape[1]).sum(1)


def count_slots(experts: Tensor, num_experts: int, sequences: int, ids: Tensor | None) -> Tensor:
    """How many slots of each sequence went to each expert, int64 [S, E]; expert -1 is none."""
    slots = experts + 1
    if sequences != 1:
        owners = _equal_lengths(experts, sequences) if ids is None else ids
        slots = slots + owners[:, None] * (num_experts + 1)
    counts = experts.new_zeros(sequences * (num_experts + 1))
    counts.scatter_add_(0, slots.flatten(), torch.ones_like(slots).flatten())
    return counts.view(sequences, num_experts + 1)[:, 1:]


def normalize_balance_loss(
    model_or_models: Models, mesh_context: MeshContext, sequences: Sequence[int]
) -> None:
    """Weigh the balance losses of the coming step by what it holds, over all ranks.

    Call it before the forwards of every step whose micro-batches differ in number or size from the
    last call's. Without any call each forward counts as a whole step, and all ranks as equal. It
    costs one int64 all-reduce over dp x cp.

    Args:
        model_or_models: the model, or the pipeline stages of this rank.
        mesh_context: the context the model was parallelized with.
        sequences: the sequences of this rank in each micro-batch; parts of sequences, under context
            parallelism, count as one.

    Raises:
        TypeError: for anything but a sequence of integers.
        ValueError: for a negative number, or no micro-batch.
    """
    if not isinstance(sequences, list | tuple) or not sequences:
        raise ValueError(
            f"sequences={sequences!r} must be a list: the sequences of each micro-batch"
        )
    normalizer = TokenNormalizer(mesh_context, list(sequences))
    scale = BalanceScale(
        per_sequence=normalizer.scale * mesh_context.cp_size, micro_batches=len(sequences)
    )
    for balance_loss in _balance_losses(model_or_models):
        balance_loss.scale = scale


def _balance_losses(model_or_models: Models) -> Iterator[BalanceLoss]:
    models = [model_or_models] if isinstance(model_or_models, nn.Module) else model_or_models
    for model in models:
        for module in model.modules():
            balance_loss = getattr(module, "balance_loss", None)
            if isinstance(balance_loss, BalanceLoss):
                yield balance_loss


def _equal_lengths(experts: Tensor, sequences: int) -> Tensor:
    length = len(experts) // max(sequences, 1)
    return torch.arange(len(experts), device=experts.device) // max(length, 1)


def _sum_of_losses(probabilities: Tensor, tokens: SequencesOfTokens, counts: Tensor) -> Tensor:
    """This rank's part of the losses of its sequences, added up; a scalar."""
    slots = counts.sum(1, keepdim=True).clamp(min=1).to(probabilities.dtype)
    shares = counts * counts.shape[1] / slots
    means = tokens.sums(probabilities) * (tokens.top_k / slots)
    return (shares * means).sum()


class _AddsLoss(torch.autograd.Function):
    """The first argument as it is; in the backward the second one gets the gradient of a loss."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, loss: Tensor) -> Tensor:
        ctx.set_materialize_grads(True)
        return value.clone()  # FSDP2 warns of units that return views

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,) = gradients
        return gradient, torch.ones((), dtype=gradient.dtype, device=gradient.device)
