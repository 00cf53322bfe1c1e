"""What checkpointing, split layers, adapters and prefetch cost is what the sizes say.

The sums by hand stand in benchmarks/dense/by_hand.py; real collectives and torch's memory tracker
are held against them, on smaller models than the benchmark's.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.dense.by_hand import traffic_of_split_layers
from benchmarks.dense.sides import CHECKPOINTING, FINE_TUNED, PREFETCH, SPLIT, STACK, WALKED
from benchmarks.dense.verdicts import (
    adapters_part,
    checkpointing_part,
    prefetch_part,
    traffic_part,
)
from benchmarks.overhead.measures import compare
from benchmarks.overhead.sides import Variant
from shardwalk.parallelizer_core.testing import run_on_ranks

TINY = Variant(vocabulary=40, dim=16, heads=2, ffn=24, layers=3, rows=1, length=5)
# As many tokens for the weights of a block as in the benchmark.
NARROW = replace(STACK, vocabulary=16, dim=16, ffn=44, layers=2, rows=2)
TINY_SPLIT = replace(SPLIT, vocabulary=40, dim=16, ffn=24, layers=2, length=6)
SMALL_TUNED = replace(FINE_TUNED, vocabulary=512, layers=3)


def test_each_mode_of_checkpointing_keeps_what_its_rule_says() -> None:
    reports = run_on_ranks(2, compare, NARROW, CHECKPOINTING, 0)
    assert_all(checkpointing_part(NARROW, reports).checks, count=3)


def test_split_layers_send_the_sum_by_hand() -> None:
    variants = [replace(TINY_SPLIT, sequence_parallel=split) for split in (False, True)]
    reports = [run_on_ranks(4, compare, variant, WALKED, 0) for variant in variants]
    assert_all(traffic_part(variants, reports).checks, count=2)


def test_the_sum_by_hand_of_one_size_is_this() -> None:
    """Hidden states of 2 x 16 x 64 elements, 3 blocks, 256 rows in a table."""
    assert traffic_of_split_layers(replace(SPLIT, sequence_parallel=True)) == {
        "_allgather_base_": (9, 234_880),
        "_reduce_scatter_base_": (6, 288_512),
        "all_reduce": (8, 2 * 8192 + 6 * 64 * 4),
        "all_gather_into_tensor": (15, 16_384 + 14 * 4096),
        "reduce_scatter_tensor": (12, 12 * 8192),
    }


def test_adapters_need_the_memory_of_frozen_weights_and_little_more() -> None:
    variants = [replace(SMALL_TUNED, rank=rank) for rank in (0, 8)]
    reports = [run_on_ranks(2, compare, variant, WALKED, 0) for variant in variants]
    assert_all(adapters_part(SMALL_TUNED, reports, 8).checks, count=2)


def test_prefetch_changes_neither_collectives_nor_numbers() -> None:
    assert_all(prefetch_part(run_on_ranks(2, compare, TINY, PREFETCH, 0)).checks, count=2)


def assert_all(checks: dict[str, bool], count: int) -> None:
    assert list(checks.values()) == [True] * count, checks
