"""What a style does to a module's parameters and activations, known before it is applied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from shardwalk.parallelizer_core.tensor_parallel.embedding_styles import (
    FeatureParallel,
    VocabularyParallel,
)
from shardwalk.parallelizer_core.tensor_parallel.partial_styles import (
    LocalParameters,
    SharedTail,
    SumOutput,
)
from shardwalk.parallelizer_core.tensor_parallel.replicas import (
    SplitInput,
    TokenParallel,
    WholeInput,
)
from shardwalk.parallelizer_core.tensor_parallel.styles import (
    ColumnParallel,
    LocalCounts,
    RowParallel,
    SequenceBoundary,
    SharedInput,
)

COLUMN_STYLES = (ColumnParallel, ColwiseParallel)
ROW_STYLES = (RowParallel, RowwiseParallel)
CUTTING_STYLES = (*COLUMN_STYLES, *ROW_STYLES, VocabularyParallel, FeatureParallel)
# These leave every parameter of their module whole, and say nothing about what it sees.
PARAMETERLESS_STYLES = (
    SharedInput,
    LocalCounts,
    SequenceBoundary,
    SumOutput,
    PrepareModuleInput,
    PrepareModuleOutput,
    PrepareModuleInputOutput,
)
_KEEPING_STYLES = (*PARAMETERLESS_STYLES, SplitInput, WholeInput, TokenParallel, SharedTail,
                   SequenceParallel)  # fmt: skip


def predicted_cut(style: ParallelStyle, module: nn.Module) -> dict[str, int | None] | None:
    """The dimension along which `style` cuts each parameter of `module`; None is whole.

    Returns:
        A dict by the names of the module's own parameters; None for a style that is not known here.
    """
    names = [name for name, _ in module.named_parameters(recurse=False)]
    if isinstance(style, _KEEPING_STYLES):
        return dict.fromkeys(names)
    if isinstance(style, VocabularyParallel):
        return dict.fromkeys(names, 0)
    if isinstance(style, FeatureParallel):
        return dict.fromkeys(names, 1)
    if isinstance(style, LocalParameters):
        return {name: style.cuts.get(name) for name in names}
    is_table = isinstance(module, nn.Embedding)
    if isinstance(style, COLUMN_STYLES):
        return dict.fromkeys(names, 1 if is_table else 0)
    if isinstance(style, ROW_STYLES):
        return {name: (0 if is_table else 1) if name == "weight" else None for name in names}
    return None


def predicted_cuts(
    styles: Iterable[ParallelStyle], module: nn.Module
) -> dict[str, int | None] | None:
    """The cuts of several styles on one module together; None where one of them is not known."""
    together: dict[str, int | None] = {
        name: None for name, _ in module.named_parameters(recurse=False)
    }
    for style in styles:
        cut = predicted_cut(style, module)
        if cut is None:
            return None
        together |= {name: dim for name, dim in cut.items() if dim is not None}
    return together


def covers(styles: Iterable[ParallelStyle]) -> bool:
    """Whether these styles say what becomes of all parameters in their module."""
    return any(not isinstance(s, (*PARAMETERLESS_STYLES, LocalParameters)) for s in styles)


def named_parameters_of(styles: Iterable[ParallelStyle]) -> set[str]:
    """The module's own parameters of which these styles say what becomes by their name."""
    return {n for style in styles if isinstance(style, LocalParameters) for n in style.cuts}


def leaves_split_features(style: ParallelStyle, module: nn.Module) -> bool:
    """Whether what follows a linear layer with this style works on a part of its features."""
    if not isinstance(module, nn.Linear):
        return False
    if isinstance(style, ColumnParallel):
        return not style.gather_output
    return isinstance(style, ColwiseParallel) and _is_last(style.output_layouts[0], 3)


def takes_split_features(style: ParallelStyle, module: nn.Module) -> bool:
    """Whether what precedes a linear layer with this style works on a part of its features."""
    if not isinstance(module, nn.Linear):
        return False
    if isinstance(style, RowParallel):
        return not style.split_input
    return isinstance(style, RowwiseParallel) and _is_last(style.input_layouts[0], 3)


def moves_split_features(style: ParallelStyle) -> bool:
    """Whether one of torch's styles hands features on in parts, or takes them so, by itself."""
    if not isinstance(style, (PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput)):
        return False
    return any(_is_last(layout, 3) for layout in _layouts(vars(style)))


def splits_sequence(style: ParallelStyle) -> bool:
    """Whether hidden states of [rows, length, width] are split over their length by `style`."""
    if isinstance(style, SequenceBoundary):
        return style.enter or style.leave
    if isinstance(style, RowParallel):
        return style.sequence_parallel
    return splits_sequence_like_torch(style)


def splits_sequence_like_torch(style: ParallelStyle) -> bool:
    """Whether one of torch's own styles has a layout that is split over the sequence."""
    if isinstance(style, SequenceParallel):
        return any(_is_sequence(layout) for layout in style.sequence_sharding)
    is_known = isinstance(style, (ColwiseParallel, RowwiseParallel, *PARAMETERLESS_STYLES))
    return is_known and any(_is_sequence(layout) for layout in _layouts(vars(style)))


def _layouts(value: object) -> Iterator[Placement]:
    if isinstance(value, Placement):
        yield value
    elif isinstance(value, ParallelStyle):
        yield from _layouts(vars(value))
    elif isinstance(value, dict):
        yield from _layouts(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _layouts(item)


def _is_sequence(layout: Placement) -> bool:
    return isinstance(layout, Shard) and layout.dim in {1, -2}


def _is_last(layout: Placement, dims: int) -> bool:
    return isinstance(layout, Shard) and layout.dim in {-1, dims - 1}
