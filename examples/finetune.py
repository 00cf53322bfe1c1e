"""Fine-tunes a pretrained language model on several ranks, and checks the numbers.

    python examples/finetune.py                            starts its own ranks, runs all checks
    torchrun --nproc-per-node 4 examples/finetune.py       trains on the ranks that are there

The checks: the first step has the loss and the gradient norm of one process, and half as many
ranks that resume from the checkpoint go on with the same losses.
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
from models import RECIPES, Recipe, token_losses
from options import Options, use_cores
from reference import one_process
from report import Report, StepProgress, equal, peak_memory, print_peaks, print_units
from rich.console import Console
from torch import nn

from shardwalk.mesh import DDPConfig, DistributedSetup, MeshContext, initialize_distributed
from shardwalk.parallelizer_core import (
    TokenNormalizer,
    clip_grad_norm_,
    load_checkpoint,
    materialize,
    parallelize_model,
    save_checkpoint,
    sync_gradients_on_last,
)


def train(options: Options, last: int) -> Report:
    """Train on this rank, together with the others, until `last` steps are done in all."""
    job = initialize_distributed("gloo", timeout_minutes=10)
    use_cores(options.ranks)
    console = Console(quiet=not job.is_main)
    context = DistributedSetup.build(options.strategy, options.sizes).mesh_context
    recipe = RECIPES[options.model]()
    model = parallel_model(recipe, context)
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


def parallel_model(recipe: Recipe, context: MeshContext) -> nn.Module:
    """Build the model so that no rank ever has more of it in memory than it keeps."""
    model = recipe.on_meta()
    if isinstance(context.strategy_config, DDPConfig):  # keeps all of it, and wraps real weights
        materialize(model, **recipe.weights)
        return parallelize_model(model, context)
    model = parallelize_model(model, context)
    materialize(model, **recipe.weights)
    return model


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
        train(options, options.steps)
        return
    if options.resume:
        sys.exit("--resume needs torchrun: the checks start from the first step")
    with tempfile.TemporaryDirectory(prefix="finetune-") as folder:
        options = replace(options, save=options.save or Path(folder, "checkpoint"))
        passed = prove(options)
    sys.exit(0 if passed else 1)


def prove(options: Options) -> bool:
    """Train, and compare with one process and with fewer ranks; say whether all is equal."""
    console = Console()
    console.rule("one process, the first step")
    [alone] = launch(1, one_process, options)
    console.rule(f"{options.ranks} ranks, {options.mesh}")
    last = options.steps + 2  # the second step after saving shows the state of the optimizer
    reports = launch(options.ranks, train, options, last)
    fewer = options.ranks // 2 if options.ranks % 2 == 0 else 1
    console.rule(f"fsdp on {fewer} resumes from the checkpoint")
    resume = replace(options, mesh="fsdp", ranks=fewer, resume=options.save, save=None)
    resumed, *_ = launch(fewer, train, resume, last)
    console.rule("many ranks and one process")
    many = reports[0]
    print_peaks(console, reports, alone)
    verdicts = [
        equal(console, "loss of step 0", many.losses[0], alone.losses[0]),
        equal(console, "gradient norm of step 0", many.norms[0], alone.norms[0]),
    ]
    for step, loss in enumerate(resumed.losses, start=options.steps):
        verdicts.append(equal(console, f"loss of step {step}, resumed", loss, many.losses[step]))
    return all(verdicts)


if __name__ == "__main__":
    main()
