"""The page about sidecars: its example runs as printed, and an installed sidecar is found."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwalk.mesh import DistributedSetup, FSDP2Config, ParallelismSizes
from shardwalk.parallelizer_core import (
    describe_units,
    get_model_parallelizer,
    parallelize_model,
    plugins,
)
from shardwalk.parallelizer_core.testing import cached, run_on_ranks

PAGE = (Path(__file__).parents[2] / "docs" / "sidecars.md").read_text(encoding="utf-8")
EXAMPLE = dict(re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE, re.DOTALL))
[ENTRY_POINT] = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)

PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "other-captioner-sidecar"
version = "1.0"

[tool.hatch.build.targets.wheel]
include = ["*.py"]
"""
SIDECAR = """\
from captioner import CaptionerParallelizer

SIDECAR = CaptionerParallelizer()
"""


@pytest.fixture
def on_path(tmp_path: Path) -> Iterator[Path]:
    sys.path.insert(0, str(tmp_path))
    yield tmp_path
    sys.path.remove(str(tmp_path))


def test_the_example_passes_its_own_tests(on_path: Path) -> None:
    for name, code in EXAMPLE.items():
        (on_path / name).write_text(code)
    tests = importlib.import_module("test_captioner")
    for sizes in tests.MESHES:
        for checkpointing in (False, "full"):
            tests.test_captioner_has_the_numbers_of_one_process(sizes, checkpointing)
    tests.test_its_gates_compute_in_fp32()


def renamed(text: str) -> str:
    """Ranks that imported the example of the page still have it."""
    return text.replace("captioner", "other_captioner")


def parallelized() -> tuple[str, list[str]]:
    from other_captioner import Captioner

    importlib.invalidate_caches()
    plugins._sidecar_points.cache_clear()
    setup = cached("installed sidecar", build_setup)
    model = parallelize_model(Captioner(), setup.mesh_context)
    sidecar = get_model_parallelizer(model)
    return type(sidecar).__module__, [unit.name for unit in describe_units(model)]


def build_setup() -> DistributedSetup:
    config = FSDP2Config(mp_policy={"param_dtype": None})
    return DistributedSetup.build(config, parallelism_sizes=ParallelismSizes(tp_size=2))


def test_a_sidecar_that_another_package_installs_is_found(on_path: Path) -> None:
    source = on_path / "source"
    source.mkdir()
    (source / "pyproject.toml").write_text(PYPROJECT + renamed(ENTRY_POINT))
    (source / "other_captioner_sidecar.py").write_text(renamed(SIDECAR))
    model = EXAMPLE["captioner.py"].replace("    parallelizer = CaptionerParallelizer()\n", "")
    (on_path / "other_captioner.py").write_text(model)
    install = ("install", "--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    command = (sys.executable, "-m", "pip", *install, "--target", str(on_path), str(source))
    subprocess.run(command, check=True)
    (source / "other_captioner_sidecar.py").unlink()
    for module, units in run_on_ranks(2, parallelized):
        assert module == "other_captioner"  # the default one has no plan for the gates
        assert "seeing.0.gate" in units
