"""Between rows of actions in the robot's units and the tokens that the policy denoises."""

from __future__ import annotations

from torch import Tensor

from shardwalk.model_praxis.config import PraxisConfig


def encode_actions(rows: Tensor, config: PraxisConfig) -> Tensor:
    """Action rows [B, n * rows_per_token, row_dim] to tokens [B, n, token_dim].

    The 1st percentile of each number becomes -1, the 99th becomes 1; nothing is clipped.

    Raises:
        TypeError: for rows that are not floating.
        ValueError: for rows of another width, or a number of them that fills no whole tokens.
    """
    space = config.action_space
    _check("action rows", rows, 2, space.row_dim)
    if rows.shape[-2] % space.rows_per_token:
        raise ValueError(
            f"action rows have shape {list(rows.shape)}; the dimension before the last must be a "
            f"multiple of {space.rows_per_token}"
        )
    low, high = _action_range(rows, config)
    scaled: Tensor = 2 * (rows - low) / (high - low) - 1
    return scaled.reshape(*rows.shape[:-2], -1, space.token_dim)


def decode_actions(tokens: Tensor, config: PraxisConfig) -> Tensor:
    """Action tokens [B, n, token_dim] back to rows [B, n * rows_per_token, row_dim].

    Raises:
        TypeError: for tokens that are not floating.
        ValueError: for tokens of another width.
    """
    space = config.action_space
    _check("action tokens", tokens, 2, space.token_dim)
    rows = tokens.reshape(*tokens.shape[:-2], -1, space.row_dim)
    low, high = _action_range(rows, config)
    return (rows + 1) / 2 * (high - low) + low


def normalize_proprio(poses: Tensor, config: PraxisConfig) -> Tensor:
    """Poses [..., proprio_dim], less their mean, over their standard deviation.

    Raises:
        TypeError: for poses that are not floating.
        ValueError: for poses of another width.
    """
    _check("poses", poses, 1, config.action_space.proprio_dim)
    stats = config.normalization
    mean, std = (poses.new_tensor(numbers) for numbers in (stats.proprio_mean, stats.proprio_std))
    return (poses - mean) / std


def _check(name: str, given: Tensor, least_dims: int, width: int) -> None:
    """Statistics would broadcast over a width of 1, and be cut to integers."""
    if not given.is_floating_point():
        raise TypeError(f"{name} are {given.dtype}, they must be floating")
    if given.ndim < least_dims or given.shape[-1] != width:
        raise ValueError(
            f"{name} have shape {list(given.shape)}; they must have {least_dims} dimensions or "
            f"more, the last of {width}"
        )


def _action_range(rows: Tensor, config: PraxisConfig) -> tuple[Tensor, Tensor]:
    stats = config.normalization
    return rows.new_tensor(stats.action_q01), rows.new_tensor(stats.action_q99)
