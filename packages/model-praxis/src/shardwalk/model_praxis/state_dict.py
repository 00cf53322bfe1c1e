"""Files of Praxis: how their names and layouts relate to those of the policy in memory.

Public facts fix these, with H the width of a tower, I that of a feed-forward, E experts:

- ``<tower>`` is ``backbone.encoder`` or ``backbone.decoder``; names of the action expert are the
  same on both sides, known of `action_encoder.w1`, `embed_proprio` and `head`;
- the projections around the towers and the time features, ``t_proj.VideoTensor``;
- ``mha.in_proj.{q,k,v}_weight``, and ``mha`` for all else of ``attn``;
- a dense feed-forward: ``ffn.0.linear.{a,b}_weight`` (gate and up) and ``ffn.1.weight``;
- a router: ``ffn.router.weight`` and ``ffn.expert_bias``, float32 in every file;
- routed experts: ``ffn.routed.gate_up_weight`` [E, H, 2 I], gate first, and
  ``ffn.routed.down_weight`` [E, I, H], where the policy holds [E, 2 I, H] and [E, H, I];
- the shared expert: ``ffn.shared.gate_up`` [H, 2 I], which the policy holds as two weights [I, H],
  and ``ffn.shared.down`` [I, H] for its [H, I]; the name of the latter follows from the former.

Chosen here, since nothing public says them: ``blocks.<i>`` and ``norm1``, ``norm2`` in it,
``registers``, the two tensors of ``t_proj.VideoTensor`` (``frequencies``, ``phases``), what stands
behind ``mha.`` beside ``in_proj`` (``gate_proj``, ``o_proj``, ``q_norm``, ``k_norm``), gate before
up in what is fused, and every other name of the action expert. Files of the released weights may
differ in any of these.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor

from shardwalk.model_praxis.config import FP32_TENSORS
from shardwalk.model_praxis.config_backbone import TEXT, VIDEO
from shardwalk.parallelizer_core import StateDictAdapter
from shardwalk.parallelizer_core.state_dict_adapter import Index, ReadSlice

Part = Literal["gate", "up"]
"""Which half of a fused file tensor: the first columns or the last."""

_Rules = Sequence[tuple[str, str]]
_TEXT_IN, _VIDEO_IN = f"input_projections.{TEXT}.proj", f"input_projections.{VIDEO}.proj"
_VIDEO_OUT = f"output_projections.{VIDEO}.proj"

# Dotted beginnings in the policy and in files; of several that fit, the first counts.
_OF_TOWER: _Rules = (
    ("time_proj", f"t_proj.{VIDEO}"),
    ("text_in.fc1", f"{_TEXT_IN}.0"),
    ("text_in.fc2", f"{_TEXT_IN}.2"),
    ("text_in.norm", f"{_TEXT_IN}.3"),
    ("video_in", _VIDEO_IN),
    ("video_out.norm", f"{_VIDEO_OUT}.0"),
    ("video_out.linear", f"{_VIDEO_OUT}.1"),
    ("video_out", _VIDEO_OUT),
)
_OF_BLOCK: _Rules = (
    ("attn.q_proj.weight", "mha.in_proj.q_weight"),
    ("attn.k_proj.weight", "mha.in_proj.k_weight"),
    ("attn.v_proj.weight", "mha.in_proj.v_weight"),
    ("attn", "mha"),
    ("ffn.gate_proj.weight", "ffn.0.linear.a_weight"),
    ("ffn.up_proj.weight", "ffn.0.linear.b_weight"),
    ("ffn.down_proj.weight", "ffn.1.weight"),
    ("ffn.gate.weight", "ffn.router.weight"),
    ("ffn.gate.e_score_correction_bias", "ffn.expert_bias"),
    ("ffn.experts.gate_up_proj", "ffn.routed.gate_up_weight"),
    ("ffn.experts.down_proj", "ffn.routed.down_weight"),
    ("ffn.shared_experts.down_proj.weight", "ffn.shared.down"),
)
_FUSED = "ffn.shared.gate_up"
_HALVES: Mapping[Part, str] = {
    "gate": "ffn.shared_experts.gate_proj.weight",
    "up": "ffn.shared_experts.up_proj.weight",
}
_TRANSPOSED = ("ffn.routed.gate_up_weight", "ffn.routed.down_weight", "ffn.shared.down")
_BLOCK = re.compile(r"(backbone\.(?:encoder|decoder)\.blocks\.\d+\.)(.+)")
_TOWER = re.compile(r"(backbone\.(?:encoder|decoder)\.)(.+)")


@dataclass(frozen=True, kw_only=True)
class FileTensor:
    """Where files hold a tensor of the policy.

    Attributes:
        key: its name in the files.
        part: which half of it; None is the whole.
    """

    key: str
    part: Part | None = None

    @property
    def is_transposed(self) -> bool:
        """Whether its last two dimensions are swapped."""
        return self.part is not None or self.key.endswith(_TRANSPOSED)


def file_tensor(name: str) -> FileTensor:
    """Where files hold the tensor that the policy calls `name`; no two names share a place."""
    front, inside, rules = _split(name)
    for part, half in _HALVES.items():
        if rules is _OF_BLOCK and inside == half:
            return FileTensor(key=f"{front}{_FUSED}", part=part)
    return FileTensor(key=front + _renamed(inside, rules))


def policy_names(key: str) -> Mapping[Part | None, str]:
    """The names in the policy of what files hold under `key`: by part where it is fused."""
    front, inside, rules = _split(key)
    if rules is _OF_BLOCK and inside == _FUSED:
        return {part: front + half for part, half in _HALVES.items()}
    return {None: front + _renamed(inside, [(theirs, ours) for ours, theirs in rules])}


def is_fp32_in_files(key: str) -> bool:
    """Whether every file holds this tensor in float32 (`PraxisConfig.fp32_tensors`)."""
    return any(fnmatchcase(key, pattern) for pattern in FP32_TENSORS)


class PraxisStateDictAdapter(StateDictAdapter):
    """The layout of Praxis files, for `materialize` and `export_safetensors`.

    A rank reads the experts and the rows that it holds, and nothing else. In an export the gate of
    a shared expert waits for the up projection that it shares a file tensor with.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, Tensor] = {}

    def file_shapes(self, name: str, shape: Sequence[int]) -> Mapping[str, Sequence[int]]:
        """One key with its shape; none for the gate of a shared expert, which is with its up."""
        place = file_tensor(name)
        if place.part == "gate":
            return {}
        if not place.is_transposed:
            return {place.key: shape}
        *front, rows, columns = shape
        return {place.key: (*front, columns, 2 * rows if place.part else rows)}

    def read(self, name: str, shape: Sequence[int], index: Index, read: ReadSlice) -> Tensor:
        """The block `index`, from the same block of the file tensor and nothing else."""
        place = file_tensor(name)
        if not place.is_transposed:
            return read(place.key, index)
        *front, rows, columns = index
        start = shape[-2] if place.part == "up" else 0
        rows = slice(rows.start + start, rows.stop + start)
        return read(place.key, (*front, columns, rows)).transpose(-2, -1)

    def to_file(self, name: str, tensor: Tensor) -> Mapping[str, Tensor]:
        """The file tensor; none for the gate of a shared expert.

        Raises:
            ValueError: for the up projection of a shared expert whose gate has not come before.
        """
        place = file_tensor(name)
        if is_fp32_in_files(place.key):
            tensor = tensor.float()
        if not place.is_transposed:
            return {place.key: tensor}
        turned = tensor.transpose(-2, -1)
        if place.part == "gate":
            self._waiting[place.key] = turned.clone()  # the tensor may be gone when up comes
            return {}
        return {place.key: self._fused(name, place.key, turned) if place.part else turned}

    def _fused(self, name: str, key: str, up: Tensor) -> Tensor:
        gate = self._waiting.pop(key, None)
        if gate is None:
            raise ValueError(f"{name} came without its gate, which {key} holds too")
        return torch.cat((gate, up), -1)


def _split(name: str) -> tuple[str, str, _Rules]:
    """What stays of a name or key, what rules are for, and the rules."""
    for pattern, rules in ((_BLOCK, _OF_BLOCK), (_TOWER, _OF_TOWER)):
        if match := pattern.fullmatch(name):
            return match[1], match[2], rules
    return name, "", ()


def _renamed(name: str, rules: Iterable[tuple[str, str]]) -> str:
    for old, new in rules:
        if f"{name}.".startswith(f"{old}."):
            return new + name[len(old) :]
    return name
