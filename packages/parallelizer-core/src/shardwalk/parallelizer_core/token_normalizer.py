"""A loss whose gradient is the mean over all valid tokens of the step, wherever they fell."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwalk.mesh import MeshContext, get_flat_mesh

_MOST_TOKENS = 2**62  # over all ranks: half of what an int64 holds

TokenCounts = int | Tensor | Sequence["int | Tensor"]


class TokenNormalizer:
    """Turns token losses into the loss to call ``backward`` on.

    Data-parallel strategies average gradients over the N = dp x cp ranks. The loss of a micro-batch
    is therefore the sum of its token losses x N / the valid tokens of all micro-batches of all
    ranks, so that gradients add up to those of one process on the whole batch. Make one per
    optimizer step, on all ranks together: it costs one int64 all-reduce over dp x cp.

    Args:
        mesh_context: the context the model was parallelized with; one without a mesh means N = 1.
        valid_token_counts: the valid tokens of this rank: one number, an integer tensor of any
            shape, or a sequence of these, one per micro-batch.

    Attributes:
        global_tokens: the valid tokens of the step over all ranks, an int.
        scale: N / `global_tokens`, a float; 0 when no rank has a valid token.

    Raises:
        TypeError: for a `mesh_context` that is none, or a count that is not an integer.
        ValueError: for a count that is negative, or too large for the ranks' sum to be an int64.
            Whatever a rank raises while it counts, the other ranks raise a ValueError as well, for
            none of them can go on alone.

    Example:
        ::

            valid = [(y != -100).sum() for _, y in micro_batches]
            normalizer = TokenNormalizer(mesh_context, valid)
            for x, y in sync_gradients_on_last(model, micro_batches):
                losses = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none")
                normalizer(losses).backward()
    """

    global_tokens: int
    scale: float

    def __init__(self, mesh_context: MeshContext, valid_token_counts: TokenCounts) -> None:
        mesh = self._mesh = _data_mesh(mesh_context)
        ranks = 1 if mesh is None else mesh.size()
        error: Exception | None = None
        count = 0
        try:
            count = _total(valid_token_counts, ranks)
        except Exception as caught:
            error = caught  # the peers are about to wait in the all-reduce: join it first
        self.global_tokens, failed_ranks = _sum_over(mesh, [count, int(error is not None)])
        if error is not None:
            raise error
        if failed_ranks:
            raise ValueError(
                f"{failed_ranks} other rank(s) gave a valid_token_counts that is not allowed"
            )
        self.scale = ranks / self.global_tokens if self.global_tokens else 0.0

    def __call__(self, token_losses: Tensor) -> Tensor:
        """The scalar loss of one micro-batch, in at least float32.

        Args:
            token_losses: the unreduced losses, of any shape, 0 where a token is not valid (as
                ``cross_entropy(reduction="none")`` leaves ignored ones), or their sum.

        Raises:
            TypeError: for anything but a floating-point tensor.
        """
        if not isinstance(token_losses, Tensor):
            raise TypeError(f"token_losses must be a tensor, got a {type(token_losses).__name__}")
        if not token_losses.is_floating_point():
            raise TypeError(f"token_losses must be floating point, got {token_losses.dtype}")
        wide = torch.promote_types(token_losses.dtype, torch.float32)
        return token_losses.sum(dtype=wide) * self.scale

    def global_loss(self, loss: Tensor) -> Tensor:
        """The loss of the whole step, the same on every rank: what to log.

        Args:
            loss: the sum of this rank's losses over its micro-batches, a scalar tensor.

        Returns:
            The mean over all valid tokens of all ranks, detached; one all-reduce over dp x cp.
        """
        total = loss.detach().clone()
        if self._mesh is not None and self._mesh.size() > 1:
            dist.all_reduce(total, dist.ReduceOp.AVG, group=self._mesh.get_group())
        return total


def _data_mesh(mesh_context: MeshContext) -> DeviceMesh | None:
    """The ranks of one stage that see different tokens; never tp, whose ranks see the same."""
    if not isinstance(mesh_context, MeshContext):
        raise TypeError(
            f"mesh_context must be a MeshContext, got a {type(mesh_context).__name__}; pass the "
            ".mesh_context of the DistributedSetup (MeshContext() for one process)"
        )
    if mesh_context.device_mesh is None:
        return None
    return get_flat_mesh(mesh_context.device_mesh, "dp_cp")


def _total(counts: object, ranks: int) -> int:
    total = sum(_count(entry) for entry in _entries(counts))
    if total > _MOST_TOKENS // ranks:
        raise ValueError(
            f"valid_token_counts must be at most {_MOST_TOKENS // ranks} per rank, got {total}"
        )
    return total


def _entries(counts: object) -> Sequence[object]:
    return counts if isinstance(counts, list | tuple) else [counts]


def _count(entry: object) -> int:
    allowed = "valid_token_counts must be integers (for a mask, pass mask.sum())"
    if isinstance(entry, Tensor):
        if entry.dtype == torch.bool or entry.is_floating_point() or entry.is_complex():
            raise TypeError(f"{allowed}, got a tensor of {entry.dtype}")
        counts = entry.detach().to("cpu", torch.int64)  # waits for an accelerator once
        smallest, largest = (int(v) for v in counts.aminmax()) if counts.numel() else (0, 0)
        wraps = largest * counts.numel() > _MOST_TOKENS
        total = sum(counts.flatten().tolist()) if wraps else int(counts.sum())
    elif isinstance(entry, int) and not isinstance(entry, bool):
        smallest = total = entry
    else:
        raise TypeError(f"{allowed}, got {entry!r} of type {type(entry).__name__}")
    if smallest < 0:
        raise ValueError(f"valid_token_counts must not be negative, got {smallest}")
    return total


def _sum_over(mesh: DeviceMesh | None, numbers: list[int]) -> list[int]:
    if mesh is None or mesh.size() == 1:
        return numbers
    summed = torch.tensor(numbers, dtype=torch.int64, device=_collective_device(mesh))
    dist.all_reduce(summed, group=mesh.get_group())
    return [int(number) for number in summed.tolist()]


def _collective_device(mesh: DeviceMesh) -> str:
    """The CPU where the group can reduce there: that waits for no kernel of the accelerator."""
    backends = dist.get_backend_config(mesh.get_group())
    return "cpu" if "cpu" in backends else mesh.device_type
