"""The default plan: what it makes of a model's structure, and what it refuses by name."""

from __future__ import annotations

import pytest
import tp_toys as toys
from torch import nn

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
from shardwalk.parallelizer_core.tensor_parallel.coverage import check_uncovered
from shardwalk.parallelizer_core.tensor_parallel.structure import structural_plan
from shardwalk.parallelizer_core.tensor_parallel.validation import validate_tp_sizes

COUNTS = LocalCounts(names=("heads", "num_kv_heads"))


def plan_of(model, *, sequence_parallel=False):
    """The default plan, which must also pass every check that an explicit one passes."""
    plan = structural_plan(model, 2, sequence_parallel)
    validate_tp_sizes(model, 2, plan)
    assert check_uncovered(model, plan) == {}
    return plan


def below(plan, prefix):
    return {path.removeprefix(prefix): s for path, s in plan.items() if path.startswith(prefix)}


def decoder(block=toys.Block, /, **kwargs):
    return toys.meta(toys.Decoder, block, **kwargs)


def changed_block(change, **kwargs):
    def make():
        block = toys.Block(**kwargs)
        change(block)
        return block

    return make


def test_attention_gated_mlp_and_norms():
    plan = plan_of(decoder(changed_block(lambda block: None, qk_norm=True)))
    column, row, whole = ColumnParallel(shared_input=True), RowParallel(), WholeInput()
    assert below(plan, "layers.1.") == {
        "norm1": (whole,),
        "norm2": (whole,),
        "attention": (SharedInput(), COUNTS),
        "attention.q_proj": (column,),
        "attention.k_proj": (column,),
        "attention.v_proj": (column,),
        "attention.o_proj": (row,),
        "attention.q_norm": (SplitInput(),),
        "attention.k_norm": (SplitInput(),),
        "mlp": (SharedInput(),),
        "mlp.gate_proj": (column,),
        "mlp.up_proj": (column,),
        "mlp.down_proj": (row,),
    }
    assert plan["norm"] == (whole,)


def test_layers_that_stand_in_the_block_itself():
    plan = plan_of(decoder(toys.FlatBlock))
    column, row = ColumnParallel(), RowParallel()
    assert below(plan, "layers.0") == {
        "": (LocalCounts(names=("n_heads",)),),
        ".norm": (WholeInput(),),
        ".wq": (column,),
        ".wk": (column,),
        ".wv": (column,),
        ".q_norm": (SplitInput(),),
        ".wo": (row,),
        ".fc1": (column,),
        ".fc2": (row,),
    }


def test_sequence_parallelism_splits_between_the_first_and_the_last_block():
    plan = plan_of(decoder(blocks=3), sequence_parallel=True)
    assert plan["layers.0"] == (SequenceBoundary(enter=True),)
    assert "layers.1" not in plan
    assert plan["layers.2"] == (SequenceBoundary(leave=True),)
    for i in range(3):
        assert plan[f"layers.{i}.norm1"] == plan[f"layers.{i}.norm2"] == (SplitInput(),)
        assert plan[f"layers.{i}.mlp.down_proj"] == (RowParallel(sequence_parallel=True),)
        assert plan[f"layers.{i}.attention.o_proj"] == (RowParallel(sequence_parallel=True),)
    assert plan["norm"] == (WholeInput(),)


def test_a_stack_of_one_enters_and_leaves_in_the_same_block_around_its_own_styles():
    plan = plan_of(decoder(toys.FlatBlock, blocks=1), sequence_parallel=True)
    assert plan["layers.0"] == (
        LocalCounts(names=("n_heads",)),
        SequenceBoundary(enter=True, leave=True),
    )


class Reader(toys.Attention):
    """Its keys come from a second argument, whose gradient no collective for the first reaches."""

    def forward(self, hidden_states, memory):
        return self.o_proj(self.q_proj(hidden_states) + self.k_proj(memory) + self.v_proj(memory))


class Renamed(toys.Attention):
    def forward(self, hidden_states):
        x = hidden_states * 2
        return self.o_proj(self.q_proj(x) + self.k_proj(x) + self.v_proj(x))


class WithMask(toys.Attention):
    def forward(self, x, mask):
        return self.o_proj(self.q_proj(x) + self.k_proj(x) + self.v_proj(x) + mask)


class Twice(toys.Attention):
    def forward(self, hidden_states):
        q = self.q_proj(hidden_states) + self.q_proj(self.k_proj(hidden_states))
        return self.o_proj(q + self.v_proj(hidden_states))


@pytest.mark.parametrize("attention", [Reader, Renamed, Twice])
def test_one_collective_serves_all_projections_only_where_the_source_proves_it(attention):
    plan = plan_of(decoder(changed_block(lambda block: None, attention=attention)))
    assert plan["layers.0.attention"] == (COUNTS,)
    assert plan["layers.0.attention.k_proj"] == (ColumnParallel(),)
    assert plan["layers.0.mlp"] == (SharedInput(),)


def test_other_arguments_of_an_attention_leave_its_input_alone():
    plan = plan_of(decoder(changed_block(lambda block: None, attention=WithMask)))
    assert plan["layers.0.attention"] == (SharedInput(), COUNTS)
    assert plan["layers.0.attention.k_proj"] == (ColumnParallel(shared_input=True),)


def test_a_residual_inside_a_gated_layer_is_not_counted_once_per_rank():
    make = changed_block(lambda block: None, mlp=toys.GatedWithResidual)
    plan = plan_of(decoder(make))
    assert "layers.0.mlp" not in plan
    assert plan["layers.0.mlp.up_proj"] == (ColumnParallel(),)


def test_a_forward_that_was_replaced_proves_nothing():
    model = decoder()
    model.layers[0].mlp.forward = lambda x: x
    plan = plan_of(model)
    assert "layers.0.mlp" not in plan
    assert plan["layers.1.mlp"] == (SharedInput(),)


def test_a_table_and_a_head_that_match_are_cut_by_rows():
    for tied in (False, True):
        plan = plan_of(decoder(tied=tied))
        assert plan["embed"] == (VocabularyParallel(),)
        assert plan["head"] == (ColumnParallel(gather_output=True),)


def with_positions(rows):
    model = toys.Decoder()
    model.positions = nn.Embedding(rows, toys.WIDTH)
    return model


def test_tables_stay_whole_where_they_do_not_match_or_may_be_read_otherwise():
    whole = (WholeInput(),)
    for model in (decoder(head_words=7), toys.meta(with_positions, toys.WORDS)):
        plan = plan_of(model)
        assert plan["embed"] == plan["head"] == whole
    plan = plan_of(toys.meta(with_positions, 9))
    assert plan["positions"] == whole
    assert plan["embed"] == (VocabularyParallel(),)


class Scaled(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * 3.0


class Shifted(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids + 1)


def test_a_table_with_its_own_forward_is_cut_if_it_looks_ids_up_as_they_are():
    for table, style in ((Scaled, VocabularyParallel()), (Shifted, WholeInput())):
        model = decoder()
        model.embed = table(toys.WORDS, toys.WIDTH, device="meta")
        assert plan_of(model)["embed"] == (style,)


def test_a_second_module_with_the_tied_table_gets_the_same_cut_or_none_is_made():
    model = decoder(tied=True)
    model.other = nn.Embedding(toys.WORDS, toys.WIDTH, device="meta")
    model.other.weight = model.embed.weight
    plan = plan_of(model)
    assert plan["other"] == plan["embed"] == (VocabularyParallel(),)
    model = decoder(tied=True)
    model.holder = nn.Module()
    model.holder.weight = model.embed.weight
    plan = plan_of(model)
    assert plan["embed"] == plan["head"] == plan["holder"] == (WholeInput(),)


def test_a_frozen_tower_stays_whole_and_a_trainable_one_must_fit():
    model = decoder()
    model.vision_tower = nn.ModuleList([nn.Conv2d(3, 3, 3, device="meta")])
    with pytest.raises(ValueError, match="vision_tower.0 does not fit"):
        plan_of(model)
    model.vision_tower.requires_grad_(False)
    plan = plan_of(model, sequence_parallel=True)
    assert below(plan, "vision_tower") == {"": (WholeInput(),)}


def test_a_module_that_stands_in_several_blocks_is_planned_once():
    shared = toys.meta(toys.Gated)
    model = decoder(changed_block(lambda block: setattr(block, "mlp", shared)))
    plan = plan_of(model)
    assert plan["layers.0.mlp"] == (SharedInput(),)
    assert not any(path.startswith("layers.1.mlp") for path in plan)


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(nn.init.zeros_(nn.Linear(toys.WIDTH, 3).weight.detach()))

    def forward(self, x):
        return x


def sinks(block):
    block.attention.sinks = nn.Parameter(nn.Linear(1, toys.HEADS).bias.detach())


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv_proj, self.o_proj = nn.Linear(toys.WIDTH, 40), nn.Linear(16, toys.WIDTH)

    def forward(self, x):
        return x


def fused_mlp(block):
    block.mlp.up_proj = nn.Linear(toys.WIDTH, 2 * toys.FFN)


def no_head_width(block):
    del block.attention.head_dim, block.attention.heads


def put(path, make):
    def change(block):
        owner, _, name = path.rpartition(".")
        setattr(block.get_submodule(owner), name, make())

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (sinks, r"layers.0.attention.sinks .*a parameter of \(4,\) that stands bare in Attention"),
        (put("attention", Fused), r"layers.0.attention .*qkv_proj, o_proj.* are not those of query"),
        (fused_mlp, r"layers.0.mlp.up_proj .*makes 40 features of 12.*fused"),
        (put("attention.q_norm", lambda: nn.RMSNorm(16)), r"q_norm .*16 .*a head has 4"),
        (put("attention.sub_norm", lambda: nn.RMSNorm(16)), r"sub_norm .*16 elements may lie"),
        (put("mlp.norm", lambda: nn.RMSNorm(toys.FFN)), r"mlp.norm .*20 elements may lie"),
        (put("mlp.act", lambda: nn.Softmax(-1)), r"mlp.act .*Softmax mixes the features"),
        (put("mlp.router", Router), r"mlp.router .*Router is neither a projection nor a norm"),
        (put("moe", Router), r"moe.weight .*\(3, 12\) that stands bare in Router"),
        (put("extra", lambda: nn.Linear(12, 12)), r"layers.0 .*extra.* are not those of query"),
        (put("scale", lambda: nn.RMSNorm(5)), r"scale .*5 elements fit neither"),
        (put("mlp", lambda: nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 12))), r"mlp .*\(0, 1\)"),
        (put("attention.heads", lambda: 3), r"attention .*heads=3, while .* hold 4 heads of 4"),
        (no_head_width, r"attention .*nothing says how wide a head is"),
        (put("attention.v_proj", lambda: nn.Linear(12, 16)), r"attention .*16, 8 and 16 wide"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_with_the_reason_and_the_way_out(change, message):
    with pytest.raises(ValueError, match=message) as caught:
        plan_of(decoder(changed_block(change)))
    assert str(caught.value).startswith("tp_size=2: layers.0")
    assert str(caught.value).endswith("or use tp_size=1")
    assert "pass tp_plan=" in str(caught.value)


def test_a_model_without_blocks_or_with_other_blocks_is_refused():
    with pytest.raises(ValueError, match="Linear does not fit .*no stack of blocks"):
        plan_of(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="layers.0 does not fit .*no attention .* is found in it"):
        plan_of(decoder(lambda: nn.RMSNorm(3)))


class Reshaping(toys.Attention):
    """Puts its heads side by side by an attribute of their width."""

    def __init__(self):
        super().__init__()
        self.inner_width = toys.HEADS * toys.HEAD_DIM

    def forward(self, hidden_states):
        rows, length, _ = hidden_states.shape
        return self.o_proj(self.q_proj(hidden_states).reshape(rows, length, self.inner_width))


class ReadingTwice(Reshaping):
    def forward(self, hidden_states):
        rows, length, _ = hidden_states.shape
        scaled = self.q_proj(hidden_states) / self.inner_width
        return self.o_proj(scaled.reshape(rows, length, self.inner_width))


class ToItsInput(toys.Attention):
    def forward(self, hidden_states):
        rows, length, width = hidden_states.size()
        return self.o_proj(self.q_proj(hidden_states).reshape(rows, length, width))


def test_the_width_that_heads_are_reshaped_to_is_that_of_one_rank():
    plan = structural_plan(toys.meta(toys.Decoder, lambda: toys.Block(Reshaping)), 2, False)
    [counts] = [s for s in plan["layers.0.attention"] if isinstance(s, LocalCounts)]
    assert "inner_width" in counts.names
    plan = structural_plan(toys.meta(toys.Decoder, lambda: toys.Block(ReadingTwice)), 2, False)
    [counts] = [s for s in plan["layers.0.attention"] if isinstance(s, LocalCounts)]
    assert "inner_width" not in counts.names


def test_heads_that_are_reshaped_to_the_width_of_the_input_are_refused():
    model = toys.meta(toys.Decoder, lambda: toys.Block(ToItsInput))
    with pytest.raises(ValueError, match=r"reshape\(rows, length, width\), the width of its input"):
        structural_plan(model, 2, False)
