"""Fine-tunes a pretrained language model on several ranks, and checks the numbers.

    python examples/finetune.py                            starts its own ranks, runs all checks
    torchrun --nproc-per-node 4 examples/finetune.py       trains on the ranks that are there

The checks: the first step has the loss and the gradient norm of one process, and fewer ranks
that resume from the checkpoint go on with the same losses. With --checkpointing, the memory
of a backward is compared with that of the other modes.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
import tyro
from data import IGNORED, Batch, micro_batches, samples
from launch import launch
from memory import compare_modes
from models import RECIPES, parallel_model, token_losses
from options import Options, use_cores
from reference import one_process
from report import Report, StepProgress, equal, peak_memory, print_peaks, print_units
from rich.console import Console
from torch import nn

from shardwalk.mesh import MeshContext, initialize_distributed
from shardwalk.parallelizer_core import (
    TokenNormalizer,
    clip_grad_norm_,
    load_checkpoint,
    save_checkpoint,
    sync_gradients_on_last,
)


def train(options: Options, last: int) -> Report:
    """Train on this rank, together with the others, until `last` steps are done in all."""
    job = initialize_distributed("gloo", timeout_minutes=10)
    use_cores(options.world_size)
    console = Console(quiet=not job.is_main)
    context = options.mesh_context()
    recipe = RECIPES[options.model]()
    try:
        model = parallel_model(recipe, context)
    except ValueError as error:  # all ranks raise the same, before any waits for another
        return Report(refusal=str(error))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, fused=True)
    print_units(console, model)
    first = load_checkpoint(options.resume, model, optimizer).step or 0 if options.resume else 0
    tokens, report = samples(recipe.encode, options.length), Report()
    with StepProgress(console, last - first) as progress:
        for step in range(first, last):
            batches = micro_batches(
                tokens,
                step=step,
                size=options.batch,
                count=options.accumulate,
                rank=context.data_rank,
                ranks=context.data_world_size,
            )
            start = time.monotonic()
            loss, norm, count = train_step(model, optimizer, context, batches)
            report.losses.append(loss)
            report.norms.append(norm)
            progress.done(step, loss, norm, count / (time.monotonic() - start))
            if options.save and step + 1 == options.steps:
                save_checkpoint(options.save, model, optimizer, step=step + 1)
    return replace(report, peak=peak_memory())


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, context: MeshContext, batches: list[Batch]
) -> tuple[float, float, int]:
    """Make one step; give the loss, the gradient norm and the number of targets of all ranks."""
    normalizer = TokenNormalizer(context, [(labels != IGNORED).sum() for _, labels in batches])
    total = torch.zeros(())
    for inputs, labels in sync_gradients_on_last(model, batches):
        loss = normalizer(token_losses(model, inputs, labels))
        loss.backward()
        total += loss.detach()
    norm = clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return normalizer.global_loss(total).item(), norm.item(), normalizer.global_tokens


def main() -> None:
    """Train under torchrun; without it, start the ranks and check what they come to."""
    options = tyro.cli(Options)
    if "RANK" in os.environ:
        sys.exit(train(options, options.steps).refusal or 0)
    if options.resume:
        sys.exit("--resume needs torchrun: the checks start from the first step")
    with tempfile.TemporaryDirectory(prefix="finetune-") as folder:
        options = replace(options, save=options.save or Path(folder, "checkpoint"))
        passed = prove(options)
    sys.exit(0 if passed else 1)


def prove(options: Options) -> bool:
    """Train, and compare with one process and with fewer ranks; say whether all is equal."""
    console = Console()
    console.rule(f"{options.world_size} ranks, {options.mesh}")
    last = options.steps + 2  # the second step after saving shows the state of the optimizer
    reports = launch(options.world_size, train, options, last)
    many = reports[0]
    if many.refusal:
        sys.exit(many.refusal)
    console.rule("one process, the first step")
    [alone] = launch(1, one_process, options)
    resume = on_fewer_ranks(options)
    console.rule(f"fsdp on {resume.world_size} resumes from the checkpoint")
    resumed, *_ = launch(resume.world_size, train, resume, last)
    verdicts = compare_modes(console, options) if options.checkpointing != "off" else []
    console.rule("many ranks and one process")
    print_peaks(console, reports, alone)
    verdicts += [
        equal(console, "loss of step 0", many.losses[0], alone.losses[0]),
        equal(console, "gradient norm of step 0", many.norms[0], alone.norms[0]),
    ]
    for step, loss in enumerate(resumed.losses, start=options.steps):
        verdicts.append(equal(console, f"loss of step {step}, resumed", loss, many.losses[step]))
    return all(verdicts)


def on_fewer_ranks(options: Options) -> Options:
    """Give the options to go on from the checkpoint with one sharded copy on fewer ranks."""
    fewer = [
        ranks
        for ranks in range(1, options.world_size)
        if options.batch % (ranks * options.accumulate) == 0
    ]
    return replace(
        options,
        mesh="fsdp",
        tp=None,
        sequence_parallel=False,
        ranks=max(fewer, default=1),
        resume=options.save,
        save=None,
    )


if __name__ == "__main__":
    main()
