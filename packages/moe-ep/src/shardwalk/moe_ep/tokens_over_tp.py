"""Layers of experts beside tensor parallelism: each rank of the axis takes a part of the tokens.

Without it all ranks would route and dispatch the same tokens, and experts compute them tp times.
What stands in such a layer beside the experts stays whole on every rank and sees a part of the
tokens, so its gradients are summed over the axis.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor.parallel import ParallelStyle

from shardwalk.mesh import MeshContext
from shardwalk.moe_ep.expert_layers import ExpertLayer
from shardwalk.parallelizer_core import ModelParallelizer
from shardwalk.parallelizer_core.fsdp2.options import fsdp2_config
from shardwalk.parallelizer_core.layers import find_block_stacks, has_forward
from shardwalk.parallelizer_core.tensor_parallel.adapters import without_wrappers
from shardwalk.parallelizer_core.tensor_parallel.layouts import (
    gather_sequence,
    on_local,
    split_sequence,
)
from shardwalk.parallelizer_core.tensor_parallel.local_parameters import (
    Forward,
    distribute_parameter,
    local_values,
    shown,
)
from shardwalk.parallelizer_core.tensor_parallel.plans import resolve_plan

Plan = Mapping[str, Any] | str | None


def plan_with_experts(
    model: nn.Module,
    layers: Sequence[ExpertLayer],
    mesh_context: MeshContext,
    sidecar: ModelParallelizer,
) -> Plan:
    """The tensor-parallel plan that was asked for, or the default, with the layers of experts.

    Changes nothing; without tensor parallelism it is what was asked for.

    Raises:
        ValueError: the plan cuts something inside a layer of experts, or tokens cannot be split
            there.
    """
    config, tp_size = fsdp2_config(mesh_context), mesh_context.tp_size
    if tp_size == 1 or not layers:
        return config.tp_plan
    _refuse_layers(model, layers, tp_size)
    sequence_parallel = config.sequence_parallel
    given: Plan = config.tp_plan
    if given is None:
        given = sidecar._tp_plan(model, sequence_parallel)
    with without_wrappers(model):  # plans speak of layers, not of the adapters around them
        if given is None:
            # The structural default knows attention and dense feed-forward layers.
            with _hidden(model, layers):
                plan = resolve_plan(model, tp_size, None, sequence_parallel)
        else:
            plan = resolve_plan(model, tp_size, given, sequence_parallel)
    for layer in layers:
        _refuse_cuts_inside(layer, plan)
        plan[layer.holder_path] = (SplitTokens(experts=layer.weights.experts),)
    return plan


def _refuse_layers(model: nn.Module, layers: Sequence[ExpertLayer], tp_size: int) -> None:
    blocks = {block for stack in find_block_stacks(model) for _, block in stack.blocks}
    for layer in layers:
        if layer.holder in blocks or layer.holder is model:
            raise ValueError(
                f"tp_size={tp_size}: {layer.path} stands directly in the block "
                f"{layer.holder_path or type(model).__name__}, so there is no module around router "
                f"and experts whose tokens could be split over tp; use tp_size=1, or put router "
                f"and experts into a module of their own"
            )
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        raise ValueError(
            f"tp_size={tp_size} with config.output_router_logits=True: each tp rank routes a part "
            f"of the tokens, so that the model's own balance loss would differ between them; set "
            f"it to False, or use tp_size=1"
        )


def _refuse_cuts_inside(layer: ExpertLayer, plan: Mapping[str, tuple[ParallelStyle, ...]]) -> None:
    for path, styles in plan.items():
        is_inside = path.startswith(f"{layer.holder_path}.")
        is_split = all(isinstance(style, SplitTokens) for style in styles)
        if is_inside or (path == layer.holder_path and not is_split):
            raise ValueError(
                f"the tensor-parallel plan names {path}, which is in the layer of experts "
                f"{layer.holder_path}: its tokens are split over tp, and all but its experts stays "
                f"whole; take it out of the plan"
            )


@contextmanager
def _hidden(model: nn.Module, layers: Sequence[ExpertLayer]) -> Iterator[None]:
    """The model without the parameters of its layers of experts."""
    holders = {layer.holder for layer in layers}
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if child in holders
    ]
    try:
        for parent, name, _ in places:
            setattr(parent, name, nn.Identity())
        yield
    finally:
        for parent, name, child in places:
            setattr(parent, name, child)


@dataclass(kw_only=True)
class SplitTokens(ParallelStyle):
    """A layer of experts that takes a part of the tokens on each rank of the axis.

    Its input, [rows, length, width] or [tokens, width], is whole on every rank or split over its
    length already; the output is as the input. Lengths need not divide, and a rank may have none.
    What the layer holds stays whole, with gradients that are summed over the axis.

    In a plan it stands as ``SplitTokens()`` at the module around router and experts; the
    expert-parallel walk puts it there by itself.

    Attributes:
        experts: the module in the layer that this style leaves alone, since its weights are spread
            otherwise; None where experts are whole on every rank too.
    """

    experts: nn.Module | None = None

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        inside = set() if self.experts is None else set(self.experts.modules())
        owners = [
            owner
            for owner in module.modules()
            if owner not in inside and any(True for _ in owner.parameters(recurse=False))
        ]
        for owner in owners:
            for name, _ in list(owner.named_parameters(recurse=False)):
                distribute_parameter(owner, name, device_mesh, Replicate())
        for part in module.modules():
            if part is not module and part not in inside and has_forward(part):
                part.forward = _WholeWeights(part, inside, part.forward)
        if hasattr(module, "gate") and hasattr(module.gate, "tokens_split_over_tp"):
            module.gate.tokens_split_over_tp = True
        module.forward = _SplitTokensForward(module, inside, module.forward, device_mesh)
        return module


@dataclass
class _WholeWeights:
    """The forward of a module that sees a part of the tokens, on its own whole weights.

    It may be a unit of its own, whose weights are there only while it runs.
    """

    module: nn.Module
    left_alone: set[nn.Module]
    inner: Forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _whole_weights(self.module, self.left_alone):
            return self.inner(*args, **kwargs)


@contextmanager
def _whole_weights(module: nn.Module, left_alone: set[nn.Module]) -> Iterator[None]:
    """Let `module` and what stands in it see whole weights, except where a unit inside has them."""
    with ExitStack() as stack:
        for owner in _outside_units(module, left_alone):
            names = [name for name, _ in owner.named_parameters(recurse=False)]
            gradients: dict[str, Placement] = {n: Partial() for n in names if n not in vars(owner)}
            stack.enter_context(shown(owner, **local_values(owner, gradients)))
        yield


def _outside_units(module: nn.Module, left_alone: set[nn.Module]) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        # A unit inside shows its own weights, as soon as it has gathered them.
        if child not in left_alone and not isinstance(child, FSDPModule):
            yield from _outside_units(child, left_alone)


@dataclass
class _SplitTokensForward:
    module: nn.Module
    left_alone: set[nn.Module]
    inner: Forward
    mesh: DeviceMesh

    def __post_init__(self) -> None:
        _, first, *_ = inspect.signature(type(self.module).forward).parameters
        self._first = first

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs[self._first]
        tokens = _Tokens(hidden, self.mesh)
        args = tuple(tokens.local(value) for value in args)
        kwargs = {name: tokens.local(value) for name, value in kwargs.items()}
        with _whole_weights(self.module, self.left_alone):
            output = self.inner(*args, **kwargs)
        if isinstance(output, tuple | list):
            return type(output)(tokens.whole(value) for value in output)
        return tokens.whole(output)


class _Tokens:
    """The tokens of one call: which of them this rank has."""

    def __init__(self, hidden: Tensor, mesh: DeviceMesh) -> None:
        self.hidden, self.mesh = hidden, mesh
        self.is_split = isinstance(hidden, DTensor)
        # A list of tokens is a sequence of that length.
        self.leading = hidden.shape[:-1] if hidden.ndim > 2 else (1, *hidden.shape[:-1])
        self.parts = hidden if isinstance(hidden, DTensor) else self._split(hidden)

    def local(self, value: Any) -> Any:
        """This rank's part of an argument that has a value for each token."""
        if value is self.hidden:
            return self._of_hidden(self.parts.to_local().contiguous())
        if not isinstance(value, Tensor) or not self._has_all_tokens(value):
            return value
        parts = value if isinstance(value, DTensor) else self._split(value)
        return self._of_hidden(parts.to_local().contiguous())

    def whole(self, value: Any) -> Any:
        """An output as the input came: whole, or split over the sequence."""
        if not isinstance(value, Tensor):
            return value
        rows, length = self.parts.to_local().shape[:2]
        is_flat = value.ndim == 2 and self.hidden.ndim > 2
        if is_flat or self.hidden.ndim == 2:
            value = value.reshape(rows, length, *value.shape[1:])
        if value.shape[:2] != (rows, length):
            raise ValueError(
                f"a layer of experts returned a tensor of shape {tuple(value.shape)} for "
                f"{rows} x {length} tokens; under tensor parallelism its outputs must have a value "
                f"for each token"
            )
        parts = on_local(lambda _: value, self.parts)
        if self.is_split and not is_flat:
            return parts
        whole = gather_sequence(parts)
        return whole.flatten(0, 1) if is_flat or self.hidden.ndim == 2 else whole

    def _split(self, value: Tensor) -> DTensor:
        return split_sequence(value if self.hidden.ndim > 2 else value.unsqueeze(0), self.mesh)

    def _of_hidden(self, local: Tensor) -> Tensor:
        return local if self.hidden.ndim > 2 else local.squeeze(0)

    def _has_all_tokens(self, value: Tensor) -> bool:
        shape = tuple(value.shape) if self.hidden.ndim > 2 else (1, *value.shape)
        return shape[:2] == tuple(self.leading[:2])
