"""DDP: the wrapper's keys, its options, and the models it refuses."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from walk_toys import Decoder, context, ids

from shardwalk.mesh import DDPConfig, MeshContext
from shardwalk.parallelizer_core import describe_units, parallelize_model
from shardwalk.parallelizer_core.testing import run_on_ranks


def ddp_context(**options):
    return MeshContext.from_meshes(context().device_mesh, strategy_config=DDPConfig(**options))


def keys_and_reload():
    torch.manual_seed(7)
    model = parallelize_model(Decoder(tied=True), ddp_context())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    plain = Decoder(tied=True)
    plain.load_state_dict(state, strict=True)
    torch.manual_seed(8)
    model.load_state_dict(Decoder(tied=True).state_dict(), strict=True)
    changed = not torch.equal(model.module.norm.weight, state["norm.weight"] + 1)
    torch.manual_seed(8)
    same = torch.equal(model.module.embed.weight, Decoder(tied=True).embed.weight)
    return isinstance(model, DistributedDataParallel), list(state), changed and same


def test_the_wrapper_saves_and_loads_the_keys_of_the_model():
    for wrapped, keys, reloaded in run_on_ranks(2, keys_and_reload):
        assert wrapped
        assert keys == list(Decoder(tied=True).state_dict())
        assert reloaded


def options_reach_torch():
    model = parallelize_model(
        Decoder(),
        ddp_context(
            broadcast_buffers=True,
            find_unused_parameters=True,
            gradient_as_bucket_view=True,
            bucket_cap_mb=3,
        ),
    )
    return (
        model.broadcast_buffers,
        model.find_unused_parameters,
        model.gradient_as_bucket_view,
        model.bucket_bytes_cap,
    )


def test_every_option_reaches_the_wrapper():
    assert run_on_ranks(2, options_reach_torch)[0] == (True, True, True, 3 * 1024**2)


def static():
    model = parallelize_model(Decoder(), ddp_context(static_graph=True))
    return model.static_graph


def test_static_graph_reaches_the_wrapper():
    assert run_on_ranks(2, static) == [True, True]


def replicas_start_equal():
    torch.manual_seed(torch.distributed.get_rank())
    model = parallelize_model(Decoder(), ddp_context())
    model(ids()).sum().backward()
    return model.module.head.weight.detach().clone(), describe_units(model)[0]


def test_replicas_start_from_the_first_ranks_weights():
    (first, unit), (second, _) = run_on_ranks(2, replicas_start_equal)
    assert torch.equal(first, second)
    assert (unit.mesh, unit.bytes_per_rank) == ("", unit.parameters * 4)


def refused(make):
    with pytest.raises(ValueError, match=r"strategy='ddp'") as error:
        parallelize_model(make(), ddp_context())
    return str(error.value)


def on_meta():
    with torch.device("meta"):
        return Decoder()


def frozen():
    return Decoder().requires_grad_(False)


@pytest.mark.parametrize(("make", "why"), [(on_meta, "materialize"), (frozen, "trainable")])
def test_models_that_ddp_cannot_wrap_are_refused(make, why):
    assert all(why in message for message in run_on_ranks(2, refused, make))
