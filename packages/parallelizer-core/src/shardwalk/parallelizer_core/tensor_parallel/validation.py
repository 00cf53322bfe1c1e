"""What tensor parallelism must divide and what it does not carry out, before anything moves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from shardwalk.parallelizer_core.tensor_parallel.component_checks import (
    check_bare_parameters,
    check_components,
    check_counts,
    check_units,
    divisors,
)
from shardwalk.parallelizer_core.tensor_parallel.cuts import (
    COLUMN_STYLES,
    CUTTING_STYLES,
    ROW_STYLES,
    leaves_split_features,
    predicted_cuts,
    takes_split_features,
)
from shardwalk.parallelizer_core.tensor_parallel.embedding_styles import (
    FeatureParallel,
    VocabularyParallel,
)
from shardwalk.parallelizer_core.tensor_parallel.head_counts import (
    HeadCounts,
    head_counts,
)
from shardwalk.parallelizer_core.tensor_parallel.replicas import SplitInput, TokenParallel
from shardwalk.parallelizer_core.tensor_parallel.role_names import (
    COLUMN_NAMES,
    ROW_NAMES,
)
from shardwalk.parallelizer_core.tensor_parallel.roles import (
    Attention,
    MisfitError,
    match_attention,
)

Plan = Mapping[str, tuple[ParallelStyle, ...]]


def validate_tp_sizes(model: nn.Module, tp_size: int, plan: Plan) -> None:
    """Refuse a plan whose cuts do not come out even, or that cuts one weight in two ways.

    Vocabularies need not divide, and neither does a linear layer whose output is gathered; but
    every rank must hold a row.

    Raises:
        ValueError: names tp_size, the number and what it counts, and the way out; on every rank
            alike, before any collective.
    """
    planned = [(path, model.get_submodule(path), styles) for path, styles in plan.items()]
    for path, module, styles in planned:
        for style in styles:
            _check_kind(path, module, style)
            _check_nothing_cut_inside(path, style, plan)
    validate_tp_heads(model, tp_size, plan)
    for path, module, styles in planned:
        for style in styles:
            check_components(tp_size, path, module, style)
            check_bare_parameters(tp_size, path, module, style)
            check_counts(tp_size, path, module, style)
            _check_features(model, tp_size, path, module, style)
            _check_rows(tp_size, path, module, style)
    refuse_conflicting_ties(model, plan)


def validate_tp_heads(model: nn.Module, tp_size: int, plan: Plan) -> None:
    """Refuse a tp size that does not divide the heads of an attention that `plan` cuts.

    Raises:
        ValueError: names num_attention_heads or num_key_value_heads and the sizes that fit; where
            no attention is recognized, the number of heads that a projection's source shows.
    """
    for path, heads, key_value_heads in _planned_heads(model, plan):
        counts = {"num_attention_heads": heads, "num_key_value_heads": key_value_heads}
        uneven = [f"{name}={count}" for name, count in counts.items() if count % tp_size]
        if uneven:
            raise ValueError(
                f"tp_size={tp_size} does not divide {' and '.join(uneven)} of {path}; "
                f"use tp_size={divisors(tp_size, heads, key_value_heads)}"
            )
    check_units(model, tp_size, plan)


def refuse_conflicting_ties(model: nn.Module, plan: Plan) -> None:
    """Refuse a plan that cuts a weight one way in one module and another way in the next.

    Raises:
        ValueError: names both modules, and how each cuts the weight they share.
    """
    seen: dict[int, tuple[str, int | None]] = {}
    for path, module in model.named_modules():
        cuts = predicted_cuts(plan.get(path, ()), module)
        if cuts is None:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            place = f"{path}.{name}"
            other, cut = seen.setdefault(id(parameter), (place, cuts[name]))
            if cut != cuts[name]:
                raise ValueError(
                    f"{other} and {place} are one weight, and the tensor-parallel plan leaves it "
                    f"{_cut_words(cut)} in the first and {_cut_words(cuts[name])} in the second; "
                    f"give both modules styles that agree (rows: VocabularyParallel() for the "
                    f"embedding and ColumnParallel(gather_output=True) for the head), or neither"
                )


def _cut_words(dim: int | None) -> str:
    return "whole" if dim is None else f"cut along dimension {dim}"


def _check_kind(path: str, module: nn.Module, style: ParallelStyle) -> None:
    """Refuse a cutting style on a module that it cannot cut."""
    is_linear, is_table = isinstance(module, nn.Linear), isinstance(module, nn.Embedding)
    name, kind = type(style).__name__, type(module).__name__
    if isinstance(style, ColwiseParallel | RowwiseParallel):
        if not (is_linear or is_table):
            raise ValueError(f"{name} at {path} cuts an nn.Linear or nn.Embedding, not a {kind}")
        if isinstance(style, RowwiseParallel) and is_table and _is_shard(style.input_layouts[0]):
            raise ValueError(
                f"{name} at {path} takes the ids of this embedding for parts of a longer list; "
                f"give it input_layouts=Replicate(), or use VocabularyParallel()"
            )
    elif isinstance(style, (*COLUMN_STYLES, *ROW_STYLES)) and not is_linear:
        raise ValueError(f"{name} at {path} cuts an nn.Linear, not a {kind}")
    elif isinstance(style, VocabularyParallel | FeatureParallel) and not is_table:
        raise ValueError(f"{name} at {path} cuts an nn.Embedding, not a {kind}")


def _check_rows(tp_size: int, path: str, module: nn.Module, style: ParallelStyle) -> None:
    """Refuse so few rows that the last rank would hold none: FSDP2 reduces no empty gradient."""
    cut = (predicted_cuts((style,), module) or {}).get("weight")
    if cut is None:
        return
    size = module.get_parameter("weight").shape[cut]
    if (tp_size - 1) * -(-size // tp_size) >= size:
        raise ValueError(
            f"tp_size={tp_size} leaves ranks without a part of {path}.weight, which is cut along a "
            f"dimension of {size}; use a smaller tp_size"
        )


def _check_nothing_cut_inside(path: str, style: ParallelStyle, plan: Plan) -> None:
    if not isinstance(style, SplitInput | TokenParallel):
        return
    for other, styles in plan.items():
        if other.startswith(f"{path}.") and any(isinstance(s, CUTTING_STYLES) for s in styles):
            raise ValueError(
                f"{type(style).__name__}() at {path} keeps every parameter in it whole, and the "
                f"plan cuts {other}; put the whole parameters into a module of their own"
            )


def _check_features(
    model: nn.Module, tp_size: int, path: str, module: nn.Module, style: ParallelStyle
) -> None:
    """Refuse features that are handed on in parts and do not divide."""
    features = _divided_features(module, style)
    if features is None or not features[1] % tp_size:
        return
    name, size = features
    known = _config_name(model, path, size)
    counted = f"{known}={size} ({path}.{name})" if known else f"{name}={size} of {path}"
    fits = divisors(tp_size, size)
    raise ValueError(f"tp_size={tp_size} does not divide {counted}; use tp_size={fits}")


def _divided_features(module: nn.Module, style: ParallelStyle) -> tuple[str, int] | None:
    """The name and number of the features of which every rank must hold equally many."""
    if isinstance(module, nn.Embedding):
        is_split = isinstance(style, ColwiseParallel) and _is_shard(style.output_layouts[0])
        divides = is_split and getattr(style, "use_local_output", False)
        return ("embedding_dim", module.embedding_dim) if divides else None
    if not isinstance(module, nn.Linear):
        return None
    if leaves_split_features(style, module) and getattr(style, "use_local_output", True):
        return "out_features", module.out_features
    if takes_split_features(style, module):
        return "in_features", module.in_features
    return None


def _planned_heads(model: nn.Module, plan: Plan) -> Iterator[tuple[str, int, int]]:
    """Path, heads and key-value heads of every attention of which `plan` splits projections."""
    for path, styles in plan.items():
        module = model.get_submodule(path)
        if not any(leaves_split_features(style, module) for style in styles):
            continue
        owner_path, _, name = path.rpartition(".")
        owner = model.get_submodule(owner_path)
        attention = match_attention(owner_path, owner)
        counts = _counts_of(attention) if attention and name in attention.names else None
        if counts is not None:
            yield owner_path, counts.heads, counts.key_value_heads
        elif name not in {*COLUMN_NAMES, *ROW_NAMES}:
            assert isinstance(module, nn.Linear)
            yield from _config_heads(model, owner, path, module.out_features)


def _counts_of(attention: Attention) -> HeadCounts | None:
    try:
        return head_counts(attention)
    except MisfitError:
        return None


def _config_heads(
    model: nn.Module, owner: nn.Module, path: str, width: int
) -> Iterator[tuple[str, int, int]]:
    """The counts of the config, if a projection of `width` holds all queries, keys or values."""
    config = _config_of(model, owner)
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return
    key_value_heads = getattr(config, "num_key_value_heads", None) or heads
    hidden = getattr(config, "hidden_size", 0) or 0
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    if width in {heads * head_dim, key_value_heads * head_dim}:
        yield path, heads, key_value_heads


def _config_of(model: nn.Module, owner: nn.Module) -> object:
    config = getattr(owner, "config", None) or getattr(model, "config", None)
    return getattr(config, "text_config", None) or config


def _config_name(model: nn.Module, path: str, size: int) -> str | None:
    """What the config calls the inner size of a feed-forward layer."""
    owner_path, _, name = path.rpartition(".")
    if name not in {*COLUMN_NAMES, *ROW_NAMES}:
        return None
    config = _config_of(model, model.get_submodule(owner_path))
    names = ("intermediate_size", "ffn_dim", "n_inner")
    return next((known for known in names if getattr(config, known, None) == size), None)


def _is_shard(layout: object) -> bool:
    return isinstance(layout, Shard)
