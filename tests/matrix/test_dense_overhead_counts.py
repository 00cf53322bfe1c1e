"""What the walk communicates and holds, counted: that of a script which names its modules.

The decoder here has L = 3 blocks and two tables that are not tied, so that L + 3 units come of it:
every block, the embedding, the head, and the root with the last norm. On two ranks no shard needs
padding, and the elements of the units are

    block      norms 16 + 16, qkv 48 x 16, out 16 x 16 + 16, gate, up and down 24 x 16 each:  2,224
    table      40 x 16, each of the two:                                                        640
    root       norm:                                                                             16
    together   3 x 2,224 + 2 x 640 + 16:                                                      7,968
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.overhead.measures import SideReport, measure, measure_tables
from benchmarks.overhead.sides import Variant
from shardwalk.parallelizer_core.testing import run_on_ranks

BLOCK, TABLE, ROOT = 2224, 640, 16
WHOLE = 3 * BLOCK + 2 * TABLE + ROOT

VARIANT = Variant(vocabulary=40, dim=16, heads=2, ffn=24, layers=3, rows=1, length=5)
VARIANTS = {
    "fsdp": VARIANT,
    "prefetch": replace(VARIANT, prefetch=True),
    "bf16": replace(VARIANT, bf16=True),
    "hsdp": replace(VARIANT, world_size=4, replicas=2),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_step_communicates_what_its_units_need_and_no_more(name: str) -> None:
    variant = VARIANTS[name]
    # Forward gathers every unit. Backward gathers again what was freed: all blocks but the last,
    # and the embedding. A rank sends its half.
    gathered = (WHOLE + 2 * BLOCK + TABLE) // 2 * (2 if variant.bf16 else 4)
    calls = {"_allgather_base_": 6 + 3, "_reduce_scatter_base_": 6}
    sent = {"_allgather_base_": gathered, "_reduce_scatter_base_": WHOLE * 4}
    largest = {
        "_allgather_base_": BLOCK // 2 * (2 if variant.bf16 else 4),
        "_reduce_scatter_base_": BLOCK * 4,
    }
    if variant.replicas > 1:  # replicas add up the halves that each shard rank holds
        calls["allreduce_"], sent["allreduce_"] = 6, WHOLE // 2 * 4
        largest["allreduce_"] = BLOCK // 2 * 4
    for report in run_on_ranks(variant.world_size, measure, variant, 0):
        for side in report.values():
            assert (side.traffic.calls, side.traffic.bytes) == (calls, sent)
            assert side.traffic.largest == largest
        assert report["walked"].loss == report["by_hand"].loss
        assert_no_more_memory(report)


@pytest.mark.parametrize("name", ["fsdp", "hsdp"])
def test_a_table_of_its_own_bounds_the_reduce_buffer(name: str) -> None:
    """In the root unit both gradients go into one buffer: the norm's 16 and twice 16,000 elements."""
    variant = replace(VARIANTS[name], vocabulary=1000)
    for report in run_on_ranks(variant.world_size, measure_tables, variant):
        buffers = {side: r.traffic.largest["_reduce_scatter_base_"] for side, r in report.items()}
        assert buffers == {
            "walked": 16_000 * 4,
            "by_hand": 16_000 * 4,
            "tables_in_root": (16 + 2 * 16_000) * 4,
        }
        assert report["walked"].peak_bytes < report["tables_in_root"].peak_bytes
        assert_no_more_memory(report)


def assert_no_more_memory(report: dict[str, SideReport]) -> None:
    assert report["walked"].peak_bytes <= 1.02 * report["by_hand"].peak_bytes
