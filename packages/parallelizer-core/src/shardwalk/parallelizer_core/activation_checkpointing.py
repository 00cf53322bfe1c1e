"""Activation checkpointing: blocks keep their inputs, and run again in the backward.

A checkpointed block gets an instance attribute `forward` and stays the module it was: no wrapper
stands in its path, its keys and its class are as before, and hooks (FSDP2's among them) run outside
of the checkpointed call, once.
"""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from shardwalk.mesh import (
    ActivationCheckpointingScope,
    activation_checkpointing_groups,
    normalize_activation_checkpointing,
    normalize_activation_checkpointing_scope,
)
from shardwalk.parallelizer_core.checkpoint_seams import check_seams, context_makers, save_rules
from shardwalk.parallelizer_core.layers import BlockStack, has_forward, layer_groups
from shardwalk.parallelizer_core.recompute_attention import AttentionBackends
from shardwalk.parallelizer_core.recompute_buffers import BuffersOfForward
from shardwalk.parallelizer_core.recompute_containers import ContainersOfForward
from shardwalk.parallelizer_core.recompute_replay import ContextPair, RecomputeMark, Together
from shardwalk.parallelizer_core.selective_checkpointing import graph_contexts, selective_contexts

_cache_stacks: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of blocks that were passed a cache

_TORCH_WRAPPED = "_checkpoint_wrapped_module"  # what torch's checkpoint_wrapper calls its module
_PART_WORDS = ("attn", "attention", "mlp", "ffn", "feed_forward", "moe", "experts", "mixer")


def apply_activation_checkpointing(
    model: nn.Module,
    mode: bool | str,
    *,
    whole_layers: bool = True,
    scope: ActivationCheckpointingScope | None = "all",
) -> None:
    """Checkpoint the blocks of `model` in place.

    Args:
        model: changed in place; names, classes and state dicts stay as they are.
        mode: False, "full" (or True), or "selective", which keeps what `selective_contexts` says.
        whole_layers: whether "full" recomputes a block as one; else each of its composite
            submodules (attention, feed-forward) by itself.
        scope: which layer groups: "all", "language", "vision", "audio", "multimodal" (all but
            language) or several of them. A frozen block that needs no gradient costs nothing.

    Raises:
        ValueError: an unknown mode or scope; a scope of which the model has no blocks; a model
            that is checkpointed already, by shardwalk or by its own means.
        TypeError: a `checkpoint_context` or `ops_to_save` of a block is not what it must be.
    """
    resolved = normalize_activation_checkpointing(mode)
    if not resolved:
        _refuse_unused_scope(scope)
        return
    refuse_checkpointing(model, resolved, scope)
    options = _Options(selective=resolved == "selective", model_name=type(model).__qualname__)
    options.stacks.update(
        (block, stack.name) for stack in _stacks(model, scope) for _, block in stack.blocks
    )
    for block in options.stacks:
        parts = [block] if whole_layers or options.selective else _parts_of(block)
        for part in parts:
            if not _is_checkpointed(part):  # as part of another block, which shares it
                vars(part)["forward"] = CheckpointedForward(part, block, options)


def refuse_checkpointing(
    model: nn.Module, mode: bool | str, scope: ActivationCheckpointingScope | None = "all"
) -> None:
    """Refuse a model that is checkpointed already or, with a mode, that cannot be.

    Raises:
        ValueError: names the module, or the option and both ways out.
        TypeError: a module in a block has a seam that cannot be used.
    """
    if not mode:
        _refuse_unused_scope(scope)
    for name, module in model.named_modules():
        by_hand = any(child == _TORCH_WRAPPED for child, _ in module.named_children())
        if (mode and by_hand) or _is_checkpointed(module):
            raise ValueError(
                f"{name or 'the model'} is checkpointed already; pass the model as it was built, "
                f"once"
            )
        if mode and getattr(module, "gradient_checkpointing", False):
            raise ValueError(
                f"activation_checkpointing={mode!r}, and the model's own gradient checkpointing is "
                f"on ({name or type(module).__name__}): all would be recomputed twice; call the "
                f"model's gradient_checkpointing_disable(), or use activation_checkpointing=False"
            )
    if mode:
        _refuse_scope(model, mode, scope)
        for stack in _stacks(model, scope):
            for _, block in stack.blocks:
                check_seams(block.modules())


def _refuse_unused_scope(scope: ActivationCheckpointingScope | None) -> None:
    if scope is not None and normalize_activation_checkpointing_scope(scope) != "all":
        raise ValueError(
            f"activation_checkpointing_scope={scope!r} selects what activation checkpointing "
            f"recomputes, and activation_checkpointing=False; set it, or leave the scope out"
        )


def _refuse_scope(
    model: nn.Module, mode: bool | str, scope: ActivationCheckpointingScope | None
) -> None:
    groups = layer_groups(model)
    if not groups:
        raise ValueError(
            f"activation_checkpointing={mode!r} recomputes blocks, and {type(model).__name__} has "
            f"no list of them; use activation_checkpointing=False"
        )
    normal = normalize_activation_checkpointing_scope(scope)
    for name in (normal,) if isinstance(normal, str) else normal:
        if not activation_checkpointing_groups(name) & groups.keys():
            there = "; ".join(
                f"{group}: {', '.join(stack.name or 'the model' for stack in stacks)}"
                for group, stacks in groups.items()
            )
            raise ValueError(
                f"activation_checkpointing_scope={scope!r} selects {name} blocks, and "
                f"{type(model).__name__} has none by the names of its modules (it has {there}); "
                f"use a scope of these, or 'all'"
            )


@dataclass
class _Options:
    """What the checkpointed calls of one model share."""

    selective: bool
    model_name: str
    stacks: dict[nn.Module, str] = field(default_factory=dict)  # of each block
    warned_of_cache: bool = False


class CheckpointedForward:
    """The forward of a module, under checkpointing where gradients are enabled."""

    def __init__(self, module: nn.Module, block: nn.Module, options: _Options) -> None:
        functools.update_wrapper(self, module.forward)
        self._forward: Callable[..., Any] = module.forward
        self._module, self._block, self._options = module, block, options
        self._traceable: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's own forward; it runs again in the backward."""
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        if torch.compiler.is_compiling() and self._traceable is not None:
            return self._traceable(*args, **kwargs)
        shown, named = self.without_caches(args, kwargs)
        # Bound beforehand: `checkpoint` has keywords of its own, which the module's may be named as
        call = functools.partial(self._forward, **named)
        makers = context_makers(self._modules())
        # A recompute that ends early never comes to what its forward recorded last, and a log could
        # not tell that from a record which the recompute does not ask for.
        try:
            return checkpoint(
                call,
                *shown,
                use_reentrant=False,
                early_stop=not makers,
                context_fn=functools.partial(self._contexts, makers, [*shown, *named.values()]),
            )
        except Exception as error:
            if any(map(operator.is_not, [*args, *kwargs.values()], [*shown, *named.values()])):
                error.add_note(_NO_CACHE)
            raise

    def make_traceable(self) -> None:
        """Let torch.compile take the checkpointed call into its graph.

        Nothing runs twice there, since the graph's partition decides what the backward computes
        again: buffers, containers and records need no care.
        """
        forward = self._forward
        options: dict[str, Any] = {"use_reentrant": False}
        if self._options.selective:
            rules = list(save_rules(self._modules()))

            def contexts() -> ContextPair:
                return graph_contexts(rules)

            options["context_fn"] = contexts

        def call(*args: Any, **kwargs: Any) -> Any:
            return checkpoint(functools.partial(forward, **kwargs), *args, **options)

        self._traceable = call

    def split(self) -> list[tuple[str, nn.Module]]:
        """Recompute the parts of the block one by one instead; their paths, none without parts."""
        parts = [part for part in _composite_children(self._module) if not _is_norm(part)]
        if parts:
            vars(self._module)["forward"] = self._forward
        for part in parts:
            if not _is_checkpointed(part):
                vars(part)["forward"] = CheckpointedForward(part, self._block, self._options)
        paths = {module: path for path, module in self._module.named_modules()}
        return [(paths[part], part) for part in parts]

    def without_caches(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with None in place of caches of keys and values."""
        shown = [self._without_cache(value) for value in args]
        return shown, {name: self._without_cache(value, name) for name, value in kwargs.items()}

    def _contexts(
        self, makers: Sequence[Callable[[], ContextPair]], values: Sequence[Any]
    ) -> ContextPair:
        """Torch asks for them right before the forward."""
        pairs = [make() for make in makers]
        forward = [pair[0] for pair in pairs]
        recompute = [
            AttentionBackends(),
            ContainersOfForward(values),
            BuffersOfForward(self._module),
            *(pair[1] for pair in pairs),
            RecomputeMark(),
        ]
        if self._options.selective:
            kept = selective_contexts(save_rules(self._modules()))
            forward.append(kept[0])
            recompute.append(kept[1])
        return Together(forward), Together(recompute)

    def _modules(self) -> Iterator[nn.Module]:
        """The block, and the modules that run in this call."""
        if self._module is not self._block:
            yield self._block
        yield from self._module.modules()

    def _without_cache(self, value: Any, name: str = "") -> Any:
        """None for a cache of keys and values: the recompute would append to it again."""
        if not is_cache(value):
            if "cache" in name and not isinstance(value, _HARMLESS):
                raise ValueError(
                    f"{self._options.model_name} passes {name}={type(value).__name__} to its "
                    f"blocks in training, which a recompute would change again; set "
                    f"use_cache=False, disable gradients, or use activation_checkpointing=False"
                )
            return value
        held = int(value.get_seq_length())
        if held:
            raise ValueError(
                f"{self._options.model_name} was called with a cache of {held} positions, which "
                f"activation checkpointing cannot pass on; disable gradients, or checkpointing"
            )
        self._refuse_second_stack(value)
        if not self._options.warned_of_cache:
            self._options.warned_of_cache = True
            warnings.warn(
                f"{self._options.model_name} passes a cache to its blocks in training; under "
                f"activation checkpointing they get None instead (set use_cache=False)",
                UserWarning,
                stacklevel=2,
            )
        return None

    def _refuse_second_stack(self, cache: Any) -> None:
        """Refuse a cache that carries keys and values from one stack of blocks to another."""
        stack = self._options.stacks[self._block]
        first = _cache_stacks.setdefault(cache, stack)
        if first != stack:
            raise ValueError(
                f"{self._options.model_name} passes one cache to the blocks of {first} and of "
                f"{stack}, so that these may read what those wrote, and under activation "
                f"checkpointing blocks get None in its place; set use_cache=False if the model "
                f"then has none, or use activation_checkpointing=False"
            )


def _is_norm(module: nn.Module) -> bool:
    """Whether it has vectors only: its name may say more than it is (`attention_norm`)."""
    return all(parameter.ndim < 2 for parameter in module.parameters())


def is_cache(value: Any) -> bool:
    """Whether the value is a cache of keys and values, by what it can do."""
    return hasattr(value, "update") and hasattr(value, "get_seq_length")


_HARMLESS = (torch.Tensor, bool, int, float, str, tuple, list, Mapping, type(None))
_NO_CACHE = (
    "Activation checkpointing gave the block None in place of a cache. A model that cannot train "
    "without one (its layers share what is in it) needs activation_checkpointing=False"
)


def _is_checkpointed(module: nn.Module) -> bool:
    return isinstance(vars(module).get("forward"), CheckpointedForward)


def _stacks(model: nn.Module, scope: ActivationCheckpointingScope | None) -> Iterator[BlockStack]:
    chosen = activation_checkpointing_groups("all" if scope is None else scope)
    for group, stacks in layer_groups(model).items():
        yield from stacks if group in chosen else ()


def _parts_of(block: nn.Module) -> Sequence[nn.Module]:
    """The submodules that are recomputed one by one; the block itself where it has none."""
    return list(_composite_children(block)) or [block]


def _composite_children(module: nn.Module) -> Iterator[nn.Module]:
    for name, child in module.named_children():
        if not any(True for _ in child.parameters()):
            continue
        if not has_forward(child):
            yield from _composite_children(child)
        elif any(True for _ in child.children()) or any(word in name for word in _PART_WORDS):
            yield child
