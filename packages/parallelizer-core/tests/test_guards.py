"""Guards for faults of torch 2.13: each fails without its guard, and stays right with it.

When a test that expects torch's own error fails, that torch no longer needs the guard.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from walk_toys import BF16, Block, Decoder, context, full_gradients, ids

from shardwalk.parallelizer_core import ModelParallelizer, parallelize_model
from shardwalk.parallelizer_core.fsdp2 import walk
from shardwalk.parallelizer_core.testing import RankError, run_on_ranks


@contextlib.contextmanager
def guards(enabled):
    original = walk.guard_fsdp_units
    if not enabled:
        walk.guard_fsdp_units = lambda model: None
    try:
        yield
    finally:
        walk.guard_fsdp_units = original


class TwoTowers(nn.Module):
    """A stack that a forward may leave out on every rank alike."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList([Block()])
        self.right = nn.ModuleList([Block()])

    def forward(self, x, both):
        x = self.left[0](x)
        return self.right[0](x) if both else x


class Branching(nn.Module):
    """One unit of which a forward may use one linear or both."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(6, 6)
        self.right = nn.Linear(6, 6)

    def forward(self, x, both):
        x = self.left(x)
        return self.right(x) if both else x


def accumulate(make, guarded, branches, unused):
    torch.manual_seed(7)
    with guards(guarded):
        model = parallelize_model(make(), context(mp_policy=BF16))
    model.set_reduce_scatter_unused_params(unused)
    x = torch.linspace(-1.0, 1.0, 24).reshape(4, 6) * (1 + dist.get_rank())
    for index, both in enumerate(branches):
        model.set_requires_gradient_sync(index == len(branches) - 1)
        model(x, both).float().square().mean().backward()
    return full_gradients(model)


def reference_gradients(make, branches):
    """Each rank's bf16 gradients in one process, averaged in fp32."""
    torch.manual_seed(7)
    master = make()
    totals = {name: torch.zeros_like(p) for name, p in master.named_parameters()}
    for rank in range(2):
        model = make()
        model.load_state_dict(master.state_dict())
        model.to(torch.bfloat16)
        x = (torch.linspace(-1.0, 1.0, 24).reshape(4, 6) * (1 + rank)).bfloat16()
        for both in branches:
            model.zero_grad()
            model(x, both).float().square().mean().backward()
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    totals[name] += parameter.grad.float() / 2
    return totals


CASES = {
    "a unit that never ran": (TwoTowers, [False, False], False, "_unsharded_param"),
    "a parameter first used in the last micro-batch": (
        Branching,
        [False, True],
        False,
        "uniform gradient dtype",
    ),
    "a parameter unused in the last micro-batch": (
        Branching,
        [False, False],
        True,
        "uniform gradient dtype",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_torch_still_fails_without_the_guard(case):
    make, branches, unused, message = CASES[case]
    with pytest.raises(RankError, match=message):
        run_on_ranks(2, accumulate, make, False, branches, unused)


@pytest.mark.parametrize("case", CASES)
def test_accumulation_is_right_with_the_guard(case):
    make, branches, unused, _ = CASES[case]
    expected = reference_gradients(make, branches)
    for grads in run_on_ranks(2, accumulate, make, True, branches, unused):
        for name, grad in grads.items():
            if grad is None:
                assert not expected[name].any()
            else:
                torch.testing.assert_close(grad, expected[name], rtol=1e-2, atol=1e-5)


def linear_in_a_unit_returns_a_view(hooked):
    from torch.distributed.fsdp import fully_shard

    linear = nn.Linear(4, 4)
    if hooked:
        unit = ModelParallelizer()._fully_shard_module(linear, mesh=_mesh())
    else:
        unit = fully_shard(linear, mesh=_mesh())
    out = unit(torch.ones(2, 3, 4))
    out += 1
    out.sum().backward()
    return unit.weight.grad.full_tensor()


def _mesh():
    from shardwalk.mesh import get_fsdp_dp_mesh

    return get_fsdp_dp_mesh(context().device_mesh)


class EndsInBias(nn.Module):
    """Blocks and root end in a biased linear, on [rows, length, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(2)
        )
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        out = self.head(x)
        out *= 2
        return {"nested": out}


def units_that_end_in_a_bias():
    torch.manual_seed(7)
    model = parallelize_model(EndsInBias(), context())
    model(torch.ones(2, 3, 4))["nested"].square().sum().backward()
    hooks = sum(len(m._forward_hooks) for m in model.modules() if type(m) is nn.Linear)
    return full_gradients(model), hooks


def test_no_unit_returns_a_view_of_a_linear():
    torch.manual_seed(7)
    reference = EndsInBias()
    reference(torch.ones(2, 3, 4))["nested"].square().sum().backward()
    for grads, hooks in run_on_ranks(2, units_that_end_in_a_bias):
        assert hooks == 3
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-5, atol=1e-6)


def test_the_output_of_a_linear_unit_is_no_view():
    with pytest.raises(RankError, match="returned a view tensor"):
        run_on_ranks(2, linear_in_a_unit_returns_a_view, False)
    for grad in run_on_ranks(2, linear_in_a_unit_returns_a_view, True):
        assert torch.equal(grad, torch.full((4, 4), 6.0))


def private_names():
    model = parallelize_model(Decoder(), context())
    state = model.layers[0]._get_fsdp_state()
    (group,) = state._fsdp_param_groups
    param = group.fsdp_params[0]
    before = state._state_ctx.iter_forward_root, group.reduce_grads
    model(ids())
    return before, hasattr(param, "_unsharded_param"), param.unsharded_accumulated_grad


def test_the_private_names_that_the_guards_use_are_where_they_were():
    assert run_on_ranks(1, private_names) == [((None, True), True, None)]
