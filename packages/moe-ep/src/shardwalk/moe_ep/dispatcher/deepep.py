"""The dispatcher over DeepEP's kernels, for experts on several GPUs; the only file that calls them.

Written against the public `deep_ep.Buffer`: `get_dispatch_layout`, `dispatch` and `combine`. They
bring each token once to every rank that has experts of it, so that what arrives is sorted, weighted
and summed here as the tokens of one rank are.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwalk.mesh import register_teardown
from shardwalk.moe_ep.dispatch_replay import forward_layout
from shardwalk.moe_ep.dispatcher.exchange_layout import process_group
from shardwalk.moe_ep.dispatcher.local import local_layout
from shardwalk.moe_ep.dispatcher.protocol import (
    DispatchMetadata,
    check_num_experts,
    check_outputs,
    check_tokens,
)
from shardwalk.moe_ep.dispatcher.slots import SlotLayout, expand_rows, sum_slots

_KERNELS_TAKE = 16  # bytes that a row must be a multiple of


@dataclass(frozen=True, kw_only=True)
class DeepEPLayout:
    """What a dispatch laid out, and a recompute takes over.

    Attributes:
        shape: tokens of this rank, and slots of each.
        handle: by which the kernels repeat a dispatch and send back.
        arrived: the slots of the experts of this rank.
        weights: fp32 [R, k], of the arrived rows, without a graph.
        counts: slots of each expert of this rank.
    """

    shape: tuple[int, int]
    handle: tuple[Any, ...]
    arrived: SlotLayout
    weights: Tensor
    counts: list[int]


@dataclass(frozen=True, kw_only=True)
class DeepEPMetadata(DispatchMetadata):
    """What `DeepEPDispatcher.combine` needs.

    Attributes:
        layout: of the dispatch.
        weights: fp32 [N], of the sorted slots, with their graph.
    """

    layout: DeepEPLayout
    weights: Tensor


class DeepEPDispatcher:
    """Brings tokens to their experts by the kernels of DeepEP; see `TokenDispatcher`.

    Tokens must be bfloat16, in rows of a multiple of 16 bytes.

    Args:
        num_experts: of the layer, on all ranks; each rank has an equal block of them, in order.
        group: the expert-parallel ranks, on NCCL, as a process group or a mesh of one axis.

    Raises:
        ImportError: DeepEP is not installed.
        ValueError: the experts don't divide evenly over the ranks; a mesh of several axes; ranks
            without NCCL.
    """

    def __init__(self, num_experts: int, group: dist.ProcessGroup | DeviceMesh) -> None:
        self._deep_ep = import_deep_ep()
        self._group = process_group(group)
        check_num_experts(num_experts, self._group.size())
        if "nccl" not in dist.get_backend(self._group):
            raise ValueError(
                f"dispatcher='deepep' needs GPUs and NCCL, and the expert-parallel group runs on "
                f"{dist.get_backend(self._group)}; use dispatcher='all_to_all'"
            )
        self.num_experts = num_experts

    def dispatch(
        self, x: Tensor, experts: Tensor, weights: Tensor
    ) -> tuple[Tensor, DeepEPMetadata]:
        """Bring every token to its experts; see `TokenDispatcher.dispatch`.

        Raises:
            TypeError: `x` is not bfloat16.
            ValueError: its rows are no multiple of 16 bytes.
        """
        check_tokens(x, experts, weights)
        check_rows(x)
        rows, row_weights, layout = _Dispatch.apply(x, weights, experts, self)  # type: ignore[no-untyped-call]
        slot_weights = row_weights.flatten().index_select(0, layout.arrived.order)
        metadata = DeepEPMetadata(counts=layout.counts, layout=layout, weights=slot_weights)
        return expand_rows(rows, layout.arrived), metadata

    def combine(self, outputs: Tensor, metadata: DeepEPMetadata) -> Tensor:
        """Sum the weighted results of every token; see `TokenDispatcher.combine`."""
        check_outputs(outputs, metadata.counts)
        layout = metadata.layout
        sums = sum_slots(outputs, metadata.weights, layout.arrived, torch.bfloat16)
        tokens: Tensor = _Combine.apply(sums, layout, self)  # type: ignore[no-untyped-call]
        return tokens

    def buffer(self, x: Tensor) -> Any:
        """The kernels' buffer for rows like those of `x`."""
        return _buffers.get(self._deep_ep, self._group, x.shape[1] * x.element_size())

    def lay_out(
        self, x: Tensor, experts: Tensor, weights: Tensor
    ) -> tuple[Tensor | None, DeepEPLayout]:
        """The layout, and the arrived rows unless it was taken over from a forward."""
        arrived: list[Tensor] = []

        def compute() -> DeepEPLayout:
            buffer = self.buffer(x)
            chosen = experts.to(getattr(self._deep_ep, "topk_idx_t", torch.int64))
            layout = buffer.get_dispatch_layout(chosen, self.num_experts)
            arguments = dispatch_arguments(layout, chosen, weights)
            rows, here, row_weights, _, handle, _ = buffer.dispatch(x, **arguments)
            arrived.append(rows)
            slots = local_layout(here, self.num_experts // self._group.size())
            return DeepEPLayout(
                shape=(experts.shape[0], experts.shape[1]),
                handle=handle,
                arrived=slots.slots,
                weights=row_weights,
                counts=slots.counts,
            )

        layout = forward_layout(experts, compute)
        return (arrived[0] if arrived else None), layout


def import_deep_ep() -> ModuleType:
    """The installed DeepEP; an ImportError that says how to get it, or do without."""
    try:
        return importlib.import_module("deep_ep")
    except ImportError as error:
        raise ImportError(
            "dispatcher='deepep' needs the package deep_ep (DeepEP), which is built from source "
            "for the GPUs at hand: https://github.com/deepseek-ai/DeepEP; dispatcher='all_to_all' "
            "works without it"
        ) from error


def check_rows(x: Tensor) -> None:
    """Raise unless the kernels take rows like these."""
    if x.dtype != torch.bfloat16:
        raise TypeError(
            f"dispatcher='deepep' takes bfloat16 tokens, not {x.dtype}; compute in bfloat16 "
            f"(mp_policy) or use dispatcher='all_to_all'"
        )
    if x.shape[1] * x.element_size() % _KERNELS_TAKE:
        raise ValueError(
            f"dispatcher='deepep' takes rows of a multiple of {_KERNELS_TAKE} bytes, and a hidden "
            f"size of {x.shape[1]} gives {x.shape[1] * x.element_size()}; use "
            f"dispatcher='all_to_all'"
        )


def dispatch_arguments(layout: tuple[Any, ...], experts: Tensor, weights: Tensor) -> dict[str, Any]:
    """From what `get_dispatch_layout` returns to the keywords of a first `dispatch`."""
    per_rank, per_rdma_rank, per_expert, is_in_rank, _ = layout
    return {
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_rdma_rank": per_rdma_rank,
        "num_tokens_per_expert": per_expert,
        "is_token_in_rank": is_in_rank,
        "topk_idx": experts,
        "topk_weights": weights.float(),
    }


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, experts: Tensor, dispatcher: DeepEPDispatcher
    ) -> tuple[Tensor, Tensor, DeepEPLayout]:
        x = x.contiguous()
        rows, layout = dispatcher.lay_out(x, experts, weights.detach())
        if rows is None:
            rows = dispatcher.buffer(x).dispatch(x, handle=layout.handle)[0]
        ctx.dispatcher, ctx.layout, ctx.dtype = dispatcher, layout, weights.dtype
        return rows, layout.weights.detach(), layout

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, None, None]:
        of_rows, of_weights = (gradient.contiguous() for gradient in gradients[:2])
        buffer = ctx.dispatcher.buffer(of_rows)
        of_x, of_weights, _ = buffer.combine(of_rows, ctx.layout.handle, topk_weights=of_weights)
        return of_x, of_weights.to(ctx.dtype), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, sums: Tensor, layout: DeepEPLayout, dispatcher: DeepEPDispatcher
    ) -> Tensor:
        ctx.dispatcher, ctx.layout = dispatcher, layout
        tokens: Tensor = dispatcher.buffer(sums).combine(sums, layout.handle)[0]
        return tokens

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradients[0].contiguous()
        buffer = ctx.dispatcher.buffer(gradient)
        return buffer.dispatch(gradient, handle=ctx.layout.handle)[0], None, None


class _Buffers:
    """One buffer for each group, as large as its longest rows need; freed before the groups end."""

    def __init__(self) -> None:
        self._buffers: dict[dist.ProcessGroup, tuple[int, Any]] = {}

    def get(self, deep_ep: ModuleType, group: dist.ProcessGroup, row_bytes: int) -> Any:
        known, buffer = self._buffers.get(group, (0, None))
        if row_bytes > known:
            if buffer is not None:
                buffer.destroy()
            if not self._buffers:
                register_teardown(self.free)
            buffer = deep_ep.Buffer(group, **buffer_sizes(deep_ep, group.size(), row_bytes))
            self._buffers[group] = (row_bytes, buffer)
        return buffer

    def free(self) -> None:
        for _, buffer in self._buffers.values():
            buffer.destroy()
        self._buffers.clear()


def buffer_sizes(deep_ep: Any, ranks: int, row_bytes: int) -> dict[str, Any]:
    """The keywords of a `Buffer` that serves dispatch and combine of such rows."""
    configs = deep_ep.Buffer.get_dispatch_config(ranks), deep_ep.Buffer.get_combine_config(ranks)
    return {
        "num_nvl_bytes": max(each.get_nvl_buffer_size_hint(row_bytes, ranks) for each in configs),
        "num_rdma_bytes": max(each.get_rdma_buffer_size_hint(row_bytes, ranks) for each in configs),
        "explicitly_destroy": True,
    }


_buffers = _Buffers()
