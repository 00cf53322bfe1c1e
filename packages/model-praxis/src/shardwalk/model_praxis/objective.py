"""Flow matching over a window: what is drawn, what the policy sees, and the loss of what it says.

Time 1 is noise, time 0 is data, and velocities are noise - data. One time and one noise for the
whole window give x_t, rounded as a low-precision data pipeline would store it; from there every
chunk moves along the same velocity to a time of its own, so that all chunks share one target. The
clean chunks that later chunks look back at are recovered from the same x_t.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwalk.model_praxis.draws import Draws, ObjectiveSettings, PraxisWindow
from shardwalk.model_praxis.model import PraxisOutput, trains_backbone
from shardwalk.model_praxis.policy_parts import policy_in
from shardwalk.model_praxis.window_checks import check_draws, check_window

_WINDOW_DIMS = {"latents": 5, "anchor": 5, "text": 3, "blank_text": 3, "proprio": 3, "actions": 3}
_DRAW_DIMS = {
    "window_time": 1, "window_noise": 5, "chunk_times": 2, "action_times": 2, "action_noise": 3,
    "drop_text": 1, "drop_proprio": 1, "offsets": 2,
}  # fmt: skip


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
    for owner, data, dims in (("window", window, _WINDOW_DIMS), ("draws", draws, _DRAW_DIMS)):
        for name, ndim in dims.items():
            shape = getattr(data, name).shape
            if len(shape) != ndim or shape[0] != window.size:
                raise ValueError(
                    f"{owner}.{name} has shape {list(shape)}, it must have {ndim} dimensions, the "
                    f"first for the {window.size} windows of window.latents"
                )
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
        policy: a `PraxisPolicy`, parallelized or not, or a wrapper that passes its calls on.
        window: on the policy's device.
        draws: on the same device.
        settings: weights, guard and rounding; the ones the draws were made with.

    Raises:
        TypeError: `policy` neither is nor holds a `PraxisPolicy`; a tensor of another dtype.
        ValueError: a tensor of windows or draws whose shape is not that of the configuration and
            of as many windows; offsets out of range. Before anything is computed, on this rank
            alone: ranks whose windows are right wait for it until the group's timeout.
    """
    inner = policy_in(policy, "praxis_loss")
    if not isinstance(settings, ObjectiveSettings):
        raise TypeError(f"settings must be ObjectiveSettings, not {type(settings).__name__}")
    chunks = check_window(inner.config, window)
    check_draws(inner.config, draws, windows=window.size, chunks=chunks)
    noised = noise_window(window, draws, settings)
    output: PraxisOutput = policy(**noised.inputs, decode=trains_backbone(inner))
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
