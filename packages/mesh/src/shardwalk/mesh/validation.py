"""Checks of single values. Each failure names the option, the value and what is allowed."""

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch

__all__ = [
    "check_boolean",
    "check_choice",
    "check_integer",
    "check_positive_number",
    "check_timeout_minutes",
    "config_from_mapping",
    "nearest",
    "parse_dtype",
    "unknown_keys",
]

T = TypeVar("T")

_DTYPE_ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
    "double": "float64",
}


def nearest(value: object, allowed: Iterable[str]) -> str:
    """Return ``"; did you mean 'name'?"`` for the closest allowed name, else an empty string."""
    word, names = str(value).lower(), list(allowed)
    found = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    found = found or [name for name in names if word and name.startswith(word)]
    return f"; did you mean {found[0]!r}?" if found else ""


def check_boolean(option: str, value: object, *, optional: bool = False) -> None:
    """Raise TypeError unless ``value`` is True or False (or None where ``optional``)."""
    if isinstance(value, bool) or (optional and value is None):
        return
    allowed = "True, False or None" if optional else "True or False"
    raise TypeError(f"{option}={value!r} must be {allowed}")


def check_integer(
    option: str,
    value: object,
    *,
    minimum: int = 1,
    maximum: int | None = None,
    optional: bool = False,
) -> None:
    """Raise TypeError for a non-integer (booleans included), ValueError outside the bounds."""
    if optional and value is None:
        return
    bounds = f">= {minimum}" if maximum is None else f"from {minimum} to {maximum}"
    allowed = f"an integer {bounds}" + (" or None" if optional else "")
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{option}={value!r} ({type(value).__name__}) must be {allowed}")
    if value < minimum or (maximum is not None and value > maximum):
        raise ValueError(f"{option}={value} must be {allowed}")


def check_positive_number(option: str, value: object, *, optional: bool = False) -> None:
    """Raise TypeError unless a number, ValueError unless finite and above zero."""
    if optional and value is None:
        return
    allowed = "a number above 0" + (" or None" if optional else "")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{option}={value!r} ({type(value).__name__}) must be {allowed}")
    if not 0 < value < math.inf:
        raise ValueError(f"{option}={value} must be {allowed}")


def check_timeout_minutes(value: object, *, optional: bool = False) -> None:
    """Raise TypeError unless a number, ValueError unless from a millisecond to 10 million minutes.

    Outside of these a timeout becomes zero or does not fit the clocks that count it.
    """
    check_positive_number("timeout_minutes", value, optional=optional)
    if isinstance(value, int | float) and not 1 / 60_000 <= value <= 10_000_000:
        raise ValueError(
            f"timeout_minutes={value} must be from 1/60000 (one millisecond) to 10000000"
        )


def check_choice(option: str, value: object, allowed: Iterable[str]) -> None:
    """Raise ValueError unless ``value`` is one of the names, with the nearest one."""
    names = list(allowed)
    if not (isinstance(value, str) and value in names):
        listed = ", ".join(map(repr, names))
        raise ValueError(f"{option}={value!r} must be one of {listed}{nearest(value, names)}")


def parse_dtype(option: str, value: object, *, optional: bool = True) -> torch.dtype | None:
    """Return the floating dtype that ``value`` is or names ("bfloat16", "torch.bfloat16", "bf16").

    Raises ValueError for an unknown name and for dtypes that are not floating point, TypeError for
    anything that is neither a dtype nor a string.
    """
    if value is None and optional:
        return None
    if isinstance(value, str):
        name = value.strip().lower().removeprefix("torch.")
        found = getattr(torch, _DTYPE_ALIASES.get(name, name), None)
        if not isinstance(found, torch.dtype):
            known = ["bfloat16", "float16", "float32", "float64"]
            raise ValueError(f"{option}={value!r} is no torch dtype{nearest(name, known)}")
        value = found
    if not isinstance(value, torch.dtype):
        raise TypeError(
            f"{option}={value!r} must be a torch.dtype or its name, such as 'bfloat16'"
            + (", or None" if optional else "")
        )
    if not value.is_floating_point:
        raise ValueError(f"{option}={value} must be a floating-point dtype, such as torch.bfloat16")
    return value


def unknown_keys(owner: str, given: Iterable[object], allowed: Iterable[str]) -> None:
    """Raise ValueError for the first key that is not allowed, with the nearest allowed one."""
    names = list(allowed)
    for key in given:
        if key not in names:
            listed = ", ".join(names) or "none"
            raise ValueError(
                f"{owner} has no option {key!r}{nearest(key, names)} (its options: {listed})"
            )


def config_from_mapping(cls: type[T], value: T | Mapping[str, Any], option: str) -> T:
    """Return ``value``, or the config that a mapping of its options describes."""
    if isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        raise TypeError(f"{option}={value!r} must be a {cls.__name__} or a dict of its options")
    fields = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    unknown_keys(cls.__name__, value, fields)
    return cls(**value)
