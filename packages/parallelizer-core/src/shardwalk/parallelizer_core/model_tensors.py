"""The tensors of a model by canonical name, with every place that holds them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwalk.parallelizer_core._torch_compat import is_persistent_buffer
from shardwalk.parallelizer_core.parallel_state import unwrap_model

# What wrappers of torch (activation checkpointing, compile) put between a module and its child.
_WRAPPER_PARTS = frozenset({"_checkpoint_wrapped_module", "_orig_mod"})


@dataclass(eq=False, kw_only=True)
class ModelTensor:
    """One tensor of a model.

    Attributes:
        names: its canonical names, in module order; more than one where it is tied.
        tensor: the tensor itself.
        places: every module and attribute that holds it.
        persistent: whether it belongs to the state dict.
    """

    tensor: Tensor
    persistent: bool
    names: list[str] = field(default_factory=list)
    places: list[tuple[nn.Module, str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The first of the names."""
        return self.names[0]

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter, not a buffer or an attribute."""
        return isinstance(self.tensor, nn.Parameter)


def canonical_name(name: str) -> str:
    """A parameter's name without what wrappers added to it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_PARTS)


def unwrapped(module: nn.Module) -> nn.Module:
    """What stands in torch's wrappers; `module` itself where it is none."""
    inner = next((child for n, child in module.named_children() if n in _WRAPPER_PARTS), None)
    return module if inner is None else unwrapped(inner)


def model_tensors(models: Sequence[nn.Module]) -> list[ModelTensor]:
    """Parameters, buffers and meta tensors in plain attributes, each once, in module order."""
    found: dict[int, ModelTensor] = {}
    for model in models:
        for prefix, module in unwrap_model(model).named_modules(remove_duplicate=False):
            for attribute, tensor, persistent in _tensors_of(module):
                entry = found.setdefault(
                    id(tensor), ModelTensor(tensor=tensor, persistent=persistent)
                )
                _add(entry, canonical_name(f"{prefix}.{attribute}".lstrip(".")), module, attribute)
                entry.persistent |= persistent
    return list(found.values())


def state_tensors(models: Sequence[nn.Module]) -> list[ModelTensor]:
    """What the state dict holds: parameters and persistent buffers."""
    return [entry for entry in model_tensors(models) if entry.persistent]


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds; writing to it writes to the tensor."""
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


def local_index(tensor: Tensor) -> tuple[slice, ...]:
    """Where in the full tensor this rank's part lies.

    Raises:
        NotImplementedError: when it is not one block, which no style of shardwalk makes.
    """
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    chunks = tensor.__create_chunk_list__()
    if len(chunks) != 1 or tuple(chunks[0].sizes) != tuple(local_part(tensor).shape):
        raise NotImplementedError(f"placements {tensor.placements} do not hold one block per rank")
    pairs = zip(chunks[0].offsets, chunks[0].sizes, strict=True)
    return tuple(slice(start, start + size) for start, size in pairs)


@torch.no_grad()
def write_full(tensor: Tensor, full: Tensor) -> None:
    """Copy this rank's part of a full tensor into `tensor`; no communication."""
    local_part(tensor).copy_(full[local_index(tensor)])


def _add(entry: ModelTensor, name: str, module: nn.Module, attribute: str) -> None:
    if name not in entry.names:
        entry.names.append(name)
    if not any(place[0] is module and place[1] == attribute for place in entry.places):
        entry.places.append((module, attribute))


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        yield name, parameter, True
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        yield name, buffer, is_persistent_buffer(module, name)
    for name, value in vars(module).items():
        if isinstance(value, Tensor) and value.is_meta:
            yield name, value, False
