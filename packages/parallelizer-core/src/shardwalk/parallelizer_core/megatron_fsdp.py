"""Megatron-FSDP: the wrapper of the `megatron-fsdp` package, by the signature that it has.

Its releases rename and drop options, so what the installed one takes is read from its functions. It
runs on CUDA only. What it does otherwise than FSDP2 is said by a warning, once:

- its optimizer takes one step with zero gradients before training, which counts as a step and
  decays the weights once (`shard_optimizer`);
- `check_for_nan_in_grad` does nothing since 0.5.0.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Iterator
from dataclasses import fields
from types import ModuleType
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from shardwalk.mesh import MegatronFSDPConfig, MeshContext, get_flat_mesh, get_submesh
from shardwalk.parallelizer_core.layers import find_block_stacks
from shardwalk.parallelizer_core.parallel_state import (
    class_of,
    current_device,
    keep_original_keys,
)

# What the page of a field calls otherwise than the package, in any of its releases.
_RENAMED = {
    "init_fsdp_with_meta_device": "init_model_with_meta_device",
    "megatron_fsdp_unit_modules": "fsdp_unit_modules",
}
_PRECISION = ("grad_reduce_in_fp32", "preserve_fp32_weights")

_prepared: WeakSet[Optimizer] = WeakSet()


def megatron_fsdp() -> ModuleType:
    """The installed package.

    Raises:
        ImportError: it is not installed; says what to install.
    """
    try:
        with warnings.catch_warnings():  # it tells of optional packages that are not there
            warnings.simplefilter("ignore", UserWarning)
            return importlib.import_module("megatron_fsdp")
    except ModuleNotFoundError as error:
        raise ImportError(
            "strategy='megatron_fsdp' needs the package megatron-fsdp; install "
            "'shardwalk-parallelizer-core[megatron-fsdp]', or use strategy='fsdp2'"
        ) from error


def refuse_megatron_fsdp(mesh_context: MeshContext) -> None:
    """Refuse what cannot work before anything is imported, moved or communicated.

    Raises:
        ImportError: the package is not installed.
        ValueError: no CUDA; sizes or options that it, or this version, does not take.
    """
    config = mesh_context.strategy_config
    assert isinstance(config, MegatronFSDPConfig)
    package = megatron_fsdp()
    if mesh_context.tp_size > 1:
        raise ValueError(
            f"tp_size={mesh_context.tp_size} under strategy='megatron_fsdp' is not in this version "
            f"of shardwalk-parallelizer-core; use tp_size=1 or strategy='fsdp2'"
        )
    sharding_arguments(config, package)
    mesh = mesh_context.device_mesh
    if mesh is not None and (mesh.device_type != "cuda" or not torch.cuda.is_available()):
        raise ValueError(
            f"strategy='megatron_fsdp' runs on CUDA only, and this mesh is on {mesh.device_type}; "
            f"use strategy='fsdp2' or 'ddp'"
        )


def wrap_megatron_fsdp(model: nn.Module, mesh_context: MeshContext) -> nn.Module:
    """Wrap `model` for Megatron-FSDP; its state dict has the keys of `model`.

    Build the optimizer on the wrapper, and pass it to `shard_optimizer`.

    Raises:
        ValueError: a model on meta without `init_fsdp_with_meta_device`; no class to wrap.
    """
    config, mesh = mesh_context.strategy_config, mesh_context.device_mesh
    assert isinstance(config, MegatronFSDPConfig)
    assert mesh is not None
    package = megatron_fsdp()
    arguments = sharding_arguments(config, package)
    arguments["fsdp_unit_modules"] = unit_classes(model, config.megatron_fsdp_unit_modules)
    if not config.init_fsdp_with_meta_device:
        _refuse_meta(model)
    _tell_of_nan_check(config, package)
    wrapped: nn.Module = package.fully_shard_model(
        module=model,
        device_mesh=megatron_mesh(mesh),
        dp_shard_dim="dp_shard_cp",
        tp_dim="tp",
        device=current_device("cuda"),
        **arguments,
    )
    keep_original_keys(wrapped)
    _watch_steps()
    return wrapped


def shard_optimizer(optimizer: Optimizer) -> Optimizer:
    """Make an optimizer over the parameters of a Megatron-FSDP model part of it, in place.

    Any other optimizer is returned as it is, so that a script can call this for every strategy.
    """
    if not _is_over_megatron_fsdp(optimizer) or optimizer in _prepared:
        return optimizer
    _warn_once(
        "megatron-fsdp prepares an optimizer by a step with zero gradients: its step count is one "
        "ahead, and weight decay is applied once before training"
    )
    _prepared.add(optimizer)
    sharded: Optimizer = megatron_fsdp().fully_shard_optimizer(optimizer)
    return sharded


def sharding_arguments(config: MegatronFSDPConfig, package: ModuleType) -> dict[str, Any]:
    """What the installed `fully_shard_model` is called with for a config, units apart.

    Raises:
        ValueError: an option that this release does not have is set; names both.
    """
    takes = inspect.signature(package.fully_shard_model).parameters
    arguments: dict[str, Any] = {}
    for field in fields(config):
        name, value = field.name, getattr(config, field.name)
        target = _RENAMED.get(name, name)
        if name == "megatron_fsdp_unit_modules" or name == "activation_checkpointing":
            continue
        if target in takes:
            arguments[target] = value
        elif name == "check_for_nan_in_grad":
            continue  # a warning tells of it
        elif name in _PRECISION and "mixed_precision_policy" in takes:
            continue
        elif value != field.default:
            raise ValueError(
                f"MegatronFSDPConfig.{name}={value!r} is no option of the installed megatron-fsdp "
                f"{package.__version__}; use {name}={field.default!r}"
            )
    if "mixed_precision_policy" in takes:
        arguments["mixed_precision_policy"] = _precision(config, package)
    _refuse_combinations(config, package)
    return arguments


def _refuse_combinations(config: MegatronFSDPConfig, package: ModuleType) -> None:
    """Refuse what the package would take and do otherwise, as read in 0.6.1."""
    level, version = config.zero_dp_strategy, package.__version__
    if config.average_in_collective:
        raise ValueError(
            f"MegatronFSDPConfig.average_in_collective=True needs an expert mesh in megatron-fsdp "
            f"{version}, and strategy='megatron_fsdp' has none; use average_in_collective=False"
        )
    for name, first in (("overlap_grad_reduce", 2), ("overlap_param_gather", 3)):
        if level >= first and not getattr(config, name):
            raise ValueError(
                f"MegatronFSDPConfig.{name}=False does nothing with zero_dp_strategy={level}, "
                f"which always overlaps in megatron-fsdp {version}; use {name}=True, or a level "
                f"below {first}"
            )


def _precision(config: MegatronFSDPConfig, package: ModuleType) -> Any:
    reduced = torch.float32 if config.grad_reduce_in_fp32 else None
    main = torch.float32 if config.preserve_fp32_weights else None
    options = {
        "main_params_dtype": main,
        "main_grads_dtype": reduced,
        "grad_comm_dtype": reduced,
    }
    takes = inspect.signature(package.MixedPrecisionPolicy).parameters
    lacks = [name for name, value in options.items() if value is not None and name not in takes]
    if lacks:
        raise ValueError(
            f"MegatronFSDPConfig.grad_reduce_in_fp32={config.grad_reduce_in_fp32} and "
            f"preserve_fp32_weights={config.preserve_fp32_weights} need {', '.join(lacks)} in the "
            f"MixedPrecisionPolicy of megatron-fsdp {package.__version__}, which has none; leave "
            f"both False"
        )
    return package.MixedPrecisionPolicy(**{n: v for n, v in options.items() if n in takes})


def unit_classes(model: nn.Module, paths: list[str] | None) -> list[type[nn.Module]]:
    """The classes whose modules become units: those of `paths`, or those the model names itself.

    A model names them in `_no_split_modules`; else they are the classes of its blocks.

    Raises:
        ValueError: a path leads to no module class, or none of the classes is in the model.
    """
    there = {class_of(module) for module in model.modules()}
    if paths is not None:
        found = [_class_at(path) for path in paths]
        absent = [path for path, cls in zip(paths, found, strict=True) if cls not in there]
        if absent:
            raise ValueError(
                f"megatron_fsdp_unit_modules: {type(model).__name__} has no module of "
                f"{', '.join(absent)}; name classes that it is built of, or use None"
            )
        return found
    names = {name for module in model.modules() for name in _no_split_modules(module)}
    named = [cls for cls in there if cls.__name__ in names]
    blocks = [class_of(block) for stack in find_block_stacks(model) for _, block in stack.blocks]
    classes = sorted(named or set(blocks), key=lambda cls: cls.__qualname__)
    if not classes:
        raise ValueError(
            f"megatron_fsdp_unit_modules=None takes the classes of _no_split_modules or of blocks, "
            f"and {type(model).__name__} has neither; name the classes of its units"
        )
    return classes


def _no_split_modules(module: nn.Module) -> Iterator[str]:
    names = getattr(module, "_no_split_modules", None)
    return iter(names if isinstance(names, list | tuple | set) else ())


def _class_at(path: str) -> type[nn.Module]:
    try:
        found = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"megatron_fsdp_unit_modules: {path} cannot be imported: {error}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ValueError(f"megatron_fsdp_unit_modules: {path} is {found!r}, no class of modules")
    return found


def megatron_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh of two axes, dp_shard_cp and tp, that the package asks for; no group is made anew.

    The tp axis has one rank.
    """
    ranks = mesh.mesh.reshape(-1, 1)
    groups = [get_flat_mesh(mesh, "dp_shard_cp").get_group(), get_submesh(mesh, "tp").get_group()]
    return DeviceMesh.from_group(
        groups, mesh.device_type, mesh=ranks, mesh_dim_names=("dp_shard_cp", "tp")
    )


def _refuse_meta(model: nn.Module) -> None:
    on_meta = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if on_meta is not None:
        raise ValueError(
            f"strategy='megatron_fsdp' got {on_meta} on the meta device; call materialize(model, "
            f"...) first, or use init_fsdp_with_meta_device=True (reset_parameters of each module "
            f"then gives the values)"
        )


def _tell_of_nan_check(config: MegatronFSDPConfig, package: ModuleType) -> None:
    takes = inspect.signature(package.fully_shard_model).parameters
    if config.check_for_nan_in_grad and "check_for_nan_in_grad" not in takes:
        _warn_once(
            f"check_for_nan_in_grad does nothing in megatron-fsdp {package.__version__}: gradients "
            f"are not checked for NaN; use report_nan_in_param_grad=True for that, and "
            f"check_for_nan_in_grad=False against this warning"
        )


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=3)


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_refuse_unprepared)


def _refuse_unprepared(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _is_over_megatron_fsdp(optimizer) and optimizer not in _prepared:
        raise RuntimeError(
            f"this {type(optimizer).__name__} holds parameters of a Megatron-FSDP model, whose "
            f"weights its step would not reach; call shard_optimizer(optimizer) once, before"
        )


def _is_over_megatron_fsdp(optimizer: Optimizer) -> bool:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return any(hasattr(parameter, "_megatron_fsdp_model") for parameter in parameters)
