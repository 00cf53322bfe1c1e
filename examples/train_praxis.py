"""Trains a small Praxis policy on a lawful little world, adapts it to another robot, checks both.

    python examples/train_praxis.py                          starts its own ranks, runs all checks
    torchrun --nproc-per-node 4 examples/train_praxis.py     trains on the ranks that are there

In the windows of chase.py a hand chases a disc. Four ranks hold half of the experts each in pairs,
and everything else in quarters. Then adapters on the action expert alone learn a robot whose x axis
points the other way. It draws predicted beside true tracks of the hand, in windows that no step
has seen. The checks: the first step has the loss and the gradient norm of one process, ranks
without expert parallelism go on from the checkpoint with the same loss, and the exported weights
with the adapters in them act as the adapters did.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import torch
import torch.distributed as dist
import tyro
from chase import HELD_OUT, hand_tracks, windows
from launch import launch
from options import use_cores
from praxis_options import Options
from praxis_report import Report, columns, same_actions, summarize
from report import StepProgress, equal, print_units
from rich.console import Console
from torch import Tensor
from tracks import draw_columns

from shardwalk.mesh import MeshContext
from shardwalk.model_praxis import (
    Draws,
    LoraSettings,
    MoeTrainingSettings,
    ObjectiveSettings,
    PraxisLoss,
    PraxisPolicy,
    apply_lora,
    draw,
    merge_lora,
    praxis_loss,
    sample,
    save_pretrained,
    step_generator,
)
from shardwalk.moe_ep import attach_router_bias_update
from shardwalk.parallelizer_core import (
    clip_grad_norm_,
    load_checkpoint,
    materialize,
    parallelize_model,
    save_checkpoint,
)

SETTINGS = ObjectiveSettings(action_weight=2.0)


def train(options: Options, last: int) -> Report:
    """Train on this rank, together with the others, until `last` steps are done in all."""
    context, console = options.start()
    config, report = options.config(), Report()
    training = MoeTrainingSettings(bias_update_speed=options.speed)
    with torch.device("meta"):
        policy = PraxisPolicy(config, training=training)
    parallelize_model(policy, context)
    materialize(policy, init="reset_parameters")
    optimizer = optimizer_of(policy, options.lr)
    attach_router_bias_update(policy, optimizer)
    print_units(console, policy)
    first = load_checkpoint(options.resume, policy, optimizer).step or 0 if options.resume else 0
    report.tracks[first] = sampled(policy)[1]
    with StepProgress(console, last - first) as progress:
        for step in range(first, last):
            start = time.monotonic()
            set_rate(optimizer, options.lr, step, options.steps)
            train_step(policy, optimizer, context, options.batch, step, report, mirrored=False)
            show(progress, options, step, report, time.monotonic() - start)
            if step + 1 == options.steps:
                report.tracks[options.steps] = sampled(policy)[1]
                keep(options, policy, optimizer)
    return report


def adapt(options: Options) -> Report:
    """Train adapters on the exported weights for the mirrored robot, and export them merged."""
    assert options.export is not None
    assert options.adapted is not None
    context, console = options.start()
    report = Report()
    with torch.device("meta"):
        policy = PraxisPolicy(options.config())
    apply_lora(policy, LoraSettings(rank=options.lora_rank, alpha=2.0 * options.lora_rank))
    parallelize_model(policy, context)
    materialize(policy, checkpoint=options.export)
    optimizer = optimizer_of(policy, options.lora_lr)
    report.tracks[0] = sampled(policy, mirrored=True)[1]
    with StepProgress(console, options.lora_steps) as progress:
        for step in range(options.lora_steps):
            start = time.monotonic()
            set_rate(optimizer, options.lora_lr, step, options.lora_steps)
            train_step(policy, optimizer, context, options.batch, step, report, mirrored=True)
            show(progress, options, step, report, time.monotonic() - start)
    report.actions, report.tracks[options.lora_steps] = sampled(policy, mirrored=True)
    save_pretrained(merge_lora(policy), options.adapted)
    return report


def optimizer_of(policy: PraxisPolicy, lr: float) -> torch.optim.Optimizer:
    """Make the optimizer of what is trained."""
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=lr, betas=(0.9, 0.95))


def set_rate(optimizer: torch.optim.Optimizer, lr: float, step: int, steps: int) -> None:
    """Let the learning rate rise over ten steps, and fall to a tenth over the last third."""
    share = min(1.0, (step + 1) / 10, max(0.1, 3 * (steps - step) / steps))
    for group in optimizer.param_groups:
        group["lr"] = lr * share


def show(
    progress: StepProgress, options: Options, step: int, report: Report, seconds: float
) -> None:
    """Show a step as done."""
    total, video, action = report.losses[-1]
    parts = {"video": video, "action": action} if video else {"action": action}
    progress.done(step, total, report.norms[-1], options.tokens / seconds, **parts)


def train_step(
    policy: PraxisPolicy,
    optimizer: torch.optim.Optimizer,
    context: MeshContext,
    batch: int,
    step: int,
    report: Report,
    *,
    mirrored: bool,
) -> None:
    """Make one step on this rank's part of the batch, and report the numbers of all ranks."""
    whole = range(step * batch, (step + 1) * batch)
    own = whole[context.data_rank :: context.data_world_size]
    loss = loss_of(policy, own, mirrored=mirrored)
    loss.mean().backward()
    norm = clip_grad_norm_(policy, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    report.losses.append(mean_over_ranks(loss))
    report.norms.append(norm.item())


def loss_of(policy: PraxisPolicy, numbers: Sequence[int], *, mirrored: bool) -> PraxisLoss:
    """Give the loss of the windows of these numbers.

    What is drawn for a window depends on its number alone, so that any number of ranks draws the
    same for the same batch.
    """
    config = policy.config
    generators = [step_generator(seed=0, step=number, micro_step=0, rank=0) for number in numbers]
    each = [draw(config, SETTINGS, generator) for generator in generators]
    joined = {f.name: torch.cat([getattr(one, f.name) for one in each]) for f in fields(Draws)}
    window = windows(config, numbers, mirrored=mirrored)
    return praxis_loss(policy, window, Draws(**joined), SETTINGS)


def mean_over_ranks(loss: PraxisLoss) -> tuple[float, float, float]:
    """Give total, video and action loss of all ranks, which have as many windows each."""
    video = torch.zeros_like(loss.action) if loss.video is None else loss.video
    means = torch.stack([part.detach().mean() for part in (loss.total, video, loss.action)])
    if dist.is_initialized():
        dist.all_reduce(means)
        means /= dist.get_world_size()
    total, of_video, of_actions = means.tolist()
    return total, of_video, of_actions


@torch.no_grad()
def sampled(policy: PraxisPolicy, *, mirrored: bool = False) -> tuple[Tensor, Tensor]:
    """Sample actions for the held-out windows; give them, and the tracks they lead to."""
    config, generator = policy.config, torch.Generator().manual_seed(0)
    window = windows(config, HELD_OUT, mirrored=mirrored)
    actions = sample(policy, window, generator=generator).actions
    return actions, hand_tracks(config, window, actions)


def keep(options: Options, policy: PraxisPolicy, optimizer: torch.optim.Optimizer) -> None:
    """Save a checkpoint, and export the weights."""
    if options.save:
        save_checkpoint(options.save, policy, optimizer, step=options.steps)
    if options.export:
        save_pretrained(policy, options.export)


def one_process(options: Options) -> Report:
    """Make the first step of a plain policy in one process; sample with the merged adapters too."""
    use_cores(1)
    with torch.device("meta"):
        policy = PraxisPolicy(options.config())
    materialize(policy, init="reset_parameters")
    loss = loss_of(policy, range(options.batch), mirrored=False)
    loss.mean().backward()
    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    # In float64: torch's norm of a large float32 tensor is off by a thousandth on CPUs.
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
    materialize(policy, checkpoint=options.adapted)
    actions, _ = sampled(policy, mirrored=True)
    return Report(
        losses=[mean_over_ranks(loss)], norms=[torch.stack(norms).norm().item()], actions=actions
    )


def main() -> None:
    """Train under torchrun; without it, start the ranks and check what they come to."""
    options = tyro.cli(Options)
    if "RANK" in os.environ:
        trained = train(options, options.steps)
        adapted = adapt(options) if options.adapted else None
        if os.environ["RANK"] == "0":
            draw_columns(options.figure, columns(options.config(), trained, adapted))
        return
    if options.resume:
        sys.exit("--resume needs torchrun: the checks start from the first step")
    with tempfile.TemporaryDirectory(prefix="train-praxis-") as folder:
        kept = {"save": options.save or Path(folder, "checkpoint")}
        kept["export"] = options.export or Path(folder, "export")
        kept["adapted"] = options.adapted or Path(folder, "adapted")
        passed = prove(replace(options, **kept))
    sys.exit(0 if passed else 1)


def prove(options: Options) -> bool:
    """Train and adapt, and compare with other ranks; say whether all is equal."""
    console, config = Console(soft_wrap=True), options.config()
    console.rule(f"{options.ranks} ranks, experts over {options.ep}")
    many = launch(options.ranks, train, options, options.steps + 1)[0]
    console.rule(f"{options.ranks} ranks adapt the action expert to a mirrored robot")
    adapted = launch(options.ranks, adapt, options)[0]
    fewer = max(options.ranks // 2, 1)
    console.rule(f"{fewer} ranks without expert parallelism resume from the checkpoint")
    other = replace(
        options, ranks=fewer, ep=1, resume=options.save, save=None, export=None, adapted=None
    )
    resumed = launch(fewer, train, other, options.steps + 1)[0]
    console.rule("one process: the first step, and the merged adapters")
    [alone] = launch(1, one_process, options)
    console.rule("what came out")
    draw_columns(options.figure, columns(config, many, adapted))
    summarize(console, config, many, adapted, options.figure)
    verdicts = [
        equal(console, "loss of step 0", many.losses[0][0], alone.losses[0][0]),
        equal(console, "gradient norm of step 0", many.norms[0], alone.norms[0]),
        equal(console, "loss of the next step, resumed", resumed.losses[0][0], many.losses[-1][0]),
        same_actions(console, alone.actions, adapted.actions),
    ]
    return all(verdicts)


if __name__ == "__main__":
    main()
