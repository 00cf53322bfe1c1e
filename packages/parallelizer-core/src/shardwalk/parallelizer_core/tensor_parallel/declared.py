"""The tensor-parallel plan that a model declares by itself, in names of styles.

Models of the ecosystem carry it as `_tp_plan` (keys relative to the module that has it) and as
`base_model_tp_plan` of their config (keys relative to the base model, which the module holds under
its `base_model_prefix`, or is itself). A `*` in a key stands for the number of a layer, and a key
names a module or a parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

_IMPLICIT = {"embed_tokens": "embedding_rowwise"}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One entry of a declared plan.

    Attributes:
        key: its key, relative to the model.
        style: the name of its style.
        is_own: whether it was given to this model alone, and not by its class or config.
    """

    key: str
    style: object
    is_own: bool = False

    def __str__(self) -> str:
        return f"{self.key!r}: {self.style!r}"


@dataclass(frozen=True, kw_only=True)
class Places:
    """What an entry names: modules by their first path, and parameters by their owner's path."""

    modules: tuple[str, ...]
    parameters: tuple[tuple[str, str], ...]

    def __bool__(self) -> bool:
        return bool(self.modules or self.parameters)


def declared_entries(model: nn.Module) -> list[Entry]:
    """The entries of every plan in `model`; where two have one key, the outer module's."""
    declared = _of_classes("", model)
    given = _of_instances("", model)
    return [
        Entry(key=key, style=style, is_own=declared.get(key) != style)
        for key, style in given.items()
    ]


def places_of(model: nn.Module, entry: Entry) -> Places:
    """The modules and parameters of `model` that an entry names."""
    first: dict[int, str] = {}
    modules: dict[str, None] = {}
    parameters: dict[tuple[str, str], None] = {}
    owner_key, _, name = entry.key.rpartition(".")
    for path, module in model.named_modules(remove_duplicate=False):
        own = first.setdefault(id(module), path)
        if _matches(path, entry.key):
            modules[own] = None
        elif _matches(path, owner_key) and name in dict(module.named_parameters(recurse=False)):
            parameters[own, name] = None
    return Places(modules=tuple(modules), parameters=tuple(parameters))


def stated_integer(model: nn.Module, path: str, name: str) -> int | None:
    """The integer `name` that the innermost module around `path`, or its config, states."""
    while path:
        path = path.rpartition(".")[0]
        owner = model.get_submodule(path)
        config = getattr(owner, "config", None)
        for holder in (owner, config, getattr(config, "text_config", None)):
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def _of_instances(path: str, module: nn.Module) -> dict[str, object]:
    """The plan as the model has it: an instance's own one holds those of the modules in it."""
    own = vars(module).get("_tp_plan")
    if isinstance(own, Mapping):
        return {_join(path, key): style for key, style in own.items()}
    plan = _of_class(path, module)
    for name, child in module.named_children():
        plan = _of_instances(_join(path, name), child) | plan
    return plan


def _of_classes(path: str, module: nn.Module) -> dict[str, object]:
    plan = _of_class(path, module)
    for name, child in module.named_children():
        plan = _of_classes(_join(path, name), child) | plan
    return plan


def _of_class(path: str, module: nn.Module) -> dict[str, object]:
    """What the class of one module and its config declare."""
    own = _plan(getattr(type(module), "_tp_plan", None))
    plan = {_join(path, key): style for key, style in own.items()}
    shared = _plan(getattr(getattr(module, "config", None), "base_model_tp_plan", None))
    # An attention that holds its config too is no model of it, and has no prefix.
    prefix = getattr(module, "base_model_prefix", None)
    if not shared or not isinstance(prefix, str):
        return plan
    base = getattr(module, prefix, None) if prefix else None
    base_path = _join(path, prefix) if isinstance(base, nn.Module) else path
    implicit = isinstance(getattr(base or module, "embed_tokens", None), nn.Embedding)
    entries = (_IMPLICIT if implicit else {}) | shared
    return {_join(base_path, key): style for key, style in entries.items()} | plan


def _plan(value: object) -> dict[str, object]:
    return dict(value) if isinstance(value, Mapping) else {}


def _matches(path: str, key: str) -> bool:
    parts, wanted = path.split("."), key.split(".")
    return len(parts) == len(wanted) and all(
        part == name or (name == "*" and part.isdigit())
        for part, name in zip(parts, wanted, strict=True)
    )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
