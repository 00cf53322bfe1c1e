"""Limits that hold over the whole repository."""

from __future__ import annotations

import ast

from tests.packaging.packages import ROOT


def test_at_most_ten_marks_of_slow() -> None:
    files = [*ROOT.glob("packages/*/tests/**/*.py"), *ROOT.glob("tests/**/*.py")]
    marks = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "pytest.mark.slow"
    ]
    assert len(marks) <= 10, marks
