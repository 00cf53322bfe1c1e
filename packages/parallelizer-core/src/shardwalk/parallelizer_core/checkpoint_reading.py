"""Readers of checkpoint files: what tensors there are, and blocks of them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwalk.parallelizer_core.state_dict_adapter import Index

SAFETENSORS_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """Shape and dtype of a tensor in a file; dtype None where torch has none like it."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None


class CheckpointReader(Protocol):
    """What `materialize` reads from; give it one of your own for other file formats."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors by key; the same on every rank."""
        ...

    def read(self, key: str, index: Index) -> Tensor:
        """One block of a tensor, on the CPU, in the file's dtype."""
        ...


class SafetensorsReader:
    """Reads a safetensors file, or a folder of them with or without an index.

    Attributes:
        bytes_read: the size of all blocks read so far.

    Raises:
        ImportError: without the safetensors package.
        FileNotFoundError: when there is no such file, or the index names one that is not there.
        ValueError: when two files of the folder hold the same key, or a file or the index is
            damaged.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError as error:
            raise ImportError(
                "reading safetensors needs the package safetensors; install "
                "shardwalk-parallelizer-core[safetensors]"
            ) from error
        self.bytes_read = 0
        self._files: dict[str, Any] = {}
        self._tensors: dict[str, TensorInfo] = {}
        for file in _safetensors_files(Path(path)):
            try:
                handle = safe_open(file, framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{file} is not a whole safetensors file: {error}") from error
            self._add(file, handle)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors by key."""
        return self._tensors

    def read(self, key: str, index: Index) -> Tensor:
        """One block of a tensor; only its bytes are read."""
        shape = [part.stop - part.start for part in index]
        part = self._files[key].get_slice(key)
        block: Tensor = part[index] if index else self._files[key].get_tensor(key)
        self.bytes_read += math.prod(shape) * block.element_size()
        return block

    def _add(self, file: Path, handle: Any) -> None:
        for key in handle.keys():  # noqa: SIM118 - a handle is no mapping
            if key in self._files:
                raise ValueError(f"{file} holds {key!r}, which another file beside it holds too")
            part = handle.get_slice(key)
            self._files[key] = handle
            self._tensors[key] = TensorInfo(
                shape=tuple(part.get_shape()), dtype=SAFETENSORS_DTYPES.get(part.get_dtype())
            )


def is_dcp_folder(path: Path) -> bool:
    """Whether the path is a folder that torch.distributed.checkpoint wrote."""
    return (path / ".metadata").is_file()


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each key, as the index says."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{index} is not valid JSON: {error}") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index} has no weight_map, which says in which file each tensor is")
    return weight_map


def _safetensors_files(path: Path) -> list[Path]:
    if not path.exists():
        raise FileNotFoundError(f"checkpoint {path} does not exist")
    if path.is_file():
        return [path]
    for index in sorted(path.glob("*.safetensors.index.json")):
        names = set(_weight_map(index).values())
        files = [path / name for name in sorted(names)]
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise FileNotFoundError(f"{index} names files that are not there: {', '.join(absent)}")
        return files
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"checkpoint {path} holds neither safetensors files nor a distributed checkpoint"
        )
    return files
