"""Draws where a policy leads the hand beside where it goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROWS = 4  # windows that are drawn
_CHUNK = 8  # frames


@dataclass(frozen=True, kw_only=True)
class Column:
    """Tracks of some windows at one point of training.

    Attributes:
        title: what point that is.
        predicted: [windows, frames, 2].
        true: of the same shape.
        before: what was predicted earlier, drawn faintly; of the same shape, or None.
    """

    title: str
    predicted: Tensor
    true: Tensor
    before: Tensor | None = None


def distance(predicted: Tensor, true: Tensor) -> float:
    """How far two tracks are apart on average over windows and frames."""
    mean: float = (predicted - true).norm(dim=-1).mean().item()
    return mean


def draw_columns(path: Path, columns: Sequence[Column]) -> None:
    """Draw the first windows of each column below each other.

    Args:
        path: of the file; its ending says which format.
        columns: from left to right.
    """
    from matplotlib.figure import Figure

    rows = min(_ROWS, len(columns[0].true))
    size = (3 * len(columns), 3 * rows + 0.6)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, len(columns), squeeze=False, sharex=True, sharey=True)
    for place, column in enumerate(columns):
        grid[0, place].set_title(
            f"{column.title}\nmean distance {distance(column.predicted, column.true):.2f}",
            fontsize=10,
        )
        kinds = [
            (column.true, {"color": "#b8bcc4", "linewidth": 6, "label": "true"}),
            (column.before, {"color": "#c2410c", "linewidth": 1, "label": "before adapting"}),
            (column.predicted, {"color": "#2563a8", "linewidth": 1.8, "label": "predicted"}),
        ]
        for row in range(rows):
            for tracks, style in kinds:
                if tracks is not None:
                    _draw_track(grid[row, place], tracks[row], style)
    for axis in grid.flat:
        axis.set(xlim=(-1, 1), ylim=(1, -1), aspect="equal", xticks=[], yticks=[])
    grid[0, -1].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


def _draw_track(axis: Axes, track: Tensor, style: Mapping[str, Any]) -> None:
    """Draw chunk by chunk: each starts from the pose that the window gives for it."""
    for number, chunk in enumerate(track.split(_CHUNK)):
        x, y = chunk.unbind(-1)
        once = style if number == 0 else {**style, "label": None}
        axis.plot(x.tolist(), y.tolist(), solid_capstyle="round", **once)
