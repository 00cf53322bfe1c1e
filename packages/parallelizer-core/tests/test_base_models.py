"""A wrapper that names its base model is parallelized through it."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from walk_toys import Decoder, context, full_gradients, ids, unit_names

from shardwalk.mesh import DDPConfig, MeshContext
from shardwalk.parallelizer_core import (
    ModelParallelizer,
    check_unit_order,
    get_model_parallelizer,
    parallelize_model,
    register_parallelizer,
    sync_gradients_on_last,
)
from shardwalk.parallelizer_core.model_parallelizer import _registered
from shardwalk.parallelizer_core.parallel_state import mesh_context_of
from shardwalk.parallelizer_core.testing import run_on_ranks


class Inner(nn.Module):
    """What stands between a wrapper and its base, and passes calls on."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args):
        return self.model(*args)


class Wrapper(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.inner = Inner(base)

    def get_base_model(self) -> nn.Module:
        return self.inner.model

    def forward(self, *args):
        return self.inner(*args)


class Prompted(Wrapper):
    """A wrapper with parameters of its own."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__(base)
        self.prompt = nn.Parameter(torch.ones(13))

    def forward(self, *args):
        return super().forward(*args) * self.prompt


class Marking(ModelParallelizer):
    """A sidecar that needs the structure of its model."""

    def parallelize(self, model, mesh_context, /):
        assert len(model.layers) == 3
        model.marked = True
        return super().parallelize(model, mesh_context)


class Marked(Decoder):
    parallelizer = Marking()


@pytest.fixture(autouse=True)
def fresh_registry() -> Iterator[None]:
    before = dict(_registered)
    yield
    _registered.clear()
    _registered.update(before)


def test_the_sidecar_of_the_base_model_is_found_unless_the_wrapper_has_one() -> None:
    assert get_model_parallelizer(Wrapper(Marked())) is Marked.parallelizer
    own = ModelParallelizer()
    register_parallelizer(Wrapper, own)
    assert get_model_parallelizer(Wrapper(Marked())) is own


def wrapped(make, base, **kwargs):
    torch.manual_seed(7)
    return parallelize_model(make(base()), context(**kwargs))


def through_the_base(replicas):
    model = wrapped(Wrapper, Marked, dp_replicate_size=replicas)
    base = model.get_base_model()
    assert type(model) is Wrapper
    assert base.marked
    assert isinstance(base, FSDPModule)
    assert mesh_context_of(model) is mesh_context_of(base) is not None
    with torch.no_grad():
        direct, outer = base(ids()), model(ids())
    rows = ids(8, 5).chunk(dist.get_world_size())[dist.get_rank()]
    for micro_batch in sync_gradients_on_last(model, rows.chunk(2)):
        (model(micro_batch).square().sum() / 8 * dist.get_world_size()).backward()
    return unit_names(model), torch.equal(direct, outer), full_gradients(model)


@pytest.mark.parametrize(("world", "replicas"), [(1, None), (2, None), (4, 2)])
def test_the_base_model_is_the_root_and_can_be_called_directly(world, replicas):
    torch.manual_seed(7)
    reference = Wrapper(Marked())
    (reference(ids(8, 5)).square().sum() / 8).backward()
    for names, equal, gradients in run_on_ranks(world, through_the_base, replicas):
        assert equal
        assert names[0] == "inner.model"
        assert "inner.model.layers.2" in names
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-6)


def own_parameters():
    model = wrapped(Prompted, Decoder)
    assert isinstance(model, FSDPModule)
    model(ids()).sum().backward()
    with pytest.raises(ValueError, match=r"Prompted holds prompt .*sidecar .*Marked.*register"):
        wrapped(Prompted, Marked)
    return unit_names(model)


def test_a_wrapper_with_parameters_of_its_own_is_the_root_and_drops_no_sidecar():
    assert run_on_ranks(2, own_parameters)[0][0] == ""


class Replacing(ModelParallelizer):
    def parallelize(self, model, mesh_context, /):
        return Inner(model)


class Replaced(Decoder):
    parallelizer = Replacing()


def test_a_sidecar_that_returns_another_module_inside_a_wrapper_is_an_error():
    with pytest.raises(TypeError, match="Replaced returned another module"):
        parallelize_model(Wrapper(Replaced()), MeshContext())


def ddp_and_unit_order():
    model = Wrapper(Decoder())
    mesh = context().device_mesh
    ddp = parallelize_model(model, MeshContext.from_meshes(mesh, strategy_config=DDPConfig()))
    assert ddp.module is model
    model = wrapped(Wrapper, Decoder)
    with check_unit_order(model):
        model(ids())


def test_ddp_goes_around_the_wrapper_and_the_debug_mode_works():
    run_on_ranks(2, ddp_and_unit_order)
