"""Private torch behind gradients and state: there, as read, and still needed."""

from __future__ import annotations

import state_toys as toys
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from shardwalk.parallelizer_core import _torch_compat as compat
from shardwalk.parallelizer_core.testing import run_on_ranks


def test_fused_norms_and_scaling() -> None:
    tensors = [torch.full((3,), 2.0, dtype=torch.bfloat16), torch.ones(4, dtype=torch.bfloat16)]
    norms = compat.foreach_norms(tensors, 1.0, torch.float32)
    assert [(norm.item(), norm.dtype) for norm in norms] == [
        (6.0, torch.float32),
        (4.0, torch.float32),
    ]
    compat.foreach_scale_(tensors, torch.tensor(0.5))
    assert [tensor[0].item() for tensor in tensors] == [1.0, 0.5]


def units() -> None:
    model = toys.fsdp(toys.toy(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    first, *others = compat.fsdp_units(model)
    assert first is model
    assert len(others) == 2
    assert compat.sync_flags_of(first) == [(True, True)]
    first.set_requires_gradient_sync(False, recurse=False)
    assert compat.sync_flags_of(first) == [(False, False)]
    compat.restore_sync_flags(first, [(True, False)])
    assert compat.sync_flags_of(first) == [(True, False)]
    assert compat.offloaded_parameters(model) == {id(p) for p in model.parameters()}
    assert compat.offloaded_parameters(toys.fsdp(toys.toy())) == set()


def test_units_and_their_flags() -> None:
    run_on_ranks(2, units)


def test_persistence_of_buffers() -> None:
    module = nn.Module()
    module.register_buffer("kept", torch.ones(1))
    module.register_buffer("dropped", torch.ones(1), persistent=False)
    assert compat.is_persistent_buffer(module, "kept")
    assert not compat.is_persistent_buffer(module, "dropped")


def test_hooks_must_be_moved_before_a_swap() -> None:
    """Fails when torch's swap_tensors keeps the hooks of a parameter by itself."""
    for moved in (False, True):
        old, calls = nn.Parameter(torch.empty(2, device="meta")), []
        old.register_hook(lambda gradient: calls.append("hook"))  # noqa: B023
        old.register_post_accumulate_grad_hook(lambda parameter: calls.append("post"))  # noqa: B023
        new = nn.Parameter(torch.ones(2))
        if moved:
            compat.move_hooks(old, new)
        torch.utils.swap_tensors(old, new)
        old.sum().backward()
        assert calls == (["hook", "post"] if moved else [])


def test_writes_through_data_are_recorded() -> None:
    """Version counters do not see them, on meta either."""
    tensors = {name: torch.empty(2, device="meta") for name in ("data", "view", "out", "none")}
    before = tensors["data"]._version
    with compat.RecordWrites() as recorder:
        tensors["data"].data.normal_()
        tensors["view"][0].zero_()
        torch.add(tensors["none"], 1.0, out=tensors["out"])
    assert tensors["data"]._version == before
    written = {name for name, tensor in tensors.items() if recorder.wrote(tensor)}
    assert written == {"data", "view", "out"}
