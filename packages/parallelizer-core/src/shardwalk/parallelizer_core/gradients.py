"""Gradients over many ranks: the global norm and clipping, accumulation, the scale of the loss.

One training step with accumulation reads::

    normalizer = TokenNormalizer(mesh_context, [(y != -100).sum() for _, y in micro_batches])
    for x, y in sync_gradients_on_last(model, micro_batches):
        losses = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none")
        normalizer(losses).backward()
    norm = clip_grad_norm_(model, 1.0)
    optimizer.step()
"""

from shardwalk.parallelizer_core.gradient_norm import clip_grad_norm_, get_total_norm
from shardwalk.parallelizer_core.gradient_sync import no_sync, sync_gradients_on_last
from shardwalk.parallelizer_core.token_normalizer import TokenNormalizer

__all__ = [
    "TokenNormalizer",
    "clip_grad_norm_",
    "get_total_norm",
    "no_sync",
    "sync_gradients_on_last",
]
