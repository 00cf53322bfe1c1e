"""What cannot be in the graph of a compiled block, and runs between its pieces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwalk.parallelizer_core.checkpoint_seams import has_checkpoint_context

_RECORDS = "records decisions that depend on its input (its checkpoint_context)"
_UNIT = "is a unit of its own, whose weights are gathered by its hooks"


@dataclass(frozen=True)
class Break:
    """A module that runs outside of the graphs.

    Attributes:
        path: where it stands in its block; "" is the block itself.
        why: the rest of a sentence about it.
    """

    path: str
    module: nn.Module
    why: str

    @property
    def is_composite_unit(self) -> bool:
        """Whether it is a unit that is worth graphs of its own."""
        return self.why == _UNIT and any(True for _ in self.module.children())

    def is_in(self, part: nn.Module) -> bool:
        """Whether the module is `part` or stands in it."""
        return any(each is self.module for each in part.modules())


def breaks_of(block: nn.Module) -> list[Break]:
    """The outermost modules in `block`, itself included, that no graph can hold."""
    if has_checkpoint_context(block):
        return [Break("", block, _RECORDS)]
    return list(_breaks_below("", block))


def run_outside_of_graphs(each: Break) -> None:
    """Make calls of the module an explicit break, so that no code in it is traced."""
    reason = f"{each.path} {each.why}"
    vars(each.module)["forward"] = torch.compiler.disable(each.module.forward, reason=reason)


def _breaks_below(path: str, module: nn.Module) -> Iterator[Break]:
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        if has_checkpoint_context(child):
            yield Break(inner, child, _RECORDS)
        elif isinstance(child, FSDPModule):
            yield Break(inner, child, _UNIT)
        else:
            yield from _breaks_below(inner, child)
