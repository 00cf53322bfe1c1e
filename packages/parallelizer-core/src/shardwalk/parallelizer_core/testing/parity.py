"""Parity: a parallel model has the numbers of one process."""

from __future__ import annotations

import atexit
import hashlib
import os
import tempfile
from collections.abc import Mapping
from typing import Any

from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwalk.mesh import FSDP2Config
from shardwalk.parallelizer_core.testing.parity_case import (
    OPTIMIZERS,
    Bf16,
    OptimizerFactory,
    ParityCase,
    Start,
    Training,
)
from shardwalk.parallelizer_core.testing.parity_compare import (
    Finding,
    Tolerance,
    describe,
    rank_disagreements,
)
from shardwalk.parallelizer_core.testing.parity_reference import run_reference
from shardwalk.parallelizer_core.testing.parity_subject import (
    SetupArguments,
    Subject,
    run_subject,
)
from shardwalk.parallelizer_core.testing.rank_pickle import dumps_call
from shardwalk.parallelizer_core.testing.rank_pool import RankPool, rank_pool

# Both sides round at the same places, until fp32 noise tips the rounding of some updated parameter.
_BF16_TOLERANCE = Tolerance(relative=1e-4, update=1e-2)

_references: dict[str, str] = {}
_folder: tempfile.TemporaryDirectory[str] | None = None


class ParityError(AssertionError):
    """The subject's numbers are not those of one process; the message has the worst of them."""


def assert_parity(
    case: ParityCase,
    *,
    world_size: int,
    strategy: Any = "fsdp2",
    parallelism_sizes: Any = None,
    setup: Mapping[str, Any] | None = None,
    subject: Subject | None = None,
    optimizers: tuple[str | OptimizerFactory, ...] = ("sgd", "adamw"),
    steps: int = 2,
    clip: float | None = None,
    meta_start: Start | None = None,
    bf16: Bf16 | None = None,
    tolerance: Tolerance | None = None,
    pool: RankPool | None = None,
) -> list[Finding]:
    """Train the case in one process and on a mesh of ranks, and raise unless both agree.

    Compared are: the parameters at the start, the loss and total gradient norm of each step, every
    gradient of the first step as a full tensor, and every parameter, buffer and extra value after
    the last; for each optimizer, from the same start. Ties and trainability must be the same, and
    all ranks must hold the same bits of every full tensor. The reference run is made once per case
    and training options and kept, so that a table of meshes costs one.

    Args:
        case: model, batches and loss.
        world_size: number of ranks.
        strategy: as for `DistributedSetup.build`, except that the string ``fsdp2`` means full
            precision unless `bf16` is given. None builds no setup, for a `subject` that
            parallelizes without one: all ranks are then data-parallel.
        parallelism_sizes: the `ParallelismSizes` of the mesh.
        setup: further arguments of `DistributedSetup.build`, by name.
        subject: what the subject calls instead of shardwalk's own functions.
        optimizers: ``sgd`` (with momentum), ``adamw`` (with eps 1e-4) or factories.
        steps: optimizer steps of each run.
        clip: the largest gradient norm; None only compares the norm.
        meta_start: build the subject on meta and materialize it from a ``checkpoint`` of the
            reference's weights, or from the ``init`` function of the case.
        bf16: compare with the fp32 mean of the gradients of the ranks' slices, each computed in
            bf16 by one process. The strategy's precision policy must say the same.
        tolerance: the largest differences; its default depends on `bf16`.
        pool: where to run; default the shared pool of that many ranks.

    Returns:
        All findings, those nearest to their tolerance first.

    Raises:
        ParityError: a difference above its tolerance, with a table of the worst.
        ValueError: options that make no sense.

    Example:
        ::

            assert_parity(
                ParityCase(model=build_my_model, batches=TokenBatches(vocabulary=100)),
                world_size=4,
                parallelism_sizes=ParallelismSizes(dp_replicate_size=2),
            )
    """
    _check(case, optimizers, steps, meta_start)
    pool = pool or rank_pool(world_size)
    if pool.world_size != world_size:
        raise ValueError(f"world_size={world_size}, but the pool has {pool.world_size} ranks")
    training = Training(
        optimizers=tuple(optimizers),
        steps=steps,
        clip=clip,
        start=meta_start,
        bf16=bf16,
        slices=_data_ranks(world_size, parallelism_sizes) if bf16 else 1,
    )
    arguments = SetupArguments(
        strategy=_full_precision(strategy) if bf16 is None else strategy,
        parallelism_sizes=parallelism_sizes,
        others=dict(setup or {}),
    )
    tolerance = tolerance or (_BF16_TOLERANCE if bf16 else Tolerance())
    folder = _reference(case, training, pool)
    reports = pool.run(
        run_subject, case, training, arguments, subject or Subject(), tolerance, folder
    )
    problems = reports[0].problems + rank_disagreements([report.digests for report in reports])
    findings: list[Finding] = reports[0].findings
    if problems or any(finding.ratio > 1 for finding in findings):
        raise ParityError(
            f"{world_size} ranks differ from one process:\n{describe(findings, problems)}"
        )
    return sorted(findings, key=lambda finding: -finding.ratio)


def _check(
    case: ParityCase,
    optimizers: tuple[str | OptimizerFactory, ...],
    steps: int,
    meta_start: Start | None,
) -> None:
    unknown = [o for o in optimizers if isinstance(o, str) and o not in OPTIMIZERS]
    if unknown or not optimizers:
        raise ValueError(f"optimizers={optimizers}: use {sorted(OPTIMIZERS)} or factories")
    if steps < 1:
        raise ValueError(f"steps={steps} is not allowed; use 1 or more")
    if meta_start not in (None, "checkpoint", "init"):
        raise ValueError(f"meta_start={meta_start!r}: use None, 'checkpoint' or 'init'")
    if meta_start == "init" and case.init is None:
        raise ValueError("meta_start='init' needs a case with an init function")


def _data_ranks(world_size: int, sizes: Any) -> int:
    """The ranks that get samples of their own."""
    names = ("pp_size", "cp_size", "tp_size")
    for name in names if sizes is not None else ():
        world_size //= getattr(sizes, name)
    return world_size


def _full_precision(strategy: Any) -> Any:
    """FSDP2 in fp32 where only its name is given; its own default is bf16."""
    if strategy != "fsdp2":
        return strategy
    return FSDP2Config(mp_policy=MixedPrecisionPolicy())


def _reference(case: ParityCase, training: Training, pool: RankPool) -> str:
    """The folder with the records of the reference run, made on first use."""
    global _folder
    call = dumps_call(run_reference, (case, training), {})
    key = hashlib.blake2b(call, digest_size=16).hexdigest()
    if key not in _references:
        if _folder is None:
            _folder = tempfile.TemporaryDirectory(prefix="shardwalk-parity-")
            atexit.register(_folder.cleanup)
        folder = os.path.join(_folder.name, key)
        os.makedirs(folder, exist_ok=True)
        pool.run(run_reference, case, training, folder)
        _references[key] = folder
    return _references[key]
