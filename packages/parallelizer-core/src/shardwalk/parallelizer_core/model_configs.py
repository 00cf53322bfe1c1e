"""The configurations that stand beside the weights of a model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwalk.parallelizer_core.base_models import base_model_of
from shardwalk.parallelizer_core.parallel_state import unwrap_model


def save_configs(models: Sequence[nn.Module], folder: Path, dtype: torch.dtype | None) -> None:
    """Let the `config` and `generation_config` of a model save themselves, if they can.

    A config that names a dtype and architectures (what transformers reads when it loads) is saved
    with those of the files and of the model's class; the model's own config does not change. A
    wrapper's config describes the model inside, whose names the files do not have: it is left out.
    """
    for name in ("config", "generation_config"):
        for model in models:
            inner = unwrap_model(model)
            config = getattr(inner, name, None)
            if callable(getattr(config, "save_pretrained", None)) and base_model_of(inner) is inner:
                _described(config, inner, dtype).save_pretrained(folder)
                break


def _described(config: Any, model: nn.Module, dtype: torch.dtype | None) -> Any:
    described = copy.deepcopy(config)
    names = [name for name in ("dtype", "torch_dtype") if hasattr(config, name)]
    if dtype is not None and names:
        setattr(described, names[0], str(dtype).removeprefix("torch."))
    if hasattr(config, "architectures"):
        described.architectures = [_class_of(model).__name__]
    return described


def _class_of(model: nn.Module) -> type:
    """The class of a model without what FSDP2 and compile made of it."""
    inner = getattr(model, "_orig_mod", model)
    return next(cls for cls in type(inner).__mro__ if not issubclass(cls, FSDPModule))
