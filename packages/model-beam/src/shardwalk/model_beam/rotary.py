"""Positions: the rotary tables, the rotation, and the query scale of layers without a rotation.

All of it is computed in float32 in every call, from the positions alone. Nothing is kept in a
buffer, so no change of a module's dtype can round the frequencies: in bfloat16 they are off by
0.4%, and the angles with them, more the further the position.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shardwalk.model_beam.rotary_scaling import frequencies

RotaryTable: TypeAlias = tuple[Tensor, Tensor]
"""Cosine and sine of every position's angles, float32 [B, S, D] each, both halves of D alike."""

_SCALE_POSITIONS = 2048
_SCALE_EXPONENT = 0.1


def rotary_table(
    position_ids: Tensor,
    parameters: Mapping[str, Any],
    *,
    head_dim: int,
    max_position_embeddings: int,
) -> RotaryTable:
    """Cosine and sine of the angles by which `rotate` turns each position's heads.

    Args:
        position_ids: [B, S], of any integer dtype.
        parameters: ``rope_type``, ``rope_theta`` and what that type needs; one entry of a
            configuration's ``rope_parameters``, which has checked them.
        head_dim: D, even.
        max_position_embeddings: the length beyond which the type ``dynamic`` stretches. It goes by
            the largest position of this call alone, so calls leave no trace in later ones.

    Returns:
        Two float32 tensors [B, S, D] on the device of the positions.

    Raises:
        TypeError: for positions that are no integers.
        ValueError: for positions of another shape.
    """
    positions = _checked(position_ids)
    inverse, scaling = frequencies(
        parameters,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        positions=positions,
    )
    angles = positions.to(torch.float32)[..., None] * inverse
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * scaling, angles.sin() * scaling


def rotate(x: Tensor, table: RotaryTable) -> Tensor:
    """Turn queries or keys by their positions' angles, in float32 with one rounding at the end.

    Args:
        x: [B, H, S, D].
        table: of `rotary_table`, for the same B and S (a B of 1 serves every sample).

    Returns:
        The rotated x, in its shape and dtype.
    """
    cos, sin = (part.unsqueeze(1) for part in table)
    # Widened once, by hand: were each product to promote for itself, the gradient would be rounded
    # once per product.
    wide = x.to(torch.promote_types(x.dtype, cos.dtype))
    return (wide * cos + _rotate_half(wide) * sin).to(x.dtype)


def query_scale(position_ids: Tensor) -> Tensor:
    """What the queries of layers without a rotation are multiplied by: longer contexts, sharper.

    (1 + (p + 1) / 2048) ** 0.1 for position p (scalable softmax, arXiv:2501.19399).

    Args:
        position_ids: [B, S], of any integer dtype.

    Returns:
        float32 [B, S].

    Raises:
        TypeError: for positions that are no integers.
        ValueError: for positions of another shape.
    """
    positions = _checked(position_ids).to(torch.float32)
    return torch.exp(_SCALE_EXPONENT * torch.log1p((positions + 1) / _SCALE_POSITIONS))


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _checked(position_ids: Tensor) -> Tensor:
    """The positions as int64, in which the largest one plus one is still right."""
    dtype = position_ids.dtype
    if dtype == torch.bool or dtype.is_floating_point or dtype.is_complex:
        raise TypeError(f"position_ids of dtype {dtype} are no positions; hand in integers")
    if position_ids.dim() != 2:
        raise ValueError(
            f"position_ids of shape {list(position_ids.shape)} must be [batch, sequence]; "
            f"give each sample its row"
        )
    return position_ids.to(torch.int64)
