"""Layers that hold several components: layouts proven from source, plans and sizes. No ranks."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import tp_toys as toys
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F

from shardwalk.parallelizer_core.tensor_parallel import (
    ColumnParallel,
    LocalCounts,
    RowParallel,
    WholeInput,
)
from shardwalk.parallelizer_core.tensor_parallel.components import _moves
from shardwalk.parallelizer_core.tensor_parallel.fused_layouts import FusedLayout, fused_layout
from shardwalk.parallelizer_core.tensor_parallel.parallelize import plan_tensors
from shardwalk.parallelizer_core.tensor_parallel.plans import resolve_plan
from shardwalk.parallelizer_core.tensor_parallel.structure import structural_plan
from shardwalk.parallelizer_core.tensor_parallel.validation import validate_tp_sizes

HEADS, KV, HEAD_DIM, WIDTH = toys.HEADS, toys.KV, toys.HEAD_DIM, toys.WIDTH
QUERY, KEY = HEADS * HEAD_DIM, KV * HEAD_DIM


class Fused(nn.Module):
    """Grouped queries, keys and values of one layer, one after the other."""

    kv = KV

    def __init__(self, features=QUERY + 2 * KEY):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = HEADS, self.kv, HEAD_DIM
        self.qkv_proj = nn.Linear(WIDTH, features)
        self.o_proj = nn.Linear(QUERY, WIDTH)

    def mix(self, q, k, v):
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def forward(self, x):
        kv_size = self.num_kv_heads * self.head_dim
        q, k, v = self.qkv_proj(x).split([self.num_heads * self.head_dim, kv_size, kv_size], dim=-1)
        return self.mix(q, k, v)


class BySlices(Fused):
    def forward(self, x):
        qkv = self.qkv_proj(x)
        end = self.num_heads * self.head_dim
        q, k = qkv[..., :end], qkv[..., end : end + self.num_kv_heads * self.head_dim]
        v = qkv[..., end + self.num_kv_heads * self.head_dim :]
        return self.mix(q, k, v)


class Even(Fused):
    kv = HEADS

    def __init__(self):
        super().__init__(3 * QUERY)


class ByChunk(Even):
    def forward(self, x):
        qkv = self.qkv_proj(x)
        assert qkv.shape[-1]
        q, k, v = torch.chunk(qkv, 3, -1)
        return self.mix(q, k, v)


class BySize(Even):
    def forward(self, x):
        q, k, v = self.qkv_proj(x).split(self.num_heads * self.head_dim, 2)
        return self.mix(q, k, v)


class ByView(Even):
    def forward(self, x):
        qkv = self.qkv_proj(x).view(*x.shape[:2], 3, self.num_heads, self.head_dim)
        return self.mix(*(t.flatten(2) for t in qkv.unbind(2)))


class InUnits(Even):
    def forward(self, x):
        shape = (*x.shape[:-1], -1, 3 * self.head_dim)
        q, k, v = self.qkv_proj(x).view(shape).chunk(3, dim=-1)
        return self.mix(q.flatten(2), k.flatten(2), v.flatten(2))


class InUnitsByView(Even):
    def forward(self, x):
        qkv = self.qkv_proj(x).view(*x.shape[:2], self.num_heads, 3, self.head_dim)
        return self.mix(*(t.flatten(2) for t in qkv.unbind(3)))


UNEVEN = (QUERY, KEY, KEY)
COUNTS = ("num_heads", "num_kv_heads")
LAYOUTS = {
    Fused: FusedLayout(components=UNEVEN, counts=COUNTS),
    BySlices: FusedLayout(components=UNEVEN, counts=COUNTS),
    ByChunk: FusedLayout(components=(QUERY,) * 3),
    BySize: FusedLayout(components=(QUERY,) * 3, counts=("num_heads",)),
    ByView: FusedLayout(components=(QUERY,) * 3, counts=("num_heads",)),
    InUnits: FusedLayout(unit=3 * HEAD_DIM),
    InUnitsByView: FusedLayout(unit=3 * HEAD_DIM, counts=("num_heads",)),
}


@pytest.mark.parametrize("attention", LAYOUTS)
def test_the_layout_of_a_fused_layer_is_read_from_its_source(attention):
    layout = LAYOUTS[attention]
    assert fused_layout(toys.meta(attention), "qkv_proj") == layout
    model = toys.meta(toys.Decoder, lambda: toys.Block(attention=attention))
    plan = structural_plan(model, 2, False)
    column = ColumnParallel(components=layout.components)
    assert plan["layers.1.attention.qkv_proj"] == (column,)
    assert plan["layers.1.attention"] == (LocalCounts(names=COUNTS),)
    validate_tp_sizes(model, 2, plan)
    with pytest.raises(ValueError, match="tp_size=3 does not divide num_attention_heads=4 and"):
        validate_tp_sizes(model, 3, plan)


class OtherOrder(Even):
    def forward(self, x):
        qkv = self.qkv_proj(x).view(*x.shape[:2], self.head_dim, 3, self.num_heads)
        return self.mix(*(t.flatten(2) for t in qkv.unbind(3)))


class ReadTwice(ByChunk):
    def forward(self, x):
        qkv = self.qkv_proj(x)
        q, k, v = qkv.chunk(3, dim=-1)
        return self.mix(q + qkv.mean(-1, keepdim=True), k, v)


class NumberOfFeatures(Even):
    def forward(self, x):
        q, k, v = self.qkv_proj(x).split(16, dim=-1)
        return self.mix(q, k, v)


class OverRows(ByChunk):
    def forward(self, x):
        q, k, v = self.qkv_proj(x).chunk(3, dim=1)
        return self.mix(q, k, v)


class Interleaved(Even):
    def forward(self, x):
        qkv = self.qkv_proj(x)
        return self.mix(qkv[..., 0::3], qkv[..., 1::3], qkv[..., 2::3])


class CalledTwice(ByChunk):
    def forward(self, x):
        q, k, v = self.qkv_proj(x).chunk(3, dim=-1)
        return self.mix(q, self.qkv_proj(k), v)


class HandedOn(ByChunk):
    def forward(self, x):
        return self.mix(*self.parts(self.qkv_proj(x)))

    def parts(self, qkv):
        return qkv.chunk(3, dim=-1)


@pytest.mark.parametrize(
    "attention",
    [OtherOrder, ReadTwice, NumberOfFeatures, OverRows, Interleaved, CalledTwice, HandedOn],
)
def test_a_layout_that_the_source_does_not_prove_is_refused(attention):
    """B08: an even cut would give each rank a wrong mixture of components, without an error."""
    assert fused_layout(toys.meta(attention), "qkv_proj") is None
    model = toys.meta(toys.Decoder, lambda: toys.Block(attention=attention))
    with pytest.raises(ValueError, match="layers.0.attention does not fit .*fused layers need"):
        structural_plan(model, 2, False)


class FusedGated(nn.Module):
    def __init__(self, inner=toys.FFN):
        super().__init__()
        self.gate_up_proj = nn.Linear(WIDTH, 2 * inner)
        self.down_proj = nn.Linear(inner, WIDTH)

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class GatedByFunction(FusedGated):
    def forward(self, x):
        return self.down_proj(F.glu(self.gate_up_proj(x)))


def of_gated(mlp):
    model = toys.meta(toys.Decoder, lambda: toys.Block(mlp=mlp))
    return model, structural_plan(model, 2, False)


def test_gate_and_up_of_one_layer_are_cut_in_each():
    _, plan = of_gated(FusedGated)
    column = ColumnParallel(components=(toys.FFN, toys.FFN))
    assert plan["layers.0.mlp.gate_up_proj"] == (column,)
    assert plan["layers.0.mlp.down_proj"] == (RowParallel(),)
    with pytest.raises(ValueError, match="layers.0.mlp does not fit .*fused"):
        of_gated(GatedByFunction)


class TakenApart(nn.Module):
    """As wide as a plain feed-forward layer, which it is not."""

    def __init__(self):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)

    def forward(self, x):
        first, second = self.up_proj(x).chunk(2, dim=-1)
        return self.down_proj(torch.cat([second, first], -1))


def test_a_feed_forward_layer_that_takes_its_features_apart_is_refused():
    with pytest.raises(ValueError, match=r"up_proj does not fit .*features apart in .10, 10."):
        of_gated(TakenApart)


def test_a_component_that_does_not_divide_is_refused_by_its_size():
    """B08: a fused width of 6 divides by 2, its components of 3 do not."""
    model, plan = of_gated(lambda: FusedGated(3))
    match = (
        r"tp_size=2 does not divide a component of 3 of the fused layers.0.mlp.gate_up_proj "
        r"\(out_features=6, which holds components of 3, 3\); use tp_size=1 or 3"
    )
    with pytest.raises(ValueError, match=match):
        validate_tp_sizes(model, 2, plan)


def explicit(style, tp_size=2):
    model, _ = of_gated(FusedGated)
    patterns = {"layers.*.mlp.gate_up_proj": style, "layers.*.mlp.down_proj": RowParallel()}
    validate_tp_sizes(model, tp_size, resolve_plan(model, tp_size, patterns, False))


def test_components_of_an_explicit_plan_are_checked():
    explicit(ColumnParallel(components=(20, 20)))
    with pytest.raises(ValueError, match="components=.20, 16.* make up 36 features.*is 40"):
        explicit(ColumnParallel(components=(20, 16)))
    with pytest.raises(ValueError, match="does not divide a component of 17 "):
        explicit(ColumnParallel(components=(17, 23)))
    with pytest.raises(ValueError, match="leave one of the two out"):
        ColumnParallel(components=(20, 20), gather_output=True)
    with pytest.raises(ValueError, match="leave one of the two out"):
        RowParallel(components=(20, 20), split_input=True)


def asked_of(block, patterns):
    """The plan with `patterns` and all else in the blocks whole, as `parallelize_model` makes it."""
    model = toys.meta(toys.Decoder, block)
    whole = {f"layers.*.norm{i}": WholeInput() for i in (1, 2)}
    options = {"sequence_parallel": False, "sidecar": None}
    return plan_tensors(model, 2, requested=whole | patterns, **options)


def gated(style, row=None):
    cut = {"layers.*.mlp.gate_up_proj": style, "layers.*.mlp.down_proj": row or RowParallel()}
    block = partial(toys.Block, mlp=FusedGated)
    return asked_of(block, {"layers.*.attention": WholeInput(), **cut})


NOT_OF_ITS_COMPONENTS = [
    (ColumnParallel(), r"ColumnParallel\(\)"),
    (ColumnParallel(components=(16, 24)), r"ColumnParallel\(components=\(16, 24\)\)"),
    (ColwiseParallel(), r"ColwiseParallel\(\)"),
]


@pytest.mark.parametrize(("style", "words"), NOT_OF_ITS_COMPONENTS)
def test_a_plan_that_cuts_a_fused_layer_in_other_components_is_refused(style, words):
    """It trained to wrong numbers, as each rank took features of the gate for those of up."""
    match = (
        f"cuts the fused layers.0.mlp.gate_up_proj with {words}, .* components of 20, 20 features, "
        r".*use ColumnParallel\(components=\(20, 20\)\), or .*WholeInput\(\) at layers.0.mlp$"
    )
    with pytest.raises(ValueError, match=match):
        gated(style)


def test_a_plan_that_hands_on_a_fused_layer_as_its_source_takes_it_is_left_alone():
    gated(ColumnParallel(components=(20, 20)))
    gated(ColumnParallel(gather_output=True), RowParallel(split_input=True))
    gated(ColwiseParallel(use_local_output=False), RowwiseParallel())
    gated(ColwiseParallel(output_layouts=Replicate()), RowParallel(split_input=True))


def projections(style, *around):
    cut = {"layers.*.attention.qkv_proj": style, "layers.*.attention.o_proj": RowParallel()}
    cut |= {"layers.*.attention": around} if around else {}
    block = partial(toys.Block, attention=Fused)
    return asked_of(block, {"layers.*.mlp": WholeInput(), **cut})


def test_a_plan_for_fused_projections_needs_their_components_and_the_counts_of_a_rank():
    """The first forward failed in a reshape."""
    way_out = (
        rf"use ColumnParallel\(components=.{QUERY}, {KEY}, {KEY}.\) beside LocalCounts\(names="
    )
    sizes, counts = UNEVEN, LocalCounts(names=COUNTS)
    for style in (ColumnParallel(), ColwiseParallel()):
        with pytest.raises(ValueError, match=f"cuts the fused layers.0.attention.qkv.*{way_out}"):
            projections(style)
    with pytest.raises(ValueError, match=r"use ColumnParallel\(components=[^)]*\)\), or keep"):
        projections(ColumnParallel(), counts)
    with pytest.raises(ValueError, match=f"by counts of all ranks; {way_out}"):
        projections(ColumnParallel(components=sizes))
    with pytest.raises(ValueError, match=r"beside LocalCounts\(names=.'num_kv_heads',\)"):
        projections(ColumnParallel(components=sizes), LocalCounts(names=COUNTS[:1]))
    projections(ColumnParallel(components=sizes), counts)


def test_units_of_a_layer_that_no_table_knows_are_not_cut_through():
    class Latent(nn.Module):
        def __init__(self):
            super().__init__()
            self.qk_head_dim, self.expand = 6, nn.Linear(WIDTH, 18)
            self.o_proj = nn.Linear(18, WIDTH)

        def forward(self, x):
            q = self.expand(x).view(*x.shape[:2], -1, self.qk_head_dim)
            return self.o_proj(q.flatten(2))

    model = toys.meta(toys.Decoder, lambda: toys.Block(attention=Latent))
    plan = {f"layers.0.attention.{n}": (s,) for n, s in (("expand", ColumnParallel()),)}
    with pytest.raises(ValueError, match="does not divide the 3 heads of 6 features that layers.0"):
        validate_tp_sizes(model, 2, plan)
    validate_tp_sizes(model, 3, plan)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("components", [(8, 4, 4), (4, 4), (12,), (4, 16, 8, 4)])
def test_moved_rows_are_those_of_each_component(components, ranks):
    """What rank `r` gets, in the order of its peers, is its part of every component."""
    whole = list(range(sum(components)))
    held = len(whole) // ranks
    moves = [_moves(components, ranks, rank) for rank in range(ranks)]
    for rank in range(ranks):
        got = [
            own * held + row
            for own, (leaving, _) in enumerate(moves)
            for start, end in leaving[rank]
            for row in range(start, end)
        ]
        starts = [sum(components[:i]) for i in range(len(components))]
        wanted = [
            row
            for start, size in zip(starts, components, strict=True)
            for row in whole[start + rank * size // ranks : start + (rank + 1) * size // ranks]
        ]
        assert got == wanted
        sent = [sum(e - s for s, e in leaving[rank]) for leaving, _ in moves]
        assert list(moves[rank][1]) == sent
