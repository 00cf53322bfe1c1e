"""Frozen dataclasses that read themselves from JSON and refuse what they do not know."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from types import NoneType, UnionType
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints


class PraxisConfigError(ValueError):
    """A document that is no configuration of this model.

    Attributes:
        path: the dotted place in the document; "" is the document itself.
        reason: what is wrong there.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path or 'the document'}: {reason}")
        self.path, self.reason = path, reason

    def inside(self, section: str) -> PraxisConfigError:
        """The same error seen from the section that holds it."""
        return PraxisConfigError(f"{section}.{self.path}" if self.path else section, self.reason)


def at_least(minimum: int, *, default: Any = MISSING) -> Any:
    """A field whose numbers may be as small as `minimum`."""
    return field(default=default, metadata={"minimum": minimum})


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the document: checks the type and sign of every field, then what they must obey.

    Numbers are finite, and above 0 where `at_least` says nothing else or they stand in a tuple.
    """

    def __post_init__(self) -> None:
        hints = _hints(type(self))
        for entry in fields(self):
            value = getattr(self, entry.name)
            if not _fits(value, hints[entry.name]):
                wanted = _describe(hints[entry.name])
                raise PraxisConfigError(entry.name, f"got {value!r}, it must be {wanted}")
            _check_numbers(entry.name, value, entry.metadata.get("minimum"))
        self._check()

    def _check(self) -> None:
        """Raise for values that do not fit together."""

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Self:
        """Read a section.

        Args:
            document: as parsed from JSON; lists stand for tuples.

        Raises:
            PraxisConfigError: an unknown or missing key, another type, a value that is not allowed;
                with the dotted path.
        """
        if not isinstance(document, Mapping):
            raise PraxisConfigError("", f"got {document!r}, it must be an object")
        known = {entry.name: entry for entry in fields(cls)}
        for key in document:
            if key not in known:
                raise PraxisConfigError(str(key), f"unknown key; known are {sorted(known)}")
        for name, entry in known.items():
            if name not in document and entry.default is MISSING:
                raise PraxisConfigError(name, "missing")
        hints = _hints(cls)
        return cls(**{key: _read(key, value, hints[key]) for key, value in document.items()})

    def to_dict(self) -> dict[str, Any]:
        """The section as JSON holds it; `from_dict` gives an equal one back."""
        return {entry.name: _write(getattr(self, entry.name)) for entry in fields(self)}


def require(condition: bool, path: str, reason: str) -> None:
    """Raise the error of a section unless a condition holds."""
    if not condition:
        raise PraxisConfigError(path, reason)


def _hints(section: type[Section]) -> dict[str, Any]:
    return get_type_hints(section)


def _read(key: str, value: Any, hint: Any) -> Any:
    """`value` with sections and tuples in place of objects and lists."""
    try:
        if isinstance(hint, type) and issubclass(hint, Section):
            return hint.from_dict(value)
        origin = get_origin(hint)
        if origin is Mapping and isinstance(value, Mapping):
            return {name: _read(name, item, get_args(hint)[1]) for name, item in value.items()}
    except PraxisConfigError as error:
        raise error.inside(key) from None
    if origin is tuple and isinstance(value, list):
        return tuple(value)
    return value


def _write(value: Any) -> Any:
    if isinstance(value, Section):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {name: _write(item) for name, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return any(_fits(value, option) for option in arguments)
    if origin is Literal:
        return value in arguments and type(value) in {type(option) for option in arguments}
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, arguments[0]) for item in value)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(
            _fits(name, str) and _fits(item, arguments[1]) for name, item in value.items()
        )
    if hint in {int, float} and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if hint is float else hint)


def _describe(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return " or ".join(_describe(option) for option in arguments)
    if origin is Literal:
        return " or ".join(repr(option) for option in arguments)
    if origin is tuple:
        return f"a list, each item {_describe(arguments[0])}"
    if origin is Mapping:
        return "an object"
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
    return "null" if hint is NoneType else names.get(hint, hint.__name__)


def _check_numbers(name: str, value: Any, minimum: int | None) -> None:
    """Numbers are finite; those of a tuple are bounded by a minimum that is given, only."""
    is_tuple = isinstance(value, tuple)
    for item in value if is_tuple else (value,):
        if isinstance(item, bool) or not isinstance(item, int | float):
            continue
        require(math.isfinite(item), name, f"{item} is not finite")
        if minimum is not None:
            require(item >= minimum, name, f"{item} must be {minimum} or more")
        elif not is_tuple:
            require(item > 0, name, f"{item} must be above 0")
