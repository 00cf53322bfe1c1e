"""One model or several: what every function that takes a model accepts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from shardwalk.mesh import MeshContext
from shardwalk.parallelizer_core.parallel_state import fsdp_units, mesh_context_of

Models = nn.Module | Sequence[nn.Module]


def as_models(model_or_models: Models) -> list[nn.Module]:
    """The models as a list.

    Raises:
        TypeError: on anything that is neither a module nor a sequence of modules.
    """
    given: object = model_or_models
    models = [given] if isinstance(given, nn.Module) else given
    if not isinstance(models, list | tuple):
        raise TypeError(
            f"expected a model or a sequence of models, got {type(models).__name__}; pass the "
            "nn.Module itself, not its parameters"
        )
    for model in models:
        if not isinstance(model, nn.Module):
            raise TypeError(f"expected models (nn.Module), got a {type(model).__name__} among them")
    return list(models)


def unique_parameters(models: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    """Every parameter of the models once, in the order of the modules; tied ones count once."""
    seen: set[int] = set()
    for model in models:
        for parameter in model.parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


def reshard(models: Sequence[nn.Module]) -> None:
    """Bring every unit's sharded parameters back, for what reads or changes them."""
    for model in models:
        for unit in fsdp_units(model):
            unit.reshard()


def shared_mesh_context(
    models: Sequence[nn.Module], given: MeshContext | None = None
) -> MeshContext | None:
    """The context given, else the one the models were parallelized with, else None."""
    if given is not None:
        return given
    contexts = (mesh_context_of(model) for model in models)
    return next((context for context in contexts if context is not None), None)
