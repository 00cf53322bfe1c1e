"""What a layer's own source does to features and heads of which each rank would hold a part.

Only functions that are called by name are seen: in the forward, in the methods and plain functions
that it calls, and in modules without parameters beside the linear layers. Source that is not at
hand, or a forward that was replaced, shows nothing.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from shardwalk.parallelizer_core.layers import has_forward
from shardwalk.parallelizer_core.module_sources import parsed_source
from shardwalk.parallelizer_core.tensor_parallel.role_names import (
    HEAD_WIDTH_ATTRIBUTES,
    KEY_VALUE_COUNTS,
    QUERY_COUNTS,
)
from shardwalk.parallelizer_core.tensor_parallel.roles import (
    has_parameters,
)

# An attention's own softmax and sums work within one head; these may work over several.
_NORMS = ("normalize", "rms_norm", "rmsnorm", "layer_norm", "group_norm", "instance_norm", "norm",
          "vector_norm", "l2norm", "l2_norm", "topk")  # fmt: skip
_REDUCTIONS = ("softmax", "log_softmax", "softmin", "gumbel_softmax", "glu", "logsumexp", "mean",
               "sum", "std", "var", "max", "min", "amax", "amin", "argmax", "argmin", "median",
               "cumsum", "cumprod", "sort", "argsort")  # fmt: skip
_ELEMENTWISE_TOO = ("max", "min")
_COUNTERS = ("arange", "linspace")
# A normalized shape of a fixed number fails by itself on a part of the features.
_FIXED_WIDTHS = (*HEAD_WIDTH_ATTRIBUTES, "normalized_shape")
_OTHER_DIMS = (0, -2, -3)


def mixing_in_feed_forward(module: nn.Module) -> tuple[str, str] | None:
    """The first call that may work over the inner features of a feed-forward layer.

    Returns:
        The path of the module in `module` in whose source it stands, and the call; None for none.
    """
    return _first_call(module, _mixes_features)


def mixing_in_attention(module: nn.Module) -> tuple[str, str] | None:
    """The same of a call that may work over several heads of an attention, or numbers them."""
    return _first_call(module, _mixes_heads)


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A call in a function's source.

    Attributes:
        name: the last part of what is called.
        is_function: whether it is a function of a module, whose first argument is the tensor.
        is_builtin: whether it is Python's own function of that name.
    """

    node: ast.Call
    function: ast.FunctionDef
    name: str
    is_function: bool
    is_builtin: bool


def _first_call(module: nn.Module, mixes: Callable[[_Call], bool]) -> tuple[str, str] | None:
    for path, owner in module.named_modules():
        is_read = owner is module or (has_forward(owner) and not has_parameters(owner))
        if not is_read or "forward" in vars(owner):
            continue
        for call in _Reader(module=owner).calls(type(owner).forward):
            if mixes(call):
                return path, f"{type(owner).__name__} calls {ast.unparse(call.node)}"
    return None


def _mixes_features(call: _Call) -> bool:
    if call.is_builtin:
        return False
    return call.name in _NORMS or (call.name in _REDUCTIONS and _is_over_features(call))


def _mixes_heads(call: _Call) -> bool:
    if call.name in _COUNTERS:
        return _counts_heads(call)
    return call.name in _NORMS and not _has_fixed_width(call)


def _is_over_features(call: _Call) -> bool:
    """Whether a reduction may be one over the last dimension."""
    place = 1 if call.is_function else 0
    given = [k.value for k in call.node.keywords if k.arg in ("dim", "axis")]
    given += call.node.args[place : place + 1]
    if not given:
        return True
    try:
        dims = ast.literal_eval(given[0])
    except ValueError:
        return call.name not in _ELEMENTWISE_TOO
    dims = dims if isinstance(dims, tuple | list) else (dims,)
    return any(dim not in _OTHER_DIMS for dim in dims)


def _has_fixed_width(call: _Call) -> bool:
    if call.name not in ("rms_norm", "layer_norm"):
        return False
    given = [k.value for k in call.node.keywords if k.arg == "normalized_shape"]
    given += call.node.args[1:2]
    leaves = [node for shape in given for node in ast.walk(shape)]
    attributes = [node for node in leaves if isinstance(node, ast.Attribute)]
    this = call.function.args.args[0].arg if call.function.args.args else ""
    names = {node.id for node in leaves if isinstance(node, ast.Name)}
    return bool(attributes) and names <= {this} and all(a.attr in _FIXED_WIDTHS for a in attributes)


def _counts_heads(call: _Call) -> bool:
    """Whether a range goes over the heads, or over a dimension of a tensor made in the forward."""
    given = {argument.arg for argument in call.function.args.args[1:]}
    for node in (inner for argument in call.node.args for inner in ast.walk(argument)):
        if not isinstance(node, ast.Attribute):
            continue
        if node.attr in (*QUERY_COUNTS, *KEY_VALUE_COUNTS):
            return True
        owner = node.value
        if node.attr in ("shape", "size") and isinstance(owner, ast.Name) and owner.id not in given:
            return True
    return False


@dataclass(kw_only=True)
class _Reader:
    """The calls in a function and in the methods and plain functions that it calls by name."""

    module: nn.Module
    seen: set[Callable[..., Any]] = field(default_factory=set)

    def calls(self, function: Callable[..., Any]) -> Iterator[_Call]:
        function = inspect.unwrap(function)
        parsed = parsed_source(function)
        if parsed is None or function in self.seen:
            return
        self.seen.add(function)
        known = getattr(function, "__globals__", {})
        for node in ast.walk(parsed):
            if isinstance(node, ast.Call):
                yield from self._call(node, parsed, known)

    def _call(
        self, node: ast.Call, parsed: ast.FunctionDef, known: dict[str, Any]
    ) -> Iterator[_Call]:
        callee = node.func
        if isinstance(callee, ast.Name):
            found = known.get(callee.id)
            yield _Call(
                node=node,
                function=parsed,
                name=callee.id,
                is_function=True,
                is_builtin=callee.id not in known,
            )
        elif isinstance(callee, ast.Attribute):
            is_own, found = self._attribute(callee, parsed, known)
            if is_own and isinstance(found, nn.Module):
                return
            is_function = isinstance(known.get(_root(callee)), ModuleType)
            yield _Call(
                node=node,
                function=parsed,
                name=callee.attr,
                is_function=is_function,
                is_builtin=False,
            )
        else:
            return
        if isinstance(found, FunctionType) and not (found.__module__ or "").startswith("torch."):
            yield from self.calls(found)

    def _attribute(
        self, callee: ast.Attribute, parsed: ast.FunctionDef, known: dict[str, Any]
    ) -> tuple[bool, object]:
        """Whether it is an attribute of the module itself; and the child, method or function."""
        if not isinstance(callee.value, ast.Name):
            return False, None
        this = parsed.args.args[0].arg if parsed.args.args else ""
        if callee.value.id == this and this == "self":
            child = dict(self.module.named_children()).get(callee.attr)
            return True, child or getattr(type(self.module), callee.attr, None)
        return False, getattr(known.get(callee.value.id), callee.attr, None)


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
