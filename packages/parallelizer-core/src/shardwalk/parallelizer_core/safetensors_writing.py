"""Writing safetensors files tensor by tensor, and a folder of them that is whole or not there.

The library's `save_file` wants every tensor of a file at once. The format itself does not: eight
bytes of length, a JSON header, then the tensors one behind the other. Names and shapes are known
beforehand, so room for the header is kept, tensors are appended, and the header is filled in last,
with the dtypes that came. All a writer holds is one staging buffer.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from shardwalk.parallelizer_core.checkpoint_reading import SAFETENSORS_DTYPES

DTYPE_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
INDEX_NAME = "model.safetensors.index.json"
STAGING_BYTES = 1 << 24

_PART = ".part"
_OWN_NAMES = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors|model\.safetensors\.index\.json")
_WIDEST_OFFSET = 10**16
_METADATA = {"__metadata__": {"format": "pt"}}

Shapes = Mapping[str, Sequence[int]]


class SafetensorsWriter:
    """One file, to which tensors are appended.

    Args:
        path: the file.
        shapes: every tensor that will come, by key, in the order of the file.
    """

    def __init__(self, path: Path, shapes: Shapes) -> None:
        widest = max(DTYPE_NAMES.values(), key=len)
        bound = {
            key: _entry(widest, shape, _WIDEST_OFFSET, _WIDEST_OFFSET)
            for key, shape in shapes.items()
        }
        size = len(_json(_METADATA | bound))
        self._header_size = size + -size % 8  # the data starts at a multiple of 8 bytes
        self._header: dict[str, Any] = {}
        self._offset = 0
        self._file = path.open("wb")
        self._file.seek(8 + self._header_size)

    @property
    def data_bytes(self) -> int:
        """The size of the tensors so far."""
        return self._offset

    def add(self, key: str, tensor: Tensor, dtype: torch.dtype) -> None:
        """Append a tensor of any device and strides, cast to `dtype` on the way."""
        start = self._offset
        buffer = bytearray(min(STAGING_BYTES, tensor.numel() * dtype.itemsize))
        for piece in _pieces(tensor.detach(), STAGING_BYTES // dtype.itemsize):
            staged = torch.frombuffer(buffer, dtype=dtype, count=piece.numel())
            staged.view(piece.shape).copy_(piece)
            self._file.write(memoryview(buffer)[: staged.nbytes])
            self._offset += staged.nbytes
        self._header[key] = _entry(DTYPE_NAMES[dtype], tensor.shape, start, self._offset)

    def finish(self) -> None:
        """Write the header, and all of it to the disk."""
        header = _json(_METADATA | self._header).ljust(self._header_size)
        assert len(header) == self._header_size
        self._file.seek(0)
        self._file.write(len(header).to_bytes(8, "little") + header)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Close the file as it is."""
        self._file.close()


class FolderWriter:
    """A folder of safetensors files as Hugging Face names them.

    Files carry the suffix ``.part`` until `publish` renames them all; only then do the files of an
    earlier export go. Left by an error, the folder is as it was before.

    Args:
        folder: made when it is not there.
        files: what each file will hold, in the order in which `add` brings it.

    Attributes:
        aside: a folder in it; `publish` moves the files in there up, beside the weights.
    """

    def __init__(self, folder: Path, files: Sequence[Shapes]) -> None:
        self._folder = folder
        self.aside = folder / f"export{_PART}"
        self._names = shard_names(len(files))
        self._pending = iter(zip(self._names, files, strict=True))
        self._weight_map: dict[str, str] = {}
        self._total = 0
        self._writer: SafetensorsWriter | None = None
        self._left: set[str] = set()

    def __enter__(self) -> FolderWriter:
        return self

    def make_folder(self) -> None:
        """Make the folder, without what an export that ended early left in it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._remove_parts()
        self.aside.mkdir()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._writer is not None:
            self._writer.abandon()
        if self._folder.is_dir():
            self._remove_parts()

    def add(self, key: str, tensor: Tensor, dtype: torch.dtype) -> None:
        """Append a tensor to the file that is to hold it."""
        writer = self._writer or self._open(*next(self._pending))
        writer.add(key, tensor, dtype)
        self._left.remove(key)
        if not self._left:
            self._finish(writer)

    def publish(self) -> None:
        """Put the files in the place of those of an earlier export."""
        for name, shapes in self._pending:  # the one file of a model without tensors
            self._finish(self._open(name, shapes))
        assert not self._left, f"not written: {', '.join(sorted(self._left))}"
        names = self._names
        if len(names) > 1:
            self._write_index()
            names = [*names, INDEX_NAME]  # last: without it nobody takes the new files for whole
        for old in exported_files(self._folder):
            old.unlink()
        for path in self.aside.iterdir():
            os.replace(path, self._folder / path.name)
        for name in names:
            os.replace(self._part(name), self._folder / name)

    def _open(self, name: str, shapes: Shapes) -> SafetensorsWriter:
        self._left = set(shapes)
        self._weight_map |= dict.fromkeys(shapes, name)
        self._writer = SafetensorsWriter(self._part(name), shapes)
        return self._writer

    def _finish(self, writer: SafetensorsWriter) -> None:
        self._total += writer.data_bytes
        writer.finish()
        self._writer = None

    def _write_index(self) -> None:
        index = {
            "metadata": {"total_size": self._total},
            "weight_map": dict(sorted(self._weight_map.items())),
        }
        text = json.dumps(index, indent=2) + "\n"
        self._part(INDEX_NAME).write_text(text, encoding="utf-8")

    def _remove_parts(self) -> None:
        for path in self._folder.glob(f"*{_PART}"):
            if _OWN_NAMES.fullmatch(path.name.removesuffix(_PART)):
                path.unlink()
        shutil.rmtree(self.aside, ignore_errors=True)

    def _part(self, name: str) -> Path:
        return self._folder / f"{name}{_PART}"


def shard_names(count: int) -> list[str]:
    """The names of so many files."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def exported_files(folder: Path) -> list[Path]:
    """The files of an earlier export: weights under the names used here, and their index."""
    return [path for path in folder.iterdir() if _OWN_NAMES.fullmatch(path.name)]


def _json(header: Mapping[str, Any]) -> bytes:
    return json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()


def _entry(dtype: str, shape: Sequence[int], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def _pieces(tensor: Tensor, elements: int) -> Iterator[Tensor]:
    """Views of a tensor, none larger than that many elements, in the order of its elements."""
    if tensor.numel() <= elements:
        if tensor.numel():
            yield tensor
    elif tensor.is_contiguous():
        yield from tensor.view(-1).split(elements)
    elif tensor.shape[0] == 1:
        yield from _pieces(tensor[0], elements)
    else:
        rows = max(1, elements * tensor.shape[0] // tensor.numel())
        for piece in tensor.split(rows):
            yield from _pieces(piece, elements)
