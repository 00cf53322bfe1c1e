"""From a model on the meta device to real weights, each rank making only what it holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwalk.parallelizer_core._torch_compat import (
    move_hooks,
    offloaded_parameters,
)
from shardwalk.parallelizer_core.base_files import BaseFiles, BaseSource
from shardwalk.parallelizer_core.checkpoint_reading import (
    CheckpointReader,
    SafetensorsReader,
    is_dcp_folder,
)
from shardwalk.parallelizer_core.checkpoint_source import ReaderSource
from shardwalk.parallelizer_core.dcp_source import DCPSource
from shardwalk.parallelizer_core.fp32_pins import pin_fp32_parameters
from shardwalk.parallelizer_core.initialization import FunctionSource, InitFunction
from shardwalk.parallelizer_core.model_sequences import (
    Models,
    as_models,
    reshard,
    shared_mesh_context,
)
from shardwalk.parallelizer_core.model_tensors import ModelTensor, model_tensors, write_full
from shardwalk.parallelizer_core.module_initializers import ModuleInitializers, ModuleSource
from shardwalk.parallelizer_core.non_persistent_buffers import rebuild_buffers
from shardwalk.parallelizer_core.parallel_state import fsdp_units, unwrap_model
from shardwalk.parallelizer_core.state_dict_adapter import adapter_of

Checkpoint = str | Path | CheckpointReader
Init = InitFunction | Literal["reset_parameters"]


class _Source(Protocol):
    def check(self, entries: Sequence[ModelTensor]) -> None: ...

    def fill(self, entries: Sequence[ModelTensor]) -> None: ...


@torch.no_grad()
def materialize(
    model_or_models: Models,
    *,
    checkpoint: Checkpoint | None = None,
    init: Init | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    ignore: Sequence[str] = (),
) -> None:
    """Give a model real weights, in place: parameters, buffers, ties.

    Works on parallelized models and on plain ones, such as one that DDP is about to wrap.
    Parameters keep identity, dtype, gradient hooks and ``requires_grad``; what is on meta gets
    memory on the device of its mesh (or where an offload policy keeps it). No communication.

    From a ``checkpoint`` each rank reads the blocks it holds. Files may differ from the model in
    names and layout (the model's attribute ``state_dict_adapter``, see `StateDictAdapter`) and in
    floating dtype (values are cast to the model's). A tied tensor may stand under any of its names.

    With ``init`` the values depend on the seed and on names, never on the mesh: every mesh gets bit
    for bit what one process gets. A function ``init(fqn, tensor, generator)`` fills each full
    parameter in place, on the CPU; ``"reset_parameters"`` runs the initializers of the modules
    (``reset_parameters``) or of the model (``_init_weights``). Persistent buffers are rebuilt.

    With both, the files are those of a base model, and ``init``, a function, fills what adapters
    around its layers add (those of peft).

    Buffers outside the state dict are rebuilt as constructed, in the dtype of construction, from
    ``compute_buffers(device)`` of their module, or by its constructor when all its arguments are
    attributes of the same names, or by the model's initializers.

    Args:
        model_or_models: the model, or the pipeline stages of this rank.
        checkpoint: a safetensors file or folder, a folder of torch.distributed.checkpoint (one of
            `save_checkpoint` included), or a `CheckpointReader`.
        init: an init function or ``"reset_parameters"``; one of the two is given, or both for a
            model with adapters.
        seed: what `init` depends on.
        device: where tensors without a mesh go; by default the mesh's device, else torch's default.
        ignore: patterns (``fnmatch``) of names in the checkpoint which the model lacks.

    Raises:
        StateMismatchError: a ValueError listing all missing, unexpected and differing names;
            raised on every rank before anything is written.
        TypeError: for an option of another type.
        ValueError: for options that do not fit together, a file that cannot be read, a buffer
            nobody can rebuild or a parameter nobody initializes, by name, before anything is
            written.
    """
    models = as_models(model_or_models)
    _check_options(checkpoint, init, ignore, seed)
    reshard(models)
    for model in models:
        if next(fsdp_units(model), None) is None:  # units were made with the pins in place
            pin_fp32_parameters(model)
    entries = model_tensors(models)
    _check_containers(models, entries)
    initializers = ModuleInitializers(models, seed)
    target = _target_device(models, entries, device)
    rebuilt = [entry for entry in entries if _is_rebuilt(entry, from_init=checkpoint is None)]
    filled = [entry for entry in entries if entry.persistent and entry not in rebuilt]
    source = _source(models, checkpoint, init, seed, ignore, initializers)
    source.check(filled)
    values = rebuild_buffers(rebuilt, target, initializers)
    _allocate(models, filled, target)
    source.fill(filled)
    for entry, value in zip(rebuilt, values, strict=True):
        _set_buffer(entry, value)
    _check_nothing_on_meta(models)


def _check_options(checkpoint: object, init: object, ignore: object, seed: object) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an integer, got {seed!r}")
    is_reader = hasattr(checkpoint, "tensors") and hasattr(checkpoint, "read")
    if not (checkpoint is None or isinstance(checkpoint, str | Path) or is_reader):
        raise TypeError(
            f"checkpoint must be a path (str or Path) or a CheckpointReader, got {checkpoint!r}"
        )
    if checkpoint is None and init is None:
        raise ValueError("materialize needs a checkpoint or init, got neither")
    if init is not None and init != "reset_parameters" and not callable(init):
        raise ValueError(
            f"init must be a function (fqn, tensor, generator) or 'reset_parameters', got {init!r}"
        )
    if isinstance(ignore, str):
        raise TypeError(f"ignore must be a sequence of patterns, got the string {ignore!r}")
    if ignore and checkpoint is None:
        raise ValueError("ignore= names what to leave unread in a checkpoint; init reads none")


def _source(
    models: list[nn.Module],
    checkpoint: Checkpoint | None,
    init: Init | None,
    seed: int,
    ignore: Sequence[str],
    initializers: ModuleInitializers,
) -> _Source:
    if checkpoint is not None and init is not None:
        return _base_source(models, checkpoint, init, seed, ignore)
    if init == "reset_parameters":
        return ModuleSource(initializers)
    if init is not None:
        return FunctionSource(init, seed)
    if isinstance(checkpoint, str | Path):
        if is_dcp_folder(Path(checkpoint)):
            return DCPSource(Path(checkpoint), ignore)
        reader: CheckpointReader = SafetensorsReader(checkpoint)
        return ReaderSource(reader, adapter_of(models), ignore, f"checkpoint {checkpoint}")
    assert checkpoint is not None
    return ReaderSource(checkpoint, adapter_of(models), ignore, "the checkpoint")


def _base_source(
    models: list[nn.Module],
    checkpoint: Checkpoint,
    init: Init,
    seed: int,
    ignore: Sequence[str],
) -> _Source:
    """The files of a base, and a function for what adapters add to it."""
    base = BaseFiles(models, adapter_of(models))
    if not base.has_adapters:
        raise ValueError(
            "materialize got both checkpoint and init, and the model has no adapters for init to "
            "fill; give one of the two"
        )
    if init == "reset_parameters":
        raise ValueError(
            "init='reset_parameters' beside a checkpoint would draw both factors of each adapter, "
            "and so start away from the base; use a function that zeroes one of them"
        )
    if isinstance(checkpoint, str | Path):
        if is_dcp_folder(Path(checkpoint)):
            raise ValueError(
                f"init beside checkpoint={str(checkpoint)!r}: a folder of torch.distributed."
                f"checkpoint is read whole; give safetensors files of the base"
            )
        checkpoint = SafetensorsReader(checkpoint)
    files = ReaderSource(checkpoint, base, ignore, "the checkpoint of the base")
    return BaseSource(base, files, FunctionSource(init, seed))


def _is_rebuilt(entry: ModelTensor, *, from_init: bool) -> bool:
    """Whether the module's construction gives the values, not the checkpoint or the function."""
    if entry.is_parameter:
        return False
    return from_init if entry.persistent else entry.tensor.is_meta


def _target_device(
    models: list[nn.Module], entries: list[ModelTensor], given: torch.device | str | None
) -> torch.device:
    """The device for plain tensors.

    Raises:
        ValueError: for a given device that is meta, or of another type than the mesh's.
    """
    mesh_types = {
        e.tensor.device_mesh.device_type for e in entries if isinstance(e.tensor, DTensor)
    }
    context = shared_mesh_context(models)
    if context is not None and context.device_mesh is not None:
        mesh_types.add(context.device_mesh.device_type)
    if given is None:
        default = torch.get_default_device()
        plain = "cpu" if default.type == "meta" else default
        return torch.device(min(mesh_types)) if mesh_types else torch.device(plain)
    device = torch.device(given)
    if device.type == "meta" or any(device.type != kind for kind in mesh_types):
        allowed = ", ".join(sorted(mesh_types)) or "a real one"
        raise ValueError(f"device={str(given)!r} does not fit the model, allowed: {allowed}")
    return device


def _allocate(models: list[nn.Module], entries: list[ModelTensor], target: torch.device) -> None:
    """Give what is on meta memory, under the same identity."""
    offloaded = set().union(*(offloaded_parameters(model) for model in models))
    for entry in entries:
        tensor = entry.tensor
        if tensor.is_meta:
            device = torch.device("cpu") if id(tensor) in offloaded else target
            entry.tensor = _replace(entry, torch.empty_like(tensor, device=device))


def _replace(entry: ModelTensor, real: Tensor) -> Tensor:
    """Put a real tensor in the place of one on meta; a parameter stays the same object."""
    old = entry.tensor
    if not isinstance(old, nn.Parameter):
        return _set_everywhere(entry, real)
    new = nn.Parameter(real, requires_grad=old.requires_grad)
    vars(new).update(vars(old))
    move_hooks(old, new)
    try:
        torch.utils.swap_tensors(old, new)
    except RuntimeError:  # someone holds a weak reference, as torch's LSTM does
        return _set_everywhere(entry, new)
    return old


def _set_everywhere(entry: ModelTensor, tensor: Tensor) -> Tensor:
    for module, attribute in entry.places:
        setattr(module, attribute, tensor)
    return tensor


def _set_buffer(entry: ModelTensor, value: Tensor) -> None:
    """Set a rebuilt value; a persistent buffer keeps its dtype, any other gets the value's."""
    if not entry.tensor.is_meta:
        write_full(entry.tensor, value)
        return
    dtype = entry.tensor.dtype if entry.persistent else value.dtype
    if isinstance(entry.tensor, DTensor):
        real = torch.empty_like(entry.tensor, dtype=dtype, device=value.device)
        write_full(real, value)
        _set_everywhere(entry, real)
    else:
        _set_everywhere(entry, value.to(dtype))


def _check_nothing_on_meta(models: list[nn.Module]) -> None:
    left = [entry.name for entry in model_tensors(models) if entry.tensor.is_meta]
    assert not left, f"still on meta: {', '.join(left)}"


def _check_containers(models: list[nn.Module], entries: list[ModelTensor]) -> None:
    """Raise for meta tensors in lists and dicts: nobody knows what they hold."""
    known = {id(entry.tensor) for entry in entries}
    hidden = [
        f"{prefix}.{name}".lstrip(".")
        for model in models
        for prefix, module in unwrap_model(model).named_modules()
        for name, value in vars(module).items()
        if any(item.is_meta and id(item) not in known for item in _tensors_in(value))
    ]
    if hidden:
        raise ValueError(
            f"containers hold tensors on meta that cannot be filled: {', '.join(hidden)}; make "
            "them buffers"
        )


def _tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        yield from (item for item in value if isinstance(item, Tensor))
