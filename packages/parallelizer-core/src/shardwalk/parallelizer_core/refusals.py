"""What this version does not carry out, refused by name before anything is changed.

Each entry goes when the feature it names arrives.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardwalk.mesh import (
    DDPConfig,
    FSDP2Config,
    MegatronFSDPConfig,
    MeshContext,
)
from shardwalk.parallelizer_core._torch_compat import gradient_hooks_of
from shardwalk.parallelizer_core.fsdp2.options import fsdp2_config
from shardwalk.parallelizer_core.layers import find_block_stacks, has_forward
from shardwalk.parallelizer_core.parallel_state import mesh_context_of, unwrap_model

_LATER = "is not in this version of shardwalk-parallelizer-core"
_WITHOUT_FSDP2 = (
    f"{{}} under {{}} {_LATER}, which compiles the blocks of strategy='fsdp2' alone; use that with "
    f"enable_compile=True, or do not ask for compiled blocks"
)


def refuse_context(mesh_context: MeshContext) -> None:
    """Refuse what `mesh_context` asks for and this version does not do.

    Raises:
        ValueError: names the size or option and the way out.
        TypeError: `mesh_context` is no MeshContext.
    """
    if not isinstance(mesh_context, MeshContext):
        hint = "; pass its .mesh_context" if hasattr(mesh_context, "mesh_context") else ""
        raise TypeError(
            f"mesh_context must be a MeshContext, not {type(mesh_context).__name__}{hint}"
        )
    if not mesh_context.is_member:
        rank = dist.get_rank() if dist.is_initialized() else 0
        raise ValueError(
            f"rank {rank} is not one of the ranks of this mesh; call parallelize_model only where "
            f"mesh_context.is_member is True"
        )
    for axis in ("pp", "cp"):
        size = getattr(mesh_context, f"{axis}_size")
        if size > 1:
            raise ValueError(
                f"{axis}_size={size} {_LATER}; use {axis}_size=1 and give those ranks to dp_size"
            )
    _refuse_strategy(mesh_context)
    _refuse_selective_megatron(mesh_context)
    refuse_compiled_tensor_parallel(fsdp2_config(mesh_context).enable_compile, mesh_context.tp_size)
    _refuse_async_of(mesh_context)
    _refuse_unused_moe_config(mesh_context)


def _refuse_selective_megatron(mesh_context: MeshContext) -> None:
    is_megatron = isinstance(mesh_context.strategy_config, MegatronFSDPConfig)
    if is_megatron and mesh_context.activation_checkpointing == "selective":
        raise ValueError(
            "activation_checkpointing='selective' under Megatron-FSDP, which has no selective "
            "checkpointing; use 'full', or strategy='fsdp2'"
        )


def refuse_compiled_tensor_parallel(enabled: bool, tp_size: int) -> None:
    """Refuse to compile blocks that are split over tensor-parallel ranks.

    Raises:
        ValueError: names the size and the way out.
    """
    if enabled and tp_size > 1:
        raise ValueError(
            f"enable_compile=True beside tp_size={tp_size} {_LATER}, whose "
            f"tensor-parallel layers show their shards in a way that torch cannot trace; use "
            f"enable_compile=False or tp_size=1"
        )


def refuse_compile(model: nn.Module, mesh_context: MeshContext, backend: str | None = None) -> None:
    """Refuse to compile what cannot be, and a backend that nothing would be compiled with.

    Args:
        model: a parallelized model, which may have been made with another context than this one.
        mesh_context: as it is given along with `backend`.
        backend: as for `torch.compile`; None is none in particular.

    Raises:
        ValueError: names the backend, the strategy or the size, and the way out.
    """
    if backend is not None:
        _refuse_backend(backend, mesh_context)
    if not fsdp2_config(mesh_context).enable_compile:
        return
    made_with = mesh_context_of(model)
    other = _strategy_without_compile(made_with) if made_with is not None else None
    if other is not None or unwrap_model(model) is not model:
        given = f"strategy={other!r}" if other else type(model).__name__
        raise ValueError(_WITHOUT_FSDP2.format("enable_compile=True", given))
    refuse_compiled_tensor_parallel(True, max(mesh_context.tp_size, _tensor_parallel_size(model)))


def _refuse_backend(backend: str, mesh_context: MeshContext) -> None:
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise ValueError(
            f"backend={backend!r} is none that torch has; use one of {', '.join(known)}"
        )
    other = _strategy_without_compile(mesh_context)
    if other is not None:
        raise ValueError(_WITHOUT_FSDP2.format(f"backend={backend!r}", f"strategy={other!r}"))
    if not fsdp2_config(mesh_context).enable_compile:
        raise ValueError(
            f"backend={backend!r} would compile nothing, because the context has "
            f"enable_compile=False; make it with FSDP2Config(enable_compile=True), or leave "
            f"backend out"
        )


def _strategy_without_compile(mesh_context: MeshContext) -> str | None:
    strategy = mesh_context.strategy_config
    if isinstance(strategy, DDPConfig):
        return "ddp"
    return "megatron_fsdp" if isinstance(strategy, MegatronFSDPConfig) else None


def _tensor_parallel_size(model: nn.Module) -> int:
    """Over how many ranks parameters of `model` are split as tensors; 1 if none is."""
    made_with = mesh_context_of(model)
    sizes = [1 if made_with is None else made_with.tp_size]
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            axes = parameter.device_mesh.mesh_dim_names or ()
            sizes += [parameter.device_mesh.size(dim) for dim, n in enumerate(axes) if n == "tp"]
    return max(sizes)


def _refuse_async_of(mesh_context: MeshContext) -> None:
    strategy, mesh = mesh_context.strategy_config, mesh_context.device_mesh
    if isinstance(strategy, FSDP2Config) and mesh is not None:
        refuse_async_tensor_parallel(
            strategy.enable_async_tensor_parallel,
            sequence_parallel=strategy.sequence_parallel,
            tp_size=mesh_context.tp_size,
            device_type=mesh.device_type,
        )


def refuse_async_tensor_parallel(
    enabled: bool, *, sequence_parallel: bool, tp_size: int, device_type: str
) -> None:
    """Refuse asynchronous tensor parallelism, by the first thing that it lacks.

    Raises:
        ValueError: says what it needs, and what this version does not do.
    """
    if not enabled:
        return
    if tp_size == 1:
        why = f"needs a tensor-parallel mesh, and tp_size={tp_size}; set tp_size"
    elif not sequence_parallel:
        why = (
            "overlaps the gathers and scatters of a split sequence with matrix products, and "
            "sequence_parallel=False; set sequence_parallel=True"
        )
    elif device_type != "cuda":
        why = (
            f"exchanges through symmetric memory of CUDA devices, and this mesh is on "
            f"{device_type}; use enable_async_tensor_parallel=False"
        )
    else:
        why = (
            f"needs compiled tensor-parallel blocks, and that {_LATER}; use "
            f"enable_async_tensor_parallel=False"
        )
    raise ValueError(f"enable_async_tensor_parallel=True {why}")


def _refuse_unused_moe_config(mesh_context: MeshContext) -> None:
    is_ddp = isinstance(mesh_context.strategy_config, DDPConfig)
    if mesh_context.moe_parallel_config is None or (mesh_context.device_mesh and not is_ddp):
        return
    where = "strategy='ddp'" if is_ddp else "a context without a mesh"
    raise ValueError(
        f"moe_parallel_config means nothing under {where}; leave it out, or use strategy='fsdp2' "
        f"with a mesh"
    )


def _refuse_strategy(mesh_context: MeshContext) -> None:
    strategy = mesh_context.strategy_config
    if strategy is not None and mesh_context.device_mesh is None:
        raise ValueError(
            f"strategy_config={type(strategy).__name__} needs a mesh, on one process too; make the "
            f"context with MeshContext.build or DistributedSetup.build, or use a bare MeshContext()"
        )


def refuse_without_blocks(model: nn.Module, strategy: FSDP2Config) -> None:
    """Refuse options that work on blocks where a model has none.

    Raises:
        ValueError: names the option.
    """
    for name in ("enable_compile", "patch_is_packed_sequence"):
        if getattr(strategy, name) and not find_block_stacks(model):
            raise ValueError(
                f"{name}=True changes blocks, and {type(model).__name__} has no list of them; use "
                f"{name}=False"
            )


def refuse_offload(policy: object, device_type: str) -> None:
    """Refuse pinned host memory where there is no accelerator to pin it for.

    Raises:
        ValueError: names the policy and what to use on the CPU.
    """
    if not isinstance(policy, CPUOffloadPolicy) or not policy.pin_memory:
        return
    if device_type == "cpu" and not torch.accelerator.is_available():
        raise ValueError(
            "offload_policy=CPUOffloadPolicy(pin_memory=True) needs an accelerator, and this mesh "
            "is on CPU; use offload_policy=None, or CPUOffloadPolicy(pin_memory=False)"
        )


def refuse_unshardable(model: nn.Module) -> None:
    """Refuse what would train to other numbers, or fail deep inside, once parameters are sharded.

    Raises:
        ValueError: names the module or parameter and the way out.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            if module.max_norm is not None:
                raise ValueError(
                    f"{name} has max_norm={module.max_norm}, which rewrites the table in its "
                    f"forward, where its shards don't see it; use max_norm=None or strategy='ddp'"
                )
            if module.sparse:
                raise ValueError(
                    f"{name} has sparse=True, and sharded gradients are dense; use sparse=False"
                )
    starts: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        if gradient_hooks_of(parameter):
            raise ValueError(
                f"{name} has a hook on its gradient, and sharding replaces the parameter; register "
                f"it after parallelize_model"
            )
        if parameter.is_meta or not parameter.numel():
            continue
        other = starts.setdefault(parameter.data_ptr(), name)
        if other != name:
            raise ValueError(
                f"{name} and {other} are two parameters over one storage, and sharding would take "
                f"them apart; tie them as one parameter: a.weight = b.weight"
            )


def refuse_model(model: nn.Module) -> None:
    """Refuse a model that was parallelized before, by shardwalk or by hand.

    Raises:
        ValueError: names the module that is wrapped, or the parameter that is split, already; the
            model is a list or dict that nobody calls.
        TypeError: `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, nn.ModuleList | nn.ModuleDict) and not has_forward(model):
        raise ValueError(
            f"{type(model).__name__} has no forward to gather the weights for; pass the module "
            f"that runs what it holds, or parallelize its elements one by one"
        )
    if hasattr(model, "_orig_mod"):
        raise ValueError("the model is compiled already; pass it as it was before torch.compile")
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule | DistributedDataParallel | nn.DataParallel):
            raise ValueError(
                f"{name or 'the model'} is parallelized already ({type(module).__name__}); pass "
                f"the model as it was built, once"
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            axes = ", ".join(parameter.device_mesh.mesh_dim_names or ("an unnamed axis",))
            raise ValueError(
                f"{name} is a DTensor over {axes} already; pass the model with plain parameters, "
                f"and leave every split to parallelize_model (tp_size, dp_size of its mesh)"
            )
