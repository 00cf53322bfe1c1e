"""From a model on any mesh to safetensors files that Hugging Face reads, tensor by tensor."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from shardwalk.parallelizer_core.agreed_failure import on_all_ranks
from shardwalk.parallelizer_core.checkpoint_reading import is_dcp_folder
from shardwalk.parallelizer_core.checkpoint_source import CASTABLE
from shardwalk.parallelizer_core.file_layout import FileLayout, file_layout
from shardwalk.parallelizer_core.fp32_pins import pinned_names
from shardwalk.parallelizer_core.gathering import (
    Gathered,
    HeldTensor,
    gather_to_first,
    held_tensor,
    plan_gathering,
    whole_tensor,
)
from shardwalk.parallelizer_core.model_configs import save_configs
from shardwalk.parallelizer_core.model_sequences import (
    Models,
    as_models,
    reshard,
    shared_mesh_context,
)
from shardwalk.parallelizer_core.model_tensors import ModelTensor, state_tensors
from shardwalk.parallelizer_core.parallel_state import unwrap_model
from shardwalk.parallelizer_core.safetensors_writing import DTYPE_NAMES, FolderWriter
from shardwalk.parallelizer_core.state_dict_adapter import adapter_of
from shardwalk.parallelizer_core.state_dicts import model_state_dict
from shardwalk.parallelizer_core.wrapped_layers import wrapped_layers

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_AGREE_EVERY = 1 << 30  # bytes: soon after a failure, and well within a group's timeout


@torch.no_grad()
def export_safetensors(
    model_or_models: Models,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_file_size: int | str = "5GB",
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write a model's weights as Hugging Face reads them; all ranks call this together.

    The files hold the state dict of one process, parameters and persistent buffers, in the layout
    of the model's ``state_dict_adapter`` (see `StateDictAdapter`). A tied tensor stands there once,
    under the name the model lists first. One tensor at a time comes to the first rank, which alone
    touches the folder: beside the shards, that rank holds one full tensor, the others hold none.

    Weights go to ``model.safetensors``, or to ``model-00001-of-00003.safetensors`` and so on with
    an index. They take these names when all of them are whole; until then an earlier export in the
    folder stays as it is, and then its files go. A ``config`` and a ``generation_config`` of the
    model with a method ``save_pretrained`` are saved beside them.

    Args:
        model_or_models: the model, or the pipeline stages of this rank.
        folder: made when it is not there.
        dtype: what floating tensors are cast to, other than those that the model pins to fp32
            (``_keep_in_fp32_modules_strict``); float64, float32, float16 or bfloat16.
        max_file_size: in bytes, or a string such as "5GB" or "500MiB"; a tensor that is larger has
            a file of its own.
        process_group: the ranks that hold the model, when these are not all and
            `parallelize_model` was not told so.

    Raises:
        TypeError: for an option of another type, or a state dict that holds more than tensors.
        ValueError: for values on meta, by name; for dtypes that the format lacks; for adapters
            around layers (LoRA); for a state-dict adapter that gives two tensors one key or not
            what it announced; for a folder that is a file or holds a distributed checkpoint.
        RuntimeError: on every rank, when writing fails on the first, or a rank raised one of the
            above.
    """
    models = as_models(model_or_models)
    folder = _folder(folder)
    _check_dtype(dtype)
    limit = _bytes(max_file_size)
    group = _group(models, process_group)
    reshard(models)
    entries = on_all_ranks(lambda: _checked_tensors(models, folder), group)
    plan = plan_gathering(_all_tables(_table(models, entries), group))
    layout = file_layout(plan, adapter_of(models), dtype, limit)
    _write(models, entries, layout, folder, group)


def _write(
    models: Sequence[nn.Module],
    entries: Sequence[ModelTensor],
    layout: FileLayout,
    folder: Path,
    group: dist.ProcessGroup | None,
) -> None:
    tensors = {entry.name: entry.tensor for entry in entries}
    first = _FirstRank(group)
    writer = FolderWriter(folder, layout.files)
    with writer if first.is_here else nullcontext():
        first.attempt(writer.make_folder)
        first.attempt(lambda: save_configs(models, writer.aside, layout.main_dtype))
        first.agree()
        moved = 0
        for item in layout.items:
            _write_tensor(item, tensors, layout, writer, first)
            moved += item.nbytes
            if moved >= _AGREE_EVERY:
                first.agree()
                moved = 0
        first.attempt(writer.publish)
        first.agree()


def _write_tensor(
    item: Gathered,
    tensors: dict[str, torch.Tensor],
    layout: FileLayout,
    writer: FolderWriter,
    first: _FirstRank,
) -> None:
    held = item.held
    blocks = gather_to_first(item, tensors.get(held.name), first.group)

    def write() -> None:
        for key, tensor in layout.file_tensors(held, whole_tensor(item, blocks)):
            writer.add(key, tensor, layout.stored_dtype(held, tensor.dtype))

    first.attempt(write)
    for _ in blocks:  # the part of the other ranks, and of the first when it has failed
        pass


class _FirstRank:
    """Does on the first rank of a group what it alone does, and nothing more once that failed."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.is_here = not dist.is_initialized() or dist.get_rank(group) == 0
        self._error: Exception | None = None

    def attempt(self, work: Callable[[], None]) -> None:
        """Do the work, and keep what it raises for `agree`."""
        if self.is_here and self._error is None:
            try:
                work()
            except Exception as error:
                self._error = error

    def agree(self) -> None:
        """Raise on every rank what the first rank kept."""
        on_all_ranks(self._raise, self.group)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


def _folder(folder: object) -> Path:
    if not isinstance(folder, str | Path):
        raise TypeError(f"folder must be a path (str or Path), got {folder!r}")
    return Path(folder)


def _check_dtype(dtype: object) -> None:
    if dtype is None or dtype in CASTABLE:
        return
    allowed = ", ".join(sorted(map(str, CASTABLE)))
    kind = ValueError if isinstance(dtype, torch.dtype) else TypeError
    raise kind(f"dtype={dtype!r} must be None or one of {allowed}")


def _bytes(size: object) -> int:
    """The limit in bytes."""
    allowed = 'a number of bytes, at least 1, or a string such as "5GB" or "500MiB"'
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise TypeError(f"max_file_size={size!r} must be {allowed}")
    number = float(size) if isinstance(size, int) else _parsed(size)
    if number < 1:
        raise ValueError(f"max_file_size={size!r} must be {allowed}")
    return int(number)


def _parsed(size: str) -> float:
    """Bytes in a string with a unit; 0 for what is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B)", size.strip(), re.IGNORECASE)
    unit = _UNITS.get(match[2].upper(), 0) if match else 0
    return float(match[1]) * unit if match else 0.0


def _group(
    models: Sequence[nn.Module], given: dist.ProcessGroup | None
) -> dist.ProcessGroup | None:
    """The ranks that take part; None means all.

    Raises:
        ValueError: when they are not those of the mesh, or this rank is not one of them.
    """
    context = shared_mesh_context(models)
    group = context.process_group if given is None and context is not None else given
    if not dist.is_initialized():
        return None
    if dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in process_group: do not call this there")
    mesh = None if context is None else context.device_mesh
    ranks = dist.get_world_size(group)
    if mesh is not None and mesh.size() != ranks:
        raise ValueError(
            f"the model is on a mesh of {mesh.size()} ranks, and {ranks} would take part; pass as "
            f"process_group= the group of the ranks of the mesh"
        )
    return group


def _checked_tensors(models: Sequence[nn.Module], folder: Path) -> list[ModelTensor]:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"folder={str(folder)!r} is a file; name a folder to export to")
    if is_dcp_folder(folder):
        raise ValueError(
            f"folder={str(folder)!r} holds a distributed checkpoint, and who loads it would not "
            f"know which of the two is meant; name another folder"
        )
    _refuse_adapters(models)
    entries = state_tensors(models)
    _refuse("have no values yet; call materialize(model, ...) first", entries, _has_no_values)
    _refuse(
        f"have dtypes that safetensors lacks; allowed: {', '.join(sorted(map(str, DTYPE_NAMES)))}",
        entries,
        lambda entry: entry.tensor.dtype not in DTYPE_NAMES,
    )
    names = {name for entry in entries for name in entry.names}
    others = [name for name in model_state_dict(models) if name not in names]
    if others:
        raise TypeError(
            f"safetensors hold parameters and buffers only, and the state dict has more: "
            f"{', '.join(others)}; keep extra state of modules in buffers"
        )
    return entries


def _refuse_adapters(models: Sequence[nn.Module]) -> None:
    for model in models:
        found = list(wrapped_layers(unwrap_model(model)))
        if found:
            raise ValueError(
                f"{found[0]} (of {len(found)} layers) has an adapter around it, and no model "
                f"reads weights under its names; export what model.merge_and_unload() returns, or "
                f"save the adapters alone: gather them from model_state_dict(model), and let the "
                f"first rank pass them to the wrapper's save_pretrained(folder, state_dict=...)"
            )


def _has_no_values(entry: ModelTensor) -> bool:
    return is_lazy(entry.tensor) or entry.tensor.is_meta


def _refuse(
    what: str, entries: Sequence[ModelTensor], applies: Callable[[ModelTensor], bool]
) -> None:
    names = [entry.name for entry in entries if applies(entry)]
    if names:
        more = f" and {len(names) - 20} more" if len(names) > 20 else ""
        raise ValueError(f"{', '.join(names[:20])}{more} {what}")


def _table(models: Sequence[nn.Module], entries: Sequence[ModelTensor]) -> list[HeldTensor]:
    names = [name for entry in entries for name in entry.names]
    pinned = set().union(*(pinned_names(unwrap_model(model), names) for model in models))
    return [held_tensor(entry, pinned=not pinned.isdisjoint(entry.names)) for entry in entries]


def _all_tables(table: list[HeldTensor], group: dist.ProcessGroup | None) -> list[list[HeldTensor]]:
    """What every rank of the group holds."""
    if not dist.is_initialized():
        return [table]
    tables: list[list[HeldTensor]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(tables, table, group=group)
    return tables
