"""The namespace `shardwalk` belongs to no package and is open to all of them."""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys

import pytest

from tests.packaging.packages import PACKAGES, ROOT, Package

each_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)


def test_no_package_claims_the_namespace() -> None:
    assert list(ROOT.glob("packages/*/src/shardwalk/*.py")) == []
    assert list(ROOT.glob("packages/*/src/*.py")) == []


@each_package
def test_names_follow_from_the_folder(package: Package) -> None:
    assert package.distribution == f"shardwalk-{package.name}"
    assert (package.source / "__init__.py").is_file()
    assert (package.source / "py.typed").is_file()


@each_package
def test_version_is_that_of_the_installed_package(package: Package) -> None:
    about = importlib.import_module(f"{package.module}.__about__")
    assert about.__version__ == package.version
    assert importlib.metadata.version(package.distribution) == package.version


@each_package
def test_siblings_are_pinned_to_compatible_releases(package: Package) -> None:
    versions = {other.distribution: other.version for other in PACKAGES}
    pins = [line for line in package.project["dependencies"] if line.startswith("shardwalk-")]
    names = [line.partition("~=")[0] for line in pins]
    assert pins == [f"{name}~={versions[name].rpartition('.')[0]}.0" for name in names]


@each_package
def test_a_fresh_interpreter_imports_nothing_but_torch_and_declared_siblings(
    package: Package,
) -> None:
    others = [p.module for p in PACKAGES]
    script = f"import sys, {package.module}\nfor name in sorted(sys.modules): print(name)\n"
    command = [sys.executable, "-W", "error", "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = {name for name in result.stdout.split() if name in others}
    pins = {line.partition("~=")[0] for line in package.project["dependencies"]}
    allowed = {p.module for p in PACKAGES if p.distribution in pins} | {package.module}
    assert loaded <= allowed
    extras = {"safetensors", "transformers", "pytest", "hypothesis"}
    assert extras.isdisjoint(result.stdout.split())
