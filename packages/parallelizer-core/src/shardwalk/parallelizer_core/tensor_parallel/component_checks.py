"""Sizes of what a layer holds several of: components, units and bare parameters, over the ranks."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from shardwalk.parallelizer_core.tensor_parallel.cuts import (
    COLUMN_STYLES,
    leaves_split_features,
    predicted_cuts,
)
from shardwalk.parallelizer_core.tensor_parallel.fused_layouts import (
    FusedLayout,
    fused_layout,
    integer_at,
)
from shardwalk.parallelizer_core.tensor_parallel.partial_styles import LocalParameters
from shardwalk.parallelizer_core.tensor_parallel.styles import (
    ColumnParallel,
    LocalCounts,
    RowParallel,
)

Plan = Mapping[str, tuple[ParallelStyle, ...]]


def refuse_unnamed_components(model: nn.Module, plan: Plan) -> None:
    """Refuse to cut a fused layer otherwise than in the components that its source shows.

    Every rank would compute with features of the wrong ones, most often without an error. A layer
    whose source shows no components is left to the plan.

    Raises:
        ValueError: names the layer, the sizes of its components, and the styles that fit.
    """
    for path, styles in plan.items():
        layout = _handed_on_in_parts(model, path, styles)
        if layout is None or len(layout.components) < 2:
            continue
        owner = path.rpartition(".")[0]
        named = any(getattr(style, "components", ()) == layout.components for style in styles)
        counts = _global_counts(model, plan, owner, layout)
        if named and not counts:
            continue
        counted = f" beside LocalCounts(names={counts}) at {owner or 'the model'}" if counts else ""
        raise ValueError(
            f"the tensor-parallel plan cuts the fused {path} with "
            f"{_words(styles)}, and the source that calls it takes its output for components of "
            f"{', '.join(map(str, layout.components))} features, one after the other"
            f"{', by counts of all ranks' if named else ''}; use "
            f"ColumnParallel(components={layout.components}){counted}, or keep the layer whole by "
            f"WholeInput() at {owner or 'all of its parts'}"
        )


def _handed_on_in_parts(
    model: nn.Module, path: str, styles: tuple[ParallelStyle, ...]
) -> FusedLayout | None:
    """The proven layout of a linear layer whose output goes on as this rank's plain part."""
    module = model.get_submodule(path)
    if not any(
        leaves_split_features(style, module) and getattr(style, "use_local_output", True)
        for style in styles
    ):
        return None
    owner, _, name = path.rpartition(".")
    return fused_layout(model.get_submodule(owner), name)


def _global_counts(
    model: nn.Module, plan: Plan, owner: str, layout: FusedLayout
) -> tuple[str, ...]:
    """The counts that the owner's source reads, and that the plan leaves those of all ranks."""
    styles = plan.get(owner, ())
    if predicted_cuts(styles, model.get_submodule(owner)) is None:
        return ()  # a style of the user's own may see to them
    local = {n for style in styles if isinstance(style, LocalCounts) for n in style.names}
    return tuple(name for name in layout.counts if name not in local)


def _words(styles: tuple[ParallelStyle, ...]) -> str:
    style = next(s for s in styles if isinstance(s, COLUMN_STYLES))
    sizes = getattr(style, "components", ())
    return f"{type(style).__name__}({f'components={sizes}' if sizes else ''})"


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


def check_units(model: nn.Module, tp_size: int, plan: Plan) -> None:
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
