"""What the layers of a declared plan must prove before they are cut as it says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from shardwalk.parallelizer_core.tensor_parallel.block_styles import layer_styles
from shardwalk.parallelizer_core.tensor_parallel.cuts import (
    CUTTING_STYLES,
    covers,
    leaves_split_features,
    takes_split_features,
)
from shardwalk.parallelizer_core.tensor_parallel.fused_layouts import (
    fused_layout,
    integer_at,
    is_width,
)
from shardwalk.parallelizer_core.tensor_parallel.mixing import (
    mixing_in_attention,
    mixing_in_feed_forward,
)
from shardwalk.parallelizer_core.tensor_parallel.partial_styles import SharedTail
from shardwalk.parallelizer_core.tensor_parallel.replicas import SplitInput, WholeInput
from shardwalk.parallelizer_core.tensor_parallel.role_names import (
    KEY_VALUE_COUNTS,
    QUERY_COUNTS,
)
from shardwalk.parallelizer_core.tensor_parallel.roles import (
    MisfitError,
    match_attention,
    match_feed_forward,
    vector_size,
)
from shardwalk.parallelizer_core.tensor_parallel.styles import (
    ColumnParallel,
    LocalCounts,
    RowParallel,
)

Plan = Mapping[str, tuple[ParallelStyle, ...]]
Styles = dict[str, tuple[ParallelStyle, ...]]


def proven_layers(model: nn.Module, plan: Plan) -> tuple[Styles, list[str]]:
    """The styles of the layers that `plan` cuts, as far as they differ from it.

    Returns:
        Styles to put in their place, and what is not safe, a clause for each.
    """
    changed: Styles = {}
    problems: list[str] = []
    for owner in dict.fromkeys(path.rpartition(".")[0] for path in _cut_paths(plan)):
        layer = _Layer(path=owner, module=model.get_submodule(owner), plan=plan)
        structural = layer.structural()
        if structural is not None:
            changed |= structural
        elif layer.columns:
            changed |= layer.literal()
            problems += layer.problems()
    return changed, problems


def whole_latents(model: nn.Module, plan: Plan) -> Iterator[str]:
    """The modules beside a `SharedTail` that can only see whole features, by their sizes.

    Norms of what goes into column-cut layers, and linear layers that make it.
    """
    for path, styles in plan.items():
        if not any(isinstance(style, SharedTail) for style in styles):
            continue
        owner_path = path.rpartition(".")[0]
        owner, tailed = model.get_submodule(owner_path), model.get_submodule(path)
        assert isinstance(tailed, nn.Linear)
        latents = _inputs_of_columns(owner_path, owner, plan) - _head_widths(owner)
        for name, child in owner.named_children():
            place = _join(owner_path, name)
            if covers(plan.get(place, ())):
                continue
            is_first = isinstance(child, nn.Linear) and child.in_features == tailed.in_features
            size = child.out_features if is_first else vector_size(child)
            if size in latents:
                yield place


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """A module whose own linear layers a declared plan cuts."""

    path: str
    module: nn.Module
    plan: Plan

    def cut(self, name: str) -> ParallelStyle | None:
        """The style that cuts the child `name`."""
        styles = self.plan.get(_join(self.path, name), ())
        return next((style for style in styles if isinstance(style, CUTTING_STYLES)), None)

    @property
    def children(self) -> dict[str, nn.Linear]:
        """Its linear layers that are cut."""
        children = dict(self.module.named_children()).items()
        return {n: c for n, c in children if isinstance(c, nn.Linear) and self.cut(n)}

    @property
    def columns(self) -> dict[str, nn.Linear]:
        """Those of which each rank has a part of the output."""
        found = ((name, child, self.cut(name)) for name, child in self.children.items())
        return {n: c for n, c, style in found if style and leaves_split_features(style, c)}

    @property
    def inner_width(self) -> int:
        """The widest input of its row-cut layers."""
        found = ((child, self.cut(name)) for name, child in self.children.items())
        rows = [c.in_features for c, style in found if style and takes_split_features(style, c)]
        return max(rows, default=0)

    def structural(self) -> Styles | None:
        """The structural default's styles, where it cuts the layer as the plan says."""
        if not self.path:
            return None
        try:
            styles = layer_styles(self.path, self.module)
        except MisfitError:
            return None
        cut = {path for path in _cut_paths(self.plan) if path.startswith(f"{self.path}.")}
        agrees = cut == set(_cut_paths(styles)) and all(
            _alike(self.plan.get(path, ()), found) for path, found in styles.items()
        )
        return styles if agrees else None

    def literal(self) -> Styles:
        """Fused columns by their components, and the counts of heads that become local."""
        styles: Styles = {}
        named = (*QUERY_COUNTS, *KEY_VALUE_COUNTS)
        counts = {n: None for n in named if integer_at(self.module, n) and n in vars(self.module)}
        for name in self.columns:
            layout = fused_layout(self.module, name)
            if layout is None:
                continue
            counts |= dict.fromkeys(layout.counts)
            if len(layout.components) > 1:
                styles[_join(self.path, name)] = (ColumnParallel(components=layout.components),)
        if counts:
            own = self.plan.get(self.path, ())
            styles[self.path] = (*own, LocalCounts(names=tuple(counts)))
        return styles

    def problems(self) -> Iterator[str]:
        """What its source or its other layers make unsafe."""
        attention = match_attention(self.path, self.module)
        projections = attention.names if attention else ()
        for name, child in self.columns.items():
            is_plain = child.out_features == self.inner_width and name not in projections
            if not is_plain and fused_layout(self.module, name) is None:
                yield (
                    f"{_join(self.path, name)} makes {child.out_features} features for a layer "
                    f"that takes {self.inner_width}, and its source does not show in which order "
                    f"they hold heads or components"
                )
        for name in self.children.keys() - self.columns.keys():
            style = self.cut(name)
            if isinstance(style, ColumnParallel | RowParallel) and _is_whole(style):
                yield (
                    f"{_join(self.path, name)} is whole on every rank beside layers that are "
                    f"split, so that its gradient may be a part on each"
                )
        if attention:
            found = mixing_in_attention(self.module)
        elif match_feed_forward(self.path, self.module):
            found = mixing_in_feed_forward(self.module)
        else:
            found = None
        if found:
            yield f"{self.path}: {found[1]}, which may work over parts"


def _cut_paths(plan: Plan) -> list[str]:
    cutting = (ColumnParallel, RowParallel)
    return [p for p, styles in plan.items() if any(isinstance(s, cutting) for s in styles)]


def _is_whole(style: ColumnParallel | RowParallel) -> bool:
    return style.gather_output if isinstance(style, ColumnParallel) else style.split_input


def _alike(declared: tuple[ParallelStyle, ...], found: tuple[ParallelStyle, ...]) -> bool:
    """Whether a module is cut, or kept, as declared; fused components may be split that were not.

    A declared plan has a fused layer gathered where its vocabulary has no word for components.
    """
    for style in found:
        if isinstance(style, ColumnParallel):
            other = next((s for s in declared if isinstance(s, ColumnParallel)), None)
            if other is None or (other.gather_output and not style.components):
                return False
            if other.components not in ((), style.components):
                return False
        opposite = {SplitInput: WholeInput(), WholeInput: SplitInput()}.get(type(style))
        if opposite is not None and opposite in declared:
            return False
    rows = [[s for s in styles if isinstance(s, RowParallel)] for styles in (declared, found)]
    return len(rows[0]) == len(rows[1]) and not any(row.components for row in rows[0])


def _inputs_of_columns(owner_path: str, owner: nn.Module, plan: Plan) -> set[int]:
    return {
        child.in_features
        for name, child in owner.named_children()
        if isinstance(child, nn.Linear)
        and any(isinstance(s, ColumnParallel) for s in plan.get(_join(owner_path, name), ()))
    }


def _head_widths(owner: nn.Module) -> set[int]:
    return {v for n, v in vars(owner).items() if is_width(n) and isinstance(v, int)}


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
