"""Dropout among layers that tensor parallelism splits: equal on what is whole, own on parts.

Between a column-cut layer and the row-cut one that takes up its features each rank holds a part of
the heads or features, and draws its own numbers for whatever drops out there, by a module or a
function. Everywhere else activations are whole, and ranks draw equal numbers, except where hidden
states are split over the sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from shardwalk.parallelizer_core.layers import has_forward
from shardwalk.parallelizer_core.tensor_parallel.adapters import Wrapped, called_at
from shardwalk.parallelizer_core.tensor_parallel.cuts import (
    leaves_split_features,
    splits_sequence,
    takes_split_features,
)
from shardwalk.parallelizer_core.tensor_parallel.dropout_checks import (
    ELEMENTWISE,
    TOKEN_STYLES,
    Plan,
    dropout_of_adapter,
    dropping_modules,
    modules_inside,
)
from shardwalk.parallelizer_core.tensor_parallel.layouts import check_split_sequence, on_local
from shardwalk.parallelizer_core.tensor_parallel.local_parameters import Forward
from shardwalk.parallelizer_core.tensor_parallel.open_cuts import named_layers
from shardwalk.parallelizer_core.tensor_parallel.random_streams import (
    OwnStream,
    entered_stream,
    equal_numbers,
    own_numbers,
    stream_digest,
)
from shardwalk.parallelizer_core.tensor_parallel.styles import RowParallel, set_forward


def split_dropout(
    model: nn.Module, mesh: DeviceMesh, plan: Plan, wrapped: Mapping[str, Wrapped]
) -> bool:
    """Let what drops out in `model`, which has its styles, draw equal or own numbers.

    Args:
        model: without wrappers.
        wrapped: the wrappers that stand in it, by path.

    Returns:
        Whether anything drops out.
    """
    dropping, in_adapters = dropping_modules(model), _in_adapters(model, plan, wrapped)
    if not dropping and not in_adapters:
        return False
    for module, sees_parts in in_adapters:
        set_forward(module, _DropoutForward(module, module.forward, mesh, sees_parts))
    for path, styles in plan.items():
        for _, module in modules_inside(path, dropping) if _has(styles, TOKEN_STYLES) else ():
            set_forward(module, _DropoutForward(module, module.forward, mesh, True))
    if any(splits_sequence(style) for styles in plan.values() for style in styles):
        for _, module in dropping:
            if isinstance(module, ELEMENTWISE) and "forward" not in vars(module):
                set_forward(module, _DropoutForward(module, module.forward, mesh, None))
    for region in _regions(model, mesh, plan) if dropping else ():
        region.mark(model, wrapped)
    return True


def _in_adapters(
    model: nn.Module, plan: Plan, wrapped: Mapping[str, Wrapped]
) -> list[tuple[nn.Module, bool]]:
    """The dropout of adapters, and whether it sees a part on each rank."""
    found: list[tuple[nn.Module, bool]] = []
    for path, around in wrapped.items():
        over = [s for place, styles in plan.items() if _is_in(path, place) for s in styles]
        takes_part = _has(plan.get(path, ()), (RowParallel,)) or _has(over, TOKEN_STYLES)
        found += [(module, takes_part) for module in dropout_of_adapter(around)]
    return found


def _has(styles: Sequence[ParallelStyle], kinds: tuple[type[ParallelStyle], ...]) -> bool:
    return any(isinstance(style, kinds) for style in styles)


@dataclass
class _DropoutForward:
    """The forward of a dropout module.

    Attributes:
        sees_parts: whether its input is a part on each rank; None where the input itself tells, as
            a DTensor that is split over the sequence does.
    """

    module: nn.Module
    inner: Forward
    mesh: DeviceMesh
    sees_parts: bool | None
    place: str = ""

    def __call__(self, input: Tensor) -> Any:
        if not self.module.training:
            return self.inner(input)
        if isinstance(input, DTensor):
            check_split_sequence(input, self.place)
            with own_numbers(self.mesh):
                return on_local(self.inner, input)
        with self._numbers():
            return self.inner(input)

    def _numbers(self) -> AbstractContextManager[None]:
        if self.sees_parts is None:
            return nullcontext()
        return own_numbers(self.mesh) if self.sees_parts else equal_numbers()


@dataclass(kw_only=True)
class _Region:
    """A stretch of a module's forward in which each rank holds a part of heads or features.

    Attributes:
        path: the module's path.
        module: while it runs, the region may be open.
        columns: paths of the layers at whose end it opens.
        rows: paths of the layers at whose start it closes.
    """

    path: str
    module: nn.Module
    columns: frozenset[str]
    rows: list[str] = field(default_factory=list)
    stream: OwnStream

    def mark(self, model: nn.Module, wrapped: Mapping[str, Wrapped]) -> None:
        """Let the layers open and close it."""
        for path in self.columns:
            for layer in called_at(model, path, wrapped):
                set_forward(layer, _Opening(layer.forward, self))
        for path in self.rows:
            for layer in called_at(model, path, wrapped):
                set_forward(layer, _Closing(layer.forward, self))
        set_forward(self.module, _Closed(self.module.forward, self))

    def open(self) -> None:
        """From here on each rank draws its own numbers.

        Raises:
            ValueError: another region is open.
        """
        other = entered_stream()
        if other is self.stream or not self._is_training():
            return
        if other is not None:
            raise ValueError(
                f"{self.path or 'the model'} splits features before another layer has taken up "
                f"those that it split: dropout cannot tell the parts of two layers that run "
                f"interleaved from what is whole; set it to 0, or use tp_size=1"
            )
        self.stream.enter()

    def close(self) -> None:
        """From here on all draw equal ones."""
        if self.stream.is_entered:
            self.stream.leave()

    def _is_training(self) -> bool:
        return any(module.training for module in self.module.modules())


@dataclass
class _Opening:
    inner: Forward
    region: _Region

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.inner(*args, **kwargs)
        self.region.open()
        return output


@dataclass
class _Closing:
    inner: Forward
    region: _Region

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.region.close()
        return self.inner(*args, **kwargs)


@dataclass
class _Closed:
    """Closes the region however the forward ends: a recompute may end it early."""

    inner: Forward
    region: _Region

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.inner(*args, **kwargs)
        finally:
            self.region.close()


def _regions(model: nn.Module, mesh: DeviceMesh, plan: Plan) -> list[_Region]:
    """The regions between the cuts of a plan, each with the columns that open it."""
    modules = dict(model.named_modules())
    columns = [p for p, styles in plan.items() if _any(leaves_split_features, styles, modules[p])]
    rows = [p for p, styles in plan.items() if _any(takes_split_features, styles, modules[p])]
    layers = {f"{o}.{row}" if o else row: (o, names) for o, names, row in named_layers(model)}
    claimed = {f"{o}.{n}" if o else n for o, names in layers.values() for n in names}
    found: dict[frozenset[str], _Region] = {}
    for row in rows:
        owner, names = layers.get(row, ("", ()))
        opening = frozenset(f"{owner}.{n}" if owner else n for n in names) & frozenset(columns)
        place = owner
        if not opening:
            place = _smallest(row, columns)
            opening = frozenset(c for c in columns if _is_in(c, place) and c not in claimed)
        if not opening:
            continue
        while place and not has_forward(modules[place]):
            place = place.rpartition(".")[0]
        stream = OwnStream(mesh)
        region = _Region(path=place, module=modules[place], columns=opening, stream=stream)
        found.setdefault(opening, region).rows.append(row)
    return list(found.values())


def _any(has_role: Any, styles: tuple[ParallelStyle, ...], module: nn.Module) -> bool:
    return any(has_role(style, module) for style in styles)


def _smallest(row: str, columns: Sequence[str]) -> str:
    place = row
    while place:
        place = place.rpartition(".")[0]
        if any(_is_in(column, place) for column in columns):
            break
    return place


def _is_in(path: str, place: str) -> bool:
    return not place or path == place or path.startswith(f"{place}.")


def check_first_numbers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Compare over the tensor-parallel ranks what the generators will draw, once, before training.

    Ranks that drop other features of what is whole would go on with parts of two models.
    """

    def check(module: nn.Module, args: tuple[Any, ...]) -> None:
        if not module.training:
            return
        handle.remove()
        digests: list[Any] = [None] * mesh.size()
        dist.all_gather_object(digests, stream_digest(mesh), group=mesh.get_group())
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if others:
            raise ValueError(
                f"tp ranks {others} would draw other random numbers than tp rank 0, and the model "
                f"has dropout, whose masks must be equal on what is whole; call "
                f"seed_everything(mesh_context, seed) before the first forward"
            )

    handle = model.register_forward_pre_hook(check)
