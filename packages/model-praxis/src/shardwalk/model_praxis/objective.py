"""Flow matching over a window: what is drawn, what the policy sees, and the loss of what it says.

Time 1 is noise, time 0 is data, and velocities are noise - data. One time and one noise for the
whole window give x_t, rounded as a low-precision data pipeline would store it; from there every
chunk moves along the same velocity to a time of its own, so that all chunks share one target. The
clean chunks that later chunks look back at are recovered from the same x_t.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from hashlib import blake2b

import torch
from torch import Tensor, nn

from shardwalk.model_praxis.config import PraxisConfig
from shardwalk.model_praxis.model import PraxisOutput, trains_backbone


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
    """

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


@dataclass(frozen=True, kw_only=True)
class NoisedWindow:
    """What the policy is given for a window, and what it should answer.

    Attributes:
        inputs: the keyword arguments of `PraxisPolicy.forward`.
        video_target: fp32 [B, C, K * L, h, w].
        action_target: fp32 [B, K * L, A].
        is_usable: whether a window's actions and poses are finite, bool [B]; the policy is given
            zeros for those that are not.
    """

    inputs: Mapping[str, Tensor | None]
    video_target: Tensor
    action_target: Tensor
    is_usable: Tensor


def noise_window(window: PraxisWindow, draws: Draws, settings: ObjectiveSettings) -> NoisedWindow:
    """Mix windows and draws into what the policy is given; all on one device.

    Raises:
        ValueError: when window and draws are of different shapes.
    """
    _check_shapes(window, draws)
    per_chunk = window.latents.shape[2] // draws.chunk_times.shape[1]
    latents, noise = window.latents.float(), draws.window_noise
    velocity = noise - latents
    t0 = draws.window_time.view(-1, 1, 1, 1, 1)
    x_t = torch.lerp(latents, noise, t0).to(settings.latent_dtype).float()
    by_frame = draws.chunk_times.repeat_interleave(per_chunk, 1)[:, None, :, None, None]
    recovered = x_t - t0 * velocity
    actions, proprio, is_usable = _finite_actions(window)
    action_by_frame = draws.action_times.repeat_interleave(per_chunk, 1)[:, :, None]
    inputs = {
        "anchor": window.anchor,
        "noised": x_t + (by_frame - t0) * velocity,
        "times": draws.chunk_times,
        "clean": recovered[:, :, :-per_chunk] if draws.chunk_times.shape[1] > 1 else None,
        "text": torch.where(draws.drop_text.view(-1, 1, 1), window.blank_text, window.text),
        "actions": torch.lerp(actions, draws.action_noise, action_by_frame),
        "action_times": draws.action_times,
        "proprio": proprio.masked_fill(draws.drop_proprio.view(-1, 1, 1), 0),
        "offsets": draws.offsets,
    }
    return NoisedWindow(
        inputs=inputs,
        video_target=velocity,
        action_target=draws.action_noise - actions,
        is_usable=is_usable,
    )


def _finite_actions(window: PraxisWindow) -> tuple[Tensor, Tensor, Tensor]:
    """Actions and poses, zero in windows where they are not finite, and which windows are.

    A gradient of 0 times an activation that is not finite would be NaN in the weights.
    """
    finite = [x.isfinite().flatten(1).all(1) for x in (window.actions, window.proprio)]
    is_usable = finite[0] & finite[1]
    keep = is_usable.view(-1, 1, 1)
    actions = torch.where(keep, window.actions.float(), 0.0)
    return actions, torch.where(keep, window.proprio.float(), 0.0), is_usable


def _check_shapes(window: PraxisWindow, draws: Draws) -> None:
    for name, given, drawn in (
        ("latents", window.latents, draws.window_noise),
        ("actions", window.actions, draws.action_noise),
        ("text", window.text, window.blank_text),
    ):
        if given.shape != drawn.shape:
            raise ValueError(
                f"window.{name} has shape {list(given.shape)}, and its draws (for text, the blank "
                f"caption) have {list(drawn.shape)}; draw for the same configuration and as many "
                f"windows, and pad both captions alike"
            )


@dataclass(frozen=True, kw_only=True)
class PraxisLoss:
    """The loss of each window of a micro-step; a window counts as one, whatever its frames.

    Attributes:
        total: what to train on, fp32 [B]: the weighted sum of the two below.
        video: mean squared error over a window's latents, fp32 [B]; None when the decoder did not
            run, since nothing of it is trained.
        action: mean squared error over a window's action tokens, fp32 [B]; 0 where cut.
        is_cut: whether the guard cut a window's action loss, bool [B].
    """

    total: Tensor
    video: Tensor | None
    action: Tensor
    is_cut: Tensor

    def mean(self) -> Tensor:
        """The mean over this rank's windows, which is the loss when all ranks have as many."""
        return self.total.mean()


def praxis_loss(
    policy: nn.Module, window: PraxisWindow, draws: Draws, settings: ObjectiveSettings
) -> PraxisLoss:
    """Run the policy once and compare its velocities with the targets.

    When nothing of the backbone is trained, the decoder does not run and the video has no term.

    Args:
        policy: a `PraxisPolicy`, parallelized or not.
        window: on the policy's device.
        draws: on the same device.
        settings: weights, guard and rounding; the ones the draws were made with.

    Raises:
        ValueError: when window and draws are of different shapes.
    """
    noised = noise_window(window, draws, settings)
    output: PraxisOutput = policy(**noised.inputs, decode=trains_backbone(policy))
    action, is_cut = guarded_action_loss(
        output.action_velocity, noised.action_target, settings.action_guard, noised.is_usable
    )
    total = settings.action_weight * action
    video = None
    if output.velocity is not None:
        video = _mean_square(output.velocity.float() - noised.video_target)
        total = total + settings.video_weight * video
    return PraxisLoss(
        total=total,
        video=None if video is None else video.detach(),
        action=action.detach(),
        is_cut=is_cut,
    )


def guarded_action_loss(
    velocity: Tensor, target: Tensor, guard: float, is_usable: Tensor
) -> tuple[Tensor, Tensor]:
    """The mean squared error per window, and which windows were cut.

    A cut window has a loss and a gradient of exactly 0: its output is replaced before the square,
    since 0 times NaN is NaN.

    Args:
        velocity: [B, ...].
        target: fp32, of the same shape.
        guard: the largest loss that counts.
        is_usable: bool [B]; False cuts a window whatever its loss.
    """
    velocity = velocity.float()
    raw = _mean_square(velocity.detach() - target)
    is_kept = is_usable & (raw <= guard)  # false for NaN
    keep = is_kept.view(-1, *[1] * (target.dim() - 1))
    loss = _mean_square(torch.where(keep, velocity, target) - target)
    return loss, ~is_kept


def _mean_square(difference: Tensor) -> Tensor:
    return difference.square().flatten(1).mean(1)
