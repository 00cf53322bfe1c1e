"""Parameters that came into a model after parallelize_model are never trained silently."""

import gc
import weakref

import pytest
import torch
from torch import nn
from walk_toys import FULL, Decoder, context, ids

from shardwalk.mesh import DDPConfig, MeshContext
from shardwalk.parallelizer_core import (
    ModelParallelizer,
    materialize,
    parallelize_model,
    stale_optimizers,
)
from shardwalk.parallelizer_core.testing import run_on_ranks


class Adapted(nn.Module):
    """A linear with a trainable pair beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def parallel(model, strategy="fsdp2", replicas=None):
    mesh_context = context(dp_replicate_size=replicas)
    if strategy == "ddp":
        config = DDPConfig(find_unused_parameters=True)
        mesh_context = MeshContext.from_meshes(mesh_context.device_mesh, strategy_config=config)
    return parallelize_model(model, mesh_context)


def inner(model):
    return model.module if hasattr(model, "module") else model


def seeded(make=Decoder):
    torch.manual_seed(7)
    return make()


def refused_at_the_first_step(strategy, replicas, optimizer):
    model = parallel(seeded(), strategy, replicas)
    for layer in inner(model).layers:
        layer.up = Adapted(layer.up)
    late = [p for name, p in model.named_parameters() if ".up.down." in name or ".up.up." in name]
    assert len(late) == 6
    early = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)
    model(ids()).sum().backward()
    before = [parameter.detach().clone() for parameter in late]
    with pytest.raises(ValueError, match="after parallelize_model: .* add adapters") as error:
        early.step()
    with pytest.raises(ValueError, match="after parallelize_model"):
        early.step()
    assert all(map(torch.equal, before, late))
    return str(error.value)


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize(
    ("world", "strategy", "replicas"),
    [(1, "fsdp2", None), (2, "fsdp2", None), (4, "fsdp2", 2), (2, "ddp", None)],
)
def test_adapters_added_too_late_are_refused_by_name(world, strategy, replicas, optimizer):
    """B12: they are in no unit and no bucket, so that each rank would train its own."""
    messages = run_on_ranks(world, refused_at_the_first_step, strategy, replicas, optimizer)
    assert len(set(messages)) == 1
    assert messages[0].startswith("layers.0.up.down.weight, layers.0.up.up.weight, ")
    assert " and 3 more came into the model" in messages[0]


def in_a_later_group(strategy):
    model = parallel(seeded(), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    extra = inner(model).extra = nn.Linear(2, 2)
    optimizer.add_param_group({"params": extra.parameters()})
    with pytest.raises(ValueError, match=r"extra\.weight, extra\.bias came"):
        optimizer.step()
    extra.requires_grad_(False)
    optimizer.step()
    extra.bias.requires_grad_(True)
    with pytest.raises(ValueError, match=r"^extra\.bias came"):
        optimizer.step()


@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
def test_a_group_added_later_and_a_parameter_unfrozen_later_are_checked_too(strategy):
    run_on_ranks(2, in_a_later_group, strategy)


def replaced_under_ddp():
    """`assign=True` puts other parameters in place, which no bucket holds."""
    model = parallel(seeded(), "ddp")
    inner(model).load_state_dict(seeded().state_dict(), assign=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"embed\.weight, layers\.0"):
        optimizer.step()


def test_parameters_that_were_exchanged_under_ddp_are_refused():
    run_on_ranks(2, replaced_under_ddp)


class KeepsOut(ModelParallelizer):
    """Keeps the norm whole, frozen and out of every unit, on purpose."""

    def _apply_fsdp_sharding(self, module, *args, **kwargs):
        kwargs["ignored_multimodal_params"] = set(module.norm.requires_grad_(False).parameters())
        return super()._apply_fsdp_sharding(module, *args, **kwargs)


class WithWholeParts(Decoder):
    """A norm that is kept out, and a scalar that is replicated."""

    parallelizer = KeepsOut()

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, ids):
        return super().forward(ids) * self.scale


def right_uses():
    plain = nn.Linear(2, 2)
    plain_optimizer = torch.optim.AdamW(plain.parameters())
    plain_optimizer.step()

    kept = parallel(seeded(WithWholeParts))
    with torch.device("meta"):
        meta = WithWholeParts()
    meta = parallel(meta)
    materialize(meta, init=lambda name, tensor, generator: nn.init.ones_(tensor))
    ddp = parallel(seeded(), "ddp")
    for model in (kept, meta, ddp):
        optimizer = torch.optim.AdamW([*model.parameters(), *plain.parameters()], foreach=False)
        model(ids()).sum().backward()
        optimizer.step()
    models = (kept, meta, ddp)
    both = torch.optim.SGD([p for model in models for p in model.parameters()], foreach=False)
    both.step()
    plain.more = nn.Linear(2, 2)  # nobody parallelized it
    plain_optimizer.add_param_group({"params": plain.more.parameters()})
    plain_optimizer.step()
    bare = parallelize_model(seeded(), MeshContext())
    bare.more = nn.Linear(2, 2)
    torch.optim.SGD(bare.parameters()).step()


def test_what_is_kept_out_on_purpose_and_models_never_parallelized_are_let_alone():
    run_on_ranks(2, right_uses)


def gathered(policy):
    model = parallelize_model(seeded(), context(mp_policy=policy))
    loss = model(ids()).float().sum()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"gathered copies of .*norm\.weight.*before the forw"):
            early.step()
        loss.backward(retain_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(ids()).float().sum().backward()
    model(ids())  # gathers the root; the optimizer holds the shards
    optimizer.step()


@pytest.mark.parametrize("policy", [FULL, {"param_dtype": "bfloat16"}])
@pytest.mark.parametrize("world", [1, 2])
def test_an_optimizer_built_over_gathered_weights_is_refused(world, policy):
    """B19: between a forward and its backward, parameters() gives what a step cannot reach."""
    run_on_ranks(world, gathered, policy)


def checks_of_three_steps():
    model = parallel(seeded())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls, check = [], stale_optimizers.refuse_late_parameters
    try:
        stale_optimizers.refuse_late_parameters = lambda given: [calls.append(1), check(given)][1]
        for _ in range(3):
            optimizer.step()
    finally:
        stale_optimizers.refuse_late_parameters = check
    references = [weakref.ref(model), weakref.ref(optimizer)]
    del model, optimizer
    gc.collect()
    return len(calls), [reference() for reference in references]


def test_an_optimizer_is_checked_once_and_nothing_is_kept_alive():
    assert run_on_ranks(2, checks_of_three_steps) == [(1, [None, None])] * 2


class SizedLikeItsShard(Adapted):
    """An adapter that takes its width from the stored weight, which is a shard by then."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base)
        rows = base.weight.to_local().shape[0]
        self.up = nn.Linear(2, rows, bias=False)


def failed_forward():
    model = parallel(seeded())
    model.layers[1].up = SizedLikeItsShard(model.layers[1].up)
    with pytest.raises(RuntimeError, match="must match the size") as error:
        model(ids())
    return error.value.__notes__


def test_a_forward_that_fails_on_an_adapter_of_the_shards_width_says_why():
    """B12: the adapter's width has to be the global one."""
    for notes in run_on_ranks(2, failed_forward):
        assert "layers.1.up.down.weight, layers.1.up.up.weight came into the model" in notes[0]
