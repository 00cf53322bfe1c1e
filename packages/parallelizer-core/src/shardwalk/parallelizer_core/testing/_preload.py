"""Imported once by the fork server, so that a new rank starts with everything heavy in place."""

import contextlib

import torch.distributed.fsdp  # noqa: F401
import torch.distributed.tensor.parallel  # noqa: F401

with contextlib.suppress(ImportError):
    import pytest  # noqa: F401

with contextlib.suppress(ImportError):
    import shardwalk.mesh  # noqa: F401
