"""What selective activation checkpointing keeps of a checkpointed call, and what it recomputes.

Kept are the outputs of attention, of functional collectives, of top-k and of every other matrix
product, beginning with the first; batched products are recomputed, since eager attention's scores
are among them. What a forward decided is written down call by call, and its recompute reads it from
the start: it cannot come to another choice, and one that takes another path is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from shardwalk.parallelizer_core._torch_compat import (
    TorchDispatchMode,
    argument_of,
    copy_kept_outputs,
    functional_collectives,
    is_operator,
    mutates_arguments,
    without_innermost_mode,
    written_arguments,
)
from shardwalk.parallelizer_core.recompute_replay import ContextPair, Together, is_deciding

SaveRule = Callable[..., bool]
"""Called with the arguments of an operator's call: whether to keep what it returns."""

_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
    "_cudnn_attention_forward",
)
_COLLECTIVES = (
    "all_reduce",
    "all_reduce_coalesced",
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "all_to_all_single",
)
_MATMULS = ("mm", "addmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm")


def always(*args: Any, **kwargs: Any) -> bool:
    """The rule that keeps every output."""
    return True


def check_save_rules(rules: Mapping[Any, SaveRule], owner: str) -> None:
    """Refuse operators whose outputs cannot stand in for a second call.

    Raises:
        TypeError: a key is no operator overload, or a rule cannot be called.
        ValueError: the operator writes to its arguments or draws random numbers.
    """
    for op, rule in rules.items():
        if not is_operator(op) or not callable(rule):
            raise TypeError(
                f"ops_to_save of {owner} maps {op!r} to {rule!r}; it must map overloads such as "
                f"torch.ops.aten.mm.default to functions of their arguments"
            )
        if mutates_arguments(op):
            raise ValueError(f"ops_to_save of {owner}: {op} writes to its arguments; it must rerun")
        if _draws_random_numbers(op, (), {}):
            raise ValueError(
                f"ops_to_save of {owner}: {op} draws random numbers; without it a recompute would "
                f"draw others for what follows"
            )


def selective_contexts(extra_rules: Iterable[Mapping[Any, SaveRule]] = ()) -> ContextPair:
    """The contexts of one checkpointed call that keep what the rules say.

    Args:
        extra_rules: by operator, which of its calls to keep in addition.

    The recompute context raises RuntimeError where an operator of the rules, or the shapes it is
    called with, differ from the forward's.
    """
    decisions = _Decisions(tuple(extra_rules))
    forward, recompute = create_selective_checkpoint_contexts(decisions.policy)
    return (
        Together([forward, _WatchForward(forward)]),
        Together([recompute, _FollowDecisions(decisions)]),
    )


def graph_contexts(extra_rules: Iterable[Mapping[Any, SaveRule]] = ()) -> ContextPair:
    """The same for a call that is traced into a graph, which marks what to keep."""
    forward, recompute = create_selective_checkpoint_contexts(_Decisions(tuple(extra_rules)).policy)
    return forward, recompute


@dataclass(frozen=True)
class _Decision:
    op: Any
    shapes: tuple[torch.Size, ...]
    saves: bool


class _Decisions:
    """What the forward of one checkpointed call decided, in order."""

    def __init__(self, extra_rules: tuple[Mapping[Any, SaveRule], ...]) -> None:
        self._extra_rules = extra_rules
        self._ops = {op for rules in extra_rules for op in rules} | _KEPT | _ALTERNATING
        self._made: list[_Decision] = []
        self._matmuls = 0
        self._position = 0

    def concerns(self, op: Any) -> bool:
        """Whether calls of this operator are decided one by one."""
        return op in self._ops

    def policy(
        self, context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        """Torch's question: in the forward a decision; before 2.13 it asks in recomputes too."""
        if not self.concerns(op):
            return CheckpointPolicy.PREFER_RECOMPUTE
        if context.is_recompute:
            decision = self._made[self._position - 1]
        else:
            saves = self._saves(op, args, kwargs)
            decision = _Decision(op, _shapes(args), saves)
            self._made.append(decision)
        return CheckpointPolicy.MUST_SAVE if decision.saves else CheckpointPolicy.PREFER_RECOMPUTE

    def restart(self) -> None:
        """Read from the first decision on."""
        self._position = 0

    def follow(self, op: Any, args: Any) -> None:
        """Check the next call of a recompute against the decision that the forward made there."""
        if self._position == len(self._made):
            raise RuntimeError(
                f"the recompute of a checkpointed call runs {op} {list(_shapes(args))} after "
                f"the {len(self._made)} operators that its forward ran; {_SAME_PATH}"
            )
        made = self._made[self._position]
        if made.op != op or made.shapes != _shapes(args):
            raise RuntimeError(
                f"the recompute of a checkpointed call runs {op} {list(_shapes(args))} where its "
                f"forward ran {made.op} {list(made.shapes)} (call {self._position}); {_SAME_PATH}"
            )
        self._position += 1

    def _saves(self, op: Any, args: Any, kwargs: Any) -> bool:
        if _draws_random_numbers(op, args, kwargs):
            return False
        asked = any(rules[op](*args, **kwargs) for rules in self._extra_rules if op in rules)
        if op in _ALTERNATING:
            self._matmuls += 1
            return asked or self._matmuls % 2 == 1
        return asked or op in _KEPT


_SAME_PATH = (
    "both must take the same path: decide what may differ through record_or_replay, under "
    "checkpoint_context = replay_contexts"
)


class _WatchForward(TorchDispatchMode):
    """Stands before torch's mode in the forward.

    It hides what `record_or_replay` runs, since no recompute runs it again, and has what is kept
    copied before an operator writes to it.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As for `_FollowDecisions`."""
        return True

    def __init__(self, keeping: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keeping = keeping

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if written := written_arguments(func, args, kwargs or {}):
            with without_innermost_mode():
                copy_kept_outputs(self._keeping, written)
        with without_innermost_mode() if is_deciding() else nullcontext():
            return func(*args, **(kwargs or {}))


class _FollowDecisions(TorchDispatchMode):
    """Reads the decisions beside a recompute, from the first one each time it is entered.

    It is entered right after torch's mode, and lets that one see what was decided and nothing else.
    Units inside a block gather their weights where they are not gathered yet, in the recompute
    otherwise than in the forward, and torch's mode would take that for another path.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Flex attention compiles itself, under torch's own modes of checkpointing too."""
        return True

    def __init__(self, decisions: _Decisions) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._decisions = decisions

    def __enter__(self) -> Any:
        self._decisions.restart()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> Any:
        if isinstance(error[1], RuntimeError) and "backward an extra time" in str(error[1]):
            error[1].add_note(
                "What activation_checkpointing='selective' keeps is given to one backward; use "
                "'full' for retain_graph=True and a second one"
            )
        return super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._decisions.concerns(func) and not is_deciding():
            self._decisions.follow(func, args)
            return func(*args, **(kwargs or {}))
        with without_innermost_mode():
            return func(*args, **(kwargs or {}))


def _draws_random_numbers(op: Any, args: Any, kwargs: Any) -> bool:
    """Whether the call moves the random state, as attention with dropout does.

    A recompute that skipped it would draw other numbers for everything after it.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()):
        return False
    return bool(argument_of(op, "dropout_p", args, kwargs) != 0.0)


def _shapes(args: Any) -> tuple[torch.Size, ...]:
    return tuple(each.shape for each in args if isinstance(each, torch.Tensor))


def _overloads(namespace: Any, names: Iterable[str]) -> Iterator[Any]:
    """The functional overloads that this torch has, whatever their release of birth."""
    for name in names:
        packet = getattr(namespace, name, None)
        for overload in packet.overloads() if packet is not None else ():
            op = getattr(packet, overload)
            if not mutates_arguments(op):
                yield op


_ALTERNATING = frozenset(_overloads(torch.ops.aten, _MATMULS))
_KEPT = frozenset([
    *_overloads(torch.ops.aten, (*_ATTENTION, "topk")),
    *_overloads(functional_collectives(), _COLLECTIVES),
    torch.ops.higher_order.flex_attention,
])
