"""Weights that stand under more than one name in a model."""

from __future__ import annotations

from collections import defaultdict

from torch import nn


class SharedParameters:
    """Which modules of a model hold the same parameter, looked up once for many questions."""

    def __init__(self, model: nn.Module) -> None:
        owners: dict[int, list[nn.Module]] = defaultdict(list)
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                owners[id(parameter)].append(module)
        self._owners = {key: modules for key, modules in owners.items() if len(modules) > 1}

    def leave(self, part: nn.Module) -> bool:
        """Whether a parameter of `part` also stands in a module outside of `part`."""
        if not self._owners:
            return False
        inside = set(part.modules())
        return any(
            owner not in inside
            for parameter in part.parameters()
            for owner in self._owners.get(id(parameter), ())
        )
