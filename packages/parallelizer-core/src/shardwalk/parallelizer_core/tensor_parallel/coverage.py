"""Parameters that a plan leaves out where only the plan can say what they see.

A whole parameter that works on a part (of the heads, of the tokens) has a part of its gradient on
each rank. A plan that is silent about it would train it to wrong numbers without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from shardwalk.parallelizer_core.layers import find_block_stacks
from shardwalk.parallelizer_core.tensor_parallel.cuts import (
    covers,
    leaves_split_features,
    named_parameters_of,
    predicted_cuts,
    splits_sequence,
    splits_sequence_like_torch,
    takes_split_features,
)
from shardwalk.parallelizer_core.tensor_parallel.replicas import SplitInput
from shardwalk.parallelizer_core.tensor_parallel.roles import vector_size

Plan = Mapping[str, tuple[ParallelStyle, ...]]


def check_uncovered(model: nn.Module, plan: Plan) -> dict[str, tuple[ParallelStyle, ...]]:
    """What `plan` must say of parameters between its cuts, and does not.

    Returns:
        Additions to the plan: `SplitInput()` for each module that can only work on split heads.

    Raises:
        ValueError: a module whose input may be whole or split, named with both declarations.
    """
    planned = _Planned(model, plan)
    additions: dict[str, tuple[ParallelStyle, ...]] = {}
    for region in planned.regions():
        for path, module in planned.uncovered(region.path):
            if not region.splits_input_of(path, module):
                raise ValueError(_undeclared(path, module, f"the layers that split {region.path}"))
            additions[path] = (SplitInput(),)
    for place in planned.sequence_places():
        for path, module in planned.uncovered(place):
            if path not in additions:
                raise ValueError(_undeclared(path, module, "a plan that splits the sequence"))
    return additions


def _undeclared(path: str, module: nn.Module, where: str) -> str:
    names = ", ".join(name for name, _ in module.named_parameters(recurse=False))
    return (
        f"the tensor-parallel plan says nothing of {path or 'the model'} ({names}), which stands "
        f"among {where}; add it to the plan as SplitInput() if it works on a part of the heads or "
        f"tokens on each rank, or as WholeInput() if every rank gives it the whole input"
    )


@dataclass(frozen=True, kw_only=True)
class _Region:
    """The smallest module that holds a row-cut linear layer and the column cuts before it.

    Attributes:
        widths: every global width that its cut layers take or make.
        is_certain: whether all parameters in it are those layers', or known to see split input.
        owners: the modules whose children those layers are.
    """

    path: str
    widths: frozenset[int]
    is_certain: bool
    owners: frozenset[str]

    def splits_input_of(self, path: str, module: nn.Module) -> bool:
        """Whether `module` can only work on split heads: no whole tensor here has its width.

        It must stand beside the cut layers: one of a list of norms may see one head of them all.
        """
        size = vector_size(module)
        is_beside = path.rpartition(".")[0] in self.owners
        is_narrow = size is not None and size > 1 and size not in self.widths
        return self.is_certain and is_beside and is_narrow


class _Planned:
    """A model's modules with parameters of their own, by what a plan says of them."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.model, self.plan = model, plan
        self.modules = dict(model.named_modules())
        self.columns = self._linears(leaves_split_features)
        self.rows = self._linears(takes_split_features)
        self.unknown = [
            path
            for path, styles in plan.items()
            if predicted_cuts(styles, self.modules[path]) is None
        ]
        self.covering = [path for path, styles in plan.items() if covers(styles)]

    def _linears(self, has_role: object) -> list[str]:
        assert callable(has_role)
        return [
            path
            for path, styles in self.plan.items()
            if any(has_role(style, self.modules[path]) for style in styles)
        ]

    def regions(self) -> Iterator[_Region]:
        found: dict[str, None] = {}
        before = [*self.columns, *self.unknown]
        for row in self.rows:
            place = row
            while place and not self._in(place, before):
                place = place.rpartition(".")[0]
            if self._in(place, before):
                found[place] = None
        for place in found:
            yield self._region(place)

    def _region(self, place: str) -> _Region:
        cut_paths = self._in(place, [*self.columns, *self.rows])
        cut = [self.modules[path] for path in cut_paths]
        widths = {
            size
            for module in cut
            if isinstance(module, nn.Linear)
            for size in (module.in_features, module.out_features)
        }
        others = [path for path in self._in(place, self.covering) if path not in self._cut_paths]
        certain = all(
            any(isinstance(style, SplitInput) for style in self.plan[path]) for path in others
        )
        uncovered = [module for _, module in self.uncovered(place)]
        certain = certain and all(vector_size(module) is not None for module in uncovered)
        return _Region(
            path=place,
            widths=frozenset(widths),
            is_certain=certain,
            owners=frozenset(path.rpartition(".")[0] for path in cut_paths),
        )

    @property
    def _cut_paths(self) -> set[str]:
        return {*self.columns, *self.rows}

    def uncovered(self, place: str) -> Iterator[tuple[str, nn.Module]]:
        """The modules in `place` with parameters of their own of which the plan says nothing."""
        for path in self._in(place, list(self.modules)):
            module = self.modules[path]
            said = named_parameters_of(self.plan.get(path, ()))
            has_own = any(name not in said for name, _ in module.named_parameters(recurse=False))
            if has_own and not any(self._in(cover, [path]) for cover in self.covering):
                yield path, module

    def sequence_places(self) -> Iterator[str]:
        """Where hidden states are split over the sequence: the whole model under torch's styles."""
        splitting = {
            path: styles
            for path, styles in self.plan.items()
            if any(splits_sequence(style) for style in styles)
        }
        if any(splits_sequence_like_torch(s) for styles in splitting.values() for s in styles):
            yield ""
            return
        for stack in find_block_stacks(self.model):
            if any(self._in(block, list(splitting)) for block, _ in stack.blocks):
                yield from (block for block, _ in stack.blocks)

    @staticmethod
    def _in(place: str, paths: list[str]) -> list[str]:
        return [p for p in paths if not place or p == place or p.startswith(f"{place}.")]
