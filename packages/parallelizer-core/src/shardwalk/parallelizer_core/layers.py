"""Finding the stacks of blocks of a model by its structure.

A block is an element of the outermost `ModuleList`, `ModuleDict` or repeating `Sequential` on its
path. Lists inside a block (experts, attention branches) belong to the block: what runs there may
depend on the data, and a unit that some ranks skip would stall the others. A `ModuleDict` of single
layers (adapters by name) is part of the layer that holds it.

Towers are known by the names on the path of a module: what a model calls its vision or audio part,
and what stands between that part and the language model. A part of any name is a tower too where
the model's configuration holds one for it alone that has no vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_WORDS = {"vision": ("vision", "visual", "image", "video"), "audio": ("audio", "speech")}
_CONNECTOR_WORDS = ("projector", "connector", "resampler", "aligner", "qformer", "merger")


@dataclass(frozen=True)
class BlockStack:
    """An ordered stack of blocks.

    Attributes:
        name: the container's path in the model.
        blocks: (path, module) of every block, in order.
    """

    name: str
    blocks: tuple[tuple[str, nn.Module], ...]


def find_block_stacks(model: nn.Module) -> list[BlockStack]:
    """All stacks of `model` in the order of its modules; one that stands twice is listed once."""
    seen: set[nn.Module] = set()
    stacks = _stacks_of("", model, seen) if _is_stack(model) else _stacks_below("", model, seen)
    return [stack for stack in stacks if stack.blocks]


def layer_groups(model: nn.Module) -> dict[str, list[BlockStack]]:
    """The stacks of `model` by layer group: "language", "vision", "audio"; none is empty.

    What connects a tower with the language model counts as vision where the model has any, else as
    audio.
    """
    stacks = find_block_stacks(model)
    towers = _tower_groups(model)
    connected = next((group for group in _WORDS if group in towers.values()), "language")
    groups: dict[str, list[BlockStack]] = {}
    for stack in stacks:
        inside = [group for path, group in towers.items() if _leads_into(stack.name, path)]
        group = next(filter(None, inside), connected) if inside else "language"
        groups.setdefault(group, []).append(stack)
    return groups


def frozen_towers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The outermost fully frozen vision or audio towers and projectors."""
    found: list[tuple[str, nn.Module]] = []
    for name in _tower_groups(model):
        module = model.get_submodule(name)
        if not any(_leads_into(name, tower) for tower, _ in found) and _is_frozen(module):
            found.append((name, module))
    return found


def has_towers(model: nn.Module) -> bool:
    """Whether any module with parameters is a tower or a projector."""
    return any(_has_parameters(model.get_submodule(name)) for name in _tower_groups(model))


def tower_paths(model: nn.Module) -> Callable[[str], bool]:
    """What tells whether a path leads into a vision or audio tower or a projector of `model`."""
    towers = list(_tower_groups(model))
    return lambda path: any(_leads_into(path, tower) for tower in towers)


def _tower_groups(model: nn.Module) -> dict[str, str | None]:
    """The group of every tower by its path, in module order; None for what connects one."""
    parts = _configs_of_parts(model)
    groups: dict[str, str | None] = {}
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        if _names_a_tower(name):
            groups[path] = _modality(path)
        elif path and id(getattr(module, "config", None)) in parts:
            groups[path] = _modality(path) or _modality(parts[id(module.config)]) or "vision"
    return groups


def _leads_into(path: str, tower: str) -> bool:
    return f"{path}.".startswith(f"{tower}.")


def _configs_of_parts(model: nn.Module) -> dict[int, str]:
    """What the configurations in that of `model` are called, by id; those of text left out."""
    config = getattr(model, "config", None)
    inner = {k: v for k, v in getattr(config, "__dict__", {}).items() if hasattr(v, "to_dict")}
    return {
        id(value): f"{name}.{type(value).__qualname__}".lower()
        for name, value in inner.items()
        if not hasattr(value, "vocab_size")
    }


def has_forward(module: nn.Module) -> bool:
    """Whether the module can be called: lists and dicts of modules cannot."""
    return type(module).forward is not nn.Module.forward


def _stacks_below(name: str, module: nn.Module, seen: set[nn.Module]) -> Iterator[BlockStack]:
    for child_name, child in module.named_children():
        path = _join(name, child_name)
        if _is_stack(child):
            yield from _stacks_of(path, child, seen)
        else:
            yield from _stacks_below(path, child, seen)


def _stacks_of(name: str, container: nn.Module, seen: set[nn.Module]) -> Iterator[BlockStack]:
    """The container's own stack, then those of the containers in it."""
    blocks: list[tuple[str, nn.Module]] = []
    nested: list[BlockStack] = []
    for child_name, child in container.named_children():
        path = _join(name, child_name)
        if _is_stack(child):
            nested.extend(_stacks_of(path, child, seen))
        elif not has_forward(child):
            nested.extend(_stacks_below(path, child, seen))
        elif child not in seen and _has_parameters(child):
            seen.add(child)
            blocks.append((path, child))
    yield BlockStack(name, tuple(blocks))
    yield from nested


def _join(name: str, child_name: str) -> str:
    return f"{name}.{child_name}" if name else child_name


def _is_stack(module: nn.Module) -> bool:
    if isinstance(module, _CONTAINERS) and not has_forward(module):
        return not (isinstance(module, nn.ModuleDict) and _holds_single_layers(module))
    return type(module) is nn.Sequential and _repeats_a_block(module)


def _holds_single_layers(container: nn.Module) -> bool:
    """Whether all elements are layers of torch itself without parts, such as linear ones."""
    return all(
        type(child).__module__.startswith("torch.nn") and not any(True for _ in child.children())
        for child in container.children()
    )


def _repeats_a_block(sequential: nn.Sequential) -> bool:
    """Two or more composite children of one class: a stack of layers, not one small function."""
    composite = [child for child in sequential if any(True for _ in child.children())]
    return len(composite) > 1 and len({type(child) for child in composite}) == 1


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _is_frozen(module: nn.Module) -> bool:
    return _has_parameters(module) and not any(p.requires_grad for p in module.parameters())


def _names_a_tower(attribute: str) -> bool:
    return bool(_modality(attribute)) or any(word in attribute for word in _CONNECTOR_WORDS)


def _modality(path: str) -> str | None:
    """The group whose words stand on `path`, the outermost name first; None without any."""
    for name in path.split("."):
        for group, words in _WORDS.items():
            if any(word in name for word in words):
                return group
    return None
