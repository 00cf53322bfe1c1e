"""Low-rank adapters around layers that are split over the tensor-parallel axis.

An adapter adds B(A(x)) to what its layer makes of x. Beside a layer cut along its output features,
A stays whole and B is cut likewise: the input is gathered once for the layer and A, and since each
rank's B sends A a part of the gradient, that of A is summed with the unit's gradients. Beside a
layer cut along its input features A is cut likewise and B stays whole: both make parts of a sum,
which is taken once. Beside a table both factors stay whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from shardwalk.parallelizer_core.tensor_parallel.adapters import Wrapped, wrapped_at
from shardwalk.parallelizer_core.tensor_parallel.components import part_of_components
from shardwalk.parallelizer_core.tensor_parallel.cuts import PARAMETERLESS_STYLES
from shardwalk.parallelizer_core.tensor_parallel.embedding_styles import (
    FeatureParallel,
    VocabularyParallel,
)
from shardwalk.parallelizer_core.tensor_parallel.layouts import (
    check_whole_sequence,
    gather_features,
    mark_features,
    on_local,
    split_features,
    sum_parts,
    sum_parts_over_sequence,
)
from shardwalk.parallelizer_core.tensor_parallel.local_parameters import (
    Forward,
    distribute_parameter,
    local_values,
    shown,
)
from shardwalk.parallelizer_core.tensor_parallel.partial_styles import SharedTail
from shardwalk.parallelizer_core.tensor_parallel.replicas import (
    SplitInput,
    TokenParallel,
    WholeInput,
)
from shardwalk.parallelizer_core.tensor_parallel.styles import (
    ColumnParallel,
    RowParallel,
    enter_parts,
    set_forward,
)

Plan = Mapping[str, tuple[ParallelStyle, ...]]
_TABLE_STYLES = (VocabularyParallel, FeatureParallel)
# These keep parameters whole, and mean the same of a layer and of the adapters added to it.
_AROUND = (*PARAMETERLESS_STYLES, SplitInput, WholeInput, TokenParallel, SharedTail)
_WAY_OUT = "add such adapters to layers that the plan leaves whole, or use tp_size=1"


def refuse_unsplittable_adapters(wrapped: Mapping[str, Wrapped], plan: Plan) -> None:
    """Refuse adapters whose layer `plan` cuts in a way that they cannot follow.

    Args:
        wrapped: the wrappers of a model by path.

    Raises:
        ValueError: names the adapter, what it is, and the way out.
    """
    for path, styles in plan.items():
        found = wrapped_at(path, wrapped)
        if found is None or not found.is_adapter or all(isinstance(s, _AROUND) for s in styles):
            continue
        for why in _obstacles(found, path, styles):
            raise ValueError(
                f"the tensor-parallel plan cuts {path}, which stands in an adapter: {why}; "
                f"{_WAY_OUT}"
            )


def _obstacles(found: Wrapped, path: str, styles: Iterable[ParallelStyle]) -> Iterator[str]:
    """Why the adapters of one layer cannot be cut with it."""
    kind = type(found.wrapper).__qualname__
    if found.depth > 1:
        yield "it stands in another one"
    if path != found.path or not isinstance(found.layer, nn.Linear | nn.Embedding):
        yield f"{kind} adapts a {type(found.layer).__name__} as a whole"
    for style in styles:
        if not isinstance(style, (ColumnParallel, RowParallel, *_TABLE_STYLES, *_AROUND)):
            yield (
                f"{type(style).__name__} does not know of adapters (ColumnParallel, RowParallel, "
                f"VocabularyParallel and FeatureParallel do)"
            )
    parameter = getattr(found.wrapper, "parameter_name", None)
    if isinstance(parameter, str):
        yield f"{kind} adds to the parameter {parameter} itself (target_parameters), as a whole"
    if len(getattr(found.wrapper, "lora_magnitude_vector", ())):
        yield "it learns magnitudes (use_dora=True), which are of whole rows"
    variants = getattr(found.wrapper, "lora_variant", None)
    if variants:
        names = ", ".join(sorted({type(variant).__name__ for variant in variants.values()}))
        yield f"it is no plain product of two factors ({names})"
    biased = [name for name, b in _factors(found.wrapper, "lora_B") if b.bias is not None]
    if biased:
        yield f"its second factor has a bias (lora_bias=True of {', '.join(biased)})"
    known = {id(parameter) for parameter in _known_parameters(found)}
    others = [name for name, p in found.wrapper.named_parameters() if id(p) not in known]
    if others:
        yield f"{kind} holds {others[0]}, which is no factor of a product of two"


def _known_parameters(found: Wrapped) -> Iterator[nn.Parameter]:
    yield from found.layer.parameters()
    for name in ("lora_A", "lora_B"):
        for _, factor in _factors(found.wrapper, name):
            yield from factor.parameters()
    for factors in _table_factors(found.wrapper):
        yield from factors.parameters()


def _factors(wrapper: nn.Module, name: str) -> list[tuple[str, nn.Linear]]:
    """The factors of every adapter of one layer, by the adapter's name."""
    held = getattr(wrapper, name, None)
    found = held.items() if isinstance(held, nn.ModuleDict) else ()
    return [(key, factor) for key, factor in found if isinstance(factor, nn.Linear)]


def _table_factors(wrapper: nn.Module) -> list[nn.ParameterDict]:
    """The factors beside a table, of every adapter."""
    held = (getattr(wrapper, name, None) for name in ("lora_embedding_A", "lora_embedding_B"))
    return [factors for factors in held if isinstance(factors, nn.ParameterDict)]


def parallelize_adapted(
    found: Wrapped, mesh: DeviceMesh, styles: Iterable[ParallelStyle]
) -> nn.Module:
    """Give an adapted layer its styles, and its adapters what goes with them.

    Returns:
        The module that the rest of the model calls.
    """
    for style in styles:
        if isinstance(style, ColumnParallel):
            _cut_columns(found, mesh, style)
        elif isinstance(style, RowParallel):
            _cut_rows(found, mesh, style)
        elif isinstance(style, _TABLE_STYLES):
            style._apply(found.layer, mesh)
            _keep_factors_whole(found.wrapper, mesh)
        else:
            style._apply(found.wrapper, mesh)
    return found.wrapper


def _keep_factors_whole(wrapper: nn.Module, mesh: DeviceMesh) -> None:
    """Hold both factors beside a table whole on the axis of the table, so that they can merge."""
    for factors in _table_factors(wrapper):
        for name, _ in list(factors.named_parameters(recurse=False)):
            distribute_parameter(factors, name, mesh, Replicate())
    set_forward(wrapper, _TableForward(wrapper, wrapper.forward))


def _cut_columns(found: Wrapped, mesh: DeviceMesh, style: ColumnParallel) -> None:
    wrapper, layer, sizes = found.wrapper, found.layer, style.components
    assert isinstance(layer, nn.Linear)
    part = _Part(layer, layer.forward, mesh, {"weight": Shard(0), "bias": Shard(0)}, sizes)
    style._apply(layer, mesh)
    for _, first in _factors(wrapper, "lora_A"):
        _cut(first, mesh, Replicate(), Partial())
    for _, second in _factors(wrapper, "lora_B"):
        _cut(second, mesh, Shard(0), Shard(0), sizes)
    set_forward(wrapper, _ColumnForward(style, part, wrapper.forward, mesh))


def _cut_rows(found: Wrapped, mesh: DeviceMesh, style: RowParallel) -> None:
    wrapper, layer, sizes = found.wrapper, found.layer, style.components
    assert isinstance(layer, nn.Linear)
    part = _Part(layer, layer.forward, mesh, {"weight": Shard(1)}, sizes, hidden=("bias",))
    style._apply(layer, mesh)
    for _, first in _factors(wrapper, "lora_A"):
        _cut(first, mesh, Shard(1), Shard(1), sizes)
    for _, second in _factors(wrapper, "lora_B"):
        _cut(second, mesh, Replicate(), Partial())
    set_forward(wrapper, _RowForward(style, part, wrapper.forward, mesh))


def _cut(
    factor: nn.Linear,
    mesh: DeviceMesh,
    cut: Placement,
    gradient: Placement,
    sizes: tuple[int, ...] = (),
) -> None:
    """Cut a factor, and let it run on this rank's part of it."""
    distribute_parameter(factor, "weight", mesh, cut)
    set_forward(factor, _Part(factor, factor.forward, mesh, {"weight": gradient}, sizes))


@dataclass
class _Part:
    """The forward of a linear layer with this rank's part of its parameters; nothing is summed.

    Attributes:
        gradients: the parameters, and how each one's gradient lies over the axis.
        components: as of `ColumnParallel` and `RowParallel`.
        hidden: the parameters that it computes without.
    """

    linear: nn.Linear
    inner: Forward
    mesh: DeviceMesh
    gradients: Mapping[str, Placement]
    components: tuple[int, ...] = ()
    hidden: tuple[str, ...] = ()

    def __call__(self, input: Tensor) -> Tensor:
        values = local_values(self.linear, self.gradients)
        if self.components:
            dim = 1 if self.gradients["weight"] == Shard(1) else 0
            values = {
                name: part_of_components(value, self.mesh, self.components, dim)
                for name, value in values.items()
            }
        with shown(self.linear, **values, **dict.fromkeys(self.hidden)):
            output: Tensor = self.inner(input)
        return output

    def inside(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """Call `forward`, in which the layer runs like this, and not as it does by itself."""
        with shown(self.linear, forward=self):
            return forward(*args, **kwargs)


@dataclass
class _ColumnForward:
    style: ColumnParallel
    part: _Part
    inner: Forward
    mesh: DeviceMesh
    place: str = ""
    keeps_split: bool = False

    def __call__(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not self.style.shared_input or isinstance(input, DTensor):
            input = enter_parts(input, self.mesh, self.place)
        output: Tensor = self.part.inside(self.inner, input, *args, **kwargs)
        if self.style.gather_output:
            leave = mark_features if self.keeps_split else gather_features
            output = leave(output, self.mesh, self.part.linear.out_features)
        return output


@dataclass
class _RowForward:
    style: RowParallel
    part: _Part
    inner: Forward
    mesh: DeviceMesh
    place: str = ""

    def __call__(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        sequence_parallel = self.style.sequence_parallel
        if sequence_parallel:
            check_whole_sequence(input, self.place)
        if self.style.split_input:
            input = split_features(input, self.mesh)
        gradient = Partial() if sequence_parallel else Replicate()
        bias = local_values(self.part.linear, {"bias": gradient}).get("bias")
        parts = self.part.inside(self.inner, input, *args, **kwargs)
        if sequence_parallel:
            split = sum_parts_over_sequence(parts, self.mesh)
            return split if bias is None else on_local(lambda x: x + bias, split)
        output = sum_parts(parts, self.mesh)
        return output if bias is None else output + bias


@dataclass
class _TableForward:
    wrapper: nn.Module
    inner: Forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for factors in _table_factors(self.wrapper):
                names = [name for name, _ in factors.named_parameters(recurse=False)]
                whole = local_values(factors, dict.fromkeys(names, Replicate()))
                stack.enter_context(shown(factors, **whole))
            return self.inner(*args, **kwargs)
