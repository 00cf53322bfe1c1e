"""What a block, or a module in it, may say about its checkpointed call.

`checkpoint_context()` returns two context managers, around the forward and around the recompute;
`ops_to_save()` returns operators that selective checkpointing keeps in addition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwalk.parallelizer_core.parallel_state import class_of
from shardwalk.parallelizer_core.recompute_replay import ContextPair
from shardwalk.parallelizer_core.selective_checkpointing import SaveRule, check_save_rules

_MEANING = {
    "checkpoint_context": "a function without arguments that returns two context managers, around "
    "the forward and around the recompute, as replay_contexts does",
    "ops_to_save": "a function without arguments that returns a mapping of operator overloads to "
    "functions of their arguments",
}


@dataclass(frozen=True)
class _Seam:
    """A seam as it was found."""

    name: str
    owner: str
    call: Callable[[], Any]

    def refuse(self, returned: object) -> TypeError:
        return TypeError(
            f"{self.name} of {self.owner} returned {returned!r}; it must be {_MEANING[self.name]}"
        )


class ContextMaker:
    """One `checkpoint_context`, called once per checkpointed call; equal to any of one function."""

    def __init__(self, seam: _Seam) -> None:
        self._seam = seam

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ContextMaker) and self._seam.call == other._seam.call

    def __hash__(self) -> int:
        return hash(self._seam.call)

    def __call__(self) -> ContextPair:
        """A new pair; TypeError where the function returns anything else."""
        pair = self._seam.call()
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and all(map(_is_context, pair))):
            raise self._seam.refuse(pair)
        return pair[0], pair[1]


def has_checkpoint_context(module: nn.Module) -> bool:
    """Whether this very module asks for contexts around its checkpointed call."""
    return any(True for _ in _seams([module], "checkpoint_context"))


def context_makers(modules: Iterable[nn.Module]) -> list[ContextMaker]:
    """The contexts that `modules` ask for, each once however many of them ask for it.

    Raises:
        TypeError: a `checkpoint_context` cannot be called.
    """
    return list(dict.fromkeys(map(ContextMaker, _seams(modules, "checkpoint_context"))))


def save_rules(modules: Iterable[nn.Module]) -> Iterator[Mapping[Any, SaveRule]]:
    """The rules that each of `modules` adds.

    Raises:
        TypeError: an `ops_to_save` cannot be called, or returns no mapping.
    """
    for _, rules in _rules(modules):
        yield rules


def check_seams(modules: Iterable[nn.Module]) -> None:
    """Refuse seams of another type, before anything is changed.

    Raises:
        TypeError: names the class and the attribute.
        ValueError: a rule names an operator that must run again.
    """
    modules = list(modules)
    context_makers(modules)
    for owner, rules in _rules(modules):
        check_save_rules(rules, owner)


def _rules(modules: Iterable[nn.Module]) -> Iterator[tuple[str, Mapping[Any, SaveRule]]]:
    for seam in _seams(modules, "ops_to_save"):
        rules = seam.call()
        if not isinstance(rules, Mapping):
            raise seam.refuse(rules)
        yield seam.owner, rules


def _seams(modules: Iterable[nn.Module], name: str) -> Iterator[_Seam]:
    for module in modules:
        if name in vars(module) or hasattr(type(module), name):
            call = getattr(module, name)
            owner = class_of(module).__qualname__
            if not callable(call):
                raise TypeError(f"{name} of {owner} is {call!r}; it must be {_MEANING[name]}")
            yield _Seam(name, owner, call)


def _is_context(value: object) -> bool:
    return hasattr(value, "__enter__") and hasattr(value, "__exit__")
