"""Plans that a model declares by itself: what they name, what is translated, what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import tp_toys as toys
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from shardwalk.parallelizer_core.tensor_parallel import (
    ColumnParallel,
    FeatureParallel,
    LocalCounts,
    LocalParameters,
    RowParallel,
    SharedTail,
    SplitInput,
    SumOutput,
    TokenParallel,
    VocabularyParallel,
    WholeInput,
)
from shardwalk.parallelizer_core.tensor_parallel.apply import apply_plan
from shardwalk.parallelizer_core.tensor_parallel.declared import declared_entries, places_of
from shardwalk.parallelizer_core.tensor_parallel.parallelize import plan_tensors
from shardwalk.parallelizer_core.tensor_parallel.plans import resolve_plan
from shardwalk.parallelizer_core.tensor_parallel.structure import structural_plan
from shardwalk.parallelizer_core.tensor_parallel.translation import TRANSLATIONS, declared_plan
from shardwalk.parallelizer_core.testing import cached, run_on_ranks

ATTENTION = {f"layers.*.attention.{n}_proj": "colwise" for n in "qkv"} | {
    "layers.*.attention.o_proj": "rowwise"
}
MLP = {f"layers.*.mlp.{n}_proj": "colwise" for n in ("gate", "up")} | {
    "layers.*.mlp.down_proj": "rowwise"
}


def declaring(plan, cls=toys.Decoder, /, *args, **kwargs):
    """A model whose class declares `plan`."""
    return toys.meta(type(cls.__name__, (cls,), {"_tp_plan": plan}), *args, **kwargs)


class Inner(nn.Module):
    """A base model in the sense of configs: what it declares is relative to it."""

    base_model_prefix = "model"

    def __init__(self, config, cls=toys.Decoder):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(toys.WORDS, toys.WIDTH)
        self.layers = nn.ModuleList([toys.Block() for _ in range(2)])

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return x


class Headed(nn.Module):
    base_model_prefix = "model"
    _tp_plan: ClassVar[dict[str, str]] = {"lm_head": "colwise_gather_output"}

    def __init__(self, config):
        super().__init__()
        self.config, self.model = config, Inner(config)
        self.lm_head = nn.Linear(toys.WIDTH, toys.WORDS)

    def forward(self, ids):
        return self.lm_head(self.model(ids))


def keys_of(model):
    return {entry.key: entry.style for entry in declared_entries(model)}


def test_keys_are_relative_to_the_base_model_or_to_the_module_that_declares_them():
    config = SimpleNamespace(base_model_tp_plan=MLP)
    inner = {f"model.{key}": style for key, style in MLP.items()}
    whole = {**inner, "model.embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"}
    model = toys.meta(Headed, config)
    assert keys_of(model) == whole
    assert keys_of(nn.ModuleDict({"wrapped": model})) == {
        f"wrapped.{k}": s for k, s in whole.items()
    }
    assert keys_of(model.model) == {**MLP, "embed_tokens": "embedding_rowwise"}
    own = SimpleNamespace(base_model_tp_plan={**MLP, "embed_tokens": "replicate"})
    assert keys_of(toys.meta(Inner, own))["embed_tokens"] == "replicate"
    assert keys_of(toys.meta(toys.Decoder)) == {}


def test_entries_name_modules_and_parameters_and_a_star_is_a_number():
    model = declaring({"layers.*.mlp.up_proj": "colwise", "layers.*.norm1.weight": "colwise"})
    modules, parameters = (places_of(model, entry) for entry in declared_entries(model))
    assert modules.modules == ("layers.0.mlp.up_proj", "layers.1.mlp.up_proj")
    assert parameters.parameters == (("layers.0.norm1", "weight"), ("layers.1.norm1", "weight"))
    (nothing,) = declared_entries(declaring({"*.0.mlp.up_proj": "colwise"}))
    assert not places_of(model, nothing)


class Sinks(toys.Attention):
    def __init__(self):
        super().__init__(qk_norm=True)
        self.sinks = nn.Parameter(torch.zeros(toys.HEADS))


def test_every_style_has_its_translation():
    styles = {
        "colwise": ColumnParallel(), "rowwise": RowParallel(),
        "colwise_rep": ColumnParallel(gather_output=True),
        "colwise_gather_output": ColumnParallel(gather_output=True),
        "rowwise_rep": RowParallel(split_input=True),
        "rowwise_split_input": RowParallel(split_input=True),
        "packed_colwise": ColumnParallel(components=(6, 6)),
        "packed_rowwise": RowParallel(components=(4, 4)),
        "embedding_rowwise": VocabularyParallel(), "embedding_colwise": FeatureParallel(),
        "sequence_parallel": TokenParallel(), "replicate": WholeInput(), "all_reduce": SumOutput(),
        "replicated_with_grad_allreduce": SplitInput(), "mla_kv_a_proj": SharedTail(features=3),
    }  # fmt: skip
    assert styles.keys() == TRANSLATIONS.keys()
    for name, style in styles.items():
        holder = nn.Module()
        holder.config = SimpleNamespace(qk_rope_head_dim=3)
        is_table = name.startswith("embedding")
        holder.part = nn.Embedding(8, 12) if is_table else nn.Linear(8, 12)
        assert TRANSLATIONS[name](holder, "part", holder.part) == (style,), name
    model = declaring(
        {**ATTENTION, "layers.*.attention.sinks": "colwise", "layers.*.attention": "local_params",
         "layers.*.attention.q_norm": "replicated_with_grad_allreduce"},
        toys.Decoder, lambda: toys.Block(attention=Sinks),
    )  # fmt: skip
    plan = plan_tensors(model, 2, requested=None, sequence_parallel=False, sidecar=None)
    shown, counts = plan["layers.0.attention"]
    assert shown == LocalParameters(cuts={"sinks": 0})
    assert counts == LocalCounts(names=("heads", "num_kv_heads"))
    # Beside what is declared, a norm that can only see split heads.
    assert plan["layers.0.attention.k_norm"] == plan["layers.0.attention.q_norm"] == (SplitInput(),)


def test_a_structural_plan_that_agrees_stands_for_the_declared_one():
    model = declaring({**ATTENTION, **MLP})
    assert resolve_plan(model, 2, None, False) == structural_plan(model, 2, False)
    assert resolve_plan(model, 2, None, True) == structural_plan(model, 2, True)
    head_alone = declaring({"head": "colwise_gather_output"})
    assert resolve_plan(head_alone, 2, None, False) == structural_plan(head_alone, 2, False)


def test_a_declared_plan_decides_where_the_structural_one_differs():
    gathered = {key: style.replace("colwise", "colwise_rep") for key, style in ATTENTION.items()}
    gathered["layers.*.attention.o_proj"] = "rowwise_rep"
    plan = resolve_plan(declaring({**gathered, **MLP}), 2, None, False)
    assert plan["layers.0.attention.q_proj"] == (ColumnParallel(gather_output=True),)
    assert plan["layers.0.attention.o_proj"] == (RowParallel(split_input=True),)
    assert "head" not in plan
    assert "layers.0.norm1" not in plan
    assert plan["layers.0.mlp.up_proj"] == (ColumnParallel(shared_input=True),)


class ReadsItsTable(toys.Decoder):
    """Reads a row of its table beside calling it, where each rank would have other rows."""

    def forward(self, ids):
        return super().forward(ids) + self.embed.weight[0].mean()


@pytest.mark.parametrize("tied", [True, False])
def test_a_table_that_others_read_stays_whole_with_what_is_tied_to_it(tied):
    plan = structural_plan(toys.meta(ReadsItsTable, tied=tied), 2, False)
    assert plan["embed"] == plan["head"] == (WholeInput(),)
    declared = {
        **{key: style.replace("colwise", "colwise_rep") for key, style in ATTENTION.items()},
        "layers.*.attention.o_proj": "rowwise_rep",
        "embed": "embedding_rowwise",
        "head": "colwise_gather_output",
    }
    plan = resolve_plan(declaring(declared, ReadsItsTable, tied=tied), 2, None, False)
    assert plan["layers.0.attention.q_proj"] == (ColumnParallel(gather_output=True),)
    assert "embed" not in plan
    assert ("head" in plan) is not tied


class Misfit(toys.Block):
    """What the structural default refuses, so that a declared plan decides."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(toys.WIDTH))


def refusal(plan, block=Misfit, **config):
    model = declaring(plan, toys.Decoder, block)
    model.config = SimpleNamespace(**config)
    with pytest.raises(ValueError, match="tp_size=2: layers.0.*does not fit the default") as caught:
        resolve_plan(model, 2, None, False)
    return str(caught.value)


class Experts(toys.Gated):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(2, 8, toys.WIDTH))


@pytest.mark.parametrize(
    ("plan", "named"),
    [
        ({**MLP, "layers.*.attention.o_proj": "sliced"},
         "'layers.*.attention.o_proj': 'sliced' has a style that is not known here"),
        ({**MLP, "layers.*.norm1": "colwise"},
         "'layers.*.norm1': 'colwise' at layers.0.norm1: a RMSNorm is no nn.Linear"),
        ({**MLP, "embed": "colwise"}, "'embed': 'colwise' at embed: a Embedding is no nn.Linear"),
        ({**MLP, "head": "embedding_colwise"}, "a Linear is no nn.Embedding"),
        ({**MLP, "layers.*.attention.q_proj": "mla_kv_a_proj"}, "config has no qk_rope_head_dim"),
        ({**MLP, "layers.*.scale": "colwise"}, "has no entry 'local_params'"),
        ({**MLP, "layers.*.scale": "packed_colwise"}, "names a parameter, which this style cannot"),
        ({**MLP, "layers.0.mlp.up_proj": "colwise"}, "names layers.0.mlp.up_proj, which another"),
        ({"blocks.*.mlp.up_proj": "colwise"},
         "none of its entries names anything in the model ('blocks.*.mlp.up_proj')"),
        ({"head": "colwise_rep"}, "it splits nothing inside the blocks"),
        ({"layers.*.attention.q_proj": "colwise"}, "says nothing of k_proj, v_proj, o_proj"),
        ({**MLP, "layers.*.mlp.up_proj": "colwise_rep"},
         "up_proj is whole on every rank beside layers that are split"),
        ({**MLP, "layers.*.mlp": "moe_tp_experts"},
         "'layers.*.mlp': 'moe_tp_experts' splits experts"),
        ({**MLP, "layers.*.mlp": "grouped_gemm"}, "set ep_size, with shardwalk-moe-ep"),
    ],
)  # fmt: skip
def test_what_has_no_safe_translation_is_refused_by_entry_with_the_way_out(plan, named):
    message = refusal(plan)
    assert named in message
    assert "declares itself is no way either" in message
    assert "pass tp_plan=..." in message


class FusedWithoutProof(toys.Attention):
    def __init__(self):
        super().__init__()
        self.qkv_proj = nn.Linear(toys.WIDTH, 3 * toys.HEADS * toys.HEAD_DIM)
        del self.q_proj, self.k_proj, self.v_proj

    def forward(self, x):
        q, k, v = self.qkv_proj(x).reshape(*x.shape[:2], 4, -1).split(4, dim=-1)
        return self.o_proj((q * k * v).flatten(2))


def test_a_fused_layer_is_not_cut_as_declared_where_its_layout_is_not_known():
    """B08: the declared even cut mixes queries with keys and values."""
    plan = {"layers.*.attention.qkv_proj": "colwise", "layers.*.attention.o_proj": "rowwise"}
    message = refusal(plan, lambda: toys.Block(attention=FusedWithoutProof))
    assert "layers.0.attention.qkv_proj makes 48 features for a layer that takes 16" in message


def test_entries_that_were_given_to_one_model_must_name_something_known():
    model = declaring(MLP)
    model._tp_plan = {**MLP, "layers.*.mlp.up": "colwise"}
    with pytest.raises(
        ValueError, match=r"_tp_plan of Decoder: 'layers.\*.mlp.up'.*names no module"
    ):
        declared_plan(model)
    model._tp_plan = {**MLP, "head": "colwize"}
    with pytest.raises(ValueError, match="'head': 'colwize' has an unknown style; .*colwise_rep"):
        declared_plan(model)
    # An entry of the class may be for a layer that this model lacks.
    assert declared_plan(declaring({**MLP, "layers.*.mlp.router": "replicate"}))


def test_a_request_and_a_sidecar_go_before_the_declared_plan():
    model = declaring(MLP)
    asked = {"head": ColumnParallel(gather_output=True)}
    assert list(resolve_plan(model, 2, asked, False)) == ["head"]
    assert list(resolve_plan(model, 2, None, False, lambda model, split: asked)) == ["head"]


class Unit(nn.Module):
    """A part between two scales, so that its input has a gradient."""

    def __init__(self, part, features=12):
        super().__init__()
        self.part = part
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, features))

    def forward(self, x):
        return self.part(x if x.dtype == torch.int64 else x * self.scale).sin()


class Pair(nn.Module):
    """A fused column and a row that takes both halves, in an order of its own."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 12)

    def forward(self, x):
        first, second = self.up(x).chunk(2, dim=-1)
        return self.down(torch.cat([second.tanh(), first.sin()], dim=-1))


class Tail(nn.Module):
    def __init__(self):
        super().__init__()
        self.compress, self.expand = nn.Linear(12, 7), nn.Linear(4, 8)
        self.out = nn.Linear(8, 12)

    def forward(self, x):
        latent, tail = self.compress(x).split([4, 3], dim=-1)
        heads = self.expand(latent).unflatten(-1, (-1, 4)) * tail.sum(-1)[..., None, None]
        return self.out(heads.flatten(-2))


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.out = nn.Linear(12, 8), nn.Linear(8, 12)
        self.sinks = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return self.out((self.up(x).unflatten(-1, (-1, 2)) + self.sinks[:, None]).flatten(-2))


class Sum(nn.Module):
    """Its output is a sum over the inner features, of which a rank has a part."""

    def __init__(self):
        super().__init__()
        self.up, self.weight = nn.Linear(12, 8), nn.Parameter(torch.randn(12, 8))

    def forward(self, x):
        return F.linear(self.up(x), self.weight)


UNITS = {
    "colwise_gather_output": (lambda: nn.Linear(12, 9), {"part": "colwise_gather_output"}),
    "rowwise_split_input": (lambda: nn.Linear(12, 5), {"part": "rowwise_split_input"}),
    "uneven rowwise_split_input": (lambda: nn.Linear(13, 5), {"part": "rowwise_split_input"}),
    "embedding_rowwise": (lambda: nn.Embedding(13, 6), {"part": "embedding_rowwise"}),
    "embedding_colwise": (lambda: nn.Embedding(13, 7), {"part": "embedding_colwise"}),
    "packed": (Pair, {"part.up": "packed_colwise", "part.down": "packed_rowwise"}),
    "sequence_parallel": (lambda: nn.LayerNorm(12), {"part": "sequence_parallel"}),
    "mla_kv_a_proj": (
        Tail, {"part.compress": "mla_kv_a_proj", "part.expand": "colwise", "part.out": "rowwise"},
    ),
    "local_params": (
        Bare, {"part.up": "colwise", "part.out": "rowwise", "part.sinks": "colwise",
               "part": "local_params"},
    ),
}  # fmt: skip


def unit(name):
    torch.manual_seed(0)
    made = UNITS[name][0]()
    model = Unit(made, getattr(made, "in_features", 12))
    model.config = SimpleNamespace(qk_rope_head_dim=3)
    model._tp_plan = UNITS[name][1]
    return model


def translated(name, model):
    if name != "sum":
        return declared_plan(model)
    model.part = Sum()
    return {
        "part.up": (ColumnParallel(),),
        "part": (LocalParameters(cuts={"weight": 1}), SumOutput()),
    }


def step(model, name):
    torch.manual_seed(1)
    size = model.scale.shape[0]
    is_table = isinstance(model.part, nn.Embedding)
    x = torch.randint(13, (2, 5)) if is_table else torch.randn(2, 5, size)
    model(x).square().sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {n: g.full_tensor() if isinstance(g, DTensor) else g.clone() for n, g in grads.items()}


def units_on_ranks():
    mesh = cached(("declared", 2), lambda: init_device_mesh("cpu", (2,)))
    compared = {}
    for name in (*UNITS, "sum"):
        model = unit(name) if name != "sum" else Unit(nn.Identity())
        torch.manual_seed(0)
        plan = translated(name, model)
        whole = step(model, name)
        apply_plan(model, mesh, plan)
        torch.testing.assert_close(
            step(model, name), whole, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
        compared[name] = len(whole)
    return compared


def test_each_translated_style_has_the_gradients_of_the_unsplit_module():
    for compared in run_on_ranks(2, units_on_ranks):
        assert compared.keys() == {*UNITS, "sum"}
        assert min(compared.values()) >= 1


class Asking(toys.Block):
    asked: str | None = "sum"

    def __init__(self):
        super().__init__()
        self.attention.gain = nn.Linear(HEAD := toys.HEAD_DIM, HEAD)
        self.attention.gain.tp_gradient_reduction = self.asked


def asking(asked):
    return toys.meta(toys.Decoder, type("Block", (Asking,), {"asked": asked}))


def plan_of(model, patterns=None):
    return plan_tensors(model, 2, requested=patterns, sequence_parallel=False, sidecar=None)


def test_a_module_asks_for_the_reduction_of_its_whole_parameters():
    path = "layers.1.attention.gain"
    assert plan_of(asking("sum"))[path] == (SplitInput(),)
    assert plan_of(asking("none"))[path] == (WholeInput(),)
    assert plan_of(asking("mean"))[path] == (WholeInput(average_gradients=True),)
    with pytest.raises(ValueError, match="layers.0.attention does not fit"):
        plan_of(asking(None))
    with pytest.raises(ValueError, match="'avg' of layers.0.attention.gain must be one of 'none'"):
        plan_of(asking("avg"))
    patterns = {"layers.*.mlp": WholeInput(), "layers.*.attention": SplitInput()}
    assert path in plan_of(asking("sum"), patterns)
    with pytest.raises(
        ValueError, match="gain asks for WholeInput.* has SplitInput.* at layers.0.a"
    ):
        plan_of(asking("none"), patterns)
    with pytest.raises(ValueError, match="gain asks for SplitInput.* has ColumnParallel"):
        plan_of(asking("sum"), {"layers.*.attention.gain": ColumnParallel()})


@pytest.mark.parametrize("asked", ["SUM", "avg", True, 1])
def test_a_reduction_that_does_not_exist_is_named_before_a_plan_fails(asked):
    model = asking(None)  # fits no default plan
    model.norm.tp_gradient_reduction = asked
    match = rf"tp_gradient_reduction={asked!r} of norm must be one of 'none', 'mean', 'sum'"
    for patterns in (None, {"no.such.module": WholeInput()}):
        with pytest.raises(ValueError, match=match):
            plan_of(model, patterns)


def reduced_gradients():
    """Each rank's gradient of a whole norm, after a loss that differs between the ranks."""
    mesh = cached(("declared", 2), lambda: init_device_mesh("cpu", (2,)))
    found = {}
    for asked in ("none", "mean", "sum"):
        model = nn.Sequential(nn.LayerNorm(3))
        model[0].tp_gradient_reduction = asked
        plan = plan_of(model, {"": WholeInput()} if asked == "none" else {"0": SplitInput()})
        apply_plan(model, mesh, plan)
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(mesh.get_local_rank()))
        model(x).square().sum().backward()
        gradient = model[0].weight.grad
        found[asked] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return found


def test_the_gradient_of_a_whole_parameter_is_left_averaged_or_summed():
    first, second = run_on_ranks(2, reduced_gradients)
    assert not torch.equal(first["none"], second["none"])
    total = first["none"] + second["none"]
    for found in (first, second):
        torch.testing.assert_close(found["sum"], total)
        torch.testing.assert_close(found["mean"], total / 2)
