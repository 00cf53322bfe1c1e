"""What an expert-parallel layer costs beside two others that send a row for every expert.

Dispatch, experts and combine, forward and backward, on gloo ranks of this machine: ours, a plain
all-to-all of one row per token and expert (with grouped products, and with a loop), and the expert
parallelism of transformers. All have the same weights, tokens and routing, and step in turn. One
line of JSON per variant; the exit code is 1 when a bound is broken.

    python -m nox -s benchmark -- moe_dispatch
    python benchmarks/moe_dispatch.py --variants 512x64_2k --steps 10 --check
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace

import tyro
from moe.measures import measure
from moe.sides import Variant
from moe.verdicts import line_of
from overhead.verdicts import say_checks

from shardwalk.parallelizer_core.testing import RankPool

VARIANTS = {
    f"{hidden}x{experts}_{tokens // 1024}k": Variant(hidden=hidden, experts=experts, tokens=tokens)
    for tokens in (2048, 4096)
    for hidden in (256, 512)
    for experts in (32, 64)
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of one run."""

    variants: tuple[str, ...] = tuple(VARIANTS)
    """What to compare, as hidden x experts _ tokens per rank; all in one run."""
    steps: int = 15
    """Timed steps of each side; 0 only compares results and memory."""
    ranks: int = 4
    """Number of ranks, all expert-parallel."""
    inner: int | None = None
    """Width of an expert instead of 3/8 of a token's; wider ones hide what dispatch costs."""
    check: bool = False
    """Say for every bound whether it is kept (on stderr)."""


def main(options: Options) -> int:
    """Run the variants, print their lines and return the exit code."""
    if unknown := set(options.variants) - VARIANTS.keys():
        raise ValueError(f"variants {sorted(unknown)} are none of {list(VARIANTS)}")
    kept = True
    with RankPool(options.ranks, timeout=1800.0, collective_timeout=300.0) as pool:
        for name in options.variants:
            variant = replace(VARIANTS[name], inner=options.inner)
            line = line_of(name, variant, pool.run(measure, variant, options.steps))
            print(json.dumps(line), flush=True)
            kept &= say_checks(name, line["checks"], options.check)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
