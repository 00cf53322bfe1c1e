"""Runs a function on ranks of its own, as torchrun does, and brings back what it returns."""

from __future__ import annotations

import multiprocessing
import os
import uuid
from collections.abc import Callable
from typing import TypeVar

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

Result = TypeVar("Result")

# What the server imports once, the ranks it forks need not import again.
PRELOADED = ["torch.distributed.fsdp", "transformers.models.llama.modeling_llama"]


def launch(ranks: int, function: Callable[..., Result], *args: object) -> list[Result]:
    """Call the function in new processes that have torchrun's environment; give their results.

    The function stands at the top level of its module. When a rank fails, the others are ended
    and the program too, with the first error.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    # Freed buffers go back to the kernel; in glibc's heap, holes between them double the peak.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**20))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        max_restarts=0,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="forkserver",
    )
    try:
        results = elastic_launch(config, function)(*args)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        said = failure.message
        raise SystemExit(
            f"rank {rank} failed: {said if isinstance(said, str) else said['message']}"
        ) from None
    return [results[rank] for rank in range(ranks)]
