"""One process that makes the first step: what all ranks together have to come to."""

from __future__ import annotations

import torch
from data import IGNORED, micro_batches, samples
from models import RECIPES, token_losses
from options import Options, use_cores
from report import Report, peak_memory

from shardwalk.parallelizer_core import materialize


def one_process(options: Options) -> Report:
    """Make the first step of a plain model, with micro-batches as large as those of a rank."""
    use_cores(options.world_size)
    recipe = RECIPES[options.model]()
    model = recipe.on_meta()
    materialize(model, **recipe.weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    batches = micro_batches(
        samples(recipe.encode, options.length),
        step=0,
        size=options.batch,
        count=options.accumulate * options.data_ranks,
    )
    targets = sum(int((labels != IGNORED).sum()) for _, labels in batches)
    total = 0.0
    for inputs, labels in batches:
        loss = token_losses(model, inputs, labels).sum() / targets
        loss.backward()
        total += loss.item()
    optimizer.step()
    # In float64: torch's norm of a large float32 tensor is off by a thousandth on CPUs.
    norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float64) for p in model.parameters()]
    norm = torch.stack(norms).norm().item()
    return Report(losses=[total], norms=[norm], peak=peak_memory())
