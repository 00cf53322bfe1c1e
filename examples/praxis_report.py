"""What train_praxis.py shows of a run: tracks of the hand, losses, and how close numbers are."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from chase import HELD_OUT, hand_tracks, windows
from rich.console import Console
from torch import Tensor
from tracks import Column, distance

from shardwalk.model_praxis import PraxisConfig


@dataclass(kw_only=True)
class Report:
    """What a rank came to.

    Attributes:
        losses: of all ranks, in each step: of both kinds together, of the video (0 where the
            decoder did not run) and of the actions.
        norms: of the gradient, in each step.
        tracks: of the hand in the held-out windows, by the number of steps done.
        actions: sampled for these windows after the last step, in tokens.
    """

    losses: list[tuple[float, float, float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    tracks: dict[int, Tensor] = field(default_factory=dict)
    actions: Tensor | None = None


def columns(config: PraxisConfig, trained: Report, adapted: Report | None = None) -> list[Column]:
    """Give the columns of the figure, from left to right."""
    true = true_tracks(config)
    drawn = [
        Column(
            title=f"after {steps} steps" if steps else "before training",
            predicted=predicted,
            true=true,
        )
        for steps, predicted in trained.tracks.items()
    ]
    if adapted is None:
        return drawn
    (_, before), (steps, after) = adapted.tracks.items()
    title = f"mirrored robot, adapters of {steps} steps"
    true = true_tracks(config, mirrored=True)
    return [*drawn, Column(title=title, predicted=after, true=true, before=before)]


def true_tracks(config: PraxisConfig, *, mirrored: bool = False) -> Tensor:
    """Give the tracks of the hand in the held-out windows."""
    window = windows(config, HELD_OUT, mirrored=mirrored)
    return hand_tracks(config, window, window.actions)


def summarize(
    console: Console, config: PraxisConfig, trained: Report, adapted: Report, figure: Path
) -> None:
    """Print how losses fell, and how far predicted tracks are from true ones."""
    (_, video, action), (_, last_video, last_action) = trained.losses[0], trained.losses[-1]
    console.print(
        f"video loss {video:.3f} in the first step, {last_video:.3f} in the last; "
        f"action loss {action:.3f} and {last_action:.3f}; "
        f"adapters: {adapted.losses[0][2]:.3f} and {adapted.losses[-1][2]:.3f}"
    )
    *_, mirrored = drawn = columns(config, trained, adapted)
    assert mirrored.before is not None
    before, after, end = (distance(column.predicted, column.true) for column in drawn)
    unadapted = distance(mirrored.before, mirrored.true)
    console.print(
        f"distance of predicted from true tracks: {before:.2f} before training, {after:.2f} "
        f"after; for the mirrored robot {unadapted:.2f} without adapters, {end:.2f} with them; "
        f"drawn in {figure}"
    )


def same_actions(console: Console, found: Tensor | None, expected: Tensor | None) -> bool:
    """Print how far two sets of actions are apart, and say whether that is rounding."""
    assert found is not None
    assert expected is not None
    difference = (found - expected).abs().max().item()
    verdict = "equal" if difference <= 1e-3 else "DIFFERENT"
    console.print(f"actions of merged adapters: {verdict} (largest difference {difference:.0e})")
    return difference <= 1e-3
