"""Module-path patterns of a plan: which modules of a model they name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle


def expand_patterns(
    model: nn.Module, patterns: Mapping[str, object], source: str
) -> dict[str, tuple[ParallelStyle, ...]]:
    """The styles of every module that a pattern names, by the module's first path.

    Each segment of a pattern may hold the wildcards of `fnmatch`; `*` stays within its segment. The
    empty pattern names the model itself.

    Raises:
        ValueError: a pattern names no module, or two patterns name the same one.
        TypeError: a key is no text, or a value no style.
    """
    styles = {key: plan_styles(source, key, value) for key, value in patterns.items()}
    paths = list(model.named_modules(remove_duplicate=False))
    first: dict[int, str] = {}
    for path, module in paths:
        first.setdefault(id(module), path)
    chosen: dict[str, str] = {}
    for pattern in styles:
        names = {first[id(module)] for path, module in paths if _matches(path, pattern)}
        if not names:
            raise ValueError(
                f"{source}: {pattern!r} names no module of {type(model).__name__}"
                f"{_nearest(pattern, list(first.values()))}"
            )
        for name in names:
            other = chosen.setdefault(name, pattern)
            if other != pattern:
                raise ValueError(
                    f"{source}: {other!r} and {pattern!r} both name {name or 'the model'}; give "
                    f"each module one pattern (its value may be a tuple of styles)"
                )
    return {path: styles[chosen[path]] for path in first.values() if path in chosen}


def plan_styles(source: str, key: object, value: object) -> tuple[ParallelStyle, ...]:
    """The value of one key of a plan as a tuple of styles.

    Raises:
        TypeError: the key is no text, or the value neither a style nor a tuple of styles.
    """
    if not isinstance(key, str):
        raise TypeError(f"{source}: the key {key!r} must be a module path, a text")
    styles = value if isinstance(value, tuple) and value else (value,)
    for style in styles:
        if not isinstance(style, ParallelStyle):
            raise TypeError(
                f"{source}: {key!r} has {value!r}, which must be a ParallelStyle of "
                f"torch.distributed.tensor.parallel or shardwalk, or a tuple of them"
            )
    return styles


def _matches(path: str, pattern: str) -> bool:
    if not path:
        return not pattern
    parts, wanted = path.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _nearest(pattern: str, paths: list[str]) -> str:
    """A hint at the existing paths that look most like `pattern`, indices written as `*`."""
    known = dict.fromkeys(
        ".".join("*" if part.isdigit() else part for part in path.split("."))
        for path in paths
        if path
    )
    near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.4)
    return f"; the nearest are {', '.join(map(repr, near))}" if near else ""
