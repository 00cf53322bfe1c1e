"""Models of transformers that see and hear, nobody prepared: the numbers of one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from shardwalk.mesh import DDPConfig, FSDP2Config, ParallelismSizes
from shardwalk.parallelizer_core.testing import Bf16, ParityCase, assert_parity
from tests.matrix.case_models import FULL
from tests.matrix.tiny_multimodal import KINDS, MediaBatches, MediaLosses, build
from tests.matrix.tiny_transformers import normal_weights

MESHES = {
    "one rank": (1, ParallelismSizes()),
    "fsdp 2": (2, ParallelismSizes()),
    "hsdp 2x2": (4, ParallelismSizes(dp_replicate_size=2)),
}
ALTERNATING = ("11110000", "00001111", "11111111")


def case(name: str, frozen: tuple[str, ...], *media: str, blank: bool = False) -> ParityCase:
    return ParityCase(
        model=partial(build, name, frozen),
        batches=MediaBatches(name, media or ("11111111",)),
        token_losses=MediaLosses(name, blank),
        init=normal_weights,
    )


def run(parity_case: ParityCase, mesh: str, sharding: str = "root", **options: Any) -> None:
    world_size, sizes = MESHES[mesh]
    policy = options.pop("policy", FULL)
    strategy = FSDP2Config(
        mp_policy=policy, multimodal={"frozen_sharding": sharding}, **options.pop("unit", {})
    )
    options = {"optimizers": ("sgd",), **options}
    assert_parity(
        parity_case, world_size=world_size, parallelism_sizes=sizes, strategy=strategy, **options
    )


@pytest.mark.parametrize("mesh", ["fsdp 2", "hsdp 2x2"])
@pytest.mark.parametrize("sharding", ["root", "per_layer", "replicate"])
@pytest.mark.parametrize("name", KINDS)
def test_frozen_towers(name: str, sharding: str, mesh: str) -> None:
    run(case(name, (KINDS[name].tower,)), mesh, sharding)
