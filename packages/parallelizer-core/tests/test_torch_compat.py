"""Private torch behind gradients and state: there, as read, and still needed."""

from __future__ import annotations

import pytest
import state_toys as toys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import create_selective_checkpoint_contexts

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


def test_enabled_attention_backends() -> None:
    everything = compat.enabled_attention_backends()
    chosen = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
    for order in (chosen, chosen[::-1]):
        with sdpa_kernel(order, set_priority=True):
            assert compat.enabled_attention_backends() == order
    assert compat.enabled_attention_backends() == everything


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
    shards = [p for unit in compat.fsdp_units(model) for p in compat.sharded_parameters(unit)]
    assert {id(p) for p in shards} == {id(p) for p in model.parameters()}
    first.unshard()
    assert not any(
        p is shown for p in compat.sharded_parameters(first) for shown in first.parameters()
    )
    first.reshard()
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


def test_operators_as_checkpointing_reads_them() -> None:
    mm, add_ = torch.ops.aten.mm.default, torch.ops.aten.add_.Tensor
    attention = torch.ops.aten._scaled_dot_product_efficient_attention.default
    assert compat.is_operator(mm)
    assert compat.is_operator(torch.ops.higher_order.flex_attention)
    assert not compat.is_operator(torch.ops.aten.mm)
    assert compat.mutates_arguments(add_)
    assert not compat.mutates_arguments(mm)
    assert compat.argument_of(attention, "dropout_p", (), {}) == 0.0
    assert compat.argument_of(attention, "dropout_p", (None,) * 5 + (0.3,), {}) == 0.3
    assert compat.argument_of(attention, "dropout_p", (), {"dropout_p": 0.2}) == 0.2
    assert compat.argument_of(mm, "dropout_p", (), {}) is None
    assert compat.is_operator(compat.functional_collectives().all_reduce.default)


def test_versions_count_changes_in_place() -> None:
    tensor = torch.ones(2)
    before = compat.tensor_version(tensor)
    assert compat.tensor_version(tensor.add_(1)) == before + 1
    with torch.inference_mode():
        assert compat.tensor_version(torch.ones(2)) == 0


def test_a_mode_that_is_taken_off_does_not_see_what_runs() -> None:
    """Fails when torch's selective mode lets operators pass that its forward did not run."""
    forward, recompute = create_selective_checkpoint_contexts(lambda *_, **__: False)  # type: ignore[no-untyped-call]
    with forward:
        torch.ones(2)
    with recompute:
        with pytest.raises(RuntimeError, match="not found in storage"):
            torch.zeros(2)
        with compat.without_innermost_mode():
            torch.zeros(2)
        with pytest.raises(RuntimeError, match="not found in storage"):
            torch.zeros(2)


def test_the_dict_of_buffers_is_what_the_module_reads() -> None:
    """Running statistics are written without being counted: a version would not tell of it."""
    module = nn.BatchNorm1d(2)
    buffers = compat.buffers_of(module)
    assert list(buffers) == ["running_mean", "running_var", "num_batches_tracked"]
    other = torch.zeros(2)
    buffers["running_mean"] = other
    module(torch.tensor([[1.0, 2.0], [3.0, 5.0]]))
    assert module.running_mean is other
    assert other.sum() > 0
    assert compat.tensor_version(other) == 0
    assert compat.buffers_of(nn.BatchNorm1d(2, track_running_stats=False))["running_var"] is None


def concatenated() -> tuple[tuple[str, ...] | None, tuple[int, ...]]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    joined = compat.concatenate_meshes([mesh["dp"], mesh["tp"]])
    return joined.mesh_dim_names, tuple(joined.shape)


def test_meshes_of_one_root_are_joined_in_the_order_given() -> None:
    """Fails when torch has another way, which FSDP2 would take for its DTensors too."""
    assert run_on_ranks(2, concatenated) == [(("dp", "tp"), (1, 2))] * 2


def exchanged_rows() -> tuple[list[float], list[float]]:
    """Two rows from here to rank 0 and one to rank 1, and a gradient that is not contiguous."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    rows = (10.0 * rank + torch.arange(3.0)).repeat(2, 1).t().requires_grad_()
    moved = compat.exchange_parts(rows, [2 - rank] * 2, [2, 1], group)
    moved.backward(100 + moved.detach().t().contiguous().t())
    assert rows.grad is not None
    return moved[:, 1].tolist(), rows.grad[:, 1].tolist()


def test_rows_are_exchanged_and_their_gradients_go_back() -> None:
    assert run_on_ranks(2, exchanged_rows) == [
        ([0.0, 1.0, 10.0, 11.0], [100.0, 101.0, 102.0]),
        ([2.0, 12.0], [110.0, 111.0, 112.0]),
    ]
