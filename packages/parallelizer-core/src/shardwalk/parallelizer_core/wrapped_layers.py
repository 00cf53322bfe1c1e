"""Wrappers around single layers: adapters, and the copies of a layer that train in its place.

They are known by their children: a `base_layer` beside adapters, or an `original_module` beside
`modules_to_save`, of which there is one for each adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from shardwalk.parallelizer_core.model_tensors import canonical_name

_LAYER, _ORIGINAL, _COPIES = "base_layer", "original_module", "modules_to_save"


def wrapped_layers(model: nn.Module) -> Iterator[str]:
    """The canonical path of every layer in `model` that stands in a wrapper."""
    for path, module in model.named_modules():
        if _is_adapted(module) or _is_copied(module):
            yield canonical_name(path)


def names_of_layers(model: nn.Module) -> Callable[[str], str]:
    """What makes a name in `model` that of the model without any wrapper.

    An adapter's own tensors keep theirs, and a copy of a layer has the name of its layer.
    """
    dropped: set[str] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        start = f"{canonical_name(path)}.".lstrip(".")
        if _is_adapted(module):
            dropped.add(f"{start}{_LAYER}")
        if _is_copied(module):
            copies = module.get_submodule(_COPIES)
            dropped |= {f"{start}{_ORIGINAL}", f"{start}{_COPIES}"}
            dropped |= {f"{start}{_COPIES}.{name}" for name, _ in copies.named_children()}

    def plain(name: str) -> str:
        parts = canonical_name(name).split(".")
        kept = (part for i, part in enumerate(parts) if ".".join(parts[: i + 1]) not in dropped)
        return ".".join(kept)

    return plain


def _is_adapted(module: nn.Module) -> bool:
    children = dict(module.named_children())
    return _LAYER in children and ("lora_A" in children or hasattr(module, "adapter_layer_names"))


def _is_copied(module: nn.Module) -> bool:
    children = dict(module.named_children())
    return _ORIGINAL in children and _COPIES in children
