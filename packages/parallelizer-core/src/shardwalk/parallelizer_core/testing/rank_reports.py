"""Saying what went wrong in which rank."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping, Sequence

from shardwalk.parallelizer_core.testing.rank_errors import RankError, RankTimeoutError
from shardwalk.parallelizer_core.testing.rank_files import RankFiles
from shardwalk.parallelizer_core.testing.rank_worker import Outcome


def failure(outcomes: Mapping[int, Outcome], files: RankFiles) -> RankError:
    """The error of the rank that failed first; one that died (when = 0) goes before all."""
    failures = {rank: outcome for rank, outcome in sorted(outcomes.items()) if outcome.summary}
    first = min(failures, key=lambda rank: failures[rank].when)
    message = [f"rank {first} of {files.world_size}: {failures[first].summary}"]
    message.append(failures[first].trace)
    if failures[first].when and (output := files.output(first)):
        message.append(f"output of rank {first}:\n{output}")
    others = [rank for rank in failures if rank != first]
    message += [f"also rank {rank}: {failures[rank].summary}" for rank in others]
    reports = {rank: outcome.trace for rank, outcome in failures.items()}
    return RankError("\n".join(message), first, reports)


def timeout_error(
    timeout: float, outcomes: Mapping[int, Outcome], pids: Sequence[int], files: RankFiles
) -> RankTimeoutError:
    """The error at the deadline, with the stacks of all ranks."""
    ranks = range(files.world_size)
    waiting = [rank for rank in ranks if rank not in outcomes]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    stacks = {rank: files.stacks(rank) for rank in ranks}
    message = [
        f"ranks {waiting} of {files.world_size} did not finish within {timeout:g} s; "
        "the stacks of all ranks:"
    ]
    message += [f"--- rank {rank}\n{stack}" for rank, stack in stacks.items()]
    message += [
        f"--- output of rank {rank}\n{text}" for rank in waiting if (text := files.output(rank))
    ]
    return RankTimeoutError("\n".join(message), waiting[0], stacks)


def describe_exit(exit_code: int | None) -> str:
    """Say how a process ended: ``signal SIGABRT`` or ``exit code 3``."""
    if exit_code is not None and exit_code < 0:
        return f"signal {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"
