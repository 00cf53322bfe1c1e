"""Which plan a model gets: patterns, names, import paths, sidecars, and errors that come through."""

from __future__ import annotations

import pytest
import tp_toys as toys
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
)

from shardwalk.parallelizer_core.tensor_parallel import (
    ColumnParallel,
    RowParallel,
    SequenceBoundary,
    SplitInput,
)
from shardwalk.parallelizer_core.tensor_parallel.plans import (
    check_plan_with_sidecar,
    register_tp_plan,
    resolve_plan,
)
from shardwalk.parallelizer_core.tensor_parallel.structure import structural_plan

COLUMN, ROW = ColumnParallel(), RowParallel()


@pytest.fixture(name="model")
def decoder():
    return toys.meta(toys.Decoder)


def resolve(model, requested=None, *, sequence_parallel=False, sidecar=None):
    return resolve_plan(model, 2, requested, sequence_parallel, sidecar)


def test_patterns_name_modules_segment_by_segment(model):
    plan = resolve(model, {"layers.*.mlp.[gu]*_proj": COLUMN, "layers.*.mlp.down_proj": (ROW,)})
    assert list(plan) == [
        f"layers.{i}.mlp.{name}" for i in (0, 1) for name in ("gate_proj", "up_proj", "down_proj")
    ]
    assert plan["layers.1.mlp.up_proj"] == (COLUMN,)
    assert plan["layers.0.mlp.down_proj"] == (ROW,)


def test_a_star_stays_within_one_segment(model):
    with pytest.raises(ValueError, match=r"'layers.\*.down_proj' names no module of Decoder"):
        resolve(model, {"layers.*.down_proj": ROW})
    assert list(resolve(model, {"*": COLUMN})) == ["embed", "layers", "norm", "head"]
    assert list(resolve(model, {"": COLUMN})) == [""]


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("layers.*.attn.q_proj", "layers.*.attention.q_proj"),
        ("layers.*.mlp.gate_proj.weight", "layers.*.mlp.gate_proj"),
        ("model.layers.*.mlp.up_proj", "layers.*.mlp.up_proj"),
    ],
)
def test_a_pattern_that_names_nothing_is_an_error_with_the_nearest_paths(model, pattern, near):
    with pytest.raises(ValueError, match="names no module") as caught:
        resolve(model, {"head": COLUMN, pattern: COLUMN})
    assert repr(pattern) in str(caught.value)
    assert repr(near) in str(caught.value)


def test_two_patterns_for_one_module_are_an_error_that_names_both(model):
    with pytest.raises(
        ValueError, match=r"'layers.\*.mlp' and 'layers.1.\*' both name layers.1.mlp"
    ):
        resolve(model, {"layers.*.mlp": SplitInput(), "layers.1.*": SplitInput()})


def test_a_module_that_stands_twice_is_planned_once_under_its_first_path():
    shared = toys.Block()
    model = nn.ModuleList([shared, shared])
    assert list(resolve(model, {"*.mlp.up_proj": COLUMN})) == ["0.mlp.up_proj"]
    assert list(resolve(model, {"1.mlp.up_proj": COLUMN})) == ["0.mlp.up_proj"]


@pytest.mark.parametrize("value", [None, "colwise", ColumnParallel, (), (COLUMN, "row"), [COLUMN]])
def test_a_value_that_is_no_style_is_a_type_error_that_names_its_key(model, value):
    with pytest.raises(TypeError, match="'head' has .* which must be a ParallelStyle"):
        resolve(model, {"head": value})
    with pytest.raises(TypeError, match="'head' has"):
        register_tp_plan("bad", {"head": value})
    with pytest.raises(TypeError, match="key 3"):
        resolve(model, {3: COLUMN})


def test_an_empty_plan_is_refused_whoever_gives_it(model):
    with pytest.raises(ValueError, match="tp_plan is empty.*all 2 .*use tp_size=1"):
        resolve(model, {})
    with pytest.raises(ValueError, match="sidecar's tensor-parallel plan is empty.*all 2 "):
        resolve(model, sidecar=lambda model, sequence_parallel: {})


def test_the_order_is_the_request_then_the_sidecar_then_the_structure(model):
    def sidecar(given, sequence_parallel):
        assert given is model
        return {"head": COLUMN}

    assert list(resolve(model, {"norm": SplitInput()}, sidecar=sidecar)) == ["norm"]
    assert list(resolve(model, sidecar=sidecar)) == ["head"]
    default = structural_plan(model, 2, False)
    assert resolve(model, sidecar=lambda model, sequence_parallel: None) == default
    assert resolve(model) == default


def test_names_and_import_paths_find_dicts_and_functions(model):
    register_tp_plan("by dict", {"head": COLUMN})
    register_tp_plan("by.function", toys.plain_plan)
    assert resolve(model, "by dict") == {"head": (COLUMN,)}
    planned = list(resolve(model, "by.function"))
    assert len(planned) == 8
    assert list(resolve(model, "tp_toys.plain_plan")) == planned
    assert list(resolve(model, "tp_toys:plain_plan")) == planned


def test_the_last_plan_of_a_name_wins(model):
    register_tp_plan("again", {"head": COLUMN})
    register_tp_plan("again", {"norm": SplitInput()})
    assert list(resolve(model, "again")) == ["norm"]


def test_an_unknown_name_says_what_is_registered(model):
    register_tp_plan("known_plan", {"head": COLUMN})
    with pytest.raises(ValueError, match="'knwon_plan' is no registered plan .*'known_plan'"):
        resolve(model, "knwon_plan")
    for path in ("no_such_package.PLAN", "tp_toys.no_such_module.PLAN", "tp_toys:no_such_plan",
                 "tp_toys:WIDTH.no_such_attribute"):  # fmt: skip
        match = rf"tp_plan='{path}' is .*known_plan.*leads nowhere: .*no_such_.*register_tp_plan\("
        with pytest.raises(ValueError, match=match) as caught:
            resolve(model, path)
        assert isinstance(caught.value.__cause__, ModuleNotFoundError | AttributeError)
    with pytest.raises(TypeError, match="tp_plan='tp_toys.WIDTH' is 12; a plan is a dict"):
        resolve(model, "tp_toys.WIDTH")
    with pytest.raises(TypeError, match="registered under a name"):
        register_tp_plan("  ", {"head": COLUMN})


def test_an_error_in_a_plan_reaches_the_user_and_no_other_plan_is_taken(
    model, tmp_path, monkeypatch
):
    """P20: the plan raises, and training goes on with another one, without sequence parallelism."""
    (tmp_path / "broken_plan.py").write_text("raise OSError('disk')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(NotImplementedError, match="^no sequence parallelism here\n") as caught:
        resolve(model, "tp_toys.plain_plan", sequence_parallel=True)
    assert caught.value.__notes__ == [
        "raised by tp_plan='tp_toys.plain_plan', called with (model, True)"
    ]
    with pytest.raises(NotImplementedError) as caught:
        resolve(model, sequence_parallel=True, sidecar=toys.plain_plan)
    assert "sidecar" in caught.value.__notes__[0]
    with pytest.raises(OSError, match="^disk\n") as caught:
        resolve(model, "broken_plan.PLAN")
    assert "broken_plan.PLAN" in caught.value.__notes__[0]
    for error in ("import no_such_package", "None.no_such_plan"):
        (tmp_path / f"broken_{len(error)}.py").write_text(error)
        with pytest.raises((ModuleNotFoundError, AttributeError), match="no_such_") as caught:
            resolve(model, f"broken_{len(error)}.no_such_plan")
        assert "raised while" in caught.value.__notes__[0]


def test_a_plan_function_must_return_a_dict(model):
    register_tp_plan("none", lambda model, sequence_parallel: None)
    register_tp_plan("list", lambda model, sequence_parallel: [COLUMN])
    for name in ("none", "list"):
        with pytest.raises(TypeError, match=f"'{name}' returned"):
            resolve(model, name)


@pytest.mark.parametrize("source", ["dict", "name", "sidecar"])
def test_sequence_parallelism_beside_a_plan_that_splits_no_sequence_is_refused(model, source):
    plan = {"layers.*.mlp.up_proj": ColwiseParallel(), "layers.*.mlp.down_proj": RowwiseParallel()}
    register_tp_plan("unsplit", plan)
    requested = {"dict": plan, "name": "unsplit", "sidecar": None}[source]
    with pytest.raises(ValueError, match="splits no sequence, and the plan decides"):
        resolve(model, requested, sequence_parallel=True, sidecar=lambda model, split: plan)


@pytest.mark.parametrize(
    "style",
    [
        SequenceBoundary(enter=True),
        RowParallel(sequence_parallel=True),
        SequenceParallel(),
        ColwiseParallel(input_layouts=Shard(1)),
        RowwiseParallel(output_layouts=Shard(1)),
        PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        PrepareModuleInput(
            input_kwarg_layouts={"x": Shard(1)}, desired_input_kwarg_layouts={"x": Replicate()}
        ),
        PrepareModuleInputOutput(
            input_layouts=Replicate(),
            desired_input_layouts=Replicate(),
            output_layouts=Replicate(),
            desired_output_layouts=Shard(1),
        ),
    ],
    ids=lambda style: type(style).__name__,
)
def test_any_style_that_splits_the_sequence_answers_the_request(model, style):
    assert resolve(model, {"layers.*.mlp": (COLUMN, style)}, sequence_parallel=True)


@pytest.mark.parametrize(
    "style", [SequenceParallel(sequence_dim=2), ColwiseParallel(), SequenceBoundary(), ROW]
)
def test_a_split_along_another_dimension_does_not(model, style):
    with pytest.raises(ValueError, match="splits no sequence"):
        resolve(model, {"layers.*.mlp": style}, sequence_parallel=True)


def test_a_sidecar_may_refuse_the_resolved_plan(model):
    class Sidecar:
        def validate_tp_plan(self, given, plan):
            raise ValueError(f"{type(given).__name__} does not serve {list(plan)}")

    plan = resolve(model, {"head": COLUMN})
    check_plan_with_sidecar(object(), model, plan)
    with pytest.raises(ValueError, match=r"Decoder does not serve \['head'\]"):
        check_plan_with_sidecar(Sidecar(), model, plan)
