"""Per-layer compile: the forward of each block becomes a graph, in place.

A block keeps its class, path and keys; only its instance attribute `forward` is another one. Hooks
(FSDP2's among them) run outside of the graph. Under activation checkpointing the checkpointed call
is part of the graph, whose partition decides what the backward computes again: nothing that a
second run of the same code could do otherwise.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from shardwalk.parallelizer_core._torch_compat import (
    compiler_backend,
    compiler_errors,
    is_graph_break,
)
from shardwalk.parallelizer_core.activation_checkpointing import (
    CheckpointedForward,
    is_cache,
)
from shardwalk.parallelizer_core.base_models import base_model_of
from shardwalk.parallelizer_core.compile_breaks import Break, breaks_of, run_outside_of_graphs
from shardwalk.parallelizer_core.layers import BlockStack, find_block_stacks
from shardwalk.parallelizer_core.parallel_state import class_of, unwrap_model

Forward = Callable[..., Any]

_kinds: WeakKeyDictionary[nn.Module, list[BlockKind]] = WeakKeyDictionary()


@dataclass(frozen=True)
class CompiledBlocks:
    """The blocks of one structure, which share their graphs.

    Attributes:
        name: path of the first one.
        class_name: its class, as its author wrote it.
        blocks: how many there are.
        graphs: graphs made so far: one, and one more for each recompilation.
        runs: calls of these graphs so far.
        whole: whether a block is one graph; else it is compiled in pieces, or not at all.
        breaks: what runs between the pieces, as (path in the block, why).
    """

    name: str
    class_name: str
    blocks: int
    graphs: int
    runs: int
    whole: bool
    breaks: tuple[tuple[str, str], ...]


def compile_blocks(model: nn.Module, backend: str | None = None) -> None:
    """Compile the blocks of `model` in place, each kind of block once, at its first call.

    A second call changes nothing, except that another backend takes the place of the first. A
    wrapper and the base model that it names are one model here.
    """
    inner = unwrap_model(model)
    kinds = _kinds.setdefault(base_model_of(inner), [])
    if not kinds:
        kinds += _install(find_block_stacks(inner))
    if backend is not None:
        for kind in kinds:
            kind.use(backend)


def describe_compiled(model: nn.Module) -> list[CompiledBlocks]:
    """What became of each kind of block of a compiled model; nothing for any other model."""
    base = base_model_of(unwrap_model(model))
    return [kind.describe() for kind in _kinds.get(base, ())]


@dataclass
class BlockKind:
    """Blocks of one structure: the graphs that they share, and what was told of them."""

    name: str
    class_name: str
    checkpointed: bool
    breaks: tuple[Break, ...] = ()
    blocks: int = 0
    graphs: int = 0
    runs: int = 0
    backend: str = "inductor"
    whole: bool = True
    compiles: bool = True
    _region: Forward | None = None
    _told: set[str] = field(default_factory=set)

    def use(self, backend: str) -> None:
        """Compile with that backend from now on."""
        if backend != self.backend:
            self.backend, self._region = backend, None

    def describe(self) -> CompiledBlocks:
        """For users."""
        return CompiledBlocks(
            name=self.name,
            class_name=self.class_name,
            blocks=self.blocks,
            graphs=self.graphs,
            runs=self.runs,
            whole=self.whole and self.compiles,
            breaks=tuple((each.path, each.why) for each in self.breaks),
        )

    def run(self, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Call the forward of one of the blocks, compiled where it can be."""
        if not self.compiles:
            return forward(*args, **kwargs)
        before = self.runs
        try:
            result = self._compiled()(forward, args, kwargs)
        except compiler_errors() as error:
            if not (self.whole and is_graph_break(error)):
                error.add_note(
                    f"In {self}, which is compiled; enable_compile=False runs it as it is"
                )
                raise
            self._break_up(error)
            return self.run(forward, args, kwargs)
        if self.runs == before:
            self.tell(f"{self} ran without any graph, as if enable_compile were False")
        return result

    def tell(self, message: str) -> None:
        """Warn of something, once."""
        if message not in self._told:
            self._told.add(message)
            warnings.warn(message, UserWarning, stacklevel=3)

    def __str__(self) -> str:
        others = f" and {self.blocks - 1} more like it" if self.blocks > 1 else ""
        return f"{self.name} ({self.class_name}{others})"

    def _compiled(self) -> Forward:
        if self._region is None:
            options: dict[str, Any] = {"backend": self._make_graph, "fullgraph": self.whole}
            if "isolate_recompiles" in inspect.signature(torch.compile).parameters:  # torch 2.13
                options["isolate_recompiles"] = True
            self._region = torch.compile(_call, **options)
        return self._region

    def _make_graph(self, graph: Any, inputs: Any) -> Forward:
        self.graphs += 1
        compiled = compiler_backend(self.backend)(graph, inputs)

        def run(*args: Any) -> Any:
            self.runs += 1
            return compiled(*args)

        return run

    def _break_up(self, error: Exception) -> None:
        """Go on without one graph per block, and say why."""
        self._region = None
        reason = f"torch cannot make one graph of its forward:\n{error}"
        if self.checkpointed:
            self.compiles = False
            self.tell(
                f"{self} runs uncompiled, because activation checkpointing needs a whole graph, "
                f"and {reason}"
            )
        else:
            self.whole = False
            self.tell(f"{self} is compiled in pieces, because {reason}")


def _call(forward: Forward, args: Any, kwargs: Any) -> Any:
    """What is compiled; a function of its own, so that each kind has its own set of graphs."""
    return forward(*args, **kwargs)


class CompiledForward:
    """The forward of one block, through the graphs of its kind."""

    def __init__(self, module: nn.Module, kind: BlockKind) -> None:
        # Not its attributes too: a checkpointed forward has some of the same names.
        functools.update_wrapper(self, module.forward, updated=())
        self._forward: Forward = module.forward
        self._kind = kind
        self._checkpointed = _checkpointed_forwards(module)
        for forward in self._checkpointed:
            forward.make_traceable()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the block; with a cache of keys and values, outside of any graph."""
        if torch.is_grad_enabled() and self._checkpointed:
            shown, kwargs = self._checkpointed[0].without_caches(args, kwargs)
            args = tuple(shown)
        if not any(map(is_cache, (*args, *kwargs.values()))):
            return self._kind.run(self._forward, args, kwargs)
        if torch.is_grad_enabled():
            self._kind.tell(
                f"{self._kind} is passed a cache of keys and values in training, and runs "
                f"uncompiled; set use_cache=False"
            )
        return self._forward(*args, **kwargs)


def _install(stacks: list[BlockStack]) -> list[BlockKind]:
    kinds: dict[Any, BlockKind] = {}
    for stack in stacks:
        for name, block in stack.blocks:
            if not isinstance(vars(block).get("forward"), CompiledForward):
                _compile_block(name, block, kinds)
    return list(kinds.values())


def _compile_block(name: str, block: nn.Module, kinds: dict[Any, BlockKind]) -> None:
    """Compile a block as one graph, or around what cannot be in one."""
    breaks = breaks_of(block)
    kind = _kind_of(name, block, kinds)
    if any(each.module is block for each in breaks):
        kind.breaks, kind.compiles = tuple(breaks), False
        kind.tell(f"{kind} runs uncompiled, because it {breaks[0].why}")
        return
    checkpointed = vars(block).get("forward")
    if breaks and isinstance(checkpointed, CheckpointedForward):
        breaks = _compile_parts(name, checkpointed, breaks, kinds)
    for each in breaks:
        if each.is_composite_unit:
            _compile_block(f"{name}.{each.path}", each.module, kinds)
        run_outside_of_graphs(each)
    kind.breaks, kind.whole = tuple(breaks), not breaks
    vars(block)["forward"] = CompiledForward(block, kind)


def _compile_parts(
    name: str, block: CheckpointedForward, breaks: list[Break], kinds: dict[Any, BlockKind]
) -> list[Break]:
    """Checkpoint the parts of a block one by one, and compile those that can be one graph.

    A graph in pieces cannot be recomputed: the second run may find other graphs than the first.
    """
    around = list(breaks)
    for path, part in block.split():
        inside = [each for each in breaks if each.is_in(part)]
        around = [each for each in around if each not in inside]
        if not inside:
            _compile_block(f"{name}.{path}", part, kinds)
        around.append(Break(path, part, inside[0].why if inside else "is compiled by itself"))
    return around


def _kind_of(name: str, block: nn.Module, kinds: dict[Any, BlockKind]) -> BlockKind:
    checkpointed = bool(_checkpointed_forwards(block))
    classes = [(path, class_of(module)) for path, module in block.named_modules()]
    key = (checkpointed, tuple(classes))
    if key not in kinds:
        kinds[key] = BlockKind(name, class_of(block).__qualname__, checkpointed)
    kinds[key].blocks += 1
    return kinds[key]


def _checkpointed_forwards(block: nn.Module) -> list[CheckpointedForward]:
    found = (vars(each).get("forward") for each in block.modules())
    return [forward for forward in found if isinstance(forward, CheckpointedForward)]
