"""Folders of weights with their config.json, written from a policy on any mesh."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwalk.model_praxis.config import PraxisConfig
from shardwalk.model_praxis.config_sections import PraxisConfigError
from shardwalk.model_praxis.policy_parts import policy_in
from shardwalk.model_praxis.state_dict import is_fp32_in_files
from shardwalk.parallelizer_core import StateDictAdapter, export_safetensors
from shardwalk.parallelizer_core.agreed_failure import on_all_ranks
from shardwalk.parallelizer_core.model_sequences import shared_mesh_context
from shardwalk.parallelizer_core.parallel_state import unwrap_model
from shardwalk.parallelizer_core.state_dict_adapter import Index, ReadSlice
from shardwalk.parallelizer_core.tensor_parallel.local_parameters import shown

SUMS = "SHA256SUMS"
_CONFIG = "config.json"


def save_pretrained(
    policy: nn.Module,
    folder: str | Path,
    *,
    config_from: str | Path | None = None,
    max_file_size: int | str = "5GB",
) -> None:
    """Write weights, ``config.json`` and ``SHA256SUMS``; all ranks call this together.

    Weights are stored in the dtype that the config names (``torch_dtype``), but for those that it
    lists as float32 (``fp32_tensors``). `materialize` reads the folder onto any mesh.

    Args:
        policy: a `PraxisPolicy` on any mesh, or a module that holds one, of which the policy alone
            is written; one with adapters needs `merge_lora` first.
        folder: made when it is not there.
        config_from: a folder whose ``config.json`` is copied as it stands there; None writes that
            of the policy, with all defaults spelled out.
        max_file_size: in bytes, or a string such as "5GB".

    Raises:
        FileNotFoundError: `config_from` has no ``config.json``.
        ValueError: that one describes another policy; and what `export_safetensors` raises.
        TypeError: `policy` neither is nor holds a `PraxisPolicy`.
        TypeError, RuntimeError: those of `export_safetensors`.
    """
    inner = policy_in(policy, "save_pretrained")
    context = shared_mesh_context([policy, inner])
    group = None if context is None else context.process_group
    if unwrap_model(policy) is not inner:
        policy = inner
    document, dtype = _document(inner.config, config_from), inner.config.dtype
    adapter = _StoredAs(inner.state_dict_adapter, dtype)
    with shown(inner, config=_ConfigFile(document), state_dict_adapter=adapter):
        export_safetensors(
            policy, folder, dtype=dtype, max_file_size=max_file_size, process_group=group
        )
    is_first = not dist.is_initialized() or dist.get_rank(group) == 0
    on_all_ranks(lambda: _write_sums(Path(folder)) if is_first else None, group)


class _ConfigFile:
    """What export takes for the model's config: it writes a document, whole."""

    def __init__(self, document: bytes) -> None:
        self._document = document

    def save_pretrained(self, folder: Path) -> None:
        """Write it."""
        (folder / _CONFIG).write_bytes(self._document)


class _StoredAs(StateDictAdapter):
    """An adapter whose files hold one dtype, routers too, which are float32 in memory."""

    def __init__(self, inner: StateDictAdapter, dtype: torch.dtype) -> None:
        self._inner, self._dtype = inner, dtype

    def file_shapes(self, name: str, shape: Sequence[int]) -> Mapping[str, Sequence[int]]:
        """Those of the adapter inside."""
        return self._inner.file_shapes(name, shape)

    def read(self, name: str, shape: Sequence[int], index: Index, read: ReadSlice) -> Tensor:
        """What the adapter inside reads."""
        return self._inner.read(name, shape, index, read)

    def to_file(self, name: str, tensor: Tensor) -> Mapping[str, Tensor]:
        """What the adapter inside gives, cast but for what all files have in float32."""
        return {
            key: value if is_fp32_in_files(key) else value.to(self._dtype)
            for key, value in self._inner.to_file(name, tensor).items()
        }


def _document(config: PraxisConfig, config_from: str | Path | None) -> bytes:
    """The bytes of config.json."""
    if config_from is None:
        return (json.dumps(config.to_dict(), indent=2) + "\n").encode()
    if PraxisConfig.from_pretrained(config_from) != config:
        raise PraxisConfigError(
            "", f"that of config_from={str(config_from)!r} differs from the policy's; leave "
            f"config_from out to write the policy's own"
        )  # fmt: skip
    return (Path(config_from) / _CONFIG).read_bytes()


def _write_sums(folder: Path) -> None:
    """The sum of every file of the export, as sha256sum writes and checks them."""
    names = sorted({path.name for path in folder.glob("model*.safetensors*")} | {_CONFIG})
    lines = []
    for name in names:
        with (folder / name).open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n")
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")
