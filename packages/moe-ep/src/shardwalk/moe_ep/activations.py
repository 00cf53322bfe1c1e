"""What stands between an expert's two products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

_GELU_SLOPE = 1.702  # with which x * sigmoid(slope * x) comes closest to GELU
UNGATED = ("relu2",)
"""Activations without a gate: experts that use them have no gate rows."""


@dataclass(frozen=True, kw_only=True)
class Activation:
    """An activation with its settings.

    Attributes:
        name: one of `ACTIVATIONS`.
        limit: what ``swiglu_clamped`` and ``swiglu_oai`` clamp at: the gate from above, up on both
            sides; None clamps nothing.
        alpha: the factor within the sigmoid of ``quick_geglu`` and ``swiglu_oai``; None is 1.702.
        fp32_product: compute in fp32, and round only the result to the dtype of the input.
    """

    name: str
    limit: float | None = None
    alpha: float | None = None
    fp32_product: bool = False

    @property
    def is_gated(self) -> bool:
        """Whether it takes gate and up, not up alone."""
        return self.name not in UNGATED

    def __call__(self, projected: Tensor) -> Tensor:
        """Activate [N, 2 I], gate columns first, then up (without a gate [N, I]), to [N, I]."""
        if self.is_gated:
            gate, up = projected.chunk(2, dim=-1)
            return self.product(gate, up)
        up = projected.float() if self.fp32_product else projected
        return torch.relu(up).square().to(projected.dtype)

    def product(self, gate: Tensor, up: Tensor) -> Tensor:
        """Activate gate and up, [..., I] each, to [..., I] in their dtype."""
        dtype = gate.dtype
        if self.fp32_product:
            gate, up = gate.float(), up.float()
        return _GATED[self.name](gate, up, self).to(dtype)


def _swiglu(gate: Tensor, up: Tensor, settings: Activation) -> Tensor:
    return F.silu(gate) * up


def _geglu(gate: Tensor, up: Tensor, settings: Activation) -> Tensor:
    return F.gelu(gate) * up


def _geglu_tanh(gate: Tensor, up: Tensor, settings: Activation) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def _quick_geglu(gate: Tensor, up: Tensor, settings: Activation) -> Tensor:
    return _sigmoid_gelu(gate, settings) * up


def _swiglu_clamped(gate: Tensor, up: Tensor, settings: Activation) -> Tensor:
    gate, up = _clamped(gate, up, settings.limit)
    return F.silu(gate) * up


def _swiglu_oai(gate: Tensor, up: Tensor, settings: Activation) -> Tensor:
    gate, up = _clamped(gate, up, settings.limit)
    return (up + 1) * _sigmoid_gelu(gate, settings)


def _sigmoid_gelu(gate: Tensor, settings: Activation) -> Tensor:
    return gate * torch.sigmoid((settings.alpha or _GELU_SLOPE) * gate)


def _clamped(gate: Tensor, up: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    if limit is None:
        return gate, up
    return gate.clamp(max=limit), up.clamp(min=-limit, max=limit)


_GATED: dict[str, Callable[[Tensor, Tensor, Activation], Tensor]] = {
    "swiglu": _swiglu,
    "geglu": _geglu,
    "geglu_tanh": _geglu_tanh,
    "quick_geglu": _quick_geglu,
    "swiglu_clamped": _swiglu_clamped,
    "swiglu_oai": _swiglu_oai,
}

ACTIVATIONS = (*_GATED, *UNGATED)
"""Their names. ``geglu`` has the exact (erf) GELU, ``geglu_tanh`` its tanh approximation."""
