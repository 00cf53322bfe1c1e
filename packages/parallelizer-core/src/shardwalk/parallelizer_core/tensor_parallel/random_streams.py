"""Random numbers over the tensor-parallel axis: equal on its ranks, or each rank's own.

The generators of this process are the equal stream: `seed_everything` starts them alike on all
ranks of the axis, and each rank draws the same from them. A rank's own stream begins at a seed
that is drawn from there, mixed with its rank, and ends with the generators where that draw left
them. So both follow from the state of the generators alone: whoever restores it, for a recompute or
from a checkpoint, draws the same numbers again.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

States = tuple[Tensor, ...]


class _Thread(threading.local):
    """The streams of their own that are entered on this thread, the innermost last."""

    def __init__(self) -> None:
        self.entered: list[OwnStream] = []


_thread = _Thread()


class OwnStream:
    """A stretch of a forward in which random numbers differ over the ranks of an axis."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self._equal: States = ()

    def enter(self) -> None:
        """Let the generators draw this rank's own numbers."""
        drawn = int(torch.randint(2**62, (), device="cpu"))
        self._equal = _states(self.mesh)
        text = f"{drawn} {self.mesh.get_local_rank()}"
        own = hashlib.sha256(text.encode()).digest()
        _seed(int.from_bytes(own[:8], "big") >> 1, self.mesh)
        _thread.entered.append(self)

    def leave(self) -> None:
        """Let them go on with the equal ones."""
        assert _thread.entered.pop() is self
        _restore(self._equal, self.mesh)

    @property
    def is_entered(self) -> bool:
        """Whether this thread is in it."""
        return self in _thread.entered

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Draw equal numbers inside."""
        own = _states(self.mesh)
        _restore(self._equal, self.mesh)
        _thread.entered.remove(self)
        try:
            yield
        finally:
            _thread.entered.append(self)
            self._equal = _states(self.mesh)
            _restore(own, self.mesh)


def entered_stream() -> OwnStream | None:
    """The stream of its own that this thread is in."""
    return _thread.entered[-1] if _thread.entered else None


@contextmanager
def own_numbers(mesh: DeviceMesh) -> Iterator[None]:
    """Draw numbers inside that differ over the ranks of `mesh`."""
    if entered_stream() is not None:
        yield
        return
    stream = OwnStream(mesh)
    stream.enter()
    try:
        yield
    finally:
        stream.leave()


@contextmanager
def equal_numbers() -> Iterator[None]:
    """Draw numbers inside that are equal over the ranks of the axis."""
    stream = entered_stream()
    if stream is None:
        yield
        return
    with stream.suspended():
        yield


def stream_digest(mesh: DeviceMesh) -> str:
    """A text that is the same where the generators will draw the same numbers."""
    states = b"".join(bytes(state.numpy()) for state in _states(mesh))
    return hashlib.sha256(states).hexdigest()


def _states(mesh: DeviceMesh) -> States:
    device = _device(mesh)
    own = () if device is None else (device.get_rng_state(),)
    return (torch.get_rng_state(), *own)


def _restore(states: States, mesh: DeviceMesh) -> None:
    torch.set_rng_state(states[0])
    device = _device(mesh)
    if device is not None:
        device.set_rng_state(states[1])


def _seed(seed: int, mesh: DeviceMesh) -> None:
    torch.default_generator.manual_seed(seed)
    device = _device(mesh)
    if device is not None:
        device.manual_seed(seed)


def _device(mesh: DeviceMesh) -> Any:
    """The module of the accelerator's generators; None on the CPU."""
    return None if mesh.device_type == "cpu" else torch.get_device_module(mesh.device_type)
