"""One error for everything in which a state and a model differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

_SHOWN = 50


class StateMismatchError(ValueError):
    """A checkpoint or state dict does not fit the model; the message lists every name."""


@dataclass
class StateMismatch:
    """Collects differences; `raise_if_any` raises them together, the same on every rank.

    Attributes:
        missing: names the model has and the source lacks.
        unexpected: names the source has and the model lacks.
        differing: lines on names that both have, with what differs.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)

    def raise_if_any(self, what: str, way_out: str) -> None:
        """Raise a `StateMismatchError` when anything was collected.

        Args:
            what: names the source, as the subject of the message.
            way_out: what the user can do about it.
        """
        parts = [
            _part("missing", self.missing),
            _part("unexpected", self.unexpected),
            _part("differing", self.differing),
        ]
        if any(parts):
            raise StateMismatchError(
                f"{what} does not fit the model; {'; '.join(filter(None, parts))}. {way_out}"
            )

    def compare_shapes(self, name: str, model: Sequence[int], source: Sequence[int]) -> None:
        """Collect a difference of shapes."""
        if tuple(model) != tuple(source):
            self.differing.append(f"{name} (model {list(model)}, source {list(source)})")


def _part(title: str, names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return f"{title} ({len(ordered)}): {', '.join(ordered[:_SHOWN])}{more}" if ordered else ""
