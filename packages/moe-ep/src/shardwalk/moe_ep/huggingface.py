"""Experts of transformers' models, found by their structure and run where their weights are.

They share one call, `experts(hidden, index, weights)`, and hold a slice of every weight for each
expert. Sliced, the same forward runs a rank's own experts on the rows that came to it, each with
one local expert and the weight one; the weighted sums are made on the way back.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwalk.moe_ep.dispatcher.protocol import TokenDispatcher
from shardwalk.moe_ep.expert_weights import (
    ExpertMisfitError,
    ExpertWeights,
    Forward,
    LocalExperts,
    read_expert_weights,
)
from shardwalk.parallelizer_core import not_kept, record_or_replay
from shardwalk.parallelizer_core._torch_compat import as_own_tensor

_INDEX = re.compile(r"(^|_)(index|indices|ids|selected_experts)$")
_WEIGHTS = re.compile(r"(^|_)(weights|scores|probs)$")
_COUNT = "num_experts"


def find_expert_modules(model: nn.Module) -> list[tuple[str, ExpertWeights]]:
    """The modules of `model` that follow the common call, each with its path, in order."""
    found: list[tuple[str, ExpertWeights]] = []
    for path, module in model.named_modules():
        if _has_common_call(module):
            try:
                found.append((path, read_expert_weights(module, getattr(module, _COUNT))))
            except ExpertMisfitError:
                continue
    return found


def find_misfits(model: nn.Module, known: set[nn.Module]) -> Iterator[tuple[str, str]]:
    """What holds experts and cannot be spread over ranks: its path, and why not.

    Args:
        known: the modules of experts that can; nothing in them is looked at.
    """
    inside = {module for experts in known for module in experts.modules()}
    for path, module in model.named_modules():
        if path.rpartition(".")[2] == "base_layer" and module in known:
            yield path, "an adapter stands around it (leave experts out of the adapter's targets)"
        if module in inside or not any(True for _ in module.parameters()):
            continue
        holds = path.rpartition(".")[2] == "experts" and not inside & set(module.modules())
        if holds or _has_expert_slices(module):
            yield path, _why(module)


def _why(module: nn.Module) -> str:
    if not _has_common_call(module):
        call = inspect.signature(type(module).forward)
        return f"it is called as forward{call}"
    try:
        read_expert_weights(module, getattr(module, _COUNT))
    except ExpertMisfitError as misfit:
        return misfit.why
    raise AssertionError("what fits is no misfit")


def _has_common_call(module: nn.Module) -> bool:
    """Whether the class's forward takes hidden states, indices and weights, and no more."""
    count = getattr(module, _COUNT, None)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        return False
    _, *given = inspect.signature(type(module).forward).parameters.values()
    needed = [p for p in given[3:] if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(given) < 3 or needed:
        return False
    return bool(_INDEX.search(given[1].name) and _WEIGHTS.search(given[2].name))


def _has_expert_slices(module: nn.Module) -> bool:
    count = getattr(module, _COUNT, None)
    return isinstance(count, int) and any(
        parameter.ndim > 2 and parameter.shape[0] == count
        for parameter in module.parameters(recurse=False)
    )


@dataclass
class ExchangedExperts:
    """The forward of a module of experts whose weights are spread over ranks.

    Attributes:
        inner: the module's own forward.
        names: what it calls its first three arguments.
        dispatcher: takes tokens to their experts and back.
        row_dtype: what rows are cast to before they run; None leaves them as they come.
        replays_routing: whether a recompute takes the choice of its forward.
    """

    local: LocalExperts
    inner: Forward
    names: tuple[str, str, str]
    dispatcher: TokenDispatcher
    row_dtype: torch.dtype | None
    replays_routing: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """[tokens, width] of hidden states [tokens, width], indices and weights [tokens, k]."""
        given = dict(zip(self.names, args, strict=False)) | kwargs
        hidden, index, weights = (given[name] for name in self.names)
        # Some routers mean by an index past the last expert that a slot goes nowhere.
        index = index.masked_fill(index >= self.local.weights.num_experts, -1)
        weights = weights.float()
        if self.replays_routing:
            index, weights = chosen_in_forward(index, weights)
        tokens = hidden if self.row_dtype is None else hidden.to(self.row_dtype)
        rows, metadata = self.dispatcher.dispatch(tokens, index, weights)
        outputs = self._run(rows, metadata.counts)
        return as_own_tensor(self.dispatcher.combine(outputs, metadata).to(hidden.dtype))

    def _run(self, rows: Tensor, counts: list[int]) -> Tensor:
        """The unweighted outputs of rows that are sorted by local expert."""
        if rows.shape[0] == 0:
            return self.local.tie(rows)
        local = torch.arange(len(counts), device=rows.device)
        repeats = torch.tensor(counts, device=rows.device)
        index = local.repeat_interleave(repeats, output_size=rows.shape[0]).unsqueeze(1)
        ones = rows.new_ones((rows.shape[0], 1))
        with self.local.shown():
            outputs: Tensor = self.inner(rows, index, ones)
        return outputs


def chosen_in_forward(index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The choice of the forward, and its weights, which a recompute has in another order perhaps.

    An expert that the recompute did not choose again keeps the forward's weight, as a constant.
    """
    first, values = record_or_replay("choice", lambda: (index, weights.detach()))
    # The forward takes the same path, since both must save as many tensors for the backward.
    same = first.unsqueeze(2) == index.unsqueeze(1)
    found = weights.gather(1, same.int().argmax(2))
    return first, torch.where(same.any(2), found, values)


@dataclass
class RecomputedForward:
    """The forward of a module of which selective checkpointing keeps nothing.

    Routers divide the scores of a top-k in place, and grouped products get their biases so: what
    was kept would be copied first.
    """

    inner: Forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        with not_kept():
            return self.inner(*args, **kwargs)


def recompute_writers(holder: nn.Module, weights: ExpertWeights) -> None:
    """Let selective checkpointing keep nothing of routers, nor of experts with biases."""
    for router in _routers_below(holder, weights):
        router.forward = RecomputedForward(router.forward)
    if any(owner.get_parameter(name).ndim < 3 for owner, name in weights.names()):
        weights.experts.forward = RecomputedForward(weights.experts.forward)


def _routers_below(holder: nn.Module, weights: ExpertWeights) -> Iterator[nn.Module]:
    """The children of `holder` with a row of weights for each expert."""
    for child in holder.children():
        rows = {parameter.shape[0] for parameter in child.parameters() if parameter.ndim}
        if child is not weights.experts and weights.num_experts in rows:
            yield child


def exchange_experts(
    local: LocalExperts,
    dispatcher: TokenDispatcher,
    *,
    row_dtype: torch.dtype | None = None,
    replays_routing: bool = True,
) -> None:
    """Let a module of experts with cut weights exchange tokens with the other ranks."""
    experts = local.weights.experts
    _, *given = inspect.signature(type(experts).forward).parameters
    first, second, third = given[:3]
    experts.forward = ExchangedExperts(
        local=local,
        inner=experts.forward,
        names=(first, second, third),
        dispatcher=dispatcher,
        row_dtype=row_dtype,
        replays_routing=replays_routing,
    )
