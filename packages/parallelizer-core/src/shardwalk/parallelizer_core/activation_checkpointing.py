"""Activation checkpointing: blocks keep their inputs, and run again in the backward.

A checkpointed block gets an instance attribute `forward` and stays the module it was: no wrapper
stands in its path, its keys and its class are as before, and hooks (FSDP2's among them) run outside
of the checkpointed call, once.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwalk.mesh import (
    ActivationCheckpointingScope,
    normalize_activation_checkpointing,
)
from shardwalk.parallelizer_core.checkpoint_seams import check_seams, context_makers, save_rules
from shardwalk.parallelizer_core.layers import find_block_stacks, has_forward
from shardwalk.parallelizer_core.recompute_buffers import BuffersOfForward
from shardwalk.parallelizer_core.recompute_replay import ContextPair, RecomputeMark, Together
from shardwalk.parallelizer_core.refusals import refuse_apply_options
from shardwalk.parallelizer_core.selective_checkpointing import selective_contexts

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
        scope: which layer groups.

    Raises:
        ValueError: an unknown mode; a scope that this version does not have; a model without
            blocks, or that is checkpointed already, by shardwalk or by its own means.
        TypeError: a `checkpoint_context` or `ops_to_save` of a block is not what it must be.
    """
    resolved = normalize_activation_checkpointing(mode)
    if not resolved:
        return
    refuse_apply_options(activation_checkpointing_scope=scope)
    refuse_checkpointing(model, resolved)
    options = _Options(selective=resolved == "selective", model_name=type(model).__qualname__)
    for block in _blocks(model):
        parts = [block] if whole_layers or options.selective else _parts_of(block)
        for part in parts:
            if not _is_checkpointed(part):  # as part of another block, which shares it
                vars(part)["forward"] = CheckpointedForward(part, block, options)


def refuse_checkpointing(model: nn.Module, mode: bool | str) -> None:
    """Refuse a model that is checkpointed already or, with a mode, that cannot be.

    Raises:
        ValueError: names the module, or the option and both ways out.
        TypeError: a module in a block has a seam that cannot be used.
    """
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
    if mode and not any(True for _ in _blocks(model)):
        raise ValueError(
            f"activation_checkpointing={mode!r} recomputes blocks, and {type(model).__name__} has "
            f"no list of them; use activation_checkpointing=False"
        )
    for block in _blocks(model) if mode else ():
        check_seams(block.modules())


@dataclass
class _Options:
    """What the checkpointed calls of one model share."""

    selective: bool
    model_name: str
    warned_of_cache: bool = False


class CheckpointedForward:
    """The forward of a module, under checkpointing where gradients are enabled."""

    def __init__(self, module: nn.Module, block: nn.Module, options: _Options) -> None:
        functools.update_wrapper(self, module.forward)
        self._forward: Callable[..., Any] = module.forward
        self._module, self._block, self._options = module, block, options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's own forward; it runs again in the backward."""
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        args = tuple(self._without_cache(value) for value in args)
        kwargs = {name: self._without_cache(value) for name, value in kwargs.items()}
        # Bound beforehand: `checkpoint` has keywords of its own, which the module's may be named as
        call = functools.partial(self._forward, **kwargs)
        makers = context_makers(self._modules())
        # A recompute that ends early never comes to what its forward recorded last, and a log could
        # not tell that from a record which the recompute does not ask for.
        return checkpoint(
            call,
            *args,
            use_reentrant=False,
            early_stop=not makers,
            context_fn=functools.partial(self._contexts, makers),
        )

    def _contexts(self, makers: Sequence[Callable[[], ContextPair]]) -> ContextPair:
        """Torch asks for them right before the forward."""
        pairs = [make() for make in makers]
        forward = [pair[0] for pair in pairs]
        recompute = [BuffersOfForward(self._module), *(pair[1] for pair in pairs), RecomputeMark()]
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

    def _without_cache(self, value: Any) -> Any:
        """None for a cache of keys and values: the recompute would append to it again."""
        if not (hasattr(value, "update") and hasattr(value, "get_seq_length")):
            return value
        held = int(value.get_seq_length())
        if held:
            raise ValueError(
                f"{self._options.model_name} was called with a cache of {held} positions, which "
                f"activation checkpointing cannot pass on; disable gradients, or checkpointing"
            )
        if not self._options.warned_of_cache:
            self._options.warned_of_cache = True
            warnings.warn(
                f"{self._options.model_name} passes a cache to its blocks in training; under "
                f"activation checkpointing they get None instead (set use_cache=False)",
                UserWarning,
                stacklevel=2,
            )
        return None


def _is_checkpointed(module: nn.Module) -> bool:
    return isinstance(vars(module).get("forward"), CheckpointedForward)


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    for stack in find_block_stacks(model):
        for _, block in stack.blocks:
            yield block


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
