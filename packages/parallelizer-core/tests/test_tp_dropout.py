"""Dropout under tensor parallelism: which masks are equal, and that nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import tp_dropping as toys
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, SequenceParallel

from shardwalk.mesh import (
    DistributedSetup,
    FSDP2Config,
    MeshContext,
    ParallelismSizes,
    seed_everything,
)
from shardwalk.parallelizer_core import parallelize_model
from shardwalk.parallelizer_core.random_state import random_state, set_random_state
from shardwalk.parallelizer_core.tensor_parallel import (
    ColumnParallel,
    LocalCounts,
    RowParallel,
    SplitInput,
    SumOutput,
    WholeInput,
)
from shardwalk.parallelizer_core.tensor_parallel.parallelize import plan_tensors
from shardwalk.parallelizer_core.testing import cached, run_on_ranks

SEQUENCES = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "split"])


def context(sequence_parallel: bool = False, **options: Any) -> MeshContext:
    def make() -> Any:
        config = FSDP2Config(mp_policy={"param_dtype": None})
        return DistributedSetup.build(config, parallelism_sizes=ParallelismSizes(tp_size=2))

    mesh = cached("dropout, tp 2", make).mesh_context.device_mesh
    options = {"mp_policy": {"param_dtype": None, "reduce_dtype": None}, **options}
    checkpointing = options.pop("activation_checkpointing", False)
    config = FSDP2Config(sequence_parallel=sequence_parallel, **options)
    return MeshContext.from_meshes(
        mesh, strategy_config=config, activation_checkpointing=checkpointing
    )


def parallel(sequence_parallel: bool = False, **options: Any) -> tuple[nn.Module, MeshContext]:
    found = context(sequence_parallel, **options)
    return parallelize_model(toys.made(), found), found


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        grad = parameter.grad
        found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()
    return found


def gathered(value: Any, group: Any = None) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def with_the_masks_of_ranks(sequence_parallel: bool) -> None:
    model, mesh_context = parallel(sequence_parallel)
    seed_everything(mesh_context, 11)
    toys.taken()
    loss = toys.loss_of(model, toys.rows())
    loss.backward()
    own = toys.taken()
    ranks = gathered(own)
    states = gathered(torch.get_rng_state())
    assert torch.equal(states[0], states[1])
    masks = {
        name: [
            toys.whole_mask(name, [r[name][i] for r in ranks], sequence_parallel=sequence_parallel)
            for i in range(len(own[name]))
        ]
        for name in own
    }
    assert len(masks) == 9
    kept = torch.cat([mask.flatten() for found in masks.values() for mask in found])
    assert abs(kept.mean().item() - (1 - toys.SHARE)) < 0.03
    reference = toys.made()
    toys.Dropout.given.update(masks)
    try:
        expected = toys.loss_of(reference, toys.rows())
    finally:
        toys.Dropout.given.clear()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    wanted = gradients(reference)
    for name, found in gradients(model).items():
        torch.testing.assert_close(found, wanted[name], rtol=1e-4, atol=1e-6)


@SEQUENCES
def test_training_is_that_of_one_process_with_the_masks_of_all_ranks(
    sequence_parallel: bool,
) -> None:
    """Whole activations have one mask on all ranks, and parts a mask of their own on each."""
    run_on_ranks(2, with_the_masks_of_ranks, sequence_parallel)


def one_step(mode: Any, sequence_parallel: bool) -> tuple[Tensor, dict[str, Tensor]]:
    model, mesh_context = parallel(sequence_parallel, activation_checkpointing=mode)
    seed_everything(mesh_context, 5)
    loss = toys.loss_of(model, toys.rows())
    loss.backward()
    return loss.detach(), gradients(model)


def recomputed(sequence_parallel: bool) -> None:
    loss, grads = one_step(False, sequence_parallel)
    for mode in ("full", "selective"):
        other, others = one_step(mode, sequence_parallel)
        assert torch.equal(loss, other), mode
        for name, grad in grads.items():
            assert torch.equal(grad, others[name]), (mode, name)


@SEQUENCES
def test_a_recompute_drops_what_its_forward_dropped(sequence_parallel: bool) -> None:
    run_on_ranks(2, recomputed, sequence_parallel)


def repeated() -> None:
    model, mesh_context = parallel()
    group = mesh_context.device_mesh["tp"].get_group()

    def masks() -> dict[str, list[Tensor]]:
        toys.taken()
        toys.loss_of(model, toys.rows()).backward()
        return toys.taken()

    seed_everything(mesh_context, 5)
    first = masks()
    state = random_state()
    second = masks()
    set_random_state(state)
    again = masks()
    for name in first:
        assert not torch.equal(first[name][0], second[name][0]), name
        assert torch.equal(second[name][0], again[name][0]), name
    # Peers draw on alike, and data ranks apart.
    states = gathered(torch.get_rng_state())
    peers = gathered(torch.get_rng_state(), group)
    assert torch.equal(peers[0], peers[1])
    assert not torch.equal(states[0], states[2])
    every = gathered(first["0.residual"][0])
    assert not torch.equal(every[0], every[2])
    # A forward in evaluation drops nothing and draws nothing.
    model.eval()
    before = torch.get_rng_state()
    with torch.no_grad():
        found = model(toys.rows())
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(found, toys.made().eval()(toys.rows()))


def test_masks_follow_from_the_seed_and_from_a_saved_state() -> None:
    run_on_ranks(4, repeated)


def unlike() -> None:
    model, mesh_context = parallel()
    torch.manual_seed(dist.get_rank())
    with pytest.raises(ValueError, match=r"tp ranks \[1\] would draw other .*seed_everything"):
        model(toys.rows())
    model, mesh_context = parallel()
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        model.eval()(toys.rows())
    seed_everything(mesh_context, 1)
    model.train()(toys.rows())


def test_peers_that_were_seeded_apart_are_refused() -> None:
    run_on_ranks(2, unlike)


def interrupted() -> None:
    """An error between two cuts leaves the generators where all ranks agree."""
    model: Any
    model, mesh_context = parallel()
    seed_everything(mesh_context, 1)
    mlp = model.layers[1].mlp
    handle = mlp.inner.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(toys.rows())
    handle.remove()
    states = gathered(torch.get_rng_state())
    assert torch.equal(states[0], states[1])
    toys.taken()
    model(toys.rows())
    ranks = gathered(toys.taken()["0.residual"][0])
    assert torch.equal(ranks[0], ranks[1])


def test_an_error_inside_a_layer_leaves_equal_numbers() -> None:
    run_on_ranks(2, interrupted)


class Nested(toys.FeedForward):
    """A feed-forward layer that runs an attention, before or after it has narrowed its features."""

    def __init__(self, *, early: bool) -> None:
        super().__init__("x")
        self.attention, self.early = toys.Attention("y"), early

    def forward(self, x: Tensor) -> Tensor:
        widened = self.up_proj(x)
        if self.early:
            x = self.attention(x)
        narrowed: Tensor = self.down_proj(self.inner(widened))
        return narrowed + (x if self.early else self.attention(x))


def interleaved() -> None:
    attention = {f"{name}_proj": ColumnParallel() for name in "qkv"} | {"o_proj": RowParallel()}
    plan: dict[str, Any] = {
        f"layers.*.{place}.{name}": style
        for place in ("attention", "mlp.attention")
        for name, style in attention.items()
    }
    plan |= {f"layers.*.{p}": LocalCounts(names=("heads",)) for p in ("attention", "mlp.attention")}
    plan |= {"layers.*.mlp.up_proj": ColumnParallel(), "layers.*.mlp.down_proj": RowParallel()}
    found = context(tp_plan=plan)
    for early in (False, True):
        model: Any = toys.made()
        for layer in model.layers:
            layer.mlp = Nested(early=early)
        model = parallelize_model(model, found)
        seed_everything(found, 1)
        if not early:
            model(toys.rows())
            continue
        with pytest.raises(ValueError, match=r"mlp\.attention splits features before another"):
            model(toys.rows())


def test_layers_that_run_interleaved_are_refused_as_they_run() -> None:
    run_on_ranks(2, interleaved)


PLAIN: dict[str, Any] = {
    "layers.*.mlp.up_proj": ColumnParallel(),
    "layers.*.mlp.down_proj": RowParallel(),
}


class Unknown(ParallelStyle):
    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        raise AssertionError


def changed(**children: Any) -> nn.Module:
    model = toys.made()
    for name, child in children.items():
        setattr(model.layers[0], name, child)
    return model


class Late(toys.Attention):
    def forward(self, hidden_states: Tensor) -> Tensor:
        out: Tensor = self.o_proj(self.v_proj(hidden_states))
        return nn.functional.dropout(out, self.attention_dropout, self.training)


WHOLE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, PLAIN | {"head": Unknown()}, "p=0.25 of drop: Unknown at head may split what they see"),
    ({}, PLAIN | {"layers.0.attention": SumOutput()}, "attention_dropout=0.25 of layers.0.attent"),
    ({}, PLAIN | {"layers.0.residual": Unknown()}, "Unknown at layers.0.residual"),
    (
        {"tail": nn.Dropout1d(0.5)},
        PLAIN | {"layers.0.tail": SplitInput()},
        "p=0.5 of layers.0.tail",
    ),
]
OTHERS: dict[str, Any] = dict.fromkeys(["embed", "layers.*", "head"], WholeInput())
SPLIT: list[tuple[dict[str, Any], Any, str]] = [
    ({"hidden_dropout": 0.1}, None, "hidden_dropout=0.1 of layers.0: sequence_parallel=True"),
    ({"tail": nn.Dropout2d(0.5)}, None, "p=0.5 of layers.0.tail: sequence_parallel=True"),
    ({"attention": Late("0")}, None, "attention_dropout=0.25 of layers.0.attention: sequence"),
    ({}, OTHERS | {"norm": SequenceParallel()}, "the plan splits sequences by torch's own"),
]


@pytest.mark.parametrize(
    ("children", "plan", "named", "sequence_parallel"),
    [*((*row, False) for row in WHOLE), *((*row, True) for row in SPLIT)],
)
def test_dropout_that_cannot_be_known_is_refused_by_name(
    children: dict[str, Any], plan: Any, named: str, sequence_parallel: bool
) -> None:
    options = {"requested": plan, "sequence_parallel": sequence_parallel, "sidecar": None}
    with pytest.raises(ValueError, match=f"tp_size=2 with .*{named}.*set it to 0, or use tp_siz"):
        plan_tensors(changed(**children), 2, **options)


@pytest.mark.parametrize(
    "child",
    [
        nn.Sequential(nn.Dropout(0.1)),
        nn.MultiheadAttention(4, 2, dropout=0.5),
        0.1,
    ],
)
def test_dropout_of_any_kind_passes_where_activations_are_whole(child: Any) -> None:
    options = {"requested": PLAIN, "sequence_parallel": False, "sidecar": None}
    assert plan_tensors(changed(path_drop=child), 2, **options)
