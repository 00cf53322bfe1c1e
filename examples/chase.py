"""Windows of a small lawful world: a hand chases a disc, and a caption says where the disc goes.

A disc moves straight on, in one of eight directions that the caption names, and bounces off the
walls. A square, the hand, closes a fixed part of its distance to the disc in every frame. So the
video and the actions of a window follow from its first frame and its caption.

Latents stand in for those of an autoencoder: per cell of 6 x 6 pixels and group of 4 frames, how
much disc and hand cover, how much that changes within the group, and the light on what they leave
free, which rises from left to right and from top to bottom. Everything depends on the number of the
window alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwalk.model_praxis import (
    PraxisConfig,
    PraxisWindow,
    decode_actions,
    encode_actions,
    normalize_proprio,
)

HELD_OUT = range(10**6, 10**6 + 16)  # numbers of windows that no step sees
CHANNELS = 6
SIDE = 4  # latent cells of a frame, along either side
CELL = 6  # pixels of a latent cell, along either side
FRAMES_PER_LATENT = 4
ROW_DIM = 2  # x and y, of an action row and of a pose
DIRECTIONS = 8
CAPTION_TOKENS = 2
CAPTION_WIDTH = 16

_WALL, _SPEED, _CLOSING = 0.8, 0.05, 0.25  # of a canvas from -1 to 1, per frame
_APART = 0.2  # at most, of hand and disc at the start, in x and in y
_DISC, _SQUARE, _SHARPNESS = 0.28, 0.2, 25.0
_SCALES = (4.0, 8.0, 4.0, 8.0, 1.0, 1.0)  # bring every channel to about 1


@dataclass(frozen=True, kw_only=True)
class Episode:
    """What happens in each frame of windows, B of them.

    Attributes:
        disc: its centre, [B, frames, 2].
        hand: its centre, [B, frames, 2].
        heading: which way the disc starts, unit vectors [B, 2].
    """

    disc: Tensor
    hand: Tensor
    heading: Tensor


def document(*, size: int, experts: int) -> dict[str, Any]:
    """Describe a policy for this world, as its config.json does.

    Args:
        size: width of both towers and of the action expert, a multiple of 64.
        experts: of each sparse block; a token goes to two of them.
    """
    tower = {"dim": size, "ffn_dim": 3 * size, "dense_layers": 1, "num_registers": 4}
    heads = {"num_heads": size // 32, "head_dim": 32}
    features = {"features": CHANNELS}
    return {
        "torch_dtype": "float32",
        "backbone": {
            "encoder": tower | {"num_layers": 4},
            "decoder": tower | {"num_layers": 3},
            "attention": heads | {"num_kv_heads": size // 64},
            "moe": {
                "num_experts": experts,
                "top_k": 2,
                "expert_dim": size * 3 // 2,
                "shared_dim": size * 3 // 2,
            },
            "rope": {"frame_stride": 64, "row_stride": 8, "theta": 1000.0},
            "patch_size": 2,
            "input_projections": {
                "VideoTensor": features,
                "TextEncodingTensor": {"features": CAPTION_WIDTH, "hidden_dim": size // 2},
            },
            "output_projections": {"VideoTensor": features},
        },
        "action_expert": heads
        | {"dim": size, "mlp_dim": 3 * size, "taps": [1, 3]}
        | {"num_future_tokens": 2, "time_features": 32},
        "action_space": {
            "row_dim": ROW_DIM,
            "proprio_dim": ROW_DIM,
            "rows_per_token": FRAMES_PER_LATENT,
        },
        "normalization": {
            "action_q01": [-0.4, -0.4],
            "action_q99": [0.4, 0.4],
            "proprio_mean": [0.0, 0.0],
            "proprio_std": [0.4, 0.4],
        },
        "chunking": {
            "chunk_frames": 2 * FRAMES_PER_LATENT,
            "latents_per_chunk": 2,
            "window_chunks": 3,
            "window_frames": 1 + 3 * 2 * FRAMES_PER_LATENT,
        },
        "video": {
            "canvas_height": SIDE * CELL,
            "canvas_width": SIDE * CELL,
            "latent_channels": CHANNELS,
            "latent_height": SIDE,
            "latent_width": SIDE,
        },
        "text_encoder": {
            "name": "captions of chase.py",
            "hidden_dim": CAPTION_WIDTH,
            "max_tokens": CAPTION_TOKENS,
            "unconditional_caption": "",
        },
    }


def windows(
    config: PraxisConfig, numbers: Sequence[int], *, mirrored: bool = False
) -> PraxisWindow:
    """Make the windows of these numbers.

    Args:
        config: its sizes; `document` makes one that fits.
        numbers: any integers; equal ones are equal windows.
        mirrored: whether the x axis of the robot, poses and actions alike, points the other way.
            The video is the same.
    """
    episode = play(config, numbers)
    hand = episode.hand * hand_axes(mirrored)
    starts = hand[:, : -1 : config.chunking.chunk_frames]
    rows = hand[:, 1:].unflatten(1, (-1, config.chunking.chunk_frames)) - starts[:, :, None]
    latents = render(config, episode)
    return PraxisWindow(
        anchor=latents[:, :, :1],
        latents=latents[:, :, 1:],
        text=captions(episode.heading),
        blank_text=captions(torch.zeros_like(episode.heading)),
        proprio=normalize_proprio(starts, config),
        actions=encode_actions(rows.flatten(1, 2), config),
    )


def hand_tracks(config: PraxisConfig, window: PraxisWindow, actions: Tensor) -> Tensor:
    """Where actions lead: x and y of the hand in each frame but the first, [B, frames, 2].

    Every chunk starts from the pose that the window gives for it.
    """
    stats = config.normalization
    mean, std = torch.tensor(stats.proprio_mean), torch.tensor(stats.proprio_std)
    starts = window.proprio * std + mean
    rows = decode_actions(actions, config)
    return rows + starts.repeat_interleave(config.chunking.chunk_frames, 1)


def hand_axes(mirrored: bool) -> Tensor:
    """The signs of x and y."""
    return torch.tensor([-1.0 if mirrored else 1.0, 1.0])


def play(config: PraxisConfig, numbers: Sequence[int]) -> Episode:
    """Let disc and hand move."""
    drawn = torch.stack([_uniform(number) for number in numbers])
    angle = (drawn[:, 4] * DIRECTIONS).floor() * (2 * math.pi / DIRECTIONS)
    heading = torch.stack((angle.cos(), angle.sin()), -1)
    moved = _SPEED * torch.arange(config.chunking.window_frames)[:, None] * heading[:, None]
    disc = _bounced(_WALL * drawn[:, None, :2] + moved)
    poses = [disc[:, 0] + _APART * drawn[:, 2:4]]
    for frame in disc.unbind(1)[1:]:
        poses.append(poses[-1] + _CLOSING * (frame - poses[-1]))
    hand = torch.stack(poses, 1)
    return Episode(disc=disc, hand=hand, heading=heading)


def render(config: PraxisConfig, episode: Episode) -> Tensor:
    """Latents of the first frame and of every group of frames behind it, [B, C, 1 + T, h, w]."""
    side = config.video.canvas_height
    disc, hand = episode.disc, episode.hand
    x = (torch.arange(side) + 0.5) * (2 / side) - 1
    pixels = torch.stack(torch.meshgrid(x, x, indexing="xy"), -1)
    to_disc = (pixels - disc[:, :, None, None]).norm(dim=-1)
    to_hand = (pixels - hand[:, :, None, None]).abs().amax(-1)
    covers = [
        torch.sigmoid(_SHARPNESS * (size - distance))
        for size, distance in ((_DISC, to_disc), (_SQUARE, to_hand))
    ]
    free = (1 - covers[0]) * (1 - covers[1])
    light = [free * pixels[..., axis] for axis in range(2)]
    moving = [channel for cover in covers for channel in _over_time(F.avg_pool2d(cover, CELL))]
    still = [_over_time(F.avg_pool2d(part, CELL))[0] for part in light]
    return torch.stack((*moving, *still), 1) * torch.tensor(_SCALES).view(-1, 1, 1, 1)


def captions(heading: Tensor) -> Tensor:
    """Stand in for the text encoder: the states of captions of two words, such as "left up".

    Args:
        heading: unit vectors [B, 2]; zeros stand for the blank caption.

    Returns:
        [B, 2, CAPTION_WIDTH]: a word says which way x goes, if any, and another one y.
    """
    generator = torch.Generator().manual_seed(0)
    words = torch.randn(CAPTION_TOKENS, 3, CAPTION_WIDTH, generator=generator)
    return words[torch.arange(CAPTION_TOKENS), heading.round().long() + 1]


def _uniform(number: int) -> Tensor:
    """Between -1 and 1, but for the last, between 0 and 1."""
    drawn = torch.rand(5, generator=torch.Generator().manual_seed(number))
    return torch.cat((2 * drawn[:4] - 1, drawn[4:]))


def _bounced(free: Tensor) -> Tensor:
    """Reflect positions at both walls, as often as it takes."""
    return _WALL - (torch.remainder(free + _WALL, 4 * _WALL) - 2 * _WALL).abs()


def _over_time(frames: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over groups of frames, and how its second half differs from the first."""
    first, groups = frames[:, :1], frames[:, 1:].unflatten(1, (-1, 2, FRAMES_PER_LATENT // 2))
    halves = groups.mean(3)
    mean, change = halves.mean(2), halves[:, :, 1] - halves[:, :, 0]
    return torch.cat((first, mean), 1), torch.cat((torch.zeros_like(first), change), 1)
