"""An optimizer built too early says so at its first step."""

import pytest
import torch
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


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_step_on_replaced_parameters_is_an_error(world, optimizer):
    assert run_on_ranks(world, built_too_early, optimizer) == [True] * world


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
