"""What cannot be spread over ranks is refused by name, before anything is changed."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from moe_layer_toys import MoEDecoder, moe_config
from moe_walk_toys import CommonCall, CommonDecoder, CommonLayer, Wrapped, context
from torch import nn

from shardwalk.mesh import ParallelismSizes
from shardwalk.moe_ep.layers import MoE
from shardwalk.parallelizer_core import parallelize_model
from shardwalk.parallelizer_core.tensor_parallel import ColumnParallel
from shardwalk.parallelizer_core.testing import run_on_ranks


def refusal(model: Any, options: dict[str, Any]) -> str:
    """What parallelizing raises, having left the model as it was."""
    torch.manual_seed(7)
    built = model()
    before = dict(built.named_parameters())
    forwards = [module.forward for module in built.modules()]
    with pytest.raises(ValueError) as caught:
        parallelize_model(built, context(**options))
    after = dict(built.named_parameters())
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    assert forwards == [module.forward for module in built.modules()]
    return str(caught.value)


def assert_refused(model: Any, *words: str, ranks: int = 2, **options: Any) -> None:
    for message in run_on_ranks(ranks, refusal, model, options):
        for word in words:
            assert word in message, message


class Six(MoEDecoder):
    def __init__(self) -> None:
        super().__init__(num_experts=6)


class SixOfTheCommonCall(CommonDecoder):
    def __init__(self) -> None:
        super().__init__(SixLayer)


class SixLayer(CommonLayer):
    def __init__(self) -> None:
        super().__init__(SixExperts)


class SixExperts(CommonCall):
    def __init__(self) -> None:
        super().__init__(num_experts=6)


@pytest.mark.parametrize("model", [Six, SixOfTheCommonCall])
def test_p25_b61_experts_that_do_not_divide(model: Any) -> None:
    """An error in the middle of the surgery would leave half of a model."""
    assert_refused(
        model,
        "ep_size=4 does not divide num_experts=6 of layers.0.mlp.experts",
        "[1, 2, 3, 6]",
        ranks=4,
        sizes={"ep_size": 4},
    )


@pytest.mark.parametrize(
    ("sizes", "world_size"),
    [({"ep_size": 3}, 4), ({"ep_size": 8}, 4), ({"tp_size": 2, "ep_size": 3}, 4)],
)
def test_b61_expert_groups_that_do_not_fill_the_ranks(
    sizes: dict[str, int], world_size: int
) -> None:
    with pytest.raises(ValueError, match=rf"ep_size={sizes['ep_size']} does not divide"):
        ParallelismSizes(**sizes).resolve(world_size)


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_model_without_experts() -> None:
    assert_refused(Dense, "ep_size=2, but Dense has no layer of experts", "ep_size=1")


class OtherCall(nn.Module):
    """Experts that are called otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.weight = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, inputs: torch.Tensor, expert_size: list[int]) -> torch.Tensor:
        return inputs


class FlatWeights(CommonCall):
    """The experts' rows follow each other in one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.down_proj = nn.Parameter(torch.randn(4 * 8, 12))


class IdentityExperts(CommonCall):
    """Some experts have no weights in one of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.down_proj = nn.Parameter(torch.randn(3, 8, 12))


class ExpertList(nn.ModuleDict):
    """One module for each expert."""

    def __init__(self) -> None:
        super().__init__({f"expert_{i}": nn.Linear(8, 8) for i in range(4)})
        self.num_experts = 4

    def forward(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        return hidden


class Scaled(CommonCall):
    """Quantization scales per expert, as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scales", torch.ones(4, 1))


def decoder_with(experts: type[nn.Module]) -> Any:
    class Layer(CommonLayer):
        def __init__(self) -> None:
            super().__init__(experts)

    return CommonDecoder(Layer)


MISFITS = {
    "another call": (OtherCall, "it is called as forward"),
    "flat weights": (FlatWeights, "down_proj of (32, 12) holds no slice for each of 4 experts"),
    "identity experts": (IdentityExperts, "down_proj of (3, 8, 12) holds no slice"),
    "a list of experts": (ExpertList, "expert_0"),
    "buffers": (Scaled, "scales is a buffer"),
}


def refusal_of_misfit(name: str) -> str:
    return refusal(lambda: decoder_with(MISFITS[name][0]), {})


@pytest.mark.parametrize("name", MISFITS)
def test_experts_that_do_not_follow_the_common_call(name: str) -> None:
    for message in run_on_ranks(2, refusal_of_misfit, name):
        assert "ep_size=2: the experts of layers.0.mlp.experts cannot be spread" in message
        assert MISFITS[name][1] in message


class Indivisible(MoEDecoder):
    def __init__(self) -> None:
        super().__init__()
        experts = self.layers[0].mlp.experts
        experts.down_proj = nn.Parameter(torch.zeros(4, 7, 5))


def test_weights_that_do_not_divide_over_the_shards() -> None:
    assert_refused(
        Indivisible,
        "layers.0.mlp.experts: down_proj of (4, 7, 5) has no dimension but the experts'",
        "ep_shard=2",
        ranks=4,
    )


class Adapted(nn.Module):
    """An adapter around stacked weights; its first factor has as many rows as there are experts."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(8, 4, bias=False)})


class AdaptedExperts(MoEDecoder):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0].mlp.experts = Adapted(Adapted(self.layers[0].mlp.experts))


class MisfitExperts(MoEDecoder):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0].mlp.experts.extra = nn.Parameter(torch.zeros(3))


def test_adapters_around_experts_are_refused_with_their_names() -> None:
    name = "layers.0.mlp.experts.base_layer.lora_A.default.weight"
    assert_refused(AdaptedExperts, f"ep_size=2: {name} belongs to an adapter", "use ep_size=1")
    assert_refused(MisfitExperts, "ep_size=2: the experts of layers.0.mlp.experts", "extra of (3,)")


class TiedExperts(CommonDecoder):
    def __init__(self) -> None:
        super().__init__()
        self.extra = self.layers[0].mlp.experts.down_proj


def test_weights_of_experts_that_stand_elsewhere_too() -> None:
    assert_refused(TiedExperts, "extra is a weight of the experts layers.0.mlp.experts too")


class TiedHead(Wrapped):
    def __init__(self) -> None:
        super().__init__(tied=True)


class HalfHead(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head.to(torch.bfloat16)


@pytest.mark.parametrize(
    ("model", "moe", "words"),
    [
        (TiedHead, {"lm_head_precision": "float32"}, ("lm_head shares its weight", "untie")),
        (HalfHead, {"lm_head_precision": "float32"}, ("stored in torch.bfloat16", "low bits")),
        (Wrapped, {"lm_head_precision": "float16"}, ("not what the rest computes in",)),
        (TiedHead, {"wrap_outer_model": False}, ("share a weight", "wrap_outer_model=True")),
        (MoEDecoder, {"wrap_outer_model": False}, ("no module of that name",)),
    ],
)
def test_options_that_do_not_fit_the_model(
    model: Any, moe: dict[str, Any], words: tuple[str, ...]
) -> None:
    assert_refused(model, *words, moe=moe)


class InTheBlock(nn.Module):
    """A block that holds router and experts itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MoE(moe_config()) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_experts_whose_tokens_cannot_be_split_over_tp() -> None:
    assert_refused(
        InTheBlock,
        "tp_size=2: layers.0.experts stands directly in the block layers.0",
        sizes={"tp_size": 2, "ep_size": 2},
    )


def cut_inside() -> str:
    names = ("layers.*.mix", "layers.*.mlp.shared_experts.up_proj")
    plan = {name: ColumnParallel(gather_output=True) for name in names}
    options = {"sizes": {"tp_size": 2, "ep_size": 2}, "tp_plan": plan}
    return refusal(partial(MoEDecoder, num_shared_experts=1), options)


def test_a_plan_that_cuts_inside_a_layer_of_experts() -> None:
    for message in run_on_ranks(2, cut_inside):
        assert "names layers.0.mlp.shared_experts.up_proj" in message
        assert "take it out of the plan" in message


class OnOneRank(MoEDecoder):
    """Asks for a dispatcher that serves one rank."""

    def __init__(self) -> None:
        super().__init__(dispatcher="local")


class WithDeepEP(MoEDecoder):
    def __init__(self) -> None:
        super().__init__(dispatcher="deepep")


def test_dispatchers_that_cannot_be_made_are_refused_before_anything_is_cut() -> None:
    assert_refused(OnOneRank, "dispatcher='local'", "ep_size=2")


@pytest.mark.skipif(find_spec("deep_ep") is not None, reason="DeepEP is installed")
def test_deepep_that_is_not_installed_is_refused_before_anything_is_cut() -> None:
    for kept in run_on_ranks(2, kept_without_deepep):
        assert kept


def kept_without_deepep() -> bool:
    model = WithDeepEP()
    before = dict(model.named_parameters())
    with pytest.raises(ImportError, match="deepep"):
        parallelize_model(model, context())
    return all(before[name] is parameter for name, parameter in model.named_parameters())
