"""Weights that are used in more than one place of a model."""

from __future__ import annotations

from collections import defaultdict

from torch import nn


class SharedParameters:
    """Which parameters of a model belong to several modules, looked up once for many questions.

    Either two modules hold the same parameter, or two modules hold the same module.
    """

    def __init__(self, model: nn.Module) -> None:
        owners: dict[int, set[nn.Module]] = defaultdict(set)
        parents: dict[nn.Module, set[nn.Module]] = defaultdict(set)
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                owners[id(parameter)].add(module)
            for child in module.children():
                parents[child].add(module)
        self._owners = {key: modules for key, modules in owners.items() if len(modules) > 1}
        self._parents = {
            module: above
            for module, above in parents.items()
            if len(above) > 1 and any(True for _ in module.parameters())
        }

    def leave(self, part: nn.Module) -> bool:
        """Whether a parameter of `part` is also used by a module outside of `part`.

        `part` itself may stand in several places.
        """
        if not self._owners and not self._parents:
            return False
        inside = set(part.modules())
        shared = [self._owners.get(id(parameter), set()) for parameter in part.parameters()]
        shared += [self._parents.get(module, set()) for module in inside if module is not part]
        return any(not users <= inside for users in shared)
