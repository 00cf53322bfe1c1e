"""Ranks that start from different weights are refused, wherever the difference is."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from walk_toys import Decoder, context

from shardwalk.mesh import DistributedSetup, ParallelismSizes
from shardwalk.parallelizer_core import parallelize_model
from shardwalk.parallelizer_core.start_values import check_equal_start
from shardwalk.parallelizer_core.testing import cached, run_on_ranks


class WithBuffer(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.bool))
        self.narrow = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.scalar = nn.Parameter(torch.ones(()))


def starts_with(changed, odd_rank, dp_replicate_size=None):
    torch.manual_seed(7)
    model = WithBuffer()
    if dist.get_rank() == odd_rank:
        tensor = {**dict(model.named_parameters()), **dict(model.named_buffers())}[changed]
        with torch.no_grad():
            tensor.copy_(tensor + 1)
    with pytest.raises(ValueError, match="has other values on ranks") as error:
        parallelize_model(model, context(dp_replicate_size=dp_replicate_size))
    return str(error.value)


@pytest.mark.parametrize("changed", ["steps", "narrow", "scalar", "layers.2.up.weight"])
def test_one_different_tensor_is_named_on_every_rank(changed):
    for message in run_on_ranks(2, starts_with, changed, 1):
        assert message.startswith(f"{changed} has other values on ranks [1] ")


def test_replicas_are_compared_too():
    for message in run_on_ranks(4, starts_with, "head.weight", 2, 2):
        assert message.startswith("head.weight has other values on ranks [2] ")


def tp_mesh(sizes, names):
    return cached(("start_values", sizes), lambda: init_mesh(sizes, names))


def init_mesh(sizes, names):
    parallelism = ParallelismSizes(**dict(zip(names, sizes, strict=True)))
    return DistributedSetup.build("fsdp2", parallelism_sizes=parallelism).mesh_context.device_mesh


def starts_over(sizes, names, changed):
    """The message of this rank, whose tensors are changed as `changed` says, by its rank."""
    torch.manual_seed(7)
    model = WithBuffer()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name in changed.get(dist.get_rank(), ()):
            tensors[name].copy_(tensors[name] + 1)
    mesh = tp_mesh(sizes, names)
    try:
        check_equal_start(model, mesh)
    except ValueError as error:
        return str(error)
    return None


TP4 = ((4,), ("tp_size",))
DP2_TP2 = ((2, 2), ("dp_size", "tp_size"))


def test_tensor_parallel_peers_are_compared_too():
    """Each cuts its part from its own copy."""
    for message in run_on_ranks(4, starts_over, *TP4, {2: ["narrow"]}):
        assert message.startswith("narrow has other values on tp ranks [2] than on tp ")
    assert run_on_ranks(4, starts_over, *TP4, {}) == [None] * 4
    assert run_on_ranks(4, starts_over, *DP2_TP2, {}) == [None] * 4


@pytest.mark.parametrize(
    ("changed", "start"),
    [
        # One odd rank: its data-parallel group sees it first, the other group hears of it.
        (
            {3: ["head.weight"]},
            "head.weight has other values on ranks [3] than on rank 1 ",
        ),
        (
            {2: ["head.weight"]},
            "head.weight has other values on ranks [2] than on rank 0 ",
        ),
        # Both data-parallel groups have something of their own to say.
        (
            {2: ["steps"], 1: ["norm.bias"]},
            "steps has other values on ranks [2] than on rank 0 ",
        ),
        # Data-parallel peers agree, tensor-parallel ones do not.
        (
            {1: ["narrow"], 3: ["narrow"]},
            "narrow has other values on tp ranks [1] than on tp rank 0 ",
        ),
    ],
)
def test_every_rank_raises_the_same_wherever_the_difference_is(changed, start):
    messages = run_on_ranks(4, starts_over, *DP2_TP2, changed)
    assert len(set(messages)) == 1
    assert messages[0].startswith(start)


def start_of_one_rank(change):
    torch.manual_seed(7)
    model = Decoder()
    if dist.get_rank() == 1:
        with torch.no_grad():
            change(model)
    with pytest.raises(ValueError, match=r"embed\.weight has other values") as error:
        parallelize_model(model, context())
    return str(error.value)


def roll(model):
    model.embed.weight.copy_(model.embed.weight.roll(1, 0))


def swap(model):
    model.embed.weight[0, :2] = model.embed.weight[0, :2].flip(0)


def freeze(model):
    model.embed.weight.requires_grad_(False)


@pytest.mark.parametrize("change", [roll, swap, freeze])
def test_the_same_values_in_another_order_and_another_trainability_are_seen(change):
    assert len(set(run_on_ranks(2, start_of_one_rank, change))) == 1


def seeds_differ():
    torch.manual_seed(dist.get_rank())
    with pytest.raises(ValueError, match=r"embed.weight .* materialize"):
        parallelize_model(Decoder(), context())
    with torch.device("meta"):
        model = Decoder()
    parallelize_model(model, context())


def test_seeds_that_differ_are_seen_at_once_and_meta_models_have_no_values_yet():
    run_on_ranks(2, seeds_differ)
