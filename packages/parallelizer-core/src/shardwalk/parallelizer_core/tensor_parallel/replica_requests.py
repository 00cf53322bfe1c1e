"""What a module itself asks for the gradients of parameters that stay whole over the tp axis."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from shardwalk.parallelizer_core.tensor_parallel.replicas import SplitInput, WholeInput

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


def with_requests(model: nn.Module, plan: Plan) -> Plan:
    """`plan` with what modules ask for, instead of what it says of their whole parameters.

    Raises:
        ValueError: the plan cuts such a module or what is in it, or an outer module keeps all in it
            whole in another way.
    """
    asked = {
        path: style
        for path, module in model.named_modules()
        if (style := requested_style(path, module)) is not None
    }
    for path, style in asked.items():
        _refuse_contradictions(path, style, plan)
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
