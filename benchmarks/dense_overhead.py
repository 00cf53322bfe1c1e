"""What the dense walk costs over a script that calls `fully_shard` by hand.

Both sides train the same decoder with the same units over the same mesh, on gloo ranks of this
machine, step by step in turn. One line of JSON per variant; the exit code is 1 when a bound is
broken.

    python -m nox -s benchmark -- dense_overhead
    python benchmarks/dense_overhead.py --variants fsdp hsdp --steps 10 --check
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import Any, Literal

import tyro
from overhead.measures import measure, measure_tables
from overhead.sides import Variant
from overhead.verdicts import overhead_line, say_checks, tables_line

from shardwalk.parallelizer_core.testing import RankPool

VARIANTS = {
    "fsdp": Variant(),
    "fsdp_prefetch": Variant(prefetch=True),
    "fsdp_bf16": Variant(bf16=True),
    "fsdp4": Variant(world_size=4, rows=1),
    "hsdp": Variant(world_size=4, replicas=2, rows=1),
}
# Small blocks under two tables of 50k rows, one for input and one for output.
TABLES = Variant(vocabulary=50_000, dim=64, heads=4, ffn=128, layers=2, rows=1, length=16)

Name = Literal["fsdp", "fsdp_prefetch", "fsdp_bf16", "fsdp4", "hsdp", "tables"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of one run."""

    variants: tuple[Name, ...] = ("fsdp", "fsdp_prefetch", "fsdp_bf16", "hsdp", "tables")
    """What to compare; all in one run."""
    steps: int = field(default=30)
    """Timed steps of each side; 0 only counts."""
    check: bool = False
    """Say for every bound whether it is kept (on stderr)."""


def main(options: Options) -> int:
    """Run the variants, print their lines and return the exit code."""
    kept = True
    for name in options.variants:
        line = run(name, options.steps)
        print(json.dumps(line), flush=True)
        kept &= say_checks(name, line["checks"], options.check)
    return 0 if kept else 1


def run(name: Name, steps: int) -> dict[str, Any]:
    """The line of one variant, measured on a pool of its own."""
    variant = TABLES if name == "tables" else VARIANTS[name]
    with RankPool(variant.world_size, timeout=600.0, collective_timeout=120.0) as pool:
        if name == "tables":
            return tables_line(name, variant, pool.run(measure_tables, variant))
        return overhead_line(name, pool.run(measure, variant, steps))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
