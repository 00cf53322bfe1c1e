"""The random generators of this process as plain data, and back."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
import torch.distributed as dist

from shardwalk.mesh import MeshContext, seed_everything
from shardwalk.parallelizer_core.initialization import named_seed


def random_state() -> dict[str, Any]:
    """The states of torch's generators (CPU and current accelerator), Python's and NumPy's."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state(), "python": random.getstate()}
    if torch.accelerator.is_available():
        state["accelerator"] = _accelerator().get_rng_state()
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = (name, [int(key) for key in keys], *rest)
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Put the generators into a state of `random_state`; one that is not here is skipped."""
    torch.set_rng_state(state["cpu"])
    random.setstate(state["python"])
    if "accelerator" in state and torch.accelerator.is_available():
        _accelerator().set_rng_state(state["accelerator"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))


def random_layout(context: MeshContext | None) -> dict[str, int]:
    """What must be equal for a rank to take over the generators of the rank with its number."""
    layout = {"world": dist.get_world_size() if dist.is_initialized() else 1}
    mesh = None if context is None else context.device_mesh
    if mesh is not None and mesh.mesh_dim_names is not None:
        layout.update(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    return layout


def reseed(context: MeshContext | None, seed: int, step: int | None) -> None:
    """Seed for another layout: from the saved seed and step alone, apart for data ranks."""
    new = named_seed(seed, f"resumed at step {step}")
    if context is None or context.device_mesh is None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        seed_everything(MeshContext(), named_seed(new, f"rank {rank}"))
    else:
        seed_everything(context, new)


def _accelerator() -> Any:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.get_device_module(accelerator)
