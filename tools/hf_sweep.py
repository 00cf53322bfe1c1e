"""Run every model of transformers that can be made tiny on two ranks, against one process.

    python -m nox -s hf_sweep -- --only llama qwen3

Results are kept in docs/hf-sweep.json after every model, and docs/hf-sweep.md is written from them.
"""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tyro

from shardwalk.parallelizer_core.testing import preload
from tests.hf_sweep.checks import CHECKS, Result, Sweep, is_fine
from tests.hf_sweep.recipes import Architecture, architectures
from tests.hf_sweep.table import load_results, save_results, table

ROOT = Path(__file__).parent.parent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to run.

    Attributes:
        only: model types or class names; all by default.
        kinds: which auto-model mappings to take architectures from.
        checks: what to compare with one process.
        resume: skip what the results hold already, unless `only` names it.
        retry: with `resume`, run again what is not as it should be, and what was not built.
        jobs: architectures at a time, each on three processes.
        limit: seconds that a step of one architecture may take.
        results: the JSON file.
        page: the table made of it.
    """

    only: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ("causal", "image-text")
    checks: tuple[str, ...] = tuple(check.name for check in CHECKS)
    resume: bool = False
    retry: bool = False
    jobs: int = 1
    limit: float = 120.0
    results: Path = ROOT / "docs" / "hf-sweep.json"
    page: Path = ROOT / "docs" / "hf-sweep.md"


def main(options: Options) -> None:
    """Sweep, keeping the results after every architecture."""
    preload("tests.hf_sweep.checks")
    known = load_results(options.results)
    todo = [one for one in architectures(*options.kinds) if _is_wanted(one, options, known)]
    local, lock = threading.local(), threading.Lock()
    sweeps: list[Sweep] = []

    def run(one: Architecture) -> None:
        if not hasattr(local, "sweep"):
            local.sweep = Sweep(options.limit)
            sweeps.append(local.sweep)
        result = local.sweep.run(one, [check for check in CHECKS if check.name in options.checks])
        with lock:
            _keep(result, known, options)
            print(_line(result), flush=True)

    with ThreadPoolExecutor(options.jobs) as threads:
        list(threads.map(run, todo))
    for sweep in sweeps:
        sweep.close()


def _is_wanted(one: Architecture, options: Options, known: dict[str, Result]) -> bool:
    if options.only:
        return bool({one.model_type, one.class_name} & set(options.only))
    before = known.get(str(one))
    if before is None or not options.resume:
        return True
    failed = not all(is_fine(name, outcome) for name, outcome in before.outcomes.items())
    return options.retry and bool(failed or before.reason)


def _keep(result: Result, known: dict[str, Result], options: Options) -> None:
    key = f"{result.model_type}/{result.class_name}"
    if key in known:
        result.outcomes = {**known[key].outcomes, **result.outcomes} if result.outcomes else {}
    known[key] = result
    save_results(known, options.results)
    options.page.write_text(table(known))


def _line(result: Result) -> str:
    outcomes = ", ".join(f"{name} {outcome}" for name, outcome in result.outcomes.items())
    found = outcomes or f"not built: {result.reason}"
    name = f"{result.model_type} {result.class_name} [{result.beside_text}]"
    return f"{name} {result.seconds} s: {found}"


if __name__ == "__main__":
    main(tyro.cli(Options))
