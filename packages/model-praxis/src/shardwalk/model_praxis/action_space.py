"""Between rows of actions in the robot's units and the tokens that the policy denoises."""

from __future__ import annotations

from torch import Tensor

from shardwalk.model_praxis.config import PraxisConfig


def encode_actions(rows: Tensor, config: PraxisConfig) -> Tensor:
    """Action rows [B, n * rows_per_token, row_dim] to tokens [B, n, token_dim].

    The 1st percentile of each number becomes -1, the 99th becomes 1; nothing is clipped.

    Raises:
        ValueError: for rows of another width, or a number of them that fills no whole tokens.
    """
    space = config.action_space
    if rows.shape[-1] != space.row_dim or rows.shape[-2] % space.rows_per_token:
        raise ValueError(
            f"action rows have shape {list(rows.shape)}; their last dimension must be "
            f"{space.row_dim}, and the one before a multiple of {space.rows_per_token}"
        )
    low, high = _action_range(rows, config)
    scaled: Tensor = 2 * (rows - low) / (high - low) - 1
    return scaled.reshape(*rows.shape[:-2], -1, space.token_dim)


def decode_actions(tokens: Tensor, config: PraxisConfig) -> Tensor:
    """Action tokens [B, n, token_dim] back to rows [B, n * rows_per_token, row_dim]."""
    space = config.action_space
    rows = tokens.reshape(*tokens.shape[:-2], -1, space.row_dim)
    low, high = _action_range(rows, config)
    return (rows + 1) / 2 * (high - low) + low


def normalize_proprio(poses: Tensor, config: PraxisConfig) -> Tensor:
    """Poses [..., proprio_dim], less their mean, over their standard deviation."""
    stats = config.normalization
    mean, std = (poses.new_tensor(numbers) for numbers in (stats.proprio_mean, stats.proprio_std))
    return (poses - mean) / std


def _action_range(rows: Tensor, config: PraxisConfig) -> tuple[Tensor, Tensor]:
    stats = config.normalization
    return rows.new_tensor(stats.action_q01), rows.new_tensor(stats.action_q99)
