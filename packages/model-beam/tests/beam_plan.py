"""Beam on the meta device as ranks of a fake world shard it; run as a script of its own.

``beam_plan.py WORLD EP RANK:LAYERS ...`` prints, as JSON, what each of these ranks holds of a model
of so many layers, with the seconds and the peak memory of the process until then.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwalk.mesh import DistributedSetup, ParallelismSizes
from shardwalk.model_beam import BeamConfig, BeamForCausalLM
from shardwalk.parallelizer_core import describe_units, parallelize_model
from shardwalk.parallelizer_core.model_tensors import local_index


def plan(world: int, ep: int, rank: int, layers: int) -> dict[str, Any]:
    """What one rank holds."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        setup = DistributedSetup.build(
            "fsdp2", parallelism_sizes=ParallelismSizes(ep_size=ep), moe_parallel_config={}
        )
        model = BeamForCausalLM.on_meta(BeamConfig(num_hidden_layers=layers), dtype=torch.bfloat16)
        started, used = time.monotonic(), time.process_time()
        parallelize_model(model, setup.mesh_context)
        return {
            "rank": rank,
            "layers": layers,
            "seconds": time.monotonic() - started,
            "cpu_seconds": time.process_time() - used,
            "peak_bytes": peak_bytes(),
            "units": [asdict(unit) for unit in describe_units(model)],
            "tensors": {name: held(tensor) for name, tensor in model.state_dict().items()},
        }
    finally:
        dist.destroy_process_group()


def held(tensor: Tensor) -> dict[str, Any]:
    """Shape, dtype and device of a tensor, and this rank's block: starts and sizes.

    The starts of a block without elements are None.
    """
    whole = list(tensor.shape)
    found = {"shape": whole, "dtype": str(tensor.dtype), "device": tensor.device.type}
    if not isinstance(tensor, DTensor):
        return {**found, "start": [0] * len(whole), "size": whole}
    size = list(tensor.to_local().shape)
    if not all(size):
        return {**found, "start": None, "size": size}
    return {**found, "start": [part.start for part in local_index(tensor)], "size": size}


def peak_bytes() -> int:
    """The most memory that this process held; what was held before its program began is left out.

    (`resource` counts that in, which is the memory of the tests.)
    """
    kilobytes = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert kilobytes is not None
    return int(kilobytes[1]) * 1024


if __name__ == "__main__":
    torch.set_num_threads(1)
    world, ep = (int(number) for number in sys.argv[1:3])
    ranks = [[world, ep, *(int(number) for number in pair.split(":"))] for pair in sys.argv[3:]]
    # A process each: torch caches what lies where by mesh, not by rank.
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        print(json.dumps(pool.starmap(plan, ranks, chunksize=1)))
