"""From a model and a context to a parallelized model: sidecars and the strategy switch."""

from __future__ import annotations

import torch
from torch import nn

from shardwalk.mesh import (
    ActivationCheckpointingScope,
    DDPConfig,
    FSDP2Config,
    MegatronFSDPConfig,
    MeshContext,
)
from shardwalk.parallelizer_core.activation_checkpointing import (
    apply_activation_checkpointing,
    refuse_checkpointing,
)
from shardwalk.parallelizer_core.autocast import autocast_dtype, autocast_forward
from shardwalk.parallelizer_core.base_models import base_model_of, first_tensor_outside
from shardwalk.parallelizer_core.compile import compile_blocks
from shardwalk.parallelizer_core.ddp import wrap_ddp
from shardwalk.parallelizer_core.fsdp2.multimodal import refuse_frozen_sharding
from shardwalk.parallelizer_core.fsdp2.options import apply_arguments, fsdp2_config
from shardwalk.parallelizer_core.fsdp2.walk import finish_units
from shardwalk.parallelizer_core.fsdp2.zero_grad import clear_shards_in_every_unit
from shardwalk.parallelizer_core.megatron_fsdp import refuse_megatron_fsdp, wrap_megatron_fsdp
from shardwalk.parallelizer_core.packed_sequences import hide_positions
from shardwalk.parallelizer_core.parallel_state import record_mesh_context, unwrap_model
from shardwalk.parallelizer_core.parallelizer import ModelParallelizer
from shardwalk.parallelizer_core.plugins import installed_sidecar
from shardwalk.parallelizer_core.protocols import FinalizesParallelization, Parallelizer
from shardwalk.parallelizer_core.refusals import (
    refuse_compile,
    refuse_context,
    refuse_model,
    refuse_offload,
    refuse_unshardable,
    refuse_without_blocks,
)
from shardwalk.parallelizer_core.stale_optimizers import remember_parameters, watch_optimizers

_DEFAULT_PARALLELIZER = ModelParallelizer()

_registered: dict[type[nn.Module], Parallelizer] = {}


def parallelize_model(model: nn.Module, mesh_context: MeshContext) -> nn.Module:
    """Parallelize `model` as `mesh_context` says; it then trains to the numbers of one process.

    A wrapper that names its base model by `get_base_model()`, as peft's does, is parallelized
    through it: the base model's sidecar is used, and the base model is the root unit, so that it
    can be called directly too (as `generate` does). Adapters must be in place before.

    Args:
        model: any module, on the meta device, the CPU or the mesh's device. Changed in place.
        mesh_context: what to apply and over which ranks; a bare `MeshContext()` shards nothing.

    Returns:
        The module to train: `model` itself, or torch's wrapper under DDP.

    Raises:
        ValueError: a size or an option that does not fit or is not in this version, named with the
            way out, before any collective runs and on every rank alike.
        ImportError: expert parallelism without the package that provides it.
    """
    refuse_model(model)
    refuse_context(mesh_context)
    if isinstance(mesh_context.strategy_config, MegatronFSDPConfig):
        refuse_megatron_fsdp(mesh_context)
    autocast_to = autocast_dtype(mesh_context)
    refuse_without_blocks(model, fsdp2_config(mesh_context))
    refuse_checkpointing(model, mesh_context.activation_checkpointing, _scope_of(mesh_context))
    refuse_frozen_sharding(
        model, fsdp2_config(mesh_context).multimodal.frozen_sharding, "multimodal.frozen_sharding"
    )
    target = _part_to_parallelize(model, mesh_context)
    before = remember_parameters(model)
    parallelized = get_model_parallelizer(model).parallelize(target, mesh_context)
    if not isinstance(parallelized, nn.Module):
        raise TypeError(
            f"the sidecar of {type(target).__qualname__} returned {parallelized!r} from "
            f"parallelize; it must return the model"
        )
    finish_units(parallelized, fsdp2_config(mesh_context).mp_policy)
    for module in unwrap_model(parallelized).modules():
        if isinstance(module, FinalizesParallelization):
            module.finalize_parallelization(mesh_context)
    _change_calls(unwrap_model(parallelized), mesh_context, autocast_to)
    if target is not model:
        parallelized = _wrapper_around(parallelized, target, model)
        clear_shards_in_every_unit(parallelized)
        record_mesh_context(target, mesh_context)
    if mesh_context.device_mesh is not None:
        watch_optimizers(before, parallelized)
    record_mesh_context(parallelized, mesh_context)
    compile_parallelized_model(parallelized, mesh_context)
    return parallelized


def _change_calls(
    model: nn.Module, mesh_context: MeshContext, autocast_to: torch.dtype | None
) -> None:
    """What the strategy asks of calls of the model, whatever it is sharded by."""
    mesh = mesh_context.device_mesh
    if fsdp2_config(mesh_context).patch_is_packed_sequence:
        hide_positions(model)
    if autocast_to is not None and mesh is not None:
        autocast_forward(model, mesh.device_type, autocast_to)


def get_model_parallelizer(model: nn.Module) -> Parallelizer:
    """The sidecar of `model`: its class's `parallelizer`, a registered one, or the default.

    Registered ones, by `register_parallelizer` or an installed package, are looked up along the
    class's MRO. A wrapper without a sidecar has that of the base model it names.

    Raises:
        TypeError: the sidecar found has no callable `parallelize`.
    """
    own = _own_sidecar(type(model))
    return own or _own_sidecar(type(base_model_of(model))) or _DEFAULT_PARALLELIZER


def register_parallelizer(cls: type[nn.Module], parallelizer: Parallelizer) -> None:
    """Give a class that one does not own a sidecar, for its subclasses too; the last call wins.

    Raises:
        TypeError: `cls` is no module class, or `parallelizer` has no callable `parallelize`.
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(
            f"a sidecar is registered for a subclass of torch.nn.Module, not for {cls!r}"
        )
    _check_sidecar(parallelizer, cls)
    _registered[cls] = parallelizer


def compile_parallelized_model(
    model: nn.Module, mesh_context: MeshContext, *, backend: str | None = None
) -> None:
    """Compile the blocks of a parallelized model in place, where `mesh_context` asks for it.

    `parallelize_model` does so at its end, for torch's `inductor`. A call after it changes nothing,
    unless it names another backend. Graphs are made at the first call of each kind of block;
    `describe_compiled` tells of them.

    Args:
        model: what `parallelize_model` returned, or the base model that it wraps.
        mesh_context: the context of `model`; FSDP2's `enable_compile=True` asks for it.
        backend: one of ``torch.compiler.list_backends(exclude_tags=())``.

    Raises:
        ValueError: torch has no such backend; one is given and `mesh_context` does not ask for
            compiled blocks, which no strategy but FSDP2 can; `model` is a wrapper of DDP or
            Megatron-FSDP, or tensor-parallel, and is asked to be compiled.
    """
    refuse_compile(model, mesh_context, backend)
    if fsdp2_config(mesh_context).enable_compile:
        compile_blocks(model, backend)


def _apply_model_parallelizer(
    parallelizer: ModelParallelizer, model: nn.Module, mesh_context: MeshContext
) -> nn.Module:
    """Apply the strategy of `mesh_context` with the hooks of `parallelizer`."""
    if mesh_context.device_mesh is None:
        _reapply_trainability(model, mesh_context)
        _checkpoint_activations(model, mesh_context, parallelizer)
        return model
    if isinstance(mesh_context.strategy_config, DDPConfig | MegatronFSDPConfig):
        _reapply_trainability(model, mesh_context)
        _checkpoint_activations(model, mesh_context, parallelizer)
        if isinstance(mesh_context.strategy_config, DDPConfig):
            return _parallelize_ddp(model, mesh_context)
        return _parallelize_megatron_fsdp(model, mesh_context)
    refuse_unshardable(model)
    refuse_offload(fsdp2_config(mesh_context).offload_policy, mesh_context.device_mesh.device_type)
    if mesh_context.ep_size > 1 or mesh_context.moe_parallel_config is not None:
        return _parallelize_moe(model, mesh_context, parallelizer)
    if mesh_context.device_mesh.size() == 1:
        return _parallelize_unsharded_fsdp2(model, mesh_context, parallelizer)
    return _parallelize_fsdp2(model, mesh_context, parallelizer)


def _parallelize_ddp(model: nn.Module, mesh_context: MeshContext) -> nn.Module:
    assert isinstance(mesh_context.strategy_config, DDPConfig)
    return wrap_ddp(model, mesh_context, mesh_context.strategy_config)


def _parallelize_fsdp2(
    model: nn.Module, mesh_context: MeshContext, parallelizer: ModelParallelizer
) -> nn.Module:
    assert mesh_context.device_mesh is not None
    return parallelizer._apply(model, mesh_context.device_mesh, **apply_arguments(mesh_context))


def _parallelize_unsharded_fsdp2(
    model: nn.Module, mesh_context: MeshContext, parallelizer: ModelParallelizer
) -> nn.Module:
    return parallelizer._apply_unsharded(model, mesh_context)


def _parallelize_moe(
    model: nn.Module, mesh_context: MeshContext, parallelizer: ModelParallelizer
) -> nn.Module:
    return parallelizer._apply_moe(model, mesh_context)


def _parallelize_megatron_fsdp(model: nn.Module, mesh_context: MeshContext) -> nn.Module:
    return wrap_megatron_fsdp(model, mesh_context)


def _checkpoint_activations(
    model: nn.Module, mesh_context: MeshContext, parallelizer: ModelParallelizer
) -> None:
    """Checkpoint where there is no dense path that does: under DDP and without a mesh."""
    apply_activation_checkpointing(
        model,
        mesh_context.activation_checkpointing,
        whole_layers=parallelizer._use_full_layer_activation_checkpointing(model),
        scope=_scope_of(mesh_context),
    )


def _scope_of(mesh_context: MeshContext) -> ActivationCheckpointingScope:
    strategy = mesh_context.strategy_config
    if isinstance(strategy, FSDP2Config | DDPConfig):
        return strategy.activation_checkpointing_scope
    return "all"


def _reapply_trainability(model: nn.Module, mesh_context: MeshContext) -> None:
    if mesh_context.reapply_trainability is not None:
        mesh_context.reapply_trainability(model)


def _part_to_parallelize(model: nn.Module, mesh_context: MeshContext) -> nn.Module:
    """`model`, or the base model that it wraps; wrappers of a strategy go around the whole.

    Raises:
        ValueError: the wrapper adds parameters of its own around a base model with a sidecar.
    """
    base = base_model_of(model)
    wraps = isinstance(mesh_context.strategy_config, DDPConfig | MegatronFSDPConfig)
    if base is model or wraps or _own_sidecar(type(model)) is not None:
        return model
    outside = first_tensor_outside(base, model)
    if outside is None:
        return base
    if _own_sidecar(type(base)) is not None:
        raise ValueError(
            f"{type(model).__qualname__} holds {outside} outside of its base model, whose sidecar "
            f"(of {type(base).__qualname__}) would not shard it; register a sidecar for "
            f"{type(model).__qualname__}"
        )
    return model


def _wrapper_around(parallelized: nn.Module, base: nn.Module, wrapper: nn.Module) -> nn.Module:
    if parallelized is not base:
        raise TypeError(
            f"the sidecar of {type(base).__qualname__} returned another module than it was given, "
            f"which {type(wrapper).__qualname__} still holds; change the model in place"
        )
    return wrapper


def _own_sidecar(cls: type[nn.Module]) -> Parallelizer | None:
    sidecar: Parallelizer | None = getattr(cls, "parallelizer", None)
    if sidecar is None:
        sidecar = _registered_along_mro(cls)
    if sidecar is not None:
        _check_sidecar(sidecar, cls)
    return sidecar


def _registered_along_mro(cls: type) -> Parallelizer | None:
    for base in cls.__mro__:
        if not issubclass(base, nn.Module):
            continue
        found = _registered.get(base) or installed_sidecar(base)
        if found is not None:
            return found
    return None


def _check_sidecar(sidecar: object, cls: type) -> None:
    if isinstance(sidecar, type) or not callable(getattr(sidecar, "parallelize", None)):
        raise TypeError(
            f"the sidecar of {cls.__qualname__} is {sidecar!r}, which has no callable "
            f"parallelize(model, mesh_context); give an instance of a ModelParallelizer subclass"
        )
