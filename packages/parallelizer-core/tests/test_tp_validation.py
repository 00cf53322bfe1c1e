"""What tensor parallelism refuses before anything moves: sizes, ties, silent gaps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import tp_toys as toys
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from shardwalk.parallelizer_core.tensor_parallel import (
    ColumnParallel,
    LocalCounts,
    RowParallel,
    SequenceBoundary,
    SharedInput,
    SplitInput,
    VocabularyParallel,
    WholeInput,
)
from shardwalk.parallelizer_core.tensor_parallel.apply import apply_plan
from shardwalk.parallelizer_core.tensor_parallel.coverage import check_uncovered
from shardwalk.parallelizer_core.tensor_parallel.cuts import predicted_cut, predicted_cuts
from shardwalk.parallelizer_core.tensor_parallel.plans import resolve_plan
from shardwalk.parallelizer_core.tensor_parallel.structure import structural_plan
from shardwalk.parallelizer_core.tensor_parallel.validation import (
    validate_tp_sizes,
)
from shardwalk.parallelizer_core.testing import cached, run_on_ranks

COLUMN, ROW, COLWISE, ROWWISE = (
    ColumnParallel(),
    RowParallel(),
    ColwiseParallel(),
    RowwiseParallel(),
)
ATTENTION = {"layers.*.attention.[qkv]_proj": COLUMN, "layers.*.attention.o_proj": ROW}
MLP = {"layers.*.mlp.[gu]*_proj": COLUMN, "layers.*.mlp.down_proj": ROW}


class Custom(ParallelStyle):
    def _apply(self, module, device_mesh):
        return module


def decoder(block=toys.Block, /, **kwargs):
    return toys.meta(toys.Decoder, block, **kwargs)


def with_heads(heads, kv):
    return decoder(lambda: changed(attention=toys.Attention(heads=heads, kv=kv)))


def changed(**children):
    block = toys.Block()
    for name, child in children.items():
        setattr(block, name, child)
    return block


def validate(model, patterns, tp_size=2):
    validate_tp_sizes(model, tp_size, resolve_plan(model, tp_size, patterns, False))


def uncovered(model, patterns):
    return check_uncovered(model, resolve_plan(model, 2, patterns, False))


HEADS = [
    (4, 2, 4, "num_key_value_heads=2", "1 or 2"),
    (6, 3, 2, "num_key_value_heads=3", "1 or 3"),
    (4, 1, 2, "num_key_value_heads=1", "1"),
    (6, 2, 4, "num_attention_heads=6 and num_key_value_heads=2", "1 or 2"),
    (2, 2, 8, "num_attention_heads=2 and num_key_value_heads=2", "1 or 2"),
]


@pytest.mark.parametrize(("heads", "kv", "tp_size", "named", "fits"), HEADS)
def test_heads_that_tp_does_not_divide_are_refused(heads, kv, tp_size, named, fits):
    """B57: the size passes set-up and dies in a reshape of the first forward."""
    model = with_heads(heads, kv)
    match = f"tp_size={tp_size} does not divide {named} of layers.0.attention; use tp_size={fits}$"
    with pytest.raises(ValueError, match=match):
        validate_tp_sizes(model, tp_size, structural_plan(model, tp_size, False))
    with pytest.raises(ValueError, match=match):
        validate(model, ATTENTION, tp_size)
    with pytest.raises(ValueError, match=match):
        validate(
            model,
            {"layers.*.attention.o_proj": ROWWISE, "layers.*.attention.q_proj": COLWISE},
            tp_size,
        )
    validate(model, {"norm": WholeInput()}, tp_size)


def test_heads_that_tp_divides_pass_and_uncut_attention_is_no_concern():
    validate(with_heads(4, 2), ATTENTION)
    validate(with_heads(4, 1), MLP)


class Strange(nn.Module):
    """Projections under names that no table knows: the config says what they hold."""

    def __init__(self, heads, kv):
        super().__init__()
        self.queries, self.keys = nn.Linear(12, heads * 4), nn.Linear(12, kv * 4)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("heads", "kv", "tp_size", "named", "fits"), HEADS)
def test_projections_of_unknown_names_are_held_against_the_config(
    heads, kv, tp_size, named, fits, nested
):
    model = decoder(lambda: changed(attention=Strange(heads, kv)))
    config = SimpleNamespace(
        num_attention_heads=heads, num_key_value_heads=kv, head_dim=4, hidden_size=12
    )
    model.config = SimpleNamespace(text_config=config) if nested else config
    with pytest.raises(ValueError, match=f"tp_size={tp_size} does not divide {named} of .*queries"):
        validate(model, {"layers.*.attention.queries": COLUMN}, tp_size)


@pytest.mark.parametrize("style", [COLUMN, COLWISE])
def test_an_inner_size_that_tp_does_not_divide_is_refused(style):
    """P24: 127 at tp 2 passes set-up and fails in the first forward."""
    model = decoder(lambda: changed(mlp=toys.Gated(127)))
    with pytest.raises(
        ValueError,
        match="tp_size=2 does not divide out_features=127 of layers.0.mlp.up_proj; use tp_size=1$",
    ):
        validate(model, {"layers.*.mlp.up_proj": style})
    model.config = SimpleNamespace(intermediate_size=127, num_attention_heads=4)
    with pytest.raises(
        ValueError, match=r"intermediate_size=127 \(layers.0.mlp.gate_proj.out_features\)"
    ):
        validate(model, MLP)
    with pytest.raises(
        ValueError, match=r"intermediate_size=127 \(layers.0.mlp.down_proj.in_features\)"
    ):
        validate(model, {"layers.*.mlp.down_proj": ROWWISE})


UNEVEN = {
    "ours": {"embed": VocabularyParallel(), "head": ColumnParallel(gather_output=True)},
    "torch": {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    },
    "torch, columns of the table": {"embed": ColwiseParallel(output_layouts=Replicate())},
}


def uneven_step(plan):
    mesh = cached(
        ("tp", dist.get_world_size()), lambda: init_device_mesh("cpu", (dist.get_world_size(),))
    )
    torch.manual_seed(0)
    model, ids = toys.Decoder(), torch.arange(33).reshape(3, 11)
    labels = ids.flip(0).masked_fill(ids < 3, -100)
    losses, gradients = [], []
    for parallel in (False, True):
        if parallel:
            model.zero_grad()
            apply_plan(model, mesh, plan)
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        loss.backward()
        losses.append(loss.detach())
        grads = [p.grad for p in model.parameters()]
        gradients.append([g.full_tensor() if isinstance(g, DTensor) else g.clone() for g in grads])
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize("plan", UNEVEN)
def test_vocabularies_of_33_rows_pass_and_give_the_numbers_of_one_process(plan, tp_size):
    """B26: padding takes part in the softmax, or set-up fails late."""
    validate(decoder(), UNEVEN[plan], tp_size)
    run_on_ranks(tp_size, uneven_step, resolve_plan(decoder(), tp_size, UNEVEN[plan], False))


def test_uneven_parts_that_a_plain_tensor_hands_on_are_refused():
    for patterns in (
        {"head": ColwiseParallel()},
        {"head": ColumnParallel()},
        {"embed": ColwiseParallel()},
    ):
        with pytest.raises(ValueError, match="tp_size=5 does not divide"):
            validate(decoder(), patterns, 5)
    validate(decoder(), {"head": ColwiseParallel(use_local_output=False)}, 5)
    validate(decoder(), {"layers.*.mlp.down_proj": RowwiseParallel(input_layouts=Replicate())}, 3)


def test_a_style_on_a_module_that_it_cannot_cut_is_refused():
    for style in (COLUMN, ROW, COLWISE, ROWWISE, VocabularyParallel()):
        with pytest.raises(
            ValueError, match=f"{type(style).__name__} at norm cuts .*not a RMSNorm"
        ):
            validate(decoder(), {"norm": style})
    for style in (COLUMN, ROW):
        with pytest.raises(ValueError, match="at embed cuts an nn.Linear, not a Embedding"):
            validate(decoder(), {"embed": style})
    with pytest.raises(ValueError, match="embed takes the ids .*input_layouts=Replicate"):
        validate(decoder(), {"embed": ROWWISE})


CONFLICTS = {
    "hidden and rows": {"embed": ColwiseParallel(output_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())},
    "rows and nothing": {"embed": VocabularyParallel()},
    "nothing and rows": {"head": ColumnParallel(gather_output=True)},
    "rows and hidden": {"embed": VocabularyParallel(), "head": RowwiseParallel(input_layouts=Replicate())},
}  # fmt: skip


@pytest.mark.parametrize("patterns", CONFLICTS.values(), ids=CONFLICTS)
def test_a_tied_weight_with_two_cuts_is_refused_with_both_names(patterns):
    """B25: one layout silently wins, and the other use breaks."""
    with pytest.raises(ValueError, match="embed.weight and head.weight are one weight"):
        validate(decoder(tied=True), patterns)


def test_a_tied_weight_with_one_cut_passes():
    for name in ("ours", "torch"):
        validate(decoder(tied=True), UNEVEN[name])
    validate(decoder(tied=True), {"embed": Custom()})


def test_predicted_cuts_are_those_that_styles_make():
    linear, table, norm = nn.Linear(4, 6), nn.Embedding(6, 4), nn.LayerNorm(4)
    for style in (COLUMN, COLWISE):
        assert predicted_cut(style, linear) == {"weight": 0, "bias": 0}
    for style in (ROW, ROWWISE):
        assert predicted_cut(style, linear) == {"weight": 1, "bias": None}
    assert predicted_cut(VocabularyParallel(), table) == {"weight": 0}
    assert predicted_cut(ROWWISE, table) == {"weight": 0}
    assert predicted_cut(COLWISE, table) == {"weight": 1}
    for style in (
        SharedInput(),
        SplitInput(),
        WholeInput(),
        SequenceBoundary(),
        SequenceParallel(),
    ):
        assert predicted_cut(style, norm) == {"weight": None, "bias": None}
    assert predicted_cut(Custom(), norm) is None
    assert predicted_cuts((SequenceBoundary(), COLUMN), linear) == {"weight": 0, "bias": 0}
    assert predicted_cuts((), linear) == {"weight": None, "bias": None}
    assert predicted_cuts((COLUMN, Custom()), linear) is None


def head_norms(**children):
    return lambda: changed(
        attention=attention_with(q_norm=nn.RMSNorm(4), k_norm=nn.RMSNorm(4), **children)
    )


def attention_with(**children):
    attention = toys.Attention()
    for name, child in children.items():
        setattr(attention, name, child)
    return attention


def test_norms_on_local_heads_get_their_gradients_summed_without_being_asked_for():
    """B05 and P5: each rank trains them on a part of the gradient, and they drift apart."""
    for patterns in (ATTENTION, {k: COLWISE if "qkv" in k else ROWWISE for k in ATTENTION}):
        assert uncovered(decoder(head_norms()), patterns | MLP) == {
            f"layers.{i}.attention.{name}_norm": (SplitInput(),) for i in (0, 1) for name in "qk"
        }
    said = {"layers.*.attention.[qk]_norm": SplitInput()}
    assert uncovered(decoder(head_norms()), ATTENTION | said) == {}


@pytest.mark.parametrize(
    "child",
    [
        nn.RMSNorm(12),
        nn.RMSNorm(16),
        nn.RMSNorm(8),
        nn.RMSNorm(1),
        nn.Linear(12, 4),
        nn.Embedding(4, 4),
    ],
    ids=["hidden", "all queries", "all keys", "scalar", "linear", "table"],
)
def test_a_module_between_the_cuts_whose_input_is_not_certain_must_be_declared(child):
    model = decoder(lambda: changed(attention=attention_with(extra=child)))
    with pytest.raises(
        ValueError,
        match=r"layers.0.attention.extra \(weight.* as SplitInput\(\) .* as WholeInput\(\)",
    ):
        uncovered(model, ATTENTION)
    for style in (SplitInput(), WholeInput(), Custom(), SequenceParallel(sequence_dim=2)):
        assert uncovered(model, ATTENTION | {"layers.*.attention.extra": style}) == {}
    for style in (SharedInput(), LocalCounts(names=())):
        with pytest.raises(ValueError, match="extra"):
            uncovered(model, ATTENTION | {"layers.*.attention.extra": style})


def test_norms_of_single_heads_must_be_declared():
    """One norm for each head: a rank would run the first ones on its own heads."""
    norms = nn.Sequential(nn.ModuleList([nn.RMSNorm(4) for _ in range(4)]))
    model = decoder(lambda: changed(attention=attention_with(q_norm=norms)))
    with pytest.raises(ValueError, match=r"says nothing of layers.0.attention.q_norm.0.0 \(weight"):
        uncovered(model, ATTENTION)


def test_a_norm_is_not_certain_beside_a_module_that_makes_something_whole():
    model = decoder(head_norms(latent=nn.Linear(12, 6), latent_norm=nn.RMSNorm(6)))
    said = ATTENTION | {"layers.*.attention.latent": WholeInput()}
    with pytest.raises(ValueError, match="attention.q_norm"):
        uncovered(model, said)
    said |= {"layers.*.attention.[qk]_norm": SplitInput()}
    with pytest.raises(ValueError, match="attention.latent_norm"):
        uncovered(model, said)
    assert uncovered(model, said | {"layers.*.attention.latent_norm": WholeInput()}) == {}


def test_a_bare_parameter_beside_the_cuts_must_be_declared():
    attention = toys.Attention()
    attention.sinks = nn.Parameter(torch.zeros(4))
    model = decoder(lambda: changed(attention=attention))
    with pytest.raises(ValueError, match=r"layers.0.attention \(sinks\)"):
        uncovered(model, ATTENTION | {"layers.*.attention": LocalCounts(names=("heads",))})
    assert uncovered(model, ATTENTION | {"layers.*.attention": Custom()}) == {}


def test_where_cut_layers_stand_in_the_block_its_norms_must_be_declared():
    model = decoder(toys.FlatBlock)
    patterns = {
        "layers.*.w[qkv]": COLUMN,
        "layers.*.wo": ROW,
        "layers.*.fc1": COLUMN,
        "layers.*.fc2": ROW,
    }
    with pytest.raises(ValueError, match=r"layers.0.norm "):
        uncovered(model, patterns)
    assert (
        uncovered(
            model, patterns | {"layers.*.norm": WholeInput(), "layers.*.q_norm": SplitInput()}
        )
        == {}
    )


TORCH_SEQUENCE = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "layers.*.norm?": SequenceParallel(),
    "layers.*.attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "layers.*.mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "layers.*.*.[qkvgu]*_proj": ColwiseParallel(),
    "layers.*.*.[od]*_proj": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}  # fmt: skip


def test_under_torchs_sequence_styles_every_module_must_be_in_the_plan():
    assert uncovered(decoder(), TORCH_SEQUENCE) == {}
    assert uncovered(decoder(head_norms()), TORCH_SEQUENCE)
    for missing, named in (
        ("norm", "norm"),
        ("layers.*.norm?", "layers.0.norm1"),
        ("head", "head"),
    ):
        patterns = {key: style for key, style in TORCH_SEQUENCE.items() if key != missing}
        with pytest.raises(ValueError, match=rf"{named} \(weight.*splits the sequence"):
            uncovered(decoder(), patterns)


def test_between_our_boundaries_every_module_of_the_blocks_must_be_in_the_plan():
    patterns = ATTENTION | MLP | {
        "layers.0": SequenceBoundary(enter=True),
        "layers.1": SequenceBoundary(leave=True),
        "layers.*.norm1": SplitInput(),
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"layers.0.norm2 \(weight, bias\).*splits the sequence"):
        uncovered(decoder(), patterns)
    assert uncovered(decoder(), patterns | {"layers.*.norm2": SplitInput()}) == {}
