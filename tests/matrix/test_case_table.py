"""The table of failure cases names tests that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "failure-cases.md"


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_test_of_the_table_exists() -> None:
    named = re.findall(r"`((?:tests|packages)/[^`:]+\.py)::(\w+)`", TABLE.read_text())
    assert len(named) > 50
    assert [(path, name) for path, name in named if name not in functions_of(ROOT / path)] == []


def test_every_row_names_a_test() -> None:
    rows = re.findall(r"^\| ([BP]\d+) \|.*$", TABLE.read_text(), re.MULTILINE)
    assert len(rows) == len(set(rows)) > 30
    for line in TABLE.read_text().splitlines():
        if re.match(r"\| [BP]\d+ \|", line):
            assert ".py::test_" in line, line
