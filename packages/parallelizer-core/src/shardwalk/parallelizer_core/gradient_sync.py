"""Accumulating gradients over micro-batches with one communication at the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar
from weakref import WeakSet

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardwalk.mesh import FSDP2Config
from shardwalk.parallelizer_core._torch_compat import (
    drop_unreduced_gradients,
    restore_sync_flags,
    sync_flags_of,
)
from shardwalk.parallelizer_core.model_sequences import Models, as_models
from shardwalk.parallelizer_core.parallel_state import fsdp_units, mesh_context_of

_MicroBatch = TypeVar("_MicroBatch")

_recorded: WeakSet[DistributedDataParallel] = WeakSet()


@contextmanager
def no_sync(model_or_models: Models, *, enabled: bool = True) -> Iterator[None]:
    """Let backward passes inside accumulate gradients without communication.

    The next backward outside reduces the sum. Run both forward and backward of the micro-batch
    inside. FSDP2 units keep unsharded gradients in the reduce dtype meanwhile, with HSDP neither
    scattering nor all-reducing; DDP keeps its plain gradients. A model whose strategy has
    ``defer_fsdp_grad_sync=False`` reduces after every micro-batch all the same: the numbers are
    equal, memory is lower, traffic higher.

    On exit, by an exception too, every flag is what it was on entry, so that contexts nest. A
    normal exit keeps the gradients for the next backward to reduce. An exception discards what
    FSDP2 units have not reduced yet; other gradients (all of them under DDP) stand in ``.grad``,
    so call ``zero_grad`` before the next step.

    Args:
        model_or_models: the model, or the pipeline stages of this rank.
        enabled: False leaves the flags alone, so that one ``with`` serves all micro-batches.

    Raises:
        TypeError: for an `enabled` that is not a bool.
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled must be True or False, got {enabled!r}")
    models = as_models(model_or_models)
    with ExitStack() as stack:
        for model in models if enabled else []:
            if defers_gradient_sync(model):
                _enter(stack, model)
        try:
            yield
        except BaseException:  # GeneratorExit included: a loop over micro-batches was left
            _drop_unreduced(models)
            raise


def sync_gradients_on_last(
    model_or_models: Models, micro_batches: Iterable[_MicroBatch]
) -> Iterator[_MicroBatch]:
    """Yield the micro-batches, all but the last inside `no_sync`.

    Example:
        ::

            for micro_batch in sync_gradients_on_last(model, micro_batches):
                normalizer(token_losses(model, micro_batch)).backward()
            clip_grad_norm_(model, 1.0)
            optimizer.step()

    Works on any iterable; it is read one micro-batch ahead. Leaving the loop early, by ``break`` or
    an exception, restores the flags too and discards the micro-batches so far: FSDP2's unreduced
    gradients at once, all others (those of DDP) with the ``zero_grad`` that must follow.
    """
    models = as_models(model_or_models)
    remaining = iter(micro_batches)
    done = object()
    current: object = next(remaining, done)
    while current is not done:
        following: object = next(remaining, done)
        with no_sync(models, enabled=following is not done):
            yield current  # type: ignore[misc]  # `done` never gets here
        current = following


def defers_gradient_sync(model: nn.Module) -> bool:
    """Whether `no_sync` holds back this model's communication (``defer_fsdp_grad_sync``)."""
    context = mesh_context_of(model)
    strategy = None if context is None else context.strategy_config
    return not isinstance(strategy, FSDP2Config) or strategy.defer_fsdp_grad_sync


def _enter(stack: ExitStack, model: nn.Module) -> None:
    for unit in fsdp_units(model):
        stack.callback(restore_sync_flags, unit, sync_flags_of(unit))
        unit.set_requires_gradient_sync(False, recurse=False)
    for module in model.modules():
        if isinstance(module, DistributedDataParallel) and not _records_its_graph(module):
            stack.enter_context(module.no_sync())


def _drop_unreduced(models: list[nn.Module]) -> None:
    for model in models:
        for unit in fsdp_units(model):
            drop_unreduced_gradients(unit)


def _records_its_graph(wrapper: DistributedDataParallel) -> bool:
    """Whether this may be the backward in which DDP records a static graph.

    torch 2.13 fails an internal assertion when that one is not synchronized. Averaging a part of
    the sum twice changes nothing, so the numbers are the same.
    """
    if not wrapper.static_graph or wrapper in _recorded:
        return False
    _recorded.add(wrapper)
    return True
