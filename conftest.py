"""What all tests share: time limits, the options, and which folders a run looks into."""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
# A test is written to take under 20 s (120 s if it is marked slow). These backstops leave room for
# a busy machine and for the start of a rank pool; a hang inside a pool is found much earlier.
SECONDS, SLOW_SECONDS, MOST_SLOW_TESTS = 90, 240, 10

# Helper modules beside the tests; appended, so that nothing here can shadow an installed package.
sys.path += [str(path) for path in sorted(ROOT.glob("packages/*/tests"))]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this repository."""
    group = parser.getgroup("shardwalk")
    group.addoption("--widest", action="store_true", help="run the widest parity tables too")
    group.addoption("--dist", type=Path, help="folder of built wheels to check (else builds them)")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Keep folders named gpu for `-m gpu`, and that run out of all others.

    A machine with GPUs may have torch and pytest only, and cannot import the other test modules.
    """
    if not collection_path.is_relative_to(ROOT):
        return None
    wants_gpu = config.option.markexpr == "gpu"
    is_gpu = "gpu" in collection_path.relative_to(ROOT).parts
    if collection_path.is_dir() and not is_gpu and wants_gpu:
        return None if any(collection_path.rglob("gpu")) else True
    return None if wants_gpu == is_gpu or collection_path.is_dir() else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give every test its time limit, and leave out what was not asked for."""
    slow = [item for item in items if item.get_closest_marker("slow")]
    if len(slow) > MOST_SLOW_TESTS:
        raise pytest.UsageError(
            f"{len(slow)} tests are marked slow; at most {MOST_SLOW_TESTS} may be"
        )
    if config.pluginmanager.hasplugin("timeout"):
        for item in items:
            _limit_time(item)
    if not config.getoption("--widest"):
        wide = {item for item in items if item.get_closest_marker("widest")} | _beyond_pairs(items)
        config.hook.pytest_deselected(items=[item for item in items if item in wide])
        items[:] = [item for item in items if item not in wide]


def _beyond_pairs(items: list[pytest.Item]) -> set[pytest.Item]:
    """Find the rows of tables marked `pairwise` whose pairs of values other rows hold already.

    Rows are taken by the number of pairs that are new with them, until none brings any.
    """
    tables: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("pairwise"):
            tables.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for rows in tables.values():
        pairs = {row: set(combinations(_values(row), 2)) for row in rows}
        covered: set[object] = set()
        while best := max(rows, key=lambda row: len(pairs[row] - covered), default=None):
            if not pairs[best] - covered:
                break
            covered |= pairs[best]
            rows.remove(best)
    return {row for rows in tables.values() for row in rows}


def _values(item: pytest.Item) -> list[tuple[str, str]]:
    params = item.callspec.params  # type: ignore[attr-defined]
    return sorted((name, repr(value)) for name, value in params.items())


def _limit_time(item: pytest.Item) -> None:
    if item.get_closest_marker("timeout") is None:
        seconds = SLOW_SECONDS if item.get_closest_marker("slow") else SECONDS
        item.add_marker(pytest.mark.timeout(seconds, method="thread"))
