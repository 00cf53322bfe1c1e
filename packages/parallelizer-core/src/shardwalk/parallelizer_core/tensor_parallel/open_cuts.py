"""Cuts of a plan that leave features split, or take them split, with nothing to match.

What a column-cut linear layer makes is a part on each rank, which only a row-cut one can take up
again. Without the other half the first forward fails in a matmul that names neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from shardwalk.parallelizer_core.layers import find_block_stacks
from shardwalk.parallelizer_core.tensor_parallel.cuts import (
    covers,
    leaves_split_features,
    moves_split_features,
    predicted_cuts,
    takes_split_features,
)
from shardwalk.parallelizer_core.tensor_parallel.roles import match_attention, match_feed_forward

Plan = Mapping[str, tuple[ParallelStyle, ...]]


def refuse_open_cuts(model: nn.Module, plan: Plan) -> None:
    """Refuse a plan that cuts a part of an attention or feed-forward layer and forgets the rest.

    Within the blocks only: an output head may hand split features to a loss that knows of them.

    Raises:
        ValueError: names the modules that are cut and those that are missing.
    """
    plan = _under_every_name(model, plan)
    cuts = _Cuts(model, plan)
    _refuse_partial_layers(model, plan, cuts)
    for path in cuts.inside(cuts.columns):
        if not cuts.has_match(path, cuts.rows, cuts.columns):
            raise ValueError(
                f"the tensor-parallel plan cuts {path} along its output features, and no row-cut "
                f"layer in its block takes them up; add the layer that follows as RowParallel(), "
                f"or use ColumnParallel(gather_output=True)"
            )
    for path in cuts.inside(cuts.rows):
        if not cuts.has_match(path, cuts.columns, cuts.rows):
            raise ValueError(
                f"the tensor-parallel plan cuts {path} along its input features, and no column-cut "
                f"layer in its block makes them; add the layers before it as ColumnParallel()"
            )


def _under_every_name(model: nn.Module, plan: Plan) -> Plan:
    """`plan`, in which a layer that stands in several modules is planned in each of them."""
    first = {module: path for path, module in model.named_modules()}
    every = {
        _join(path, name): plan[first[child]]
        for module, path in first.items()
        for name, child in module.named_children()
        if first[child] in plan
    }
    return {**every, **plan}


def _refuse_partial_layers(model: nn.Module, plan: Plan, cuts: _Cuts) -> None:
    for owner, columns, row in named_layers(model):
        names = [*columns, row]
        cut = [name for name in names if _join(owner, name) in {*cuts.columns, *cuts.rows}]
        rest = [name for name in names if not _is_said(_join(owner, name), plan)]
        if cut and rest:
            missing = ", ".join(
                f"{name} as {'RowParallel()' if name == row else 'ColumnParallel()'}"
                for name in rest
            )
            raise ValueError(
                f"the tensor-parallel plan cuts {', '.join(cut)} of {owner or 'the model'} and "
                f"says nothing of {', '.join(rest)}, which belong to the same layer; add "
                f"{missing} (or declare what does not belong to it as WholeInput())"
            )


def named_layers(model: nn.Module) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Path, column names and row name of every attention and feed-forward layer."""
    for path, module in model.named_modules():
        attention, feed_forward = match_attention(path, module), match_feed_forward(path, module)
        if attention:
            yield path, tuple(dict.fromkeys(attention.names[:3])), attention.names[3]
        if feed_forward:
            yield path, feed_forward.columns, feed_forward.row


class _Cuts:
    """The linear layers that a plan cuts, and whatever else may split or join features."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.columns: list[str] = []
        self.rows: list[str] = []
        self.others: list[str] = []
        for path, styles in plan.items():
            module = model.get_submodule(path)
            if any(leaves_split_features(style, module) for style in styles):
                self.columns.append(path)
            if any(takes_split_features(style, module) for style in styles):
                self.rows.append(path)
            is_unknown = predicted_cuts(styles, module) is None
            if is_unknown or any(moves_split_features(style) for style in styles):
                self.others.append(path)
        self.blocks = [path for stack in find_block_stacks(model) for path, _ in stack.blocks]

    def inside(self, paths: Iterable[str]) -> list[str]:
        """Those of `paths` that stand in a block."""
        return [path for path in paths if any(_is_in(path, block) for block in self.blocks)]

    def has_match(self, path: str, partners: list[str], alike: list[str]) -> bool:
        """Whether a layer of the other kind stands in the smallest module that holds one.

        One whose own smallest module with a layer of the first kind leaves `path` out is taken.
        """
        place = self._smallest(path, [*partners, *self.others])
        if place is None:
            return False
        found = [other for other in partners if _is_in(other, place)]
        if any(_is_in(other, place) for other in self.others):
            return True
        return any(_is_in(path, self._smallest(other, alike) or "") for other in found)

    def _smallest(self, path: str, others: list[str]) -> str | None:
        place = path
        while place:
            place = place.rpartition(".")[0]
            if any(_is_in(other, place) for other in others):
                is_inside = place in self.blocks or self.inside([place])
                return place if is_inside else None
        return None


def _is_said(path: str, plan: Plan) -> bool:
    return any(_is_in(path, planned) and covers(styles) for planned, styles in plan.items())


def _is_in(path: str, place: str) -> bool:
    return not place or path == place or path.startswith(f"{place}.")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
