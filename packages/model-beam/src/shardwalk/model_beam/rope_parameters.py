"""What the rotation of each layer type may be made of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from shardwalk.model_beam.rotary_scaling import ROPE_TYPES

_LAYER_TYPES = ("sliding_attention", "full_attention")
_ALWAYS = ("rope_type", "rope_theta")
_NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": (
        "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
    ),
}  # fmt: skip
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "yarn": (
        "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
    ),
}  # fmt: skip
_ANYWHERE = ("type", "partial_rotary_factor")
_EXAMPLE = '{"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}, ...}'
_DYNAMIC_HEAD = 4  # its exponent divides by the width of a head less 2


def with_rope_types(rope_parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which every rotation has its ``rope_type``: the older ``type``, or "default"."""
    copied = dict(rope_parameters)
    for layer_type, entry in copied.items():
        if isinstance(entry, Mapping):
            copied[layer_type] = {"rope_type": entry.get("type", "default"), **entry}
    return copied


def check_rope_parameters(
    rope_parameters: Mapping[str, Any], *, layer_types: Sequence[str], head_dim: int
) -> None:
    """Refuse rotations that cannot work, miss a field, or hold one that nothing would read.

    Args:
        rope_parameters: by layer type, None or a mapping.
        layer_types: of every layer; each must have its entry.
        head_dim: D.

    Raises:
        TypeError: for a value of another type.
        ValueError: for all else.
    """
    _check_keys(rope_parameters, layer_types)
    for layer_type, entry in rope_parameters.items():
        if entry is not None:
            _check_entry(_Entry(layer_type, entry))
            _check_head_dim(layer_type, entry["rope_type"], head_dim)


def _check_keys(rope_parameters: Mapping[str, Any], layer_types: Sequence[str]) -> None:
    flat = [key for key in rope_parameters if key not in _LAYER_TYPES]
    if flat:
        raise ValueError(
            f"rope_parameters has {flat[0]!r} where a layer type is expected; allowed are "
            f"{list(_LAYER_TYPES)}, each with None or its own parameters: {_EXAMPLE}"
        )
    for layer_type in _LAYER_TYPES:
        if layer_type in layer_types and layer_type not in rope_parameters:
            raise ValueError(
                f"rope_parameters has no {layer_type!r}, which layer_types uses; give it "
                f"parameters as in {_EXAMPLE}, or None for layers without a rotation"
            )


class _Entry:
    """One rotation, and errors which say where it stands."""

    def __init__(self, layer_type: str, values: Any) -> None:
        self.where = f"rope_parameters[{layer_type!r}]"
        if not isinstance(values, Mapping):
            raise TypeError(f"{self.where}={values!r} must be None or a mapping: {_EXAMPLE}")
        self.values = values

    def refused(self, name: str, why: str) -> ValueError:
        return ValueError(f"{self.where}[{name!r}]={self.values.get(name)!r} {why}")

    def number(self, name: str, *, at_least: float = 0.0, whole: bool = False) -> None:
        """Check a field that is there: above 0, ``at_least``, and finite."""
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            kind = "an integer" if whole else "a number"
            raise TypeError(f"{self.where}[{name!r}]={value!r} must be {kind}")
        if not (math.isfinite(value) and value > 0 and value >= at_least):
            bound = f"{at_least:g} or more" if at_least else "above 0"
            raise self.refused(name, f"is not allowed; it must be {bound}, and finite")


def _check_entry(entry: _Entry) -> None:
    rope_type = entry.values["rope_type"]
    if rope_type not in ROPE_TYPES:
        raise entry.refused("rope_type", f"is not known; use one of {list(ROPE_TYPES)}")
    if entry.values.get("type", rope_type) != rope_type:
        raise entry.refused("type", f"contradicts rope_type={rope_type!r}; leave it out")
    if entry.values.get("partial_rotary_factor", 1.0) != 1.0:
        raise entry.refused(
            "partial_rotary_factor", "is not supported: heads are rotated whole; leave it out"
        )
    _check_fields(entry, rope_type)
    _check_numbers(entry)
    if rope_type == "llama3":
        _check_llama3(entry)
    if rope_type == "yarn":
        _check_yarn(entry)


def _check_fields(entry: _Entry, rope_type: str) -> None:
    needed = (*_ALWAYS, *_NEEDED[rope_type])
    allowed = (*needed, *_OPTIONAL.get(rope_type, ()))
    for name in needed:
        if name not in entry.values:
            raise ValueError(
                f"{entry.where} has no {name!r}, which rope_type={rope_type!r} needs: "
                f"{list(needed)}; add it"
            )
    for name in entry.values:
        if name not in allowed and name not in _ANYWHERE:
            raise entry.refused(
                name, f"would do nothing: rope_type={rope_type!r} reads {list(allowed)}; drop it"
            )


def _check_numbers(entry: _Entry) -> None:
    for name, value in entry.values.items():
        optional = value is None and name in _OPTIONAL["yarn"]
        if name in {"rope_type", "type", "truncate", "partial_rotary_factor"} or optional:
            continue
        whole = name == "original_max_position_embeddings"
        entry.number(name, at_least=1.0 if whole or name == "factor" else 0.0, whole=whole)
    if entry.values["rope_theta"] <= 1:
        raise entry.refused("rope_theta", "is not allowed; it must be above 1")


def _check_llama3(entry: _Entry) -> None:
    if entry.values["high_freq_factor"] <= entry.values["low_freq_factor"]:
        raise entry.refused(
            "high_freq_factor",
            f"must be above low_freq_factor={entry.values['low_freq_factor']!r}; raise it",
        )


def _check_yarn(entry: _Entry) -> None:
    fast = entry.values.get("beta_fast") or 32
    slow = entry.values.get("beta_slow") or 1
    if fast < slow:
        raise entry.refused("beta_fast", f"(32 if None) is below beta_slow={slow!r}; swap them")
    if entry.values.get("truncate") not in {None, True}:
        raise entry.refused(
            "truncate", "is not supported: the ramp of Beam begins and ends at whole pairs; drop it"
        )
    slopes = [name for name in ("mscale", "mscale_all_dim") if entry.values.get(name) is not None]
    if slopes and entry.values.get("attention_factor") is not None:
        raise entry.refused(slopes[0], "would do nothing beside attention_factor; drop one of them")
    if len(slopes) == 1:
        raise entry.refused(
            slopes[0], "would do nothing alone; give mscale and mscale_all_dim, or neither"
        )


def _check_head_dim(layer_type: str, rope_type: str, head_dim: int) -> None:
    if head_dim % 2:
        raise ValueError(
            f"head_dim={head_dim} is odd, and the rotation of rope_parameters[{layer_type!r}] "
            f"turns pairs; use an even head_dim, or None for {layer_type!r}"
        )
    if rope_type == "dynamic" and head_dim < _DYNAMIC_HEAD:
        raise ValueError(
            f"head_dim={head_dim} leaves rope_type='dynamic' of rope_parameters[{layer_type!r}] "
            f"nothing to stretch; use {_DYNAMIC_HEAD} or more, or another rope_type"
        )
