"""The example in the README runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardwalk.parallelizer_core.testing import run_on_ranks

README = Path(__file__).parents[2] / "README.md"


def run_example(code: str) -> None:
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.slow
def test_the_example_runs_on_two_ranks() -> None:
    code, *_ = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 18
    run_on_ranks(2, run_example, code)


def test_its_links_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README.read_text(encoding="utf-8"))
    assert [link for link in links if not (README.parent / link).exists()] == []
