"""The styles of one block that consists of attention, feed-forward layers and norms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from shardwalk.parallelizer_core.layers import has_forward
from shardwalk.parallelizer_core.tensor_parallel.head_counts import (
    HeadCounts,
    count_attributes,
    head_counts,
)
from shardwalk.parallelizer_core.tensor_parallel.mixing import (
    mixing_in_attention,
    mixing_in_feed_forward,
)
from shardwalk.parallelizer_core.tensor_parallel.replica_requests import requested_style
from shardwalk.parallelizer_core.tensor_parallel.replicas import SplitInput, WholeInput
from shardwalk.parallelizer_core.tensor_parallel.role_names import (
    HEAD_NORM_NAMES,
)
from shardwalk.parallelizer_core.tensor_parallel.roles import (
    Attention,
    FeedForward,
    MisfitError,
    check_feed_forward,
    match_attention,
    match_feed_forward,
    named_children_with_parameters,
    vector_size,
)
from shardwalk.parallelizer_core.tensor_parallel.shared_inputs import hands_input_to_all
from shardwalk.parallelizer_core.tensor_parallel.styles import (
    ColumnParallel,
    LocalCounts,
    RowParallel,
    SharedInput,
)

Styles = Iterator[tuple[str, ParallelStyle]]
# Between split layers, these would mix features of which each rank holds a part.
_MIXERS = (nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.GLU)
_NOTHING_FOUND = (
    "no attention with linear layers for query, key, value and output is found in it, and no "
    "feed-forward layer (fused layers need a plan of their own, unless their source shows how they "
    "hold their components)"
)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One module in a block, with the layers whose linear layers are its direct children."""

    path: str
    module: nn.Module
    attention: Attention | None
    counts: HeadCounts | None
    feed_forward: FeedForward | None
    is_block: bool
    hidden_size: int
    sequence_parallel: bool

    @property
    def is_closed(self) -> bool:
        """Whether it is one layer by itself, so that its other children stand inside the split."""
        return not self.is_block and not (self.attention is None and self.feed_forward is None)

    @property
    def claimed(self) -> tuple[str, ...]:
        """The children that have a role."""
        attention = self.attention.names if self.attention else ()
        ff = self.feed_forward
        return (*attention, *((*ff.columns, ff.row) if ff else ()))

    @property
    def split_widths(self) -> set[int]:
        """The global widths of what lies between its column- and row-cut layers."""
        widths = {self.attention.width(0), self.attention.width(1)} if self.attention else set()
        widths |= {sum(self.attention.fused_widths)} if self.attention else set()
        return widths | ({self.feed_forward.inner_size} if self.feed_forward else set())


def block_styles(path: str, block: nn.Module, sequence_parallel: bool) -> Styles:
    """Every style of a block by module path, in the order of application on each module.

    Raises:
        MisfitError: a module in it has parameters and is no attention, feed-forward layer or norm.
    """
    hidden = _hidden_size(path, block)
    return _styles_in(path, block, hidden, sequence_parallel, is_block=True)


def layer_styles(path: str, layer: nn.Module) -> dict[str, tuple[ParallelStyle, ...]]:
    """The styles of one attention or feed-forward layer and of what stands in it.

    Raises:
        MisfitError: as `block_styles`.
    """
    styles: dict[str, list[ParallelStyle]] = {}
    for place, style in _styles_in(path, layer, _hidden_size(path, layer), False):
        styles.setdefault(place, []).append(style)
    return {place: tuple(found) for place, found in styles.items()}


def _hidden_size(path: str, block: nn.Module) -> int:
    modules = list(block.modules())
    layers = [match_attention("", module) for module in modules]
    others = [match_feed_forward("", module) for module in modules]
    sizes = {layer.hidden_size for layer in (*layers, *others) if layer is not None}
    if not sizes:
        raise MisfitError(path, _NOTHING_FOUND)
    if len(sizes) > 1:
        raise MisfitError(path, f"its layers take hidden states of several widths, {sorted(sizes)}")
    return sizes.pop()


def _styles_in(
    path: str, module: nn.Module, hidden: int, sequence_parallel: bool, *, is_block: bool = False
) -> Styles:
    _refuse_bare(path, module)
    attention = match_attention(path, module)
    part = _Part(
        path=path,
        module=module,
        attention=attention,
        counts=head_counts(attention) if attention else None,
        feed_forward=match_feed_forward(path, module),
        is_block=is_block,
        hidden_size=hidden,
        sequence_parallel=sequence_parallel,
    )
    if part.attention and part.counts:
        yield from _attention_styles(part, part.attention, part.counts)
    if part.feed_forward:
        yield from _feed_forward_styles(part, part.feed_forward)
    yield from _rest_styles(part, path, module)


def _attention_styles(part: _Part, attention: Attention, counts: HeadCounts) -> Styles:
    *columns, row = attention.names
    _refuse_buffers(part, {counts.heads, counts.key_value_heads}, "heads")
    _refuse_mixing(part, mixing_in_attention(part.module), "heads")
    sizes = attention.fused.components if attention.fused else ()
    yield from _linear_styles(part, tuple(dict.fromkeys(columns)), row, sizes)
    names = count_attributes(attention, counts)
    if names:
        yield part.path, LocalCounts(names=names)


def _feed_forward_styles(part: _Part, found: FeedForward) -> Styles:
    check_feed_forward(found)
    if not part.is_block:
        _refuse_buffers(part, {found.inner_size}, "features")
    for name, child in part.module.named_children():
        if isinstance(child, _MIXERS):
            raise MisfitError(
                f"{part.path}.{name}",
                f"{type(child).__name__} mixes the features between {found.columns[0]} and "
                f"{found.row}, of which each rank would hold a part",
            )
    if not part.attention:
        _refuse_mixing(part, mixing_in_feed_forward(part.module), "features")
    sizes = found.fused.components if found.fused else ()
    yield from _linear_styles(part, found.columns, found.row, sizes)


def _refuse_mixing(part: _Part, found: tuple[str, str] | None, parts: str) -> None:
    if found is not None:
        path, calls = found
        raise MisfitError(
            _join(part.path, path) if path else part.path,
            f"{calls}, which may work over {parts} of which each rank would hold a part",
        )


def _refuse_buffers(part: _Part, sizes: set[int], parts: str) -> None:
    for name, buffer in part.module.named_buffers(recurse=False):
        if any(size > 1 and size in sizes for size in buffer.shape):
            raise MisfitError(
                _join(part.path, name),
                f"a buffer of {tuple(buffer.shape)}, which may hold something for each of the "
                f"{parts}, of which each rank has a part",
            )


def _linear_styles(
    part: _Part, columns: tuple[str, ...], row: str, components: tuple[int, ...] = ()
) -> Styles:
    shared = part.is_closed and len(columns) > 1 and hands_input_to_all(part.module, columns)
    if shared:
        yield part.path, SharedInput()
    for name in columns:
        yield _join(part.path, name), ColumnParallel(shared_input=shared, components=components)
    yield _join(part.path, row), RowParallel(sequence_parallel=part.sequence_parallel)


def _rest_styles(part: _Part, path: str, module: nn.Module) -> Styles:
    """The styles of the children of `module` (the part's, or a container in it) without a role."""
    for name, child in named_children_with_parameters(module):
        child_path = _join(path, name)
        if module is part.module and name in part.claimed:
            continue
        size, asked = vector_size(child), requested_style(child_path, child)
        if asked is not None:
            yield child_path, asked
        elif not has_forward(child):
            _refuse_bare(child_path, child)
            yield from _rest_styles(part, child_path, child)
        elif size is not None:
            yield child_path, _vector_style(part, child_path, name, size)
        elif isinstance(child, nn.Linear):
            raise MisfitError(path, _no_roles(module))
        elif part.is_closed:
            raise MisfitError(child_path, f"{type(child).__name__} is neither a projection nor a "
                              f"norm of {part.path}")  # fmt: skip
        else:
            yield from _styles_in(child_path, child, part.hidden_size, part.sequence_parallel)


def _vector_style(part: _Part, path: str, name: str, size: int) -> ParallelStyle:
    """The style of a module with 1-D parameters of one size: a norm of heads or hidden states."""
    head_dim = part.counts.head_dim if part.counts else None
    is_head_norm = part.counts is not None and name in HEAD_NORM_NAMES
    if size == head_dim and (is_head_norm or size != part.hidden_size):
        return SplitInput()
    if is_head_norm:
        raise MisfitError(
            path, f"it has {size} elements, while a head has {head_dim}: a norm over several heads"
        )
    if part.is_closed and (size in part.split_widths or size == head_dim):
        raise MisfitError(path, f"its {size} elements may lie over features that are split")
    if size == part.hidden_size:
        return SplitInput() if part.sequence_parallel else WholeInput()
    raise MisfitError(
        path, f"its {size} elements fit neither hidden states of {part.hidden_size} nor heads"
    )


def _no_roles(module: nn.Module) -> str:
    names = [name for name, child in module.named_children() if isinstance(child, nn.Linear)]
    return (
        f"the names of its linear layers ({', '.join(names)}) are not those of query, key, value "
        f"and output, nor of a feed-forward layer alone (fused layers need a plan of their own, "
        f"unless their source shows how they hold their components)"
    )


def _refuse_bare(path: str, module: nn.Module) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        raise MisfitError(
            _join(path, name),
            f"a parameter of {tuple(parameter.shape)} that stands bare in {type(module).__name__}",
        )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
