"""What is kept of a training run, in the same form for the reference and the subject."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")

LOSS, NORM = "loss", "gradient norm"
INITIAL, GRADIENT, PARAMETER = "initial parameter", "gradient", "parameter"
BUFFER, EXTRA = "buffer", "extra"


@dataclass(kw_only=True)
class Record:
    """Full CPU tensors by section and name, and the structure of the model.

    Attributes:
        values: section -> name -> tensor.
        ties: for each parameter name, the names that share its tensor.
        trainable: the names of the parameters that train.
    """

    values: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    ties: dict[str, list[str]] = field(default_factory=dict)
    trainable: list[str] = field(default_factory=list)

    def put(self, section: str, name: str, value: Tensor) -> None:
        """Keep a value whole and on the CPU; collective for a DTensor."""
        self.values.setdefault(section, {})[name] = full(value)

    def put_start(self, model: nn.Module, *, whole: bool) -> None:
        """Keep which parameters are tied and which train, and with `whole` their values too."""
        groups: dict[int, list[str]] = {}
        for name, parameter in named_parameters(model):
            if whole:
                self.put(INITIAL, name, parameter)
            groups.setdefault(id(parameter), []).append(name)
            if parameter.requires_grad:
                self.trainable.append(name)
        self.ties = {name: sorted(group) for group in groups.values() for name in group}

    def put_gradients(self, model: nn.Module) -> None:
        """Keep the gradients of all trainable parameters; none means zero."""
        for name, parameter in named_parameters(model):
            if parameter.requires_grad:
                gradient = parameter.grad
                if gradient is None:
                    gradient = torch.zeros_like(parameter)
                self.put(GRADIENT, name, gradient)

    def put_state(self, model: nn.Module, extras: Mapping[str, Tensor]) -> None:
        """Keep parameters, buffers and extra values after the last step."""
        for name, parameter in named_parameters(model):
            self.put(PARAMETER, name, parameter)
        for name, buffer in unwrap(model).named_buffers(remove_duplicate=False):
            self.put(BUFFER, canonical_name(name), buffer)
        for name, value in extras.items():
            self.put(EXTRA, name, value)

    def digests(self) -> dict[str, str]:
        """A checksum of every value's bits, by which ranks compare what they hold."""
        return {
            f"{section} {name}": digest(value)
            for section, values in self.values.items()
            for name, value in values.items()
        }


def full(value: Tensor) -> Tensor:
    """The whole tensor as a plain CPU copy; collective for a DTensor."""
    value = value.detach()
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.to("cpu", copy=True)


def digest(value: Tensor) -> str:
    """A checksum of a tensor's dtype, shape and bits."""
    content = value.contiguous().reshape(-1).view(torch.uint8)
    header = f"{value.dtype}{tuple(value.shape)}".encode()
    return hashlib.blake2b(header + content.numpy().tobytes(), digest_size=16).hexdigest()


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside a DDP wrapper, else the model itself."""
    inner: Any = model.module if isinstance(model, DistributedDataParallel) else model
    unwrapped: nn.Module = inner
    return unwrapped


def canonical_name(name: str) -> str:
    """The name as of the model before anything wrapped or compiled it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """All parameters under all their names: a tied one comes once per name."""
    for name, parameter in unwrap(model).named_parameters(remove_duplicate=False):
        yield canonical_name(name), parameter
