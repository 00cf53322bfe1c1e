"""An optimizer built too early says so at its first step."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from walk_toys import Decoder, context, ids

from shardwalk.mesh import DDPConfig, MeshContext
from shardwalk.parallelizer_core import materialize, parallelize_model
from shardwalk.parallelizer_core.testing import run_on_ranks


def built_too_early(optimizer):
    model = Decoder()
    early = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)
    model = parallelize_model(model, context())
    model(ids()).sum().backward()
    with pytest.raises(RuntimeError, match=r"built before parallelize_model, .*embed\.weight"):
        early.step()
    late = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)
    before = model.head.weight.full_tensor().clone()
    late.step()
    return bool((model.head.weight.full_tensor() != before).any())


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Adagrad"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_step_on_replaced_parameters_is_an_error(world, optimizer):
    """B19: never a step that changes nothing; Adagrad has state of the old ones from the start."""
    assert run_on_ranks(world, built_too_early, optimizer) == [True] * world


def built_on_meta():
    with torch.device("meta"):
        model = Decoder()
        early = torch.optim.SGD(model.parameters(), lr=0.1)
    parallelize_model(model, context())
    with pytest.raises(RuntimeError, match=r"built before parallelize_model, .*embed\.weight"):
        early.step()


def test_an_optimizer_built_over_meta_parameters_is_an_error_too():
    """B19."""
    run_on_ranks(2, built_on_meta)


def three_steps(model, optimizer, rows):
    with torch.no_grad():
        model(rows)
    step = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)
    for _ in range(3):
        step.zero_grad()
        model(rows).square().mean().backward()
        with torch.no_grad():
            model(rows)
        step.step()
    return {
        name: getattr(parameter, "full_tensor", parameter.clone)().detach()
        for name, parameter in model.named_parameters()
    }


def three_steps_on_ranks(optimizer, strategy, replicas):
    torch.manual_seed(7)
    mesh_context = context(dp_replicate_size=replicas)
    if strategy == "ddp":
        mesh = mesh_context.device_mesh
        mesh_context = MeshContext.from_meshes(mesh, strategy_config=DDPConfig())
    model = parallelize_model(Decoder(), mesh_context)
    rows = ids(8, 5).chunk(dist.get_world_size())[dist.get_rank()]
    return three_steps(model, optimizer, rows)


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Adagrad"])
@pytest.mark.parametrize(
    ("world", "strategy", "replicas"),
    [(1, "fsdp2", None), (2, "fsdp2", None), (4, "fsdp2", 2), (2, "ddp", None)],
)
def test_an_optimizer_built_after_a_forward_without_gradients_trains(
    world, strategy, replicas, optimizer
):
    """B19: the parameters that it gets are the ones training changes, as in one process."""
    torch.manual_seed(7)
    expected = three_steps(Decoder(), optimizer, ids(8, 5))
    for found in run_on_ranks(world, three_steps_on_ranks, optimizer, strategy, replicas):
        for (name, weight), wanted in zip(found.items(), expected.values(), strict=True):
            torch.testing.assert_close(weight, wanted, rtol=1e-4, atol=1e-4, msg=name)


def early_and_right():
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp = MeshContext.from_meshes(context().device_mesh, strategy_config=DDPConfig())
    wrapped = parallelize_model(model, ddp)
    wrapped(ids()).sum().backward()
    optimizer.step()

    with torch.device("meta"):
        model = Decoder()
    model = parallelize_model(model, context())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    materialize(model, init=lambda name, tensor, generator: nn.init.ones_(tensor))
    model(ids()).sum().backward()
    optimizer.step()


def test_an_optimizer_whose_parameters_live_on_steps_as_ever():
    """DDP replaces none, and materialize gives the parameters on meta their values in place."""
    run_on_ranks(2, early_and_right)
