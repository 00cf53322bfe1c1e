"""Tiny configurations from the defaults of a configuration class, by the meaning of field names.

No model is named here: a field shrinks by what its name says it counts, a list with one entry per
layer keeps a layer of each kind, and a size that equals or multiplies another keeps doing so.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.hf_sweep.field_rules import (
    CODES,
    DEPTH,
    ID,
    INDICES,
    MISSING,
    OFF,
    PLAIN_IDS,
    STD,
    Sizes,
    Target,
    target_of,
)

Fields = dict[str, Any]


def shrink(defaults: Fields, sizes: Sizes, *, fill: bool = False, sections: bool = False) -> Fields:
    """The same fields with tiny values, for a configuration class to be made of again.

    `fill` gives sizes that are None a value too; `sections` gives rotary parameters the sections
    of multimodal positions.
    """
    return _Shrinker(defaults, sizes, fill, sections).fields(defaults)


@dataclass(frozen=True)
class _Part:
    """A part of a configuration: its fields, the depth of its stack, the layers to keep of it."""

    fields: Fields
    depth: int
    picked: list[int]


class _Shrinker:
    """What fields of one configuration, in all its parts, have in common."""

    def __init__(self, defaults: Fields, sizes: Sizes, fill: bool, sections: bool) -> None:
        self.sizes, self.fill, self.sections = sizes, fill, sections
        self.set = dict(sizes.set)
        self.ids: dict[int, int] = {}
        self.absent = self.set.keys() - set(names_of(defaults))
        self.widths = set(widths_of(defaults))

    def fields(self, given: Fields) -> Fields:
        depth = depth_of(given)
        parts = parts_of_depth(given, depth)
        picked = self.pick_layers(given, depth, 2 * len(parts) or self.sizes.layers)
        part = _Part(given, depth, picked)
        out: Fields = {}
        for key, value in given.items():
            if key in parts:
                out[key] = 2
            elif parts and DEPTH.fullmatch(str(key)):
                out[key] = 2 * len(parts)
            else:
                out[key] = self.value(str(key), value, part)
        added = self.absent | (MISSING.keys() & self.set.keys() if "model_type" in given else set())
        return out | {key: value for key, value in self.set.items() if key in given or key in added}

    def value(self, key: str, value: Any, part: _Part) -> Any:
        if isinstance(value, dict):
            return self.mapping(key, value, part)
        if isinstance(value, list | tuple):
            return self.sequence(key, list(value), part)
        if value is None and self.fill and key not in self.set:
            return self.filled(key, len(part.picked) or self.sizes.layers)
        if isinstance(value, bool) or value is None or isinstance(value, str):
            return False if key == "use_cache" else value
        if isinstance(value, float):
            return self.real(key, value)
        return self.integer(key, value, part)

    def mapping(self, key: str, value: Fields, part: _Part) -> Fields:
        """A dict: fields of single layers, rotary parameters, or a part of its own."""
        if _is_by_layer(value, part.depth):
            return self.by_layer(value, part.picked)
        if "rope" not in key:
            return self.fields(value)
        if not value and self.fill:
            plain = {"rope_type": "default", "rope_theta": 10000.0}
            value = dict.fromkeys(part.fields.get("layer_types") or (), plain) or plain
        return self.rope(value, part.fields)

    def filled(self, key: str, layers: int) -> Any:
        """A value for a size, a list or the token of an image, that the defaults leave open."""
        if ID.fullmatch(key):
            is_place = "image_token" in key or "video_token" in key
            return self.token(key, 1 << 30) if is_place else None
        if key.startswith("clip"):
            return 8.0
        if key.endswith("seed"):
            return 1
        if key == "vocabulary_map":
            return {"<image>": self.token("image_token_id", 1 << 30)}
        if key == "layer_types":
            return ["full_attention"] * layers
        if key == "mlp_layer_types":
            return ["dense"] + ["sparse"] * (layers - 1)
        target = target_of(key)
        size = target(self.sizes, 1 << 20) if target else 1 << 20
        return size if size < 1 << 20 else None

    def by_layer(self, given: dict[Any, Fields], picked: list[int]) -> dict[Any, Fields]:
        """Fields of single layers, by index, under the indices of the layers that are kept."""
        known = {int(index): fields for index, fields in given.items()}
        return {new: self.fields(known[old]) for new, old in enumerate(picked) if old in known}

    def real(self, key: str, value: float) -> float:
        if OFF.fullmatch(key):
            return 0.0
        return 0.1 if STD.fullmatch(key) else value

    def integer(self, key: str, value: int, part: _Part) -> int:
        of = part.fields
        if OFF.fullmatch(key):
            return 0
        if ID.fullmatch(key):
            return self.token(key, value)
        if key.endswith("_token_offset"):
            offsets = sorted(v for k, v in of.items() if str(k).endswith("_token_offset"))
            return CODES * (1 + offsets.index(value))
        if value == part.depth > 1 and key.endswith(("layers", "depth", "layer", "blocks")):
            return len(part.picked)
        target = target_of(key)
        return self.related(key, value, of, target) if target else self.by_value(value, of)

    def related(self, key: str, value: int, of: Fields, target: Target) -> int:
        """The target of a rule, unless the default relates it to another size."""
        sizes, width = self.sizes, first_of(of, "hidden_size", "d_model", "n_embd")
        heads = first_of(of, "num_attention_heads", "num_heads", "n_head")
        inner = of.get("expand", 0) * width
        if "head" in key and "dim" not in key and value == heads:
            is_inner = inner and value * of.get("head_dim", 0) == inner
            return sizes.heads * of["expand"] if is_inner else sizes.heads
        if key == "head_dim" and value == of.get("qk_rope_head_dim"):
            return sizes.head // 2
        is_width = target(sizes, 1 << 20) == sizes.width
        is_multiple = sizes.multiples and width and value % width == 0
        if is_width and is_multiple and value not in self.widths:
            return sizes.width * (value // width)
        return target(sizes, value)

    def by_value(self, value: int, of: Fields) -> int:
        """An unknown field: equal to a known size of the same part, or small."""
        for key, other in of.items():
            target = target_of(str(key))
            if other == value and type(other) is int and value >= 32 and target:
                return self.related(str(key), value, of, target)
        return min(value, 64)

    def token(self, key: str, value: int) -> int:
        """A special token: distinct ones stay distinct, at the end of the vocabulary."""
        if value < 0 or (key in PLAIN_IDS and value < 4):
            return value
        last = self.sizes.vocabulary - 1
        return self.ids.setdefault(value, last - len(self.ids))

    def sequence(self, key: str, values: list[Any], part: _Part) -> list[Any]:
        depth = part.depth
        if ID.fullmatch(key):
            return [self.token(key, v) for v in values]
        if depth and INDICES.fullmatch(key) and _are_indices(values, depth):
            return self.indices(values, depth, len(part.picked))
        if depth > 1 and len(values) == depth:
            values = [values[index] for index in part.picked]
        return [self.value(key, v, _Part(part.fields, 0, [])) for v in values]

    def indices(self, values: list[int], depth: int, layers: int) -> list[int]:
        """Indices of layers: those of the tiny stack, as many as fit."""
        if values == list(range(depth)):
            return list(range(layers))
        return [v if v < 0 else min(v * layers // depth, layers - 1) for v in values]

    def pick_layers(self, given: Fields, depth: int, count: int) -> list[int]:
        """The layers to keep: some of each kind that a list of one entry per layer names."""
        lists = [
            v for v in given.values()
            if isinstance(v, list | tuple) and len(v) == depth > 1 and list(v) != list(range(depth))
        ]  # fmt: skip
        lists += [
            [index in {int(known) for known in v} for index in range(depth)]
            for v in given.values()
            if isinstance(v, dict) and _is_by_layer(v, depth)
        ]
        picked: list[int] = []
        seen: Counter[tuple[int, str]] = Counter()
        for index in range(depth):
            kinds = [(at, str(values[index])) for at, values in enumerate(lists)]
            if any(seen[kind] < self.sizes.copies for kind in kinds):
                picked.append(index)
                seen.update(kinds)
        rest = [index for index in range(depth) if index not in picked]
        return sorted(picked + rest[: max(0, count - len(picked))])

    def rope(self, given: Fields, of: Fields) -> Fields:
        """Rotary parameters: sections and factors cover half of a head."""
        rotated = of.get("qk_rope_head_dim")
        size = min(self.sizes.head // 2, rotated) if rotated else self.sizes.head
        half = int(size * (given.get("partial_rotary_factor") or 1)) // 2
        out: Fields = {}
        if self.sections and not any(isinstance(value, dict) for value in given.values()):
            given = {"mrope_section": [0, 0, 0], **given}
        for key, value in given.items():
            if isinstance(value, dict):
                out[key] = self.rope(value, of)
            elif key == "mrope_section" and value:
                side = max(1, half * 3 // 8)
                out[key] = [side, side, half - 2 * side]
            elif isinstance(value, list) and value:
                out[key] = value[:half]
            elif key == "original_max_position_embeddings" and value:
                out[key] = min(value, 64)
            else:
                out[key] = value
        return out


def depth_of(fields: Fields) -> int:
    """The number of layers of the stack that these fields describe, 0 for none."""
    for key, value in fields.items():
        if type(value) is int and DEPTH.fullmatch(str(key)):
            return value
    return 0


def parts_of_depth(fields: Fields, depth: int) -> list[str]:
    """The fields that count layers of several kinds in one stack, if they add up to its depth."""
    names = [
        k for k, v in fields.items() if type(v) is int and re.fullmatch(r"n_\w+_layers", str(k))
    ]
    return names if depth > 1 and sum(fields[name] for name in names) == depth else []


def names_of(fields: Fields) -> Iterator[str]:
    """The names of all fields of all parts."""
    for key, value in fields.items():
        yield str(key)
        if isinstance(value, dict):
            yield from names_of(value)


def widths_of(fields: Fields) -> Iterator[int]:
    """The hidden sizes of all parts."""
    for key, value in fields.items():
        if isinstance(value, dict):
            yield from widths_of(value)
        elif type(value) is int and key in ("hidden_size", "d_model", "n_embd"):
            yield value


def first_of(fields: Fields, *names: str) -> int:
    """The value of the first of these fields that is there, 0 for none."""
    return next((fields[name] for name in names if type(fields.get(name)) is int), 0)


def _are_indices(values: list[Any], depth: int) -> bool:
    """Whether a list holds indices of layers, and not a flag for each."""
    are_flags = len(values) == depth and set(values) <= {0, 1}
    return all(type(value) is int for value in values) and not are_flags


def _is_by_layer(value: Fields, depth: int) -> bool:
    return bool(value) and all(
        str(key).isdigit() and int(key) < depth and isinstance(fields, dict)
        for key, fields in value.items()
    )
