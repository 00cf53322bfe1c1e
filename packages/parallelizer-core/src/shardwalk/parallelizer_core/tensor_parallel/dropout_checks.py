"""What drops out in a model, and what tensor parallelism cannot tell of it."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from shardwalk.parallelizer_core.module_sources import parsed_source
from shardwalk.parallelizer_core.tensor_parallel.adapters import Wrapped
from shardwalk.parallelizer_core.tensor_parallel.cuts import (
    predicted_cuts,
    splits_sequence,
    splits_sequence_like_torch,
)
from shardwalk.parallelizer_core.tensor_parallel.partial_styles import LocalParameters, SumOutput
from shardwalk.parallelizer_core.tensor_parallel.replicas import SplitInput, TokenParallel
from shardwalk.parallelizer_core.tensor_parallel.roles import match_attention
from shardwalk.parallelizer_core.tensor_parallel.styles import RowParallel

Plan = Mapping[str, tuple[ParallelStyle, ...]]
Dropping = Sequence[tuple[str, nn.Module]]

ELEMENTWISE = (nn.Dropout, nn.AlphaDropout)
TOKEN_STYLES = (SplitInput, TokenParallel)
_WHOLE_CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout)
_MODULES = (*ELEMENTWISE, *_WHOLE_CHANNELS)
_DROPPING_CLASSES = ("Drop", "StochasticDepth")


def refuse_unknown_dropout(
    model: nn.Module, tp_size: int, plan: Plan, wrapped: Mapping[str, Wrapped]
) -> None:
    """Refuse dropout of which it cannot be known what it sees under `plan`.

    Args:
        model: without wrappers.
        wrapped: the wrappers that stood in it, by path.

    Raises:
        ValueError: names the module, its share, and the way out.
    """
    dropping = dropping_modules(model)
    dropping += [(w.path, m) for w in wrapped.values() for m in dropout_of_adapter(w)]
    if not dropping:
        return
    for path, styles in plan.items():
        module = model.get_submodule(path)
        is_leaf = not any(True for _ in module.children())
        if is_leaf and predicted_cuts(styles, module) is None:
            name = type(styles[-1]).__name__
            _refuse(tp_size, dropping, f"{name} at {path} may split what they see")
        for place, inner in modules_inside(path, dropping):
            in_adapter = place == path and path in wrapped
            if not in_adapter and _sees_unknown_parts(styles, module, inner):
                name = type(styles[-1]).__name__
                _refuse(tp_size, [(place, inner)], f"it stands in {path}, which has {name}()")
    if any(splits_sequence(style) for styles in plan.values() for style in styles):
        _refuse_on_sequences(model, tp_size, plan, dropping)


def _sees_unknown_parts(
    styles: tuple[ParallelStyle, ...], module: nn.Module, inner: nn.Module
) -> bool:
    if any(isinstance(style, SumOutput | LocalParameters) for style in styles):
        return True
    if any(isinstance(style, TOKEN_STYLES) for style in styles):
        return not isinstance(inner, ELEMENTWISE)
    return predicted_cuts(styles, module) is None


def _refuse_on_sequences(model: nn.Module, tp_size: int, plan: Plan, dropping: Dropping) -> None:
    """Hidden states are split over the sequence: only modules, and attention, can be known."""
    if any(splits_sequence_like_torch(style) for styles in plan.values() for style in styles):
        _refuse(tp_size, dropping, "the plan splits sequences by torch's own styles")
    for path, module in dropping:
        if isinstance(module, ELEMENTWISE) or _drops_weights_alone(path, module, plan):
            continue
        _refuse(
            tp_size,
            [(path, module)],
            "sequence_parallel=True splits hidden states over the sequence, which only nn.Dropout "
            "and nn.AlphaDropout, and attention for its weights, are known to do right",
        )


def _drops_weights_alone(path: str, module: nn.Module, plan: Plan) -> bool:
    """Whether an attention whose heads are split drops nothing after its output projection."""
    attention = match_attention(path, module)
    output = None if attention is None else f"{path}.{attention.names[3]}"
    if attention is None or not any(isinstance(s, RowParallel) for s in plan.get(output or "", ())):
        return False
    function = parsed_source(type(module).forward)
    if function is None:
        return False
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    ends = [c.lineno for c in calls if ast.unparse(c.func) == f"self.{attention.names[3]}"]
    drops = [c.lineno for c in calls if "drop" in ast.unparse(c.func).lower()]
    return bool(ends) and all(line < min(ends) for line in drops)


def _refuse(tp_size: int, dropping: Dropping, why: str) -> None:
    for path, module in dropping:
        for name, value in shares_of(module):
            raise ValueError(
                f"tp_size={tp_size} with {name}={value} of {path or 'the model'}: {why}, so its "
                f"masks may be equal where they must differ over the tensor-parallel ranks, or "
                f"differ where they must be equal; set it to 0, or use tp_size=1"
            )


def shares_of(module: nn.Module) -> list[tuple[str, float]]:
    """The module's own probabilities of dropping something (features, paths, layers), if not 0.

    They go by many names: any share under a name with "drop", and `p` of a class of that name.
    """
    owners = (*reversed(type(module).__mro__), module)
    values = {name: value for owner in owners for name, value in vars(owner).items()}
    shares = [(n, v) for n, v in values.items() if isinstance(v, float) and "drop" in n.lower()]
    probability = getattr(module, "p", None)
    named = any(word in type(module).__name__ for word in _DROPPING_CLASSES)
    if isinstance(probability, int | float) and (named or isinstance(module, _MODULES)):
        shares.append(("p", probability))
    return [(name, share) for name, share in shares if 0 < share <= 1]


def dropping_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that drop something."""
    return [(path, module) for path, module in model.named_modules() if shares_of(module)]


def modules_inside(path: str, modules: Dropping) -> Dropping:
    """Those of `modules` at `path` or in it."""
    return [(p, m) for p, m in modules if not path or p == path or p.startswith(f"{path}.")]


def dropout_of_adapter(around: Wrapped) -> list[nn.Module]:
    """The modules of the adapters around a layer that drop something."""
    layer = set(around.layer.modules())
    modules = around.wrapper.modules() if around.is_adapter else ()
    return [m for m in modules if m not in layer and isinstance(m, _MODULES) and shares_of(m)]
