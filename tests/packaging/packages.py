"""The packages of this repository as data, for the tests beside this file."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Package:
    """One folder of packages/."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def module(self) -> str:
        return "shardwalk." + self.name.replace("-", "_")

    @functools.cached_property
    def project(self) -> dict[str, Any]:
        table: dict[str, Any] = tomllib.loads((self.folder / "pyproject.toml").read_text())
        return table["project"]

    @property
    def distribution(self) -> str:
        return self.project["name"]

    @property
    def source(self) -> Path:
        return self.folder / "src" / self.module.replace(".", "/")

    @property
    def version(self) -> str:
        text = (self.source / "__about__.py").read_text()
        match = re.search(r'__version__ = "(.+)"', text)
        assert match is not None
        return match[1]

    def trees(self) -> Iterator[tuple[Path, ast.Module]]:
        for file in sorted(self.source.rglob("*.py")):
            yield file, ast.parse(file.read_text(), str(file))


PACKAGES = [Package(file.parent) for file in sorted(ROOT.glob("packages/*/pyproject.toml"))]
