"""Small policies without a zero in their weights, and random windows for them."""

from __future__ import annotations

from typing import Any

import torch
from praxis_toys import random_inputs, randomize, tiny_config
from torch import Tensor

from shardwalk.model_praxis import PraxisConfig, PraxisPolicy, PraxisWindow


def small_policy(config: PraxisConfig | None = None, *, seed: int = 0) -> PraxisPolicy:
    """A policy to whose outputs every input matters."""
    policy = PraxisPolicy(config or tiny_config())
    randomize(policy, seed=seed)
    return policy


def small_window(config: PraxisConfig, *, windows: int = 1, seed: int = 0) -> PraxisWindow:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(windows, *shape, generator=generator)

    chunks, video, text = config.chunking.window_chunks, config.video, config.text_encoder
    frames = chunks * config.chunking.latents_per_chunk
    cells = (video.latent_height, video.latent_width)
    return PraxisWindow(
        anchor=normal(video.latent_channels, 1, *cells),
        latents=normal(video.latent_channels, frames, *cells),
        text=normal(5, text.hidden_dim),
        blank_text=normal(5, text.hidden_dim),
        proprio=normal(chunks, config.action_space.proprio_dim),
        actions=normal(frames, config.action_space.token_dim),
    )


def small_inputs(config: PraxisConfig, *, windows: int = 1, seed: int = 0) -> dict[str, Any]:
    """Arguments of a policy's forward."""
    generator = torch.Generator().manual_seed(seed + 1000)
    chunks, per_chunk = config.chunking.window_chunks, config.chunking.latents_per_chunk
    space = config.action_space

    def normal(*shape: int) -> Tensor:
        return torch.randn(windows, *shape, generator=generator)

    return random_inputs(config, windows=windows, chunks=chunks, seed=seed) | {
        "actions": normal(chunks * per_chunk, space.token_dim),
        "action_times": torch.rand(windows, chunks, generator=generator),
        "proprio": normal(chunks, space.proprio_dim),
    }
