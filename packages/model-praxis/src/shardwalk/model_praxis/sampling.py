"""From noise to a window's video and actions, by a few Euler steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from shardwalk.model_praxis.draws import PraxisWindow, shift_time
from shardwalk.model_praxis.policy_parts import policy_in
from shardwalk.model_praxis.window_checks import check_window


@dataclass(frozen=True, kw_only=True)
class PraxisSample:
    """What the policy makes of a window.

    Attributes:
        latents: of all chunks, fp32 [B, C, K * L, h, w].
        actions: normalized action tokens, fp32 [B, K * L, A].
    """

    latents: Tensor
    actions: Tensor


@torch.no_grad()
def sample(
    policy: nn.Module,
    window: PraxisWindow,
    *,
    steps: int = 2,
    flow_shift: float = 1.0,
    video_guidance: float = 1.0,
    action_guidance: float = 1.0,
    generator: torch.Generator | None = None,
) -> PraxisSample:
    """Denoise every chunk of a window at once, each behind the window's own clean chunks before it.

    Video and actions go from time 1 to 0 together, in equal steps of the actions' time.

    Args:
        policy: a `PraxisPolicy`, parallelized or not, or a wrapper that passes its calls on; all
            ranks that hold it call this together, with equal steps and guidances, which decide how
            often the policy runs.
        window: gives anchor, text, poses and the clean chunks; its last chunk and its actions give
            their shapes alone.
        steps: Euler steps.
        flow_shift: `shift_time` of the video's times.
        video_guidance: velocities become blank + guidance * (with text - blank), where blank is a
            second call with the blank caption; 1 is none.
        action_guidance: the same for actions.
        generator: for the noise; on its device, or on the CPU's default one, noise is drawn.

    Raises:
        TypeError: `policy` neither is nor holds a `PraxisPolicy`; an option, or a tensor of the
            window, of another type.
        ValueError: an option out of range; a tensor of the window of another shape.
    """
    config = policy_in(policy, "sample").config
    _check_options(steps, flow_shift, video_guidance, action_guidance)
    check_window(config, window)
    guidances = (video_guidance, action_guidance)
    video, actions = (_noise_like(x, generator) for x in (window.latents, window.actions))
    uniform = torch.linspace(1, 0, steps + 1)
    grid = list(zip(shift_time(uniform, flow_shift).tolist(), uniform.tolist(), strict=True))
    for now, after in pairwise(grid):
        velocities = _velocities(policy, window, (video, actions), now, guidances)
        video = video + (after[0] - now[0]) * velocities[0]
        actions = actions + (after[1] - now[1]) * velocities[1]
    return PraxisSample(latents=video, actions=actions)


def _check_options(
    steps: int, flow_shift: float, video_guidance: float, action_guidance: float
) -> None:
    numbers = {
        "flow_shift": flow_shift,
        "video_guidance": video_guidance,
        "action_guidance": action_guidance,
    }
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise TypeError(f"steps={steps!r} must be an integer")
    if steps < 1:
        raise ValueError(f"steps={steps} must be 1 or more")
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name}={value!r} must be a number")
        if not math.isfinite(value):
            raise ValueError(f"{name}={value} must be finite")
    if flow_shift <= 0:
        raise ValueError(f"flow_shift={flow_shift} must be above 0")


def _noise_like(x: Tensor, generator: torch.Generator | None) -> Tensor:
    device = "cpu" if generator is None else generator.device
    return torch.randn(x.shape, generator=generator, device=device).to(x.device)


def _velocities(
    policy: nn.Module,
    window: PraxisWindow,
    noised: tuple[Tensor, Tensor],
    times: tuple[float, float],
    guidances: tuple[float, float],
) -> list[Tensor]:
    """Of video and actions, with guidance."""
    told = _denoise(policy, window, window.text, noised, times)
    if guidances == (1.0, 1.0):
        return told
    blank = _denoise(policy, window, window.blank_text, noised, times)
    return [b + g * (t - b) for t, b, g in zip(told, blank, guidances, strict=True)]


def _denoise(
    policy: nn.Module,
    window: PraxisWindow,
    text: Tensor,
    noised: tuple[Tensor, Tensor],
    times: tuple[float, float],
) -> list[Tensor]:
    chunks = window.proprio.shape[1]
    per_chunk = window.latents.shape[2] // chunks
    video_times, action_times = (
        window.proprio.new_full((window.size, chunks), t, dtype=torch.float32) for t in times
    )
    output = policy(
        noised=noised[0], times=video_times, anchor=window.anchor, text=text, actions=noised[1],
        action_times=action_times, proprio=window.proprio,
        clean=window.latents[:, :, :-per_chunk] if chunks > 1 else None,
    )  # fmt: skip
    return [output.velocity.float(), output.action_velocity.float()]
