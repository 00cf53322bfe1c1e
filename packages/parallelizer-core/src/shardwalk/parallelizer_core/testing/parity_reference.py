"""The reference run: one process, the whole batch, no wrapping."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwalk.parallelizer_core.materialize import materialize
from shardwalk.parallelizer_core.testing.parity_case import (
    Bf16,
    ParityCase,
    Rows,
    Start,
    Training,
    make_optimizer,
    share_of_rows,
)
from shardwalk.parallelizer_core.testing.parity_record import LOSS, NORM, Record, canonical_name
from shardwalk.parallelizer_core.testing.rank_worker import rank_device


def run_reference(case: ParityCase, training: Training, folder: str) -> None:
    """Train on rank 0 alone and leave the records, and a checkpoint to start from, in `folder`."""
    if dist.get_rank() != 0:
        return
    records = [_train(case, training, index) for index in range(len(training.optimizers))]
    if training.start == "checkpoint":
        _save_checkpoint(build_model(case, None), checkpoint_folder(folder))
    torch.save([vars(record) for record in records], records_file(folder))


def load_records(folder: str) -> list[Record]:
    """What `run_reference` left, one record per optimizer."""
    return [Record(**fields) for fields in torch.load(records_file(folder), mmap=True)]


def records_file(folder: str) -> str:
    """Where the records of a reference run are."""
    return os.path.join(folder, "records.pt")


def checkpoint_folder(folder: str) -> str:
    """Where the safetensors of a reference run's first weights are."""
    return os.path.join(folder, "checkpoint")


def build_model(case: ParityCase, start: Start | None) -> nn.Module:
    """The case's model: real weights, or for a meta start none."""
    torch.manual_seed(case.seed)
    with torch.device("meta" if start is not None else rank_device()):
        return case.model()


def give_weights(model: nn.Module, case: ParityCase, start: Start | None, folder: str) -> None:
    """End a meta start of either side: weights by the case's init or from the checkpoint."""
    if start == "init":
        materialize(model, init=case.init, device=rank_device())
    elif start == "checkpoint":
        materialize(model, checkpoint=checkpoint_folder(folder), device=rank_device())


def _train(case: ParityCase, training: Training, index: int) -> Record:
    """Run one of the optimizers; start and gradients are kept of the first, as all share them."""
    start: Start | None = "init" if training.start == "init" else None
    model = build_model(case, start)
    give_weights(model, case, start, folder="")
    record = Record()
    record.put_start(model, whole=index == 0)
    optimizer = make_optimizer(training.optimizers[index], model)
    torch.manual_seed(case.seed)
    for step in range(training.steps):
        record.put(LOSS, f"of step {step}", _backward(case, training, model, step))
        if index == step == 0:
            record.put_gradients(model)
        record.put(NORM, f"of step {step}", _clip(model, training.clip))
        optimizer.step()
        optimizer.zero_grad()
    record.put_state(model, case.extras(model))
    _check(record)
    return record


def _backward(case: ParityCase, training: Training, model: nn.Module, step: int) -> Tensor:
    """Leave the gradients of the mean loss over all valid tokens in the model; return the loss."""
    micro_batches = [share_of_rows(rows, 0, 1, rank_device()) for rows in case.batches(step)]
    tokens = sum(case.valid_tokens(rows) for rows in micro_batches)
    if training.bf16 is not None:
        slices = training.slices
        return _backward_bf16(case, training.bf16, slices, model, micro_batches, tokens)
    total = torch.zeros((), device=rank_device())
    for rows in micro_batches:
        loss = case.token_losses(model, rows).sum() / tokens
        loss.backward()
        total += loss.detach()
    return total


def _backward_bf16(
    case: ParityCase,
    bf16: Bf16,
    slices: int,
    model: nn.Module,
    micro_batches: Sequence[Rows],
    tokens: int,
) -> Tensor:
    """The fp32 mean of the gradients that `slices` ranks have in bf16.

    Each scales its loss by slices / tokens before the backward pass, as its normalizer would, so
    that gradients are rounded at the same magnitude.
    """
    worker = _bf16_copy(model, bf16)
    total = torch.zeros((), device=rank_device())
    for part in range(slices):
        for rows in micro_batches:
            local = share_of_rows(rows, part, slices, rank_device())
            loss = case.token_losses(worker, local).sum() * (slices / tokens)
            loss.backward()
            total += loss.detach() / slices
            _move_gradients(worker, model, slices)
    for mine, theirs in zip(model.buffers(), worker.buffers(), strict=True):
        mine.copy_(theirs)
    return total


def _bf16_copy(model: nn.Module, bf16: Bf16) -> nn.Module:
    worker = copy.deepcopy(model)
    for name, parameter in worker.named_parameters():
        if not bf16.keeps(canonical_name(name)):
            parameter.data = parameter.data.to(torch.bfloat16)
        parameter.grad = None
    if bf16.prepare is not None:
        bf16.prepare(worker)
    return worker


def _move_gradients(worker: nn.Module, model: nn.Module, slices: int) -> None:
    for source, target in zip(worker.parameters(), model.parameters(), strict=True):
        if source.grad is None:
            continue
        share = source.grad.to(target.dtype) / slices
        target.grad = share if target.grad is None else target.grad + share
        source.grad = None


def _clip(model: nn.Module, clip: float | None) -> Tensor:
    """The gradient norm, in float64; gradients are scaled so that it is at most `clip`."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norms = torch.stack([torch.linalg.vector_norm(g.double()) for g in gradients])
    norm: Tensor = torch.linalg.vector_norm(norms)
    if clip is not None and norm > clip:
        for gradient in gradients:
            gradient.mul_(clip / norm)
    return norm


def _check(record: Record) -> None:
    """Refuse a reference against which everything, or nothing, would be equal."""
    for section, values in record.values.items():
        for name, value in values.items():
            if value.is_floating_point() and not value.isfinite().all():
                raise ValueError(f"the reference run has a {section} that is not finite: {name}")
    if not any(norm > 0 for norm in record.values[NORM].values()):
        raise ValueError("all gradients of the reference run are zero: nothing can be compared")


def _save_checkpoint(model: nn.Module, folder: str) -> None:
    """Write the state dict, each tied tensor once under its first name."""
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError(
            'meta_start="checkpoint" needs the extra: pip install '
            '"shardwalk-parallelizer-core[safetensors]"'
        ) from error
    os.makedirs(folder)
    seen: set[int] = set()
    unique: dict[str, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            unique[name] = value.detach().cpu().contiguous()
    save_file(unique, os.path.join(folder, "model.safetensors"))
