"""DDP: the wrapper's keys, its options, and the models it refuses."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from walk_toys import Block, Decoder, context, full_gradients, ids

from shardwalk.mesh import DDPConfig, DistributedSetup, MeshContext, ParallelismSizes
from shardwalk.parallelizer_core import (
    describe_units,
    parallelize_model,
    sync_gradients_on_last,
)
from shardwalk.parallelizer_core.testing import cached, run_on_ranks


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


def reductions(bucket_cap_mb):
    """How many buckets a backward reduces, once torch has seen the order of the gradients."""
    model = parallelize_model(Decoder(), ddp_context(bucket_cap_mb=bucket_cap_mb))
    sizes = []

    def count(state, bucket):
        sizes.append(bucket.buffer().numel())
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(None, count)
    for _ in range(2):
        sizes.clear()
        model(ids()).sum().backward()
    return len(sizes)


def test_the_size_of_buckets_decides_how_many_are_reduced():
    assert run_on_ranks(2, reductions, None) == [1, 1]
    assert run_on_ranks(2, reductions, 0.0005)[0] > 3


class Counting(Decoder):
    """Counts its forwards in a buffer, as running statistics would."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, rows):
        return super().forward(rows) + 0 * self.seen


def buffers_of_ranks(synchronized):
    model = parallelize_model(Counting(), ddp_context(broadcast_buffers=synchronized))
    model.module.seen.fill_(torch.distributed.get_rank() + 1.0)
    model(ids()).sum().backward()
    return model.module.seen.item()


def test_buffers_are_those_of_the_first_rank_where_they_are_broadcast():
    assert run_on_ranks(2, buffers_of_ranks, True) == [1.0, 1.0]
    assert run_on_ranks(2, buffers_of_ranks, False) == [1.0, 2.0]


def views_of_buckets(view):
    model = parallelize_model(Decoder(), ddp_context(gradient_as_bucket_view=view))
    for _ in range(2):
        model(ids()).sum().backward()
    gradients = [p.grad for p in model.parameters()]
    return len({gradient.untyped_storage().data_ptr() for gradient in gradients}) < len(gradients)


def test_gradients_share_the_storage_of_their_bucket_as_views_of_it():
    assert run_on_ranks(2, views_of_buckets, True) == [True, True]
    assert run_on_ranks(2, views_of_buckets, False) == [False, False]


class Towers(nn.Module):
    """Tied tables, blocks, a frozen block, and a block that a micro-batch may leave out."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.vision_tower = nn.ModuleList([Block()]).requires_grad_(False)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, rows, whole):
        x = self.layers[0](self.vision_tower[0](self.embed(rows)))
        return self.head(self.layers[1](x) if whole else x)


def towers():
    torch.manual_seed(3)
    return Towers()


def accumulated(model, rank, ranks):
    """Two steps of two micro-batches; the last of the first step leaves a block out."""
    found = []
    for uses in ([True, False], [True, True]):
        rows = [(ids(4, 5).roll(n).chunk(ranks)[rank], use) for n, use in enumerate(uses)]
        for batch, whole in sync_gradients_on_last(model, rows):
            (model(batch, whole).logsumexp(-1).mean() / 2).backward()
        found.append(full_gradients(getattr(model, "module", model)))
        model.zero_grad()
    return found


def checkpointed(mode):
    options = {"find_unused_parameters": True, "activation_checkpointing": mode}
    model = parallelize_model(towers(), ddp_context(**options))
    return accumulated(model, torch.distributed.get_rank(), 2)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_b59_checkpointing_with_tied_frozen_and_unused_parts(mode):
    expected = accumulated(towers(), 0, 1)
    for found in run_on_ranks(2, checkpointed, mode):
        for step, wanted in zip(found, expected, strict=True):
            for name, gradient in wanted.items():
                if gradient is None:
                    assert step[name] is None, name
                else:
                    assert (step[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name


def split_over_tp():
    mesh = cached("ddp tp", lambda: init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    model = Decoder()
    parallelize_module(model.layers[0], mesh, {"up": ColwiseParallel()})
    with pytest.raises(ValueError, match=r"layers\.0\.up\.weight is a DTensor over tp.*tp_size"):
        parallelize_model(model, ddp_context())
    with pytest.raises(ValueError, match="tp_size=2 is not supported by DDPConfig"):
        DistributedSetup.build("ddp", ParallelismSizes(tp_size=2))


def test_b59_split_parameters_are_refused_by_the_size_that_splits_them():
    run_on_ranks(2, split_over_tp)


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
