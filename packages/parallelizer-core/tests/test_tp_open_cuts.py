"""Plans that cut a part of a layer and forget the rest are refused with what is missing."""

from __future__ import annotations

import pytest
import tp_toys as toys
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
)

from shardwalk.parallelizer_core.tensor_parallel import (
    ColumnParallel,
    LocalCounts,
    RowParallel,
    SplitInput,
    WholeInput,
)
from shardwalk.parallelizer_core.tensor_parallel.parallelize import plan_tensors

COLUMN, ROW = ColumnParallel(), RowParallel()
ATTENTION = {"layers.*.attention.[qkv]_proj": COLUMN, "layers.*.attention.o_proj": ROW}
MLP = {"layers.*.mlp.[gu]*_proj": COLUMN, "layers.*.mlp.down_proj": ROW}


class Custom(ParallelStyle):
    def _apply(self, module, device_mesh):
        return module


class Split(nn.Module):
    """A feed-forward layer of other names, its halves in modules of their own."""

    def __init__(self):
        super().__init__()
        self.inward = nn.Sequential(nn.Linear(toys.WIDTH, toys.FFN), nn.ReLU())
        self.outward = nn.Sequential(nn.Linear(toys.FFN, toys.WIDTH))

    def forward(self, x):
        return self.outward(self.inward(x))


def plan(patterns, mlp=toys.Gated):
    model = toys.meta(toys.Decoder, lambda: toys.Block(mlp=mlp))
    given = {"requested": patterns, "sequence_parallel": False, "sidecar": None}
    return plan_tensors(model, 2, **given)


@pytest.mark.parametrize("cut", [COLUMN, ColwiseParallel()], ids=["ours", "torch"])
@pytest.mark.parametrize("beside", [{}, MLP], ids=["alone", "beside a whole layer"])
def test_queries_alone_are_refused_with_the_rest_of_the_attention(beside, cut):
    message = (
        "cuts q_proj of layers.0.attention and says nothing of k_proj, v_proj, o_proj, .*"
        r"add k_proj as ColumnParallel\(\), v_proj as ColumnParallel\(\), o_proj as RowParallel\(\)"
    )
    with pytest.raises(ValueError, match=message):
        plan(beside | {"layers.*.attention.q_proj": cut})


@pytest.mark.parametrize("beside", [{}, ATTENTION], ids=["alone", "beside a whole layer"])
@pytest.mark.parametrize(
    ("patterns", "missing"),
    [
        ({"gate_proj": COLUMN}, "gate_proj of .* says nothing of up_proj, down_proj"),
        ({"down_proj": ROW}, "down_proj of .* says nothing of gate_proj, up_proj"),
        ({"down_proj": RowwiseParallel()}, "down_proj of .* nothing of gate_proj, up_proj"),
        ({"gate_proj": COLUMN, "down_proj": ROW}, "says nothing of up_proj, .*add up_proj as Col"),
        ({"gate_proj": COLUMN, "up_proj": COLUMN}, "says nothing of down_proj, .*add down_proj as"),
    ],
)  # fmt: skip
def test_a_part_of_a_gated_layer_is_refused_with_the_rest(patterns, missing, beside):
    with pytest.raises(ValueError, match=missing):
        plan(beside | {f"layers.*.mlp.{name}": style for name, style in patterns.items()})


@pytest.mark.parametrize("beside", [{}, ATTENTION], ids=["alone", "beside a whole layer"])
def test_layers_of_other_names_need_both_halves(beside):
    inward, outward = {"layers.*.mlp.inward.0": COLUMN}, {"layers.*.mlp.outward.0": ROW}
    with pytest.raises(ValueError, match=r"cuts layers.0.mlp.inward.0 .*no row-cut.*RowParallel"):
        plan(beside | inward, Split)
    with pytest.raises(ValueError, match=r"cuts layers.0.mlp.outward.0 .*no column-cut.*add the"):
        plan(beside | outward, Split)
    assert len(plan(beside | inward | outward, Split)) == 4 + (8 if beside else 0)


def test_the_flat_half_of_a_block_matches_within_the_block():
    patterns = {"layers.*.w[qkv]": COLUMN, "layers.*.wo": ROW, "layers.*.fc1": COLUMN}
    said = {"layers.*.norm": WholeInput(), "layers.*.q_norm": SplitInput()}
    model = toys.meta(toys.Decoder, toys.FlatBlock)
    given = {"sequence_parallel": False, "sidecar": None}
    with pytest.raises(ValueError, match="cuts fc1 of layers.0 and says nothing of fc2"):
        plan_tensors(model, 2, requested=patterns | said, **given)
    assert plan_tensors(model, 2, requested=patterns | said | {"layers.*.fc2": ROW}, **given)


WHOLE = {"layers.*.attention.[kv]_proj": SplitInput(), "layers.*.attention.o_proj": ROW}


@pytest.mark.parametrize(
    "patterns",
    [
        ATTENTION | MLP,
        MLP,
        ATTENTION | {"layers.*.attention": LocalCounts(names=("heads", "num_kv_heads"))},
        {"layers.*.mlp.gate_proj": ColumnParallel(gather_output=True)},
        {"layers.*.mlp.gate_proj": ColwiseParallel(output_layouts=Replicate())},
        WHOLE | {"layers.*.attention.q_proj": COLUMN},
        {"layers.*.mlp.gate_proj": COLUMN, "layers.*.mlp": Custom()},
        {"head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)},
        {"embed": ColwiseParallel(output_layouts=Replicate())},
        {"layers.*.mlp.down_proj": RowwiseParallel(input_layouts=Replicate())},
    ],
)
def test_what_is_matched_or_declared_passes(patterns):
    assert plan(patterns)


def test_a_module_that_hands_on_parts_itself_matches_either_half():
    mover = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(-1))
    patterns = {"layers.*.mlp.outward.0": ROW, "layers.*.mlp.outward": mover}
    assert plan(patterns, Split)
    del patterns["layers.*.mlp.outward"]
    with pytest.raises(ValueError, match="no column-cut"):
        plan(patterns, Split)
