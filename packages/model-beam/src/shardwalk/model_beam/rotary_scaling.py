"""Rotary frequencies: the plain ones, and four ways to stretch them to longer contexts.

Every type has its order of float32 operations fixed here, since the angle of a far position makes
the last bit of a frequency visible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_BETA_FAST, _BETA_SLOW = 32, 1  # rotations within the original context; section 3.2 of YaRN


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What the formula of a type may read.

    Attributes:
        parameters: ``rope_theta`` and the fields of the type.
        head_dim: D.
        max_position_embeddings: the longest context of training.
        positions: int64 of any shape, on the device of the result.
    """

    parameters: Mapping[str, Any]
    head_dim: int
    max_position_embeddings: int
    positions: Tensor

    def exponents(self) -> Tensor:
        """2 i / D for every pair i of a head, float32 [D / 2]."""
        even = torch.arange(
            0, self.head_dim, 2, dtype=torch.float32, device=self.positions.device
        )  # fmt: skip
        return even / self.head_dim

    def plain(self) -> Tensor:
        """The frequencies before any stretching, float32 [D / 2]."""
        frequencies: Tensor = 1.0 / (self.parameters["rope_theta"] ** self.exponents())
        return frequencies


def frequencies(
    parameters: Mapping[str, Any],
    *,
    head_dim: int,
    max_position_embeddings: int,
    positions: Tensor,
) -> tuple[Tensor, float]:
    """Radians per position of every pair of a head's entries, and a factor for cosine and sine.

    Args:
        parameters: ``rope_type``, ``rope_theta`` and the fields of the type.
        head_dim: D, even.
        max_position_embeddings: the longest context of training.
        positions: int64 of any shape; the largest one decides in the type ``dynamic``.

    Returns:
        float32 [D / 2] on the device of the positions, and a number.
    """
    request = _Request(
        parameters=parameters,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        positions=positions,
    )
    return _FORMULAS[parameters["rope_type"]](request)


def _default(request: _Request) -> tuple[Tensor, float]:
    """One frequency per pair, falling from 1 to nearly 1 / theta (arXiv:2104.09864)."""
    return request.plain(), 1.0


def _linear(request: _Request) -> tuple[Tensor, float]:
    """Positions, or what is the same the frequencies, divided by a factor (arXiv:2306.15595)."""
    return request.plain() / request.parameters["factor"], 1.0


def _dynamic(request: _Request) -> tuple[Tensor, float]:
    """A larger theta for calls beyond the context of training, growing with their length.

    The lowest frequency is stretched by factor x length / context - (factor - 1), the highest one
    not at all.
    """
    plain, positions = request.plain(), request.positions
    if positions.numel() == 0:
        return plain, 1.0
    factor, context = request.parameters["factor"], request.max_position_embeddings
    length = positions.max() + 1
    stretch = factor * length.to(torch.float32) / context - (factor - 1)
    power = request.head_dim / (request.head_dim - 2)
    theta = request.parameters["rope_theta"] * stretch**power
    # Chosen on the device: a branch in Python would wait for it. Of a negative stretch, below the
    # context, comes a NaN that is not chosen.
    return torch.where(length > context, 1.0 / (theta ** request.exponents()), plain), 1.0


def _yarn(request: _Request) -> tuple[Tensor, float]:
    """Slow pairs divided by a factor, fast ones left, a ramp between (arXiv:2309.00071).

    Cosine and sine are scaled too, so that attention gets as sharp as it was.
    """
    parameters = request.parameters
    periods = parameters["rope_theta"] ** request.exponents()
    stretched, kept = 1.0 / (parameters["factor"] * periods), 1.0 / periods
    share = 1 - _ramp(request)
    return stretched * (1 - share) + kept * share, _yarn_attention_factor(parameters)


def _ramp(request: _Request) -> Tensor:
    """0 for the pairs that YaRN leaves, 1 for those it stretches, float32 [D / 2]."""
    low = math.floor(_pair_of(request, request.parameters.get("beta_fast") or _BETA_FAST))
    high = math.ceil(_pair_of(request, request.parameters.get("beta_slow") or _BETA_SLOW))
    first, last = float(max(low, 0)), float(min(high, request.head_dim - 1))
    if first == last:
        last += 0.001
    pairs = torch.arange(
        request.head_dim // 2, dtype=torch.float32, device=request.positions.device
    )  # fmt: skip
    return ((pairs - first) / (last - first)).clamp(0, 1)


def _pair_of(request: _Request, rotations: float) -> float:
    """The pair, as a real number, that turns so often within the original context."""
    context = request.parameters["original_max_position_embeddings"]
    theta = request.parameters["rope_theta"]
    turned = math.log(context / (rotations * 2 * math.pi))
    return (request.head_dim * turned) / (2 * math.log(theta))


def _yarn_attention_factor(parameters: Mapping[str, Any]) -> float:
    """0.1 ln(factor) + 1 unless given, or the ratio of two such terms with their own slopes."""
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    above, below = parameters.get("mscale"), parameters.get("mscale_all_dim")
    factor = parameters["factor"]
    if above and below:
        return _sharpening(factor, above) / _sharpening(factor, below)
    return _sharpening(factor, 1)


def _sharpening(factor: float, slope: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * slope * math.log(factor) + 1.0


def _llama3(request: _Request) -> tuple[Tensor, float]:
    """Pairs by wavelength: long ones divided by a factor, short ones left, a blend between.

    The bounds are the original context over ``low_freq_factor`` and over ``high_freq_factor``
    (the long-context stage of arXiv:2407.21783 and its released code).
    """
    parameters, plain = request.parameters, request.plain()
    context, factor = parameters["original_max_position_embeddings"], parameters["factor"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    wavelength = 2 * math.pi / plain
    share = (context / wavelength - low) / (high - low)
    blended = (1 - share) * plain / factor + share * plain
    stretched = torch.where(wavelength > context / low, plain / factor, blended)
    return torch.where(wavelength < context / high, plain, stretched), 1.0


_FORMULAS: dict[str, Callable[[_Request], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
}

ROPE_TYPES = tuple(_FORMULAS)
"""The names that ``rope_type`` may have."""
