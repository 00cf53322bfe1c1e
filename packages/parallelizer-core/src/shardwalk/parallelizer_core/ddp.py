"""Distributed data parallel: torch's wrapper, with the state-dict keys of the wrapped model."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardwalk.mesh import DDPConfig, MeshContext, get_flat_mesh
from shardwalk.parallelizer_core.fp32_pins import pin_fp32_parameters
from shardwalk.parallelizer_core.parallel_state import current_device, keep_original_keys


def wrap_ddp(
    model: nn.Module, mesh_context: MeshContext, config: DDPConfig
) -> DistributedDataParallel:
    """Wrap `model` so that its gradients are averaged over the data-parallel ranks.

    The state dict of the wrapper has the keys of `model`, and loads them.

    Raises:
        ValueError: the model has parameters on the meta device, or none to train, or keeps what
            it pins to fp32 in a narrower dtype.
    """
    _refuse_ddp_model(model)
    pin_fp32_parameters(model)
    assert mesh_context.device_mesh is not None
    mesh = get_flat_mesh(mesh_context.device_mesh, "dp")
    device = current_device(mesh.device_type)
    wrapped = DistributedDataParallel(
        model.to(device),
        device_ids=None if device.type == "cpu" else [device.index],
        process_group=mesh.get_group(),
        find_unused_parameters=config.find_unused_parameters,
        static_graph=config.static_graph,
        bucket_cap_mb=config.bucket_cap_mb,
        gradient_as_bucket_view=config.gradient_as_bucket_view,
        **_buffer_option(config.broadcast_buffers),
    )
    keep_original_keys(wrapped)
    return wrapped


def _refuse_ddp_model(model: nn.Module) -> None:
    on_meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if on_meta:
        raise ValueError(
            f"strategy='ddp' keeps whole copies, and {len(on_meta)} parameters are on the meta "
            f"device ({', '.join(on_meta[:3])}, ...): call materialize(model, ...) first, then "
            f"parallelize_model"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "strategy='ddp' averages gradients, and no parameter of this model is trainable"
        )


def _buffer_option(synchronize: bool) -> dict[str, Any]:
    """The argument that synchronizes buffers before each forward: torch 2.13 renamed it."""
    names = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
    return {name: synchronize}
