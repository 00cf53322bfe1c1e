"""The weights of a module of experts: cut over the ep axis, and plain tensors while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from shardwalk.parallelizer_core._torch_compat import as_own_tensor
from shardwalk.parallelizer_core.tensor_parallel.local_parameters import (
    distribute_parameter,
    local_values,
    shown,
)

Forward = Callable[..., Any]


class ExpertMisfitError(Exception):
    """A module of experts whose weights cannot be cut by expert.

    Attributes:
        why: what does not fit, without the way out.
    """

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """How the parameters in a module of experts lie over the ep axis.

    Attributes:
        experts: the module.
        num_experts: experts over all ranks.
        by_expert: owner -> names of its parameters whose dimension 0 is experts.
        shared: owner -> names of its parameters that all experts use, such as a norm's.
        counts: the integer attributes of `experts` that hold the number of experts.
    """

    experts: nn.Module
    num_experts: int
    by_expert: dict[nn.Module, tuple[str, ...]]
    shared: dict[nn.Module, tuple[str, ...]]
    counts: tuple[str, ...]

    def parameters(self) -> list[nn.Parameter]:
        """Every parameter as it is registered now."""
        named = (*self.by_expert.items(), *self.shared.items())
        return [owner.get_parameter(name) for owner, names in named for name in names]

    def names(self) -> Iterator[tuple[nn.Module, str]]:
        """Every parameter whose dimension 0 is experts, by its owner and name."""
        return ((owner, name) for owner, names in self.by_expert.items() for name in names)


def read_expert_weights(experts: nn.Module, num_experts: int) -> ExpertWeights:
    """Tell which parameters in `experts` hold a slice for each expert.

    Raises:
        ExpertMisfitError: a parameter or buffer has neither a dimension 0 of `num_experts` nor the
            shape of something that all experts share.
    """
    by_expert: dict[nn.Module, tuple[str, ...]] = {}
    shared: dict[nn.Module, tuple[str, ...]] = {}
    for path, owner in experts.named_modules():
        kinds = {
            name: _is_by_expert(path, name, parameter, num_experts)
            for name, parameter in owner.named_parameters(recurse=False)
        }
        _refuse_buffers(path, owner, num_experts)
        by_expert[owner] = tuple(name for name, is_cut in kinds.items() if is_cut)
        shared[owner] = tuple(name for name, is_cut in kinds.items() if not is_cut)
    if not any(by_expert.values()):
        raise ExpertMisfitError(f"no parameter in it holds a slice for each of {num_experts}")
    return ExpertWeights(
        experts=experts,
        num_experts=num_experts,
        by_expert={owner: names for owner, names in by_expert.items() if names},
        shared={owner: names for owner, names in shared.items() if names},
        counts=tuple(n for n, v in vars(experts).items() if _counts(n, v, num_experts)),
    )


def _is_by_expert(path: str, name: str, parameter: Tensor, num_experts: int) -> bool:
    fits = parameter.ndim > 0 and parameter.shape[0] == num_experts
    if fits and (not path or parameter.ndim > 1):
        return True
    if path and parameter.ndim == 1:
        return False
    raise ExpertMisfitError(
        f"{path}.{name}".lstrip(".")
        + f" of {tuple(parameter.shape)} holds no slice for each of {num_experts} experts"
    )


def _refuse_buffers(path: str, owner: nn.Module, num_experts: int) -> None:
    for name, buffer in owner.named_buffers(recurse=False):
        if buffer.ndim > 0 and buffer.shape[0] == num_experts:
            raise ExpertMisfitError(
                f"{path}.{name}".lstrip(".") + " is a buffer with a slice for each expert, and "
                "only parameters are cut"
            )


def _counts(name: str, value: object, num_experts: int) -> bool:
    return "experts" in name and type(value) is int and value == num_experts


def cut_over_ep(weights: ExpertWeights, ep_mesh: DeviceMesh) -> None:
    """Leave this rank a contiguous block of experts; what experts share stays whole.

    Nothing is communicated: every rank cuts its own copy.
    """
    for owner, name in weights.names():
        distribute_parameter(owner, name, ep_mesh, Shard(0))
    for owner, names in weights.shared.items():
        for name in names:
            distribute_parameter(owner, name, ep_mesh, Replicate())


@dataclass(frozen=True, kw_only=True)
class LocalExperts:
    """The experts of this rank: `weights` as plain tensors whose gradients are scaled.

    Attributes:
        weights: cut by `cut_over_ep`.
        gradient_factor: what the gradients of the weights are multiplied by in the backward.
    """

    weights: ExpertWeights
    ep_size: int
    gradient_factor: float

    @property
    def count(self) -> int:
        """The number of experts on this rank."""
        return self.weights.num_experts // self.ep_size

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Let the module see its local weights, and the number of its local experts."""
        with ExitStack() as stack:
            for owner in {**self.weights.by_expert, **self.weights.shared}:
                stack.enter_context(shown(owner, **self._values(owner)))
            counts = dict.fromkeys(self.weights.counts, self.count)
            stack.enter_context(shown(self.weights.experts, **counts))
            yield

    def tie(self, rows: Tensor) -> Tensor:
        """`rows`, none of them, as something that depends on every weight.

        A rank whose experts got no token has zero gradients, as its peers in the reduction expect.
        """
        weights = [
            value
            for owner in {**self.weights.by_expert, **self.weights.shared}
            for value in self._values(owner).values()
        ]
        return _Tie.apply(rows, *weights)  # type: ignore[no-any-return,no-untyped-call]

    def _values(self, owner: nn.Module) -> dict[str, Tensor]:
        gradients: dict[str, Placement] = dict.fromkeys(
            self.weights.by_expert.get(owner, ()), Shard(0)
        )
        # Each rank's experts saw other rows, so that what they share has a part of its gradient.
        part = Partial() if self.ep_size > 1 else Replicate()
        gradients |= dict.fromkeys(self.weights.shared.get(owner, ()), part)
        values = local_values(owner, gradients)
        return {name: scale_gradient(v, self.gradient_factor) for name, v in values.items()}


@dataclass
class LocalForward:
    """The forward of experts whose weights are cut: the module's own, on its local weights."""

    local: LocalExperts
    inner: Forward

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the module's own forward."""
        with self.local.shown():
            output: Tensor = self.inner(*args, **kwargs)
        # An output of a unit that is a view would lose the unit's hook to an in-place op.
        return as_own_tensor(output)


def run_on_local_weights(local: LocalExperts) -> None:
    """Let a module with cut weights run on this rank's own, whoever brings it the rows."""
    experts = local.weights.experts
    experts.forward = LocalForward(local, experts.forward)


def scale_gradient(tensor: Tensor, factor: float) -> Tensor:
    """`tensor`, whose gradient is multiplied by `factor` on its way back."""
    if factor == 1:
        return tensor
    return _ScaleGradient.apply(tensor, factor)  # type: ignore[no-any-return,no-untyped-call]


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(*weights)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        needed: Sequence[bool] = ctx.needs_input_grad[1:]
        zeros = (
            torch.zeros_like(weight) if needs else None
            for weight, needs in zip(ctx.saved_tensors, needed, strict=True)
        )
        return gradient, *zeros
