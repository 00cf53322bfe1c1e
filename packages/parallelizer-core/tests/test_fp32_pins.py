"""Names that pin parameters to fp32: what they match, and what is refused."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from shardwalk.parallelizer_core.fp32_pins import (
    is_pinned,
    pin_fp32_parameters,
    pin_parameters_below,
    pinned_names,
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 2)
        self.gated = nn.Linear(4, 4)
        self.A_log = nn.Parameter(torch.zeros(4))
        self.register_buffer("bias", torch.zeros(2))

    def forward(self, x):
        return self.gated(x) * self.A_log


class Model(nn.Module):
    def __init__(self, pins, device=None) -> None:
        super().__init__()
        with torch.device(device or "cpu"):
            self.layers = nn.ModuleList([Block(), Block()])
        self._keep_in_fp32_modules_strict = pins


def pinned(model: nn.Module) -> list[str]:
    return list(pin_fp32_parameters(model))


def test_a_pin_matches_whole_path_segments():
    assert pinned(Model(["gate"])) == [
        f"layers.{i}.gate.{kind}" for i in (0, 1) for kind in ("weight", "bias")
    ]
    assert pinned(Model({"layers.1.gate.weight"})) == ["layers.1.gate.weight"]
    assert pinned(Model("A_log")) == ["layers.0.A_log", "layers.1.A_log"]


def test_pins_of_an_inner_module_are_relative_to_it():
    outer = nn.Module()
    outer.inner = Model(["0.gate"])
    assert pinned(outer) == [
        "inner.layers.0.gate.weight",
        "inner.layers.0.gate.bias",
    ]


def test_a_pin_may_name_a_buffer():
    assert pinned(Model(["bias"])) == [
        f"layers.{i}.{linear}.bias" for i in (0, 1) for linear in ("gate", "gated")
    ]
    model = Model(["0.bias"])
    model.layers[0].bias = model.layers[0].bias.bfloat16()
    with pytest.raises(ValueError, match=r"layers\.0\.bias is pinned to float32"):
        pin_fp32_parameters(model)
    model = Model(["0.bias"], device="meta").to(torch.bfloat16)
    assert pinned(model) == []
    assert model.layers[0].bias.dtype == torch.float32


class Family(nn.Linear):
    _keep_in_fp32_modules_strict = ("weight", "gate.weight")

    def __init__(self) -> None:
        super().__init__(2, 2)


class Member(Family):
    pass


def test_a_pin_of_a_base_class_may_miss_in_one_of_its_models():
    member = Member()
    member._keep_in_fp32_modules_strict = {"weight", "gate.weight"}  # as transformers copies it
    assert pinned(nn.Sequential(member)) == ["0.weight"]
    with pytest.raises(ValueError, match="Family pins 'gate.weight', which names no module"):
        pin_fp32_parameters(Family())


@pytest.mark.parametrize("pin", ["gat", "router", "layers.5"])
def test_a_pin_that_matches_nothing_is_an_error(pin):
    with pytest.raises(ValueError, match=f"pins '{pin}', which names no module"):
        pin_fp32_parameters(Model([pin]))


def test_narrow_weights_are_refused_where_they_are_real_and_widened_on_meta():
    with pytest.raises(
        ValueError, match=r"layers\.0\.gate\.weight is pinned to float32 .* torch\.bfloat16"
    ):
        pin_fp32_parameters(Model(["gate"]).to(torch.bfloat16))
    model = Model(["gate"], device="meta").to(torch.bfloat16)
    pin_fp32_parameters(model)
    assert model.layers[0].gate.weight.dtype == torch.float32
    assert model.layers[0].gated.weight.dtype == torch.bfloat16


def test_marks_are_per_parameter():
    model = Model(["gate"])
    pin_fp32_parameters(model)
    assert is_pinned(model.layers[0].gate.weight)
    assert not is_pinned(model.layers[0].gated.weight)
    assert not is_pinned(Model(["gate"]).layers[0].gate.weight)


def test_names_pin_what_stands_below_them_in_one_part_of_a_model():
    model = Model(None)
    found = pin_parameters_below(model.layers[0], ["gate", "router"])
    assert list(found) == ["gate.weight", "gate.bias"]
    assert is_pinned(model.layers[0].gate.weight)
    assert not is_pinned(model.layers[1].gate.weight)
    with pytest.raises(ValueError, match="gate.weight is pinned to float32"):
        pin_parameters_below(Model(None).to(torch.bfloat16).layers[0], ["gate"])


def test_a_wrapper_on_the_path_hides_nothing():
    model = Model(["layers.1.gate.weight"])
    model.layers[1] = checkpoint_wrapper(model.layers[1])
    pin_fp32_parameters(model)
    assert is_pinned(model.layers[1].gate.weight)


class Adapted(nn.Module):
    """An adapter around a linear layer, with the children of peft's."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 1, bias=False)})


class Copied(nn.Module):
    """A layer and a copy that trains in its place; other attributes are those of the layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.original_module = layer
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(layer)})

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.original_module, name)


def test_adapters_and_copies_of_a_layer_hide_nothing():
    model = Model(["layers.0.gate.weight", "layers.1.gate", "1.A_log"])
    wrapper = nn.Module()
    wrapper.model = Copied(model)
    wrapper.model.modules_to_save = nn.ModuleDict()
    model.layers[0].gate = Adapted(model.layers[0].gate)
    model.layers[1].gate = checkpoint_wrapper(Copied(model.layers[1].gate))
    copies = "layers.1.gate._checkpoint_wrapped_module"
    wanted = [
        "layers.0.gate.base_layer.weight",
        *(f"{copies}.original_module.{kind}" for kind in ("weight", "bias")),
        *(f"{copies}.modules_to_save.default.{kind}" for kind in ("weight", "bias")),
        "layers.1.A_log",
    ]
    found = pin_fp32_parameters(wrapper)
    assert list(found) == [f"model.original_module.{name}" for name in wanted]
    assert all(is_pinned(parameter) for parameter in found.values())
    names = [
        name.replace("._checkpoint_wrapped_module", "") for name, _ in wrapper.named_parameters()
    ]
    read = pinned_names(wrapper, names)
    assert read == {name.replace("._checkpoint_wrapped_module", "") for name in found}
    model._keep_in_fp32_modules_strict = ["router"]
    with pytest.raises(ValueError, match="of Model pins 'router'"):
        pin_fp32_parameters(wrapper)
