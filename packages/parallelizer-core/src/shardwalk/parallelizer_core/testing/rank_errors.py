"""What a pool of ranks raises in the parent process."""

from __future__ import annotations

from collections.abc import Mapping


class RankError(RuntimeError):
    """A rank raised or died.

    Attributes:
        rank: the rank whose failure came first.
        reports: for every rank that failed, its traceback or what it wrote before it died.
    """

    def __init__(self, message: str, rank: int, reports: Mapping[int, str]) -> None:
        super().__init__(message)
        self.rank = rank
        self.reports = dict(reports)


class RankTimeoutError(RankError, TimeoutError):
    """The deadline passed first; ``reports`` holds the Python stacks of every rank."""
