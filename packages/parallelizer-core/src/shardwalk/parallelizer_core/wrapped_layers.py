"""Wrappers around single layers: adapters, and the copies of a layer that train in its place.

They are known by their children: a `base_layer` beside adapters, or an `original_module` beside
`modules_to_save`, of which there is one for each adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from shardwalk.parallelizer_core.model_tensors import canonical_name

LAYER, ORIGINAL, COPIES = "base_layer", "original_module", "modules_to_save"


def wrapped_layers(model: nn.Module) -> Iterator[str]:
    """The canonical path of every layer in `model` that stands in a wrapper."""
    for path, module in model.named_modules():
        if is_adapted(module) or is_copied(module):
            yield canonical_name(path)


def names_of_layers(model: nn.Module) -> Callable[[str], str]:
    """What makes a name in `model` that of the model without any wrapper.

    An adapter's own tensors keep theirs, and a copy of a layer has the name of its layer.
    """
    dropped: set[str] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        start = f"{canonical_name(path)}.".lstrip(".")
        if is_adapted(module):
            dropped.add(f"{start}{LAYER}")
        if is_copied(module):
            copies = module.get_submodule(COPIES)
            dropped |= {f"{start}{ORIGINAL}", f"{start}{COPIES}"}
            dropped |= {f"{start}{COPIES}.{name}" for name, _ in copies.named_children()}

    def plain(name: str) -> str:
        parts = canonical_name(name).split(".")
        kept = (part for i, part in enumerate(parts) if ".".join(parts[: i + 1]) not in dropped)
        return ".".join(kept)

    return plain


def is_of_adapter(model: nn.Module) -> Callable[[str], bool]:
    """What tells of a name in `model` whether an adapter added its tensor."""
    layers: dict[str, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if is_adapted(module):
            start = f"{canonical_name(path)}.".lstrip(".")
            layers[start] = f"{start}{LAYER}."

    def added(name: str) -> bool:
        name = canonical_name(name)
        return any(name.startswith(a) and not name.startswith(b) for a, b in layers.items())

    return added


def is_adapted(module: nn.Module) -> bool:
    """Whether `module` holds a layer and adapters beside it."""
    children = dict(module.named_children())
    return LAYER in children and ("lora_A" in children or hasattr(module, "adapter_layer_names"))


def is_copied(module: nn.Module) -> bool:
    """Whether `module` holds a layer and copies that train in its place."""
    children = dict(module.named_children())
    return ORIGINAL in children and COPIES in children
