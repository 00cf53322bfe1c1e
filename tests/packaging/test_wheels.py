"""What is in the wheels and sdists."""

from __future__ import annotations

import email
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.packaging.packages import PACKAGES, Package


@pytest.fixture(scope="module")
def dist(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = request.config.getoption("--dist")
    if given is not None:
        return Path(given)
    folder = tmp_path_factory.mktemp("dist")
    for package in PACKAGES:
        command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
        subprocess.run(command, cwd=package.folder, check=True, capture_output=True)
    return folder


def names_in_wheel(dist: Path, package: Package) -> dict[str, bytes]:
    (wheel,) = dist.glob(f"{package.distribution.replace('-', '_')}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


each_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)


@each_package
def test_wheel_holds_its_portion_of_the_namespace_and_nothing_else(
    dist: Path, package: Package
) -> None:
    files = names_in_wheel(dist, package)
    portion = package.module.replace(".", "/") + "/"
    stray = [name for name in files if not name.startswith(portion) and ".dist-info/" not in name]
    assert stray == []
    source = package.folder / "src"
    expected = {
        str(path.relative_to(source))
        for path in source.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert {name for name in files if name.startswith(portion)} == expected
    assert f"{portion}py.typed" in expected


@each_package
def test_wheel_metadata(dist: Path, package: Package) -> None:
    files = names_in_wheel(dist, package)
    (metadata,) = (email.message_from_bytes(v) for k, v in files.items() if k.endswith("/METADATA"))
    assert metadata["Name"] == package.distribution
    assert metadata["Version"] == package.version
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    licenses = [text for name, text in files.items() if name.endswith("/licenses/LICENSE")]
    assert [b"Apache License" in text for text in licenses] == [True]


@each_package
def test_sdist_builds_the_same_wheel(dist: Path, package: Package, tmp_path: Path) -> None:
    (sdist,) = dist.glob(f"{package.distribution.replace('-', '_')}-*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=unpacked, check=True, capture_output=True)
    assert names_in_wheel(tmp_path, package) == names_in_wheel(dist, package)


@each_package
def test_licence_is_that_of_the_repository(package: Package) -> None:
    root = package.folder.parent.parent
    assert (package.folder / "LICENSE").read_bytes() == (root / "LICENSE").read_bytes()
