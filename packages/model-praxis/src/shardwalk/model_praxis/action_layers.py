"""The small layers of the action expert: times, action tokens, scales and feed-forwards."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_SLOWEST = 10000.0  # the longest period of the time features is this times 2 pi


def sinusoidal_features(t: Tensor, width: int) -> Tensor:
    """[cos(t f), sin(t f)] with f_i = 10000^(-i / (width / 2)); float32 [..., width]."""
    half = width // 2
    exponents = torch.arange(half, dtype=torch.float32, device=t.device) / half
    angles = t.float()[..., None] * torch.exp(-math.log(_SLOWEST) * exponents)
    return torch.cat([angles.cos(), angles.sin()], -1)


def geglu(x: Tensor) -> Tensor:
    """gelu(first half) * second half, with the tanh form of gelu; [..., 2 n] to [..., n]."""
    gate, value = x.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * value


def widened(x: Tensor) -> Tensor:
    """`x` in float32, or wider where it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_normed(x: Tensor, eps: float) -> Tensor:
    """x / rms(x), without a weight, in float32 or wider, which it returns."""
    wide = widened(x)
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


class ZeroLinear(nn.Linear):
    """A linear layer that starts at 0."""

    def reset_parameters(self) -> None:
        """Weight and bias become 0."""
        nn.init.zeros_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class SinusoidalTimestep(nn.Module):
    """The condition of a time: sinusoidal features through two layers, `fc1` and `fc2`.

    Args:
        features: width of the features, even.
        dim: width of the condition.
    """

    def __init__(self, features: int, dim: int) -> None:
        super().__init__()
        self.features = features
        self.fc1, self.fc2 = nn.Linear(features, dim), nn.Linear(dim, dim)

    def forward(self, t: Tensor) -> Tensor:
        """Times [...] to conditions [..., dim] in the dtype of the weights."""
        features = sinusoidal_features(t, self.features).to(self.fc1.weight.dtype)
        out: Tensor = self.fc2(F.silu(self.fc1(features)))
        return out


class ActionTauEncoder(nn.Module):
    """Action tokens and their times to the width of the expert: w3(silu(w2([w1(a); tau(t)]))).

    tau are the sinusoidal features in the expert's width. `w1` alone depends on the rig.

    Args:
        token_dim: numbers of an action token.
        dim: width of the expert, even.
    """

    def __init__(self, token_dim: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.w1 = nn.Linear(token_dim, dim)
        self.w2 = nn.Linear(2 * dim, dim)
        self.w3 = nn.Linear(dim, dim)

    def forward(self, actions: Tensor, t: Tensor) -> Tensor:
        """Actions [B, n, token_dim] and times [B, n] to [B, n, dim]."""
        embedded = self.w1(actions.to(self.w1.weight.dtype))
        tau = sinusoidal_features(t, self.dim).to(embedded.dtype)
        out: Tensor = self.w3(F.silu(self.w2(torch.cat([embedded, tau], -1))))
        return out


class ScaleAdaLN(nn.Module):
    """(1 + proj(silu(condition))) * rms_norm(x): a scale of each token's own, no shift, no gate.

    `proj` starts at 0. The norm has no weight; norm and product are float32 or wider.

    Args:
        dim: width of tokens and conditions.
        eps: added to the mean square.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.proj = ZeroLinear(dim, dim)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """[B, n, dim], twice, to the shape and dtype of `x`."""
        scale = self.proj(F.silu(condition))
        return ((1 + widened(scale)) * rms_normed(x, self.eps)).to(x.dtype)


class GegluMLP(nn.Module):
    """down_proj(geglu(up_proj(x))): `up_proj` makes both halves, the gate's first."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(dim, 2 * inner)
        self.down_proj = nn.Linear(inner, dim)

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] to the same."""
        out: Tensor = self.down_proj(geglu(self.up_proj(x)))
        return out


class _FiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.where(gradient.isfinite(), gradient, 0)


def finite_gradient(x: Tensor) -> Tensor:
    """`x`; of the gradient that comes back, what is not finite becomes 0.

    Behind a loss that a guard has cut every gradient is 0, or NaN where 0 met what is not finite.
    """
    out: Tensor = _FiniteGradient.apply(x)  # type: ignore[no-untyped-call]
    return out
