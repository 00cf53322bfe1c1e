"""The subject run: the same model, weights and samples on a mesh of ranks."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwalk.mesh import DDPConfig, DistributedSetup
from shardwalk.parallelizer_core.gradients import (
    TokenNormalizer,
    clip_grad_norm_,
    get_total_norm,
    sync_gradients_on_last,
)
from shardwalk.parallelizer_core.model_parallelizer import parallelize_model
from shardwalk.parallelizer_core.testing.parity_case import (
    ParityCase,
    Rows,
    Training,
    make_optimizer,
    name_of_optimizer,
    share_of_rows,
)
from shardwalk.parallelizer_core.testing.parity_compare import Finding, Tolerance, compare
from shardwalk.parallelizer_core.testing.parity_record import INITIAL, LOSS, NORM, Record, unwrap
from shardwalk.parallelizer_core.testing.parity_reference import (
    build_model,
    give_weights,
    load_records,
)
from shardwalk.parallelizer_core.testing.rank_worker import cached, rank_device


def parallelize_default(model: nn.Module, setup: Any) -> nn.Module:
    """`parallelize_model` on the context of the setup."""
    return parallelize_model(model, setup.mesh_context)


def normalizer_default(setup: Any, counts: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """`TokenNormalizer`; without a setup, all ranks are data-parallel."""
    if setup is None:
        return _WorldNormalizer(counts)
    return TokenNormalizer(setup.mesh_context, counts)


def clip_grad_norm_default(model: nn.Module, max_norm: float) -> Tensor:
    """`clip_grad_norm_`, or only the norm where `max_norm` is infinite."""
    return get_total_norm(model) if math.isinf(max_norm) else clip_grad_norm_(model, max_norm)


def clip_grad_norm_torch(model: nn.Module, max_norm: float) -> Tensor:
    """The clipping of torch itself, for subjects made without shardwalk."""
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def sync_always(model: nn.Module, micro_batches: Iterable[Rows]) -> Iterator[Rows]:
    """Communicate after every micro-batch."""
    yield from micro_batches


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What the subject calls where one process calls nothing; shardwalk's own by default.

    Attributes:
        parallelize: (model, setup) -> model.
        normalizer: (setup, valid tokens per micro-batch) -> function of the token losses.
        sync_on_last: (model, micro-batches) -> the micro-batches, holding communication back.
        clip_grad_norm: (model, largest norm, may be infinite) -> norm.
    """

    parallelize: Callable[[nn.Module, Any], nn.Module] = parallelize_default
    normalizer: Callable[[Any, Sequence[int]], Callable[[Tensor], Tensor]] = normalizer_default
    sync_on_last: Callable[[nn.Module, Iterable[Rows]], Iterable[Rows]] = sync_gradients_on_last
    clip_grad_norm: Callable[[nn.Module, float], Tensor] = clip_grad_norm_default


@dataclass(frozen=True, kw_only=True)
class SetupArguments:
    """The arguments of `DistributedSetup.build`; a strategy of None means no setup at all."""

    strategy: Any
    parallelism_sizes: Any
    others: Mapping[str, Any]

    def build(self) -> Any:
        """The setup, made once per rank and kept, since process groups are slow to make."""
        if self.strategy is None:
            return None
        return cached(("DistributedSetup", pickle.dumps(vars(self))), self._build)

    def _build(self) -> Any:
        return DistributedSetup.build(
            strategy=self.strategy, parallelism_sizes=self.parallelism_sizes, **self.others
        )


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What a rank tells of its runs: checksums of all it held and, from rank 0, the findings."""

    digests: dict[str, str]
    findings: list[Finding]
    problems: list[str]


def run_subject(
    case: ParityCase,
    training: Training,
    arguments: SetupArguments,
    subject: Subject,
    tolerance: Tolerance,
    folder: str,
) -> RankReport:
    """Train on this rank with its peers and compare with the reference's records in `folder`."""
    setup = arguments.build()
    report = RankReport(digests={}, findings=[], problems=[])
    expected = load_records(folder) if dist.get_rank() == 0 else []
    for index, choice in enumerate(training.optimizers):
        record = _train(case, training, setup, subject, index, folder)
        name = name_of_optimizer(choice)
        report.digests.update({f"{name}: {key}": d for key, d in record.digests().items()})
        if expected:
            start = expected[0].values[INITIAL]
            findings, problems = compare(name, expected[index], record, start, tolerance)
            report.findings.extend(findings)
            report.problems.extend(problems)
    return report


def _train(
    case: ParityCase,
    training: Training,
    setup: Any,
    subject: Subject,
    index: int,
    folder: str,
) -> Record:
    model = _build_subject(case, training, setup, subject, folder)
    record = Record()
    record.put_start(model, whole=index == 0)
    optimizer = make_optimizer(training.optimizers[index], model)
    torch.manual_seed(case.seed)
    for step in range(training.steps):
        micro_batches = [_local_rows(rows, setup) for rows in case.batches(step)]
        record.put(LOSS, f"of step {step}", _backward(case, setup, subject, model, micro_batches))
        if index == step == 0:
            record.put_gradients(model)
        clip = math.inf if training.clip is None else training.clip
        record.put(NORM, f"of step {step}", subject.clip_grad_norm(model, clip))
        optimizer.step()
        optimizer.zero_grad()
    record.put_state(model, case.extras(unwrap(model)))
    return record


def _build_subject(
    case: ParityCase, training: Training, setup: Any, subject: Subject, folder: str
) -> nn.Module:
    model = build_model(case, training.start)
    if setup is not None and isinstance(setup.mesh_context.strategy_config, DDPConfig):
        give_weights(model, case, training.start, folder)  # DDP cannot wrap a model on meta
        return subject.parallelize(model, setup)
    model = subject.parallelize(model, setup)
    give_weights(model, case, training.start, folder)
    return model


def _local_rows(rows: Rows, setup: Any) -> Rows:
    if setup is None:
        return share_of_rows(rows, dist.get_rank(), dist.get_world_size(), rank_device())
    context = setup.mesh_context
    return share_of_rows(rows, context.data_rank, context.data_world_size, rank_device())


def _backward(
    case: ParityCase,
    setup: Any,
    subject: Subject,
    model: nn.Module,
    micro_batches: Sequence[Rows],
) -> Tensor:
    """Leave the gradients in the model and return the loss over all ranks.

    Normalized losses hold the factor N = data-parallel ranks, and ranks with equal samples (tensor
    parallel peers) have equal losses, so the mean over all ranks is the global loss.
    """
    normalize = subject.normalizer(setup, [case.valid_tokens(rows) for rows in micro_batches])
    total = torch.zeros((), dtype=torch.float64, device=rank_device())
    for rows in subject.sync_on_last(model, micro_batches):
        loss = normalize(case.token_losses(model, rows))
        loss.backward()
        total += loss.detach()
    dist.all_reduce(total)
    return total / dist.get_world_size()


class _WorldNormalizer:
    """The sum of token losses x ranks / valid tokens of all ranks."""

    def __init__(self, counts: Sequence[int]) -> None:
        tokens = torch.tensor(sum(counts), device=rank_device())
        dist.all_reduce(tokens)
        self._scale = dist.get_world_size() / int(tokens)

    def __call__(self, token_losses: Tensor) -> Tensor:
        return token_losses.sum() * self._scale
