"""What the GPU tests need to run anywhere: a reason to skip, and the packages' sources."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

# A machine with GPUs may only have a checkout, and nothing installed.
if importlib.util.find_spec("shardwalk") is None:
    sys.path += [str(path) for path in sorted(Path(__file__).parents[2].glob("packages/*/src"))]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder, and skip it where there is no GPU to run it on."""
    wants_gpu = os.environ.get("SHARDWALK_GPU_TESTS_BACKEND", "nccl") == "nccl"
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if wants_gpu and not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="torch finds no CUDA device here"))
