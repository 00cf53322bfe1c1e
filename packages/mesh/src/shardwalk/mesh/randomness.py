"""Random numbers that agree where ranks must agree and differ where they must not."""

import hashlib
import random
import sys

import torch

from shardwalk.mesh.axes import MeshAxisName as Axis
from shardwalk.mesh.context import MeshContext
from shardwalk.mesh.validation import check_integer

__all__ = ["seed_everything"]


def seed_everything(mesh_context: MeshContext, seed: int) -> int:
    """Seed Python, torch (all devices) and NumPy, if it is imported; return the seed used.

    Ranks that differ in tp alone get the same numbers; those that differ in pp, dp_replicate,
    dp_shard or cp get unrelated ones. Nearby seeds share no stream.
    """
    check_integer("seed", seed, minimum=0)
    place = [mesh_context.axis_rank(axis) for axis in (Axis.PP, Axis.CP)]
    data_rank = mesh_context.data_rank
    text = f"{seed} {data_rank} {' '.join(map(str, place))}"
    own = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
    random.seed(own)
    torch.manual_seed(own)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(own % 2**32)
    return own
