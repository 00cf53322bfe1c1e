"""What activation checkpointing saves: the memory of one backward in each mode, side by side."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from data import full_rows, samples
from launch import launch
from models import RECIPES, parallel_model, token_losses
from options import Options, use_cores
from report import Report, equal, peak_memory, print_modes
from rich.console import Console

from shardwalk.mesh import initialize_distributed
from shardwalk.parallelizer_core import TokenNormalizer, clip_grad_norm_

MODES: tuple[Literal["off", "full", "selective"], ...] = ("off", "full", "selective")
LONGER = 8  # times --length: below, gradients and their buffers outweigh what is recomputed


def compare_modes(console: Console, options: Options) -> list[bool]:
    """Print the peak memory of each mode; say whether all come to the same numbers.

    Every mode has processes of its own, because the peak of a process never goes down.
    """
    shape = f"{options.data_ranks} x {LONGER * options.length} tokens"
    console.rule(f"one backward of {shape}, in each mode of checkpointing")
    modes = {
        mode: launch(options.world_size, one_backward, replace(options, checkpointing=mode))
        for mode in MODES
    }
    print_modes(console, modes)
    off, *_ = modes["off"]
    verdicts = []
    for mode, (report, *_) in modes.items():
        if mode != "off":
            verdicts += [
                equal(console, f"loss, {mode} and off", report.losses[0], off.losses[0]),
                equal(console, f"gradient norm, {mode} and off", report.norms[0], off.norms[0]),
            ]
    return verdicts


def one_backward(options: Options) -> Report:
    """Run one long row through the model and back, on this rank and together with the others.

    The optimizer makes no step: its state would outweigh the activations.
    """
    initialize_distributed("gloo", timeout_minutes=10)
    use_cores(options.world_size)
    context = options.mesh_context()
    recipe = RECIPES[options.model]()
    model = parallel_model(recipe, context)
    inputs, labels = full_rows(
        samples(recipe.encode, options.length),
        rows=options.data_ranks,
        length=LONGER * options.length,
        rank=context.data_rank,
        ranks=context.data_world_size,
    )
    normalizer = TokenNormalizer(context, [torch.tensor(labels.numel())])
    loss = normalizer(token_losses(model, inputs, labels))
    loss.backward()
    norm = clip_grad_norm_(model, 1.0)
    total = normalizer.global_loss(loss.detach())
    return Report(losses=[total.item()], norms=[norm.item()], peak=peak_memory())
