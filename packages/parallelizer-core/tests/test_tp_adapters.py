"""Adapters around layers of a tensor-parallel plan: paths as without them, and what is refused."""

from __future__ import annotations

import pytest
import tp_toys as toys
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from shardwalk.parallelizer_core.tensor_parallel import (
    LocalParameters,
    SplitInput,
    SumOutput,
    WholeInput,
)
from shardwalk.parallelizer_core.tensor_parallel.parallelize import plan_tensors


class Adapter(nn.Module):
    """What peft makes of a linear layer."""

    def __init__(self, base: nn.Linear, *, bias: bool = False) -> None:
        super().__init__()
        self.base_layer = base
        first = nn.Linear(base.in_features, 2, bias=False)
        second = nn.Linear(2, base.out_features, bias=bias)
        self.lora_A, self.lora_B = nn.ModuleDict({"x": first}), nn.ModuleDict({"x": second})
        self.lora_magnitude_vector = nn.ModuleDict()
        self.lora_variant: dict[str, object] = {}

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["x"](self.lora_A["x"](x))


class Saved(nn.Module):
    """What peft makes of a layer of which it trains a copy."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.original_module = layer
        copy = nn.Linear(layer.in_features, layer.out_features, bias=False)
        self.modules_to_save = nn.ModuleDict({"x": copy})

    def forward(self, x):
        return self.modules_to_save["x"](x)


def wrap(model: nn.Module, path: str, wrapper: type[nn.Module] = Adapter, **options):
    owner, _, name = path.rpartition(".")
    made = toys.meta(wrapper, model.get_submodule(path), **options)
    setattr(model.get_submodule(owner), name, made)
    return made


def plan_of(model: nn.Module, requested=None):
    options = {"sequence_parallel": False, "sidecar": None}
    return plan_tensors(model, 2, requested=requested, **options)


def test_a_plan_has_the_paths_of_the_model_without_adapters():
    model = toys.meta(toys.Decoder, tied=True)
    expected = plan_of(model)
    wrapped = wrap(model, "layers.0.attention.q_proj"), wrap(model, "layers.1.mlp.down_proj")
    wrap(model, "head", Saved)
    names = [name for name, _ in model.named_modules()]
    assert plan_of(model) == expected
    assert plan_of(model, dict(expected)) == expected
    with pytest.raises(ValueError, match="names no module"):
        plan_of(model, {"layers.0.attention.q_proj.base_layer": WholeInput()})
    assert [name for name, _ in model.named_modules()] == names
    assert model.layers[0].attention.q_proj is wrapped[0]


class Magnitude(Adapter):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base)
        self.lora_magnitude_vector["x"] = nn.Linear(1, base.out_features)


class Variant(Adapter):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base)
        self.lora_variant["x"] = Magnitude


class OfParameter(Adapter):
    """What peft makes of a parameter (`target_parameters`)."""

    parameter_name = "weight"


class Scaling(nn.Module):
    """An adapter of another kind."""

    adapter_layer_names = ("scale",)

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.scale = base, nn.Parameter(base.weight[0])


class Twice(Adapter):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base)
        self.base_layer = Adapter(base)


@pytest.mark.parametrize(
    ("wrapper", "options", "why"),
    [
        (Adapter, {"bias": True}, "lora_bias=True of x"),
        (Magnitude, {}, "use_dora=True"),
        (OfParameter, {}, "OfParameter adds to the parameter weight itself .target_parameters"),
        (Variant, {}, "no plain product of two factors"),
        (Scaling, {}, "Scaling holds scale"),
        (Twice, {}, "stands in another one"),
    ],
)
@pytest.mark.parametrize("path", ["layers.0.attention.q_proj", "layers.1.mlp.down_proj"])
def test_adapters_that_cannot_be_cut_are_refused_by_name(wrapper, options, why, path):
    model = toys.meta(toys.Decoder)
    wrap(model, path, wrapper, **options)
    with pytest.raises(ValueError, match=f"cuts {path}, which stands in an adapter: .*{why}.*=1"):
        plan_of(model)


def test_styles_that_do_not_know_of_adapters_are_refused_by_name():
    model = toys.meta(toys.Decoder)
    wrap(model, "layers.0.mlp.gate_proj")
    theirs = {f"layers.*.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    theirs |= {"layers.*.mlp.down_proj": RowwiseParallel()}
    with pytest.raises(ValueError, match="gate_proj, which .*ColwiseParallel does not know of ada"):
        plan_of(model, theirs)
    experts = toys.meta(toys.Decoder)
    experts.layers[0].mlp.register_parameter("bare", nn.Parameter(experts.norm.weight))
    wrap(experts, "layers.0.mlp", Scaling2)
    cut = {"layers.0.mlp": (LocalParameters(cuts={"bare": 0}), SumOutput())}
    with pytest.raises(ValueError, match=r"layers\.0\.mlp, which .*Scaling2 adapts a Gated as"):
        plan_of(experts, cut)


class Scaling2(nn.Module):
    adapter_layer_names = ()

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer = base


def test_any_adapter_goes_with_a_layer_that_stays_whole():
    model = toys.meta(toys.Decoder)
    plan = plan_of(model) | {"head": (WholeInput(),), "embed": (WholeInput(),)}
    wrap(model, "head", Magnitude)
    assert plan_of(model, plan)["head"] == (WholeInput(),)
    assert plan_of(model, plan | {"head": (SplitInput(),)})["head"] == (SplitInput(),)
