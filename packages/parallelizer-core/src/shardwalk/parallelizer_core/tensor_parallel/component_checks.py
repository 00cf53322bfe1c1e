"""Sizes of what a layer holds several of: components, units and bare parameters, over the ranks."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from shardwalk.parallelizer_core.tensor_parallel.cuts import leaves_split_features
from shardwalk.parallelizer_core.tensor_parallel.fused_layouts import fused_layout, integer_at
from shardwalk.parallelizer_core.tensor_parallel.partial_styles import LocalParameters
from shardwalk.parallelizer_core.tensor_parallel.styles import (
    ColumnParallel,
    LocalCounts,
    RowParallel,
)


def check_components(tp_size: int, path: str, module: nn.Module, style: ParallelStyle) -> None:
    """Refuse components that do not make up a layer, or of which ranks would hold unequal parts."""
    if not (isinstance(style, ColumnParallel | RowParallel) and style.components):
        return
    assert isinstance(module, nn.Linear), "_check_kind has seen to that"
    is_column, sizes = isinstance(style, ColumnParallel), style.components
    name = "out_features" if is_column else "in_features"
    width = getattr(module, name)
    if sum(sizes) != width or min(sizes) < 1:
        raise ValueError(
            f"{type(style).__name__}(components={sizes}) at {path}: they make up {sum(sizes)} "
            f"features, and {name} is {width}; give the sizes of what lies one after the other"
        )
    uneven = [size for size in sizes if size % tp_size]
    if uneven:
        raise ValueError(
            f"tp_size={tp_size} does not divide a component of {uneven[0]} of the fused {path} "
            f"({name}={width}, which holds components of {', '.join(map(str, sizes))}); use "
            f"tp_size={divisors(tp_size, *sizes)}"
        )


def check_bare_parameters(tp_size: int, path: str, module: nn.Module, style: ParallelStyle) -> None:
    """Refuse names that are no parameters of the module, and sizes that do not divide."""
    if not isinstance(style, LocalParameters):
        return
    own = dict(module.named_parameters(recurse=False))
    for name, dim in style.cuts.items():
        shape = tuple(own[name].shape) if name in own else ()
        if not -len(shape) <= dim < len(shape):
            raise ValueError(
                f"LocalParameters at {path} cuts {name} along dimension {dim}, and the module has "
                f"{f'it in the shape {shape}' if name in own else 'no parameter of that name'}"
            )
        if shape[dim] % tp_size:
            raise ValueError(
                f"tp_size={tp_size} does not divide dimension {dim} of {path}.{name}, {shape}; use "
                f"tp_size={divisors(tp_size, shape[dim])}"
            )


def check_counts(tp_size: int, path: str, module: nn.Module, style: ParallelStyle) -> None:
    """Refuse counts that do not divide, of a module whose forward reads them."""
    for name in style.names if isinstance(style, LocalCounts) else ():
        count = integer_at(module, name)
        if count is None or count % tp_size:
            raise ValueError(
                f"tp_size={tp_size} does not divide {name}={count} of {path or 'the model'}, which "
                f"its forward reads; use tp_size={divisors(tp_size, count or 1)}"
            )


def check_units(
    model: nn.Module, tp_size: int, plan: Mapping[str, tuple[ParallelStyle, ...]]
) -> None:
    """Refuse a tp size that would cut through the units (heads) that a layer's source shows.

    Raises:
        ValueError: names the layer, how many units of which size it holds, and the sizes that fit.
    """
    for path, styles in plan.items():
        module = model.get_submodule(path)
        is_split = any(leaves_split_features(style, module) for style in styles)
        if not (is_split and isinstance(module, nn.Linear)):
            continue
        owner, _, name = path.rpartition(".")
        layout = fused_layout(model.get_submodule(owner), name)
        if layout is None or not layout.unit:
            continue
        units = module.out_features // layout.unit
        if units % tp_size:
            raise ValueError(
                f"tp_size={tp_size} does not divide the {units} heads of {layout.unit} features "
                f"that {path} makes; use tp_size={divisors(tp_size, units)}"
            )


def divisors(tp_size: int, *counts: int) -> str:
    """The sizes up to about `tp_size` that divide all of these, as words."""
    *most, last = (str(n) for n in range(1, max(8, tp_size) + 1) if not any(c % n for c in counts))
    return f"{', '.join(most)} or {last}" if most else last
