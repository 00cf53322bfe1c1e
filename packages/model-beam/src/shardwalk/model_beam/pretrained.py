"""Models from folders of Hugging Face files, and such folders from models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from shardwalk.model_beam.config import BeamConfig, checked_config
from shardwalk.parallelizer_core import export_safetensors, materialize
from shardwalk.parallelizer_core.tensor_parallel.local_parameters import shown

ARCHITECTURE = "BeamForCausalLM"
"""What transformers calls the model that reads the files."""

_DTYPE_KEYS = ("dtype", "torch_dtype")
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
}

_Model = TypeVar("_Model", bound=nn.Module)


def model_on_meta(
    make: Callable[..., _Model],
    config: BeamConfig | str | Path,
    *,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> _Model:
    """A model without memory for its weights, to be parallelized and then materialized.

    Args:
        make: the class of the model.
        config: of the model, or the folder with its ``config.json``.
        dtype: in which weights are stored, but for the router's weight and correction bias, which
            are float32 in any case. None is what the config names, and float32 where it names
            nothing.
        options: further arguments of `make`.

    Raises:
        FileNotFoundError: a folder without ``config.json``.
        TypeError: for a dtype that is none, and for what is neither config nor folder.
        ValueError: for one that is not float64, float32, float16 or bfloat16.
    """
    if isinstance(config, str | Path):
        config = BeamConfig.from_pretrained(config)
    config = checked_config(config)
    stored = _stored_dtype(config) if dtype is None else _checked(dtype)
    with torch.device("meta"):
        model = make(config, **options)
    return model.to(stored)


def load_pretrained(
    make: Callable[..., _Model],
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> _Model:
    """A whole model with the weights of a folder, for one process.

    To train it sharded, take `model_on_meta`, `parallelize_model` and then
    ``materialize(model, checkpoint=folder)``: each rank then reads only what it holds.

    Args:
        make, dtype, options: as in `model_on_meta`.
        folder: holds ``config.json`` and safetensors, in one file or in several with their index.
        device: of the weights; None is torch's default device.

    Raises:
        FileNotFoundError: a file is not there.
        StateMismatchError: a ValueError that lists each key that is missing, not known or of
            another shape.
        TypeError, ValueError: as in `model_on_meta`, and for a config that is not valid.
    """
    model = model_on_meta(make, folder, dtype=dtype, **options)
    materialize(model, checkpoint=folder, device=device)
    return model


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_file_size: int | str = "5GB",
) -> None:
    """Write ``config.json`` and weights as transformers loads them; all ranks call this together.

    Beside `export_safetensors`, whose arguments these are, the config then names the class that
    reads the files and the dtype of the weights.

    Args:
        model: with a `BeamConfig` as its ``config``, on any mesh.
        folder: made when it is not there.
        dtype: in which weights are written, but for those that are float32 in any case; None is
            that in which they are stored.
        max_file_size: in bytes, or a string such as "5GB".

    Raises:
        TypeError, ValueError, RuntimeError: those of `export_safetensors`.
    """
    written = _weights_dtype(model) if dtype is None else dtype
    config = checked_config(getattr(model, "config", None))
    described = _described(config, written)
    with shown(model, config=described):
        export_safetensors(model, folder, dtype=dtype, max_file_size=max_file_size)


def _stored_dtype(config: BeamConfig) -> torch.dtype:
    """What the config names."""
    named = [config.extra[key] for key in _DTYPE_KEYS if config.extra.get(key) is not None]
    if not named:
        return torch.float32
    name = str(named[0])
    if name not in _DTYPES:
        raise ValueError(f"dtype={name!r} in the config must be one of {list(_DTYPES)}")
    return _DTYPES[name]


def _checked(dtype: object) -> torch.dtype:
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype={dtype!r} must be a torch.dtype or None")
    if dtype not in _DTYPES.values():
        raise ValueError(f"dtype={dtype} must be one of {', '.join(map(str, _DTYPES.values()))}")
    return dtype


def _weights_dtype(model: nn.Module) -> torch.dtype:
    """The storage dtype of most weights."""
    sizes: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    return max(sizes, key=lambda dtype: sizes[dtype])


def _described(config: BeamConfig, dtype: torch.dtype) -> BeamConfig:
    """The config that stands beside weights of this dtype."""
    extra = {key: value for key, value in config.extra.items() if key not in _DTYPE_KEYS}
    extra |= {"architectures": [ARCHITECTURE], "dtype": str(dtype).removeprefix("torch.")}
    return replace(config, extra=extra)
