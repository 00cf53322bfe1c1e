"""Wrappers that hold a base model and pass calls on to it, such as one that adds adapters."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn


def base_model_of(model: nn.Module) -> nn.Module:
    """The model that `model` wraps, or `model` itself.

    A wrapper names its base model by a method `get_base_model()`, as peft's does.
    """
    get_base_model = getattr(model, "get_base_model", None)
    base = get_base_model() if callable(get_base_model) else None
    if isinstance(base, nn.Module) and any(base is module for module in model.modules()):
        return base
    return model


def first_tensor_outside(base: nn.Module, model: nn.Module) -> str | None:
    """The name of a parameter or buffer of `model` that `base`, a part of it, does not hold."""
    inside = {id(tensor) for _, tensor in _tensors(base)}
    return next((name for name, tensor in _tensors(model) if id(tensor) not in inside), None)


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
