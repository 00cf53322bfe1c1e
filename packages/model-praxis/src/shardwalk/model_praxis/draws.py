"""What training is told and what it draws: settings, windows, every random number of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from hashlib import blake2b

import torch
from torch import Tensor

from shardwalk.model_praxis.config import PraxisConfig


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """The numbers of the training objective; none of them is known of released weights.

    Attributes:
        flow_shift: `shift_time` of the video's times; 1 leaves them uniform.
        video_weight: factor of the video's loss.
        action_weight: factor of the actions' loss.
        text_dropout: how often a window's text becomes the blank caption.
        proprio_dropout: how often a window's proprioceptive poses become zero.
        action_guard: a window whose action loss is above this, or not finite, adds no action loss.
        move_positions: whether anchor, text and video move by random offsets below a frame block.
        latent_dtype: what x_t is rounded to.

    Raises:
        TypeError: for a value of another type.
        ValueError: for a value outside its range.
    """

    flow_shift: float = 1.0
    video_weight: float = 1.0
    action_weight: float = 1.0
    text_dropout: float = 0.1
    proprio_dropout: float = 0.1
    action_guard: float = 10.0
    move_positions: bool = True
    latent_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "float" and (
                isinstance(value, bool) or not isinstance(value, int | float)
            ):
                raise TypeError(f"{field.name}={value!r} must be a number")
        if not isinstance(self.move_positions, bool):
            raise TypeError(f"move_positions={self.move_positions!r} must be True or False")
        if not (isinstance(self.latent_dtype, torch.dtype) and self.latent_dtype.is_floating_point):
            raise TypeError(f"latent_dtype={self.latent_dtype!r} must be a floating torch.dtype")
        for name in ("text_dropout", "proprio_dropout"):
            self._require(name, 0 <= getattr(self, name) <= 1, "between 0 and 1")
        for name in ("video_weight", "action_weight"):
            self._require(name, 0 <= getattr(self, name) < math.inf, "0 or more, and finite")
        self._require("flow_shift", 0 < self.flow_shift < math.inf, "above 0, and finite")
        self._require("action_guard", self.action_guard > 0, "above 0 (math.inf never cuts)")

    def _require(self, name: str, is_allowed: bool, allowed: str) -> None:
        if not is_allowed:
            raise ValueError(f"{name}={getattr(self, name)!r} is not allowed; it must be {allowed}")


@dataclass(frozen=True, kw_only=True)
class PraxisWindow:
    """Encoded windows of an episode, B of them; everything floating.

    Attributes:
        anchor: the latent frame before the first chunk, [B, C, 1, h, w].
        latents: latents of the K chunks, [B, C, K * L, h, w].
        text: states of the text encoder, [B, X, H].
        blank_text: states of the unconditional caption, of the same shape.
        proprio: normalized poses at the starts of the chunks, [B, K, P].
        actions: normalized action tokens, one per latent frame, [B, K * L, A].
    """

    anchor: Tensor
    latents: Tensor
    text: Tensor
    blank_text: Tensor
    proprio: Tensor
    actions: Tensor

    @property
    def size(self) -> int:
        """The number of windows."""
        return self.latents.shape[0]

    def to(self, device: torch.device | str) -> PraxisWindow:
        """The same windows on another device."""
        return PraxisWindow(**_moved(self, device))


@dataclass(frozen=True, kw_only=True)
class Draws:
    """Every random number of a micro-step, made before its forward.

    Attributes:
        window_time: the time of x_t, fp32 [B].
        window_noise: the noise of x_t, fp32 [B, C, K * L, h, w].
        chunk_times: the time of each noised chunk, fp32 [B, K].
        action_times: the time of each chunk's actions, fp32 [B, K].
        action_noise: fp32 [B, K * L, A].
        drop_text: whether the text becomes the blank caption, bool [B].
        drop_proprio: whether the poses become zero, bool [B].
        offsets: how far the positions of anchor, text and video move, int64 [B, 3].
    """

    window_time: Tensor
    window_noise: Tensor
    chunk_times: Tensor
    action_times: Tensor
    action_noise: Tensor
    drop_text: Tensor
    drop_proprio: Tensor
    offsets: Tensor

    def to(self, device: torch.device | str) -> Draws:
        """The same draws on another device."""
        return Draws(**_moved(self, device))


def _moved(data: PraxisWindow | Draws, device: torch.device | str) -> dict[str, Tensor]:
    return {field.name: getattr(data, field.name).to(device) for field in fields(data)}


def step_generator(*, seed: int, step: int, micro_step: int, rank: int) -> torch.Generator:
    """A CPU generator for the draws of one micro-step of one rank, unlike that of any other.

    Ranks that share a window (tensor parallel peers) pass the same `rank`.
    """
    name = f"{seed} {step} {micro_step} {rank}".encode()
    digest = blake2b(name, digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def draw(
    config: PraxisConfig,
    settings: ObjectiveSettings,
    generator: torch.Generator,
    *,
    windows: int = 1,
) -> Draws:
    """Draw what a micro-step of so many windows needs, on the generator's device.

    Every number is drawn whatever the settings, so that a rate or a shift changes no other draw.

    Raises:
        TypeError: `windows` is no integer.
        ValueError: `windows` is below 1.
    """
    if isinstance(windows, bool) or not isinstance(windows, int):
        raise TypeError(f"windows={windows!r} must be an integer")
    if windows < 1:
        raise ValueError(f"windows={windows} must be 1 or more")

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=generator.device)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=generator.device)

    chunks = config.chunking.window_chunks
    frames = chunks * config.chunking.latents_per_chunk
    video = config.video
    cells = (video.latent_channels, frames, video.latent_height, video.latent_width)
    window_time = shift_time(uniform(windows), settings.flow_shift)
    chunk_times = shift_time(uniform(windows, chunks), settings.flow_shift)
    offsets = (uniform(windows, 3) * config.backbone.rope.frame_stride).long()
    return Draws(
        window_time=window_time,
        window_noise=normal(windows, *cells),
        chunk_times=chunk_times,
        action_times=uniform(windows, chunks),
        action_noise=normal(windows, frames, config.action_space.token_dim),
        drop_text=uniform(windows) < settings.text_dropout,
        drop_proprio=uniform(windows) < settings.proprio_dropout,
        offsets=offsets if settings.move_positions else torch.zeros_like(offsets),
    )


def shift_time(u: Tensor, shift: float) -> Tensor:
    """s u / (1 + (s - 1) u): from uniform times to later ones for s > 1; 0 and 1 stay."""
    return shift * u / (1 + (shift - 1) * u)
