"""Hidden states that a block does not leave as they were split over the sequence."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import tp_toys as toys
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from shardwalk.mesh import DistributedSetup, FSDP2Config, ParallelismSizes
from shardwalk.parallelizer_core import parallelize_model
from shardwalk.parallelizer_core.tensor_parallel import RowParallel, SequenceBoundary
from shardwalk.parallelizer_core.tensor_parallel.apply import apply_plan
from shardwalk.parallelizer_core.tensor_parallel.parallelize import plan_tensors
from shardwalk.parallelizer_core.testing import cached, run_on_ranks


def mesh_of_all():
    world = dist.get_world_size()
    return cached(("tp", world), lambda: init_device_mesh("cpu", (world,)))


def sequence_plan(model, requested=None):
    return plan_tensors(model, 2, requested=requested, sequence_parallel=True, sidecar=None)


class Flattening(toys.Block):
    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        flat = x.reshape(-1, toys.WIDTH)
        return (flat + self.mlp(self.norm2(flat))).view(x.shape)


class FlatRow(toys.Gated):
    def forward(self, x):
        return self.down_proj((self.gate_proj(x) * self.up_proj(x)).flatten(0, 1)).view(x.shape)


class FlatMlp(toys.Block):
    def __init__(self):
        super().__init__(mlp=FlatRow)


class OverTheLength(toys.Block):
    def forward(self, x):
        x = x.softmax(1) + self.attention(self.norm1(x)).softmax(1)
        return x + self.mlp(self.norm2(x.flip(1)))


class FlatStack(toys.Decoder):
    def forward(self, ids):
        x = self.embed(ids).flatten(0, 1)
        for layer in self.layers:
            x = layer(x)
        return x


def refusal(model_class, block, length):
    torch.manual_seed(0)
    model = model_class(block)
    apply_plan(model, mesh_of_all(), sequence_plan(model))
    with pytest.raises(ValueError) as caught:
        model(torch.arange(2 * length).view(2, length))
    return str(caught.value)


@pytest.mark.parametrize("length", [8, 7])
@pytest.mark.parametrize(
    ("model", "block", "named"),
    [
        (toys.Decoder, Flattening, "layers.0.norm2 gets a tensor of"),
        (toys.Decoder, FlatMlp, "layers.0.mlp.down_proj gets a tensor of"),
        (toys.Decoder, OverTheLength, "layers.0.norm2 gets a tensor of"),
        (FlatStack, toys.Block, "layers.0 gets a tensor of"),
    ],
)
def test_a_block_that_moves_tokens_is_an_error_on_every_rank(model, block, named, length):
    """Ranks would exchange parts of other sizes than they wait for, and abort."""
    for message in run_on_ranks(2, refusal, model, block, length):
        assert named in message
        assert message.startswith("sequence_parallel=True splits hidden states of")
        assert message.endswith("use sequence_parallel=False")


def with_order(*order):
    model = toys.Decoder(blocks=3)
    blocks = dict(zip("abc", model.layers, strict=True))
    model.layers = nn.ModuleList([blocks[name] for name in order])
    return model


@pytest.mark.parametrize(
    ("order", "twice"),
    [("aba", "2 is layers.0"), ("abca", "3 is layers.0"), ("aab", "1 is layers.0"),
     ("abb", "2 is layers.1"), ("abba", "2 is layers.1"), ("abbca", "4 is layers.0")],
)  # fmt: skip
def test_an_end_of_the_stack_that_stands_elsewhere_too_is_refused(order, twice):
    model = toys.meta(with_order, *order)
    with pytest.raises(ValueError, match=f"sequence_parallel=True: layers.{twice} again"):
        sequence_plan(model)


def test_boundaries_of_an_explicit_plan_are_held_against_the_order_too():
    ends = {"layers.0": SequenceBoundary(enter=True), "layers.1": SequenceBoundary(leave=True)}
    with pytest.raises(ValueError, match="layers.2 is layers.0 again"):
        sequence_plan(toys.meta(with_order, *"aba"), ends)


def step_in_order(order):
    torch.manual_seed(0)
    model, ids = with_order(*order), torch.arange(14).view(2, 7)
    results = []
    for parallel in (False, True):
        if parallel:
            model.zero_grad()
            apply_plan(model, mesh_of_all(), sequence_plan(model))
        model(ids).logsumexp(-1).square().sum().backward()
        grads = [p.grad for p in model.parameters()]
        results.append([g.full_tensor() if isinstance(g, DTensor) else g.clone() for g in grads])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("order", ["abab", "abbc", "aaaa"])
def test_repeated_blocks_whose_ends_come_in_pairs_have_the_numbers_of_one_process(order):
    run_on_ranks(2, step_in_order, order)


def step_without_tokens(shape):
    torch.manual_seed(0)
    model = toys.Decoder(toys.FlatBlock)
    expected = model(torch.arange(14).view(2, 7))
    context = cached(("tp setup", 2), lambda: DistributedSetup.build(
        FSDP2Config(sequence_parallel=True, mp_policy={"param_dtype": None, "reduce_dtype": None}),
        ParallelismSizes(tp_size=2),
    ).mesh_context)  # fmt: skip
    model = parallelize_model(model, context)
    empty = model(torch.zeros(shape, dtype=torch.int64))
    assert empty.shape == (*shape, toys.WORDS)
    empty.sum().backward()
    assert not any(p.grad.full_tensor().any() for p in model.parameters())
    torch.testing.assert_close(model(torch.arange(14).view(2, 7)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (0, 0)])
def test_a_batch_without_tokens_leaves_zero_gradients(shape):
    """torch takes no view of a tensor that is split along a dimension of no length."""
    run_on_ranks(2, step_without_tokens, shape)


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x)


def split_twice():
    mesh, model = mesh_of_all(), Rows()
    apply_plan(model, mesh, {"layer": (RowParallel(sequence_parallel=True),)})
    split = model(torch.ones(2, 3, 4 // mesh.size()))
    outer = nn.Sequential(Rows())
    apply_plan(outer, mesh, {"0": (SequenceBoundary(enter=True),)})
    for module, given in ((outer, split), (model, split)):
        with pytest.raises(ValueError, match=r"(0|layer) gets a tensor of \(2, 3, 4\) placed as"):
            module(given)


def test_what_is_split_already_is_not_split_again():
    run_on_ranks(2, split_twice)


class NormInside(toys.Attention):
    def __init__(self):
        super().__init__(qk_norm=True)
        self.norm = nn.RMSNorm(toys.WIDTH)

    def forward(self, hidden_states):
        return super().forward(self.norm(hidden_states))


def asking(path, value):
    model = toys.meta(toys.Decoder, lambda: toys.Block(attention=NormInside))
    model.get_submodule(path).tp_gradient_reduction = value
    return model


@pytest.mark.parametrize("value", ["none", "mean"])
@pytest.mark.parametrize("path", ["layers.1.norm2", "layers.0.attention.norm"])
def test_a_module_on_split_hidden_states_cannot_be_taken_for_one_with_whole_input(path, value):
    """The first forward failed in a product of whole and split tensors."""
    match = f"tp_gradient_reduction='{value}' of {path} takes .*sequence_parallel=True its hidden "
    given = sequence_plan(asking(path, "sum"))
    for requested in (None, given):
        with pytest.raises(ValueError, match=match):
            sequence_plan(asking(path, value), requested)
        assert sequence_plan(asking(path, "sum"), requested)[path] == given[path]
    whole = plan_tensors(
        asking(path, value), 2, requested=None, sequence_parallel=False, sidecar=None
    )
    assert path in whole


@pytest.mark.parametrize("path", ["norm", "layers.0.attention.q_norm"])
def test_a_module_outside_the_split_sequence_may_ask_for_any_reduction(path):
    assert path in sequence_plan(asking(path, "mean"))
