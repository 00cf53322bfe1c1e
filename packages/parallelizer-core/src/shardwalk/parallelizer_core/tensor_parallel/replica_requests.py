"""What a module itself asks for the gradients of parameters that stay whole over the tp axis."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from shardwalk.parallelizer_core.layers import find_block_stacks
from shardwalk.parallelizer_core.tensor_parallel.cuts import leaves_split_features
from shardwalk.parallelizer_core.tensor_parallel.replicas import SplitInput, WholeInput
from shardwalk.parallelizer_core.tensor_parallel.roles import vector_size
from shardwalk.parallelizer_core.tensor_parallel.styles import LocalCounts, SequenceBoundary

Plan = dict[str, tuple[ParallelStyle, ...]]

ATTRIBUTE = "tp_gradient_reduction"
_STYLES: dict[str, ParallelStyle] = {
    "none": WholeInput(),
    "mean": WholeInput(average_gradients=True),
    "sum": SplitInput(),
}


def requested_style(path: str, module: nn.Module) -> ParallelStyle | None:
    """The style that a module asks for by its attribute `tp_gradient_reduction`, else None.

    "none" leaves its gradients as each rank has them (whole, because it sees whole input), "mean"
    averages them over the ranks, and "sum" adds up the parts of a module that sees a part of its
    input on each rank.

    Raises:
        ValueError: the attribute has another value.
    """
    asked = getattr(module, ATTRIBUTE, None)
    if asked is None:
        return None
    if not isinstance(asked, str) or asked not in _STYLES:
        raise ValueError(
            f"{ATTRIBUTE}={asked!r} of {path or 'the model'} must be one of "
            f"{', '.join(map(repr, _STYLES))}, or None to leave it to the tensor-parallel plan"
        )
    return _STYLES[asked]


def requested_styles(model: nn.Module) -> dict[str, ParallelStyle]:
    """What the modules of `model` ask for, by path.

    Raises:
        ValueError: an attribute has a value that is not allowed.
    """
    return {
        path: style
        for path, module in model.named_modules()
        if (style := requested_style(path, module)) is not None
    }


def with_requests(model: nn.Module, plan: Plan) -> Plan:
    """`plan` with what modules ask for, instead of what it says of their whole parameters.

    Raises:
        ValueError: the plan cuts such a module or what is in it, an outer module keeps all in it
            whole in another way, or a module that asks to be taken for one with whole input gets
            hidden states that are split over the sequence.
    """
    asked = requested_styles(model)
    split = _split_blocks(model, plan) if asked else []
    for path, style in asked.items():
        _refuse_contradictions(path, style, plan)
        if isinstance(style, WholeInput) and _gets_split_sequence(model, path, plan, split):
            raise ValueError(
                f"{ATTRIBUTE}={getattr(model.get_submodule(path), ATTRIBUTE)!r} of {path} takes it "
                f"for a module that sees its whole input, and under sequence_parallel=True its "
                f"hidden states are split over the sequence; use 'sum', leave the attribute out, "
                f"or use sequence_parallel=False"
            )
    merged = plan | {path: (style,) for path, style in asked.items()}
    return {path: merged[path] for path, _ in model.named_modules() if path in merged}


def _refuse_contradictions(path: str, style: ParallelStyle, plan: Plan) -> None:
    whole = (SplitInput, WholeInput)
    for other, styles in plan.items():
        is_in = other == path or not path or other.startswith(f"{path}.")
        is_around = other != path and (not other or path.startswith(f"{other}."))
        replaced = other == path and all(isinstance(s, whole) for s in styles)
        around = is_around and any(isinstance(s, whole) and s != style for s in styles)
        if (is_in and not replaced) or around:
            raise ValueError(
                f"{path or 'the model'} asks for {type(style).__name__}() by its {ATTRIBUTE}, and "
                f"the tensor-parallel plan has {type(styles[0]).__name__}() at "
                f"{other or 'the model'}; drop one of the two"
            )


def _split_blocks(model: nn.Module, plan: Plan) -> list[str]:
    """The blocks between whose boundaries hidden states are split over the sequence."""
    stacks = [[path for path, _ in stack.blocks] for stack in find_block_stacks(model)]
    bounded = {
        p for p, styles in plan.items() if any(isinstance(s, SequenceBoundary) for s in styles)
    }
    return [path for paths in stacks if bounded.intersection(paths) for path in paths]


def _gets_split_sequence(model: nn.Module, path: str, plan: Plan, blocks: list[str]) -> bool:
    """Whether a module works on the hidden states of its block, and not within a split layer."""
    block = next((b for b in blocks if path.startswith(f"{b}.")), None)
    owner = path.rpartition(".")[0]
    while block is not None:
        widths = _widths_of_columns(model, owner, plan)
        if widths:
            return vector_size(model.get_submodule(path)) in widths
        if owner == block:
            return True
        if not all(isinstance(style, LocalCounts) for style in plan.get(owner, ())):
            return False  # its style decides what is handed on in it
        owner = owner.rpartition(".")[0]
    return False


def _widths_of_columns(model: nn.Module, owner: str, plan: Plan) -> set[int]:
    """The widths of what goes into the column-cut layers of one module."""
    columns = [
        child
        for name, child in model.get_submodule(owner).named_children()
        if any(leaves_split_features(s, child) for s in plan.get(f"{owner}.{name}", ()))
    ]
    return {child.in_features for child in columns if isinstance(child, nn.Linear)}
