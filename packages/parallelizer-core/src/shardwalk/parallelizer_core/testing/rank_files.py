"""The files through which a rank's output and its stacks reach the parent."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

_TAIL = 4000


@dataclass(frozen=True)
class RankFiles:
    """The files of one start of a pool, in its temporary folder."""

    folder: str
    world_size: int

    def output_path(self, rank: int) -> str:
        """Where a rank's stdout and stderr go."""
        return os.path.join(self.folder, f"rank{rank}.out")

    def stacks_path(self, rank: int) -> str:
        """Where a rank dumps its Python stacks when it gets SIGUSR1."""
        return os.path.join(self.folder, f"rank{rank}.stacks")

    def output(self, rank: int) -> str:
        """The end of what a rank wrote in this run, without gloo's lines about connections."""
        lines = _read(self.output_path(rank)).splitlines()
        return "\n".join(line for line in lines if not line.startswith("[Gloo]"))[-_TAIL:]

    def clear_output(self) -> None:
        """Forget what ranks wrote so far; they append, so that they go on at the start."""
        for rank in range(self.world_size):
            os.truncate(self.output_path(rank), 0)

    def print_output(self) -> None:
        """Print what ranks wrote here, each line behind its rank."""
        for rank in range(self.world_size):
            for line in self.output(rank).splitlines():
                print(f"[rank {rank}] {line}")

    def stacks(self, rank: int, patience: float = 2.0) -> str:
        """The stack dump that a rank was asked for, once it stopped growing."""
        end = time.monotonic() + patience
        seen = ""
        while time.monotonic() < end:
            time.sleep(0.05)
            now = _read(self.stacks_path(rank))
            if now and now == seen:
                break
            seen = now
        return seen or "(no stack: the rank did not answer)"


def _read(path: str) -> str:
    if not os.path.exists(path):
        return ""
    with open(path, errors="replace") as stream:
        return stream.read()
