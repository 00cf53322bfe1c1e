"""One communicator per set of ranks, and none that would connect a rank with itself alone."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from shardwalk.mesh import _torch_compat

__all__ = ["group_of", "mesh_device_type", "minutes"]

Key = tuple[tuple[int, ...], timedelta | None]


@dataclass
class _Groups:
    """The groups made under one default group, and how often each key was asked to be made."""

    made: dict[Key, dist.ProcessGroup] = field(default_factory=dict)
    counts: dict[Key, int] = field(default_factory=dict)


_by_default_group: WeakKeyDictionary[dist.ProcessGroup, _Groups] = WeakKeyDictionary()


def minutes(value: float | None) -> timedelta | None:
    """Return minutes, fractions allowed, as a timedelta."""
    return None if value is None else timedelta(minutes=value)


def mesh_device_type() -> str:
    """Return the device type that the default group serves: the accelerator's, else ``"cpu"``.

    An accelerator that only gloo or a fake group serves does not count.
    """
    if not torch.accelerator.is_available():
        return "cpu"
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    served = dict(part.split(":") for part in dist.get_backend_config().split(","))
    own = served.get(accelerator.type, "gloo") not in ("gloo", "fake")
    return accelerator.type if own else "cpu"


def group_of(
    ranks: Iterable[int],
    timeout: timedelta | None,
    description: str,
    known: Iterable[dist.ProcessGroup] = (),
) -> dist.ProcessGroup:
    """Return the group of these global ranks, in this order; the caller must be one of them.

    Only the members call it, each with the same arguments. Reused where it exists: the default
    group when it has these ranks and this timeout, one of ``known``, one made here before.
    A rank alone gets a group without a real backend, whose collectives copy. ``timeout`` None means
    that of the default group.
    """
    ranks = tuple(ranks)
    default = dist.group.WORLD
    assert default is not None
    assert dist.get_rank() in ranks
    own_timeout = _torch_compat.group_timeout(default)
    # A group without a timeout of its own (a fake one) cannot have another.
    timeout = own_timeout and (timeout or own_timeout)
    if ranks == tuple(range(dist.get_world_size())) and (timeout == own_timeout or len(ranks) == 1):
        return default
    for group in known:
        if tuple(dist.get_process_group_ranks(group)) == ranks:
            return group
    key = (ranks, timeout if len(ranks) > 1 else None)
    groups = _by_default_group.setdefault(default, _Groups())
    found = groups.made.get(key)
    if found is None or not _torch_compat.is_registered(found):
        found = groups.made[key] = _make(groups, key, description)
    return found


def _make(groups: _Groups, key: Key, description: str) -> dist.ProcessGroup:
    ranks, timeout = key
    groups.counts[key] = groups.counts.get(key, 0) + 1
    digest = hashlib.sha1(f"{ranks} {timeout}".encode(), usedforsecurity=False).hexdigest()
    name = f"shardwalk_{digest}_{groups.counts[key]}"
    if len(ranks) == 1:
        _torch_compat.load_fake_backend()
        return _torch_compat.new_named_group(ranks, name, "fake", None, description)
    backend = _torch_compat.default_backend()
    return _torch_compat.new_named_group(ranks, name, backend, timeout, description)
