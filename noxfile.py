"""The sessions that build and prove the packages; `python -m nox -l` lists them.

The packages are data: every folder of packages/ with a pyproject.toml is one, in the order of
their dependencies. The venv of the session `base` owns torch; the other venvs see it through a
`.pth` file, which saves a gigabyte and a minute each.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import nox
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent
DIST = ROOT / "dist"
CONSTRAINTS = ROOT / "constraints" / "torch-cpu.txt"
PROJECT = nox.project.load_toml("pyproject.toml")

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "typecheck", "build", "isolated", "matrix"]


class Package:
    """One folder of packages/: its names, and what its pyproject.toml declares."""

    def __init__(self, folder: Path) -> None:
        """Read the pyproject.toml of `folder`."""
        self.folder = folder
        self.toml: dict[str, Any] = nox.project.load_toml(folder / "pyproject.toml")
        self.name: str = folder.name
        self.distribution: str = canonicalize_name(self.toml["project"]["name"])
        self.module = "shardwalk." + folder.name.replace("-", "_")
        self.tests = folder / "tests"

    @property
    def requirements(self) -> set[str]:
        """The names of the distributions that it needs, without extras."""
        return {
            canonicalize_name(Requirement(line).name)
            for line in self.toml["project"].get("dependencies", [])
        }

    @property
    def test_group(self) -> list[str]:
        """What its tests import beside what it needs itself."""
        return list(nox.project.dependency_groups(self.toml, "test"))


def discover() -> dict[str, Package]:
    """Find the packages by name, each after those it depends on."""
    found = [Package(file.parent) for file in sorted(ROOT.glob("packages/*/pyproject.toml"))]
    siblings = {package.distribution for package in found}
    ordered: dict[str, Package] = {}
    while len(ordered) < len(found):
        done = {package.distribution for package in ordered.values()}
        ready = [
            package
            for package in found
            if package.name not in ordered and package.requirements & siblings <= done
        ]
        if not ready:
            raise ValueError(f"the packages depend on each other in a circle: {found}")
        ordered |= {package.name: package for package in ready}
    return ordered


PACKAGES = discover()
each_package = nox.parametrize("name", [nox.param(name, id=name) for name in PACKAGES])


def closure(package: Package) -> list[Package]:
    """List the package and every sibling that it needs, dependencies first."""
    needed = {package.distribution}
    for other in reversed(PACKAGES.values()):
        if other.distribution in needed:
            needed |= other.requirements
    return [other for other in PACKAGES.values() if other.distribution in needed]


def group(name: str) -> list[str]:
    """List the requirements of a dependency group of the root pyproject.toml."""
    return list(nox.project.dependency_groups(PROJECT, name))


def editable(packages: Iterable[Package]) -> list[str]:
    """Give pip's arguments for editable installs."""
    paths = [str(package.folder.relative_to(ROOT)) for package in packages]
    return ["--no-build-isolation", *(word for path in paths for word in ("-e", path))]


def install(
    session: nox.Session, *args: str, bare: Sequence[str] = (), with_base: bool = True
) -> None:
    """Install what `args` name, unless this venv already holds exactly that.

    The stamp covers everything the result depends on: arguments, constraints and every
    pyproject.toml. Sources need no stamp, since siblings are installed in editable mode.
    `bare` names what is installed without its dependencies.
    """
    venv = Path(session.virtualenv.location)
    if with_base:
        _see_base(session)
    stamp, key = venv / "installed.sha256", _fingerprint([*args, *bare])
    if stamp.exists() and stamp.read_text() == key:
        session.log("the venv is up to date")
        return
    stamp.unlink(missing_ok=True)
    if args:
        session.install("-c", str(CONSTRAINTS.relative_to(ROOT)), *args)
    if bare:
        session.install("--no-deps", *bare)
    # As an install step, so that `nox --no-install` does not claim to have installed anything.
    write = f"import pathlib; pathlib.Path({str(stamp.resolve())!r}).write_text({key!r})"
    session.run_install("python", "-c", write, log=False)


def _fingerprint(args: Sequence[str]) -> str:
    files = [CONSTRAINTS, *(package.folder / "pyproject.toml" for package in PACKAGES.values())]
    text = "\n".join([sys.version, str(ROOT), *args, *(file.read_text() for file in files)])
    return hashlib.sha256(text.encode()).hexdigest()


def _see_base(session: nox.Session) -> None:
    venv = Path(session.virtualenv.location)
    base = venv.parent / "base"
    for lib in venv.glob("lib/python*/site-packages"):
        (lib / "base.pth").write_text(f"{(base / lib.relative_to(venv)).resolve()}\n")


def pytest(session: nox.Session, *args: str, **env: str) -> None:
    """Run pytest; what it counts goes to reports/, where .ci/run adds the sessions up."""
    report = Path(session.cache_dir).parent / "reports" / f"{session.name}.xml"
    env = {"OMP_NUM_THREADS": "1", **env}
    session.run("python", "-m", "pytest", f"--junit-xml={report}", *args, env=env)


def sources() -> str:
    """Give the src folders of all packages as a search path."""
    return os.pathsep.join(str(package.folder / "src") for package in PACKAGES.values())


@nox.session(default=False)
def base(session: nox.Session) -> None:
    """Install torch and pytest once, for every other session (which ask for this one)."""
    install(session, *group("base"), with_base=False)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting and the direction of imports between the packages."""
    install(session, *group("lint"), with_base=False)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", "--no-cache", env={"PYTHONPATH": sources()})


@nox.session(requires=["base"])
def typecheck(session: nox.Session) -> None:
    """Check types: strictly in the packages, without demanding annotations in their tests."""
    install(session, *group("typecheck"))
    env = {"MYPYPATH": sources()}
    session.run("mypy", *(f"packages/{name}/src" for name in PACKAGES), env=env)
    for package in PACKAGES.values():
        if any(package.tests.glob("*.py")):
            paths = os.pathsep.join([sources(), str(package.tests)])
            config = "--config-file=tests/mypy.ini"
            tests = str(package.tests.relative_to(ROOT))
            session.run("mypy", config, tests, env={"MYPYPATH": paths})


@nox.session(requires=["base"])
def build(session: nox.Session) -> None:
    """Build wheels and sdists into dist/, and check what is in them and what they import."""
    install(session, *group("build"), *editable(PACKAGES.values()))
    shutil.rmtree(DIST, ignore_errors=True)
    for package in PACKAGES.values():
        session.run(
            "python", "-m", "build", "--no-isolation", "--outdir=dist", f"packages/{package.name}",
            silent=True,
        )  # fmt: skip
    session.run(
        "twine", "check", "--strict", *sorted(f"dist/{file.name}" for file in DIST.iterdir())
    )
    pytest(session, "tests/packaging", "--dist=dist", *session.posargs)


@nox.session(default=False, requires=["base"])
@each_package
def tests(session: nox.Session, name: str) -> None:
    """Run the tests of one package on its sources: `isolated` runs them on what is installed."""
    package = PACKAGES[name]
    install(session, *package.test_group, *editable(closure(package)))
    pytest(session, str(package.tests.relative_to(ROOT)), *session.posargs)


@nox.session(requires=["base"])
def matrix(session: nox.Session) -> None:
    """Run the parity tables that cross packages, over gloo, and the examples on a tiny model.

    `-- --widest` runs the widest tables too.
    """
    install(session, *group("matrix"), *editable(PACKAGES.values()))
    pytest(session, "tests/matrix", "tests/examples", *session.posargs)


@nox.session(requires=["base"], reuse_venv=False)
@each_package
def isolated(session: nox.Session, name: str) -> None:
    """Run the tests of one package on wheels, with its declared siblings and no others."""
    package = PACKAGES[name]
    needed = closure(package)
    # Not create_tmp(), whose long TMPDIR could outgrow the 108 characters of the ranks' sockets.
    wheels = Path(session.virtualenv.location).resolve() / "wheels"
    _see_base(session)
    folders = [str(other.folder) for other in needed]
    build_wheels = ("pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    session.run("python", "-m", *build_wheels, "-w", str(wheels), *folders)
    session.install("-c", str(CONSTRAINTS), *package.test_group, *map(str, wheels.glob("*.whl")))
    absent = [other.module for other in PACKAGES.values() if other not in needed]
    present = [other.module for other in needed]
    session.run("python", "-P", "tools/check_isolation.py", *present, "--absent", *absent)
    pytest(session, str(package.tests.relative_to(ROOT)), *session.posargs)


@nox.session(default=False, requires=["base"])
def demo(session: nox.Session) -> None:
    """Fine-tune a real pretrained model on gloo ranks and compare with one process."""
    install(session, *group("demo"), *editable(PACKAGES.values()), bare=group("demo-weights"))
    session.run("python", "examples/finetune.py", *session.posargs)


@nox.session(default=False, requires=["base"])
def demo_praxis(session: nox.Session) -> None:
    """Train a small Praxis policy with experts over gloo ranks, then adapters for another robot."""
    install(session, *group("demo-praxis"), *editable(PACKAGES.values()))
    session.run("python", "examples/train_praxis.py", *session.posargs)


@nox.session(default=False, requires=["base"])
def demo_beam(session: nox.Session) -> None:
    """Train a small Beam with experts over gloo ranks; resume it elsewhere, export it."""
    install(session, *group("demo-beam"), *editable(PACKAGES.values()))
    session.run("python", "examples/train_beam.py", *session.posargs)


@nox.session(default=False, requires=["base"])
def benchmark(session: nox.Session) -> None:
    """Run one benchmark: `nox -s benchmark -- dense_overhead [options]`."""
    names = sorted(file.stem for file in (ROOT / "benchmarks").glob("[!_]*.py"))
    if not session.posargs or session.posargs[0] not in names:
        session.error(f"name a benchmark: nox -s benchmark -- {{{','.join(names)}}} [options]")
    install(session, *group("benchmark"), *editable(PACKAGES.values()))
    name, *options = session.posargs
    session.run("python", f"benchmarks/{name}.py", *options, env={"OMP_NUM_THREADS": "1"})


@nox.session(default=False, venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Run the parity tables on NCCL with the torch and the GPUs of the Python that runs nox."""
    code = "import torch; print(torch.cuda.device_count())"
    try:
        count = int(session.run(sys.executable, "-c", code, silent=True) or 0)
    except nox.command.CommandFailed:
        session.skip(f"no GPU tests: {sys.executable} has no torch")
    if count == 0:
        session.skip("no GPU tests: torch finds no CUDA device here")
    session.run(sys.executable, "-m", "pytest", "-c", "gpu.ini", "-m", "gpu", *session.posargs)
