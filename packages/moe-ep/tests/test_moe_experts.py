"""Grouped experts: the numbers of a plain loop over experts, whatever the groups look like."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shardwalk.moe_ep import grouped_matmul
from shardwalk.moe_ep.activations import ACTIVATIONS, Activation
from shardwalk.moe_ep.config import MoEConfig
from shardwalk.moe_ep.experts import GroupedExperts
from shardwalk.moe_ep.grouped_matmul import RowGroups, grouped_linear
from shardwalk.parallelizer_core import materialize

CPU = torch.device("cpu")
COUNTS = {
    "uneven": [3, 0, 5, 1],
    "empty ends": [0, 4, 5, 0],
    "one expert": [0, 0, 9, 0],
    "no rows": [0, 0, 0, 0],
}
counts_of = pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())


def config(**options) -> MoEConfig:
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_experts": 4, "top_k": 2}
    return MoEConfig(**{**sizes, **options})


def plain(experts: GroupedExperts, rows: Tensor, counts: list[int]) -> Tensor:
    """One expert after the other, each row by itself, in the words of the formula."""
    outputs, start = [], 0
    first = "gate_up_proj" if hasattr(experts, "gate_up_proj") else "up_proj"
    for expert, count in enumerate(counts):
        for row in rows[start : start + count]:
            projected = getattr(experts, first)[expert] @ row
            bias = getattr(experts, f"{first}_bias")
            projected = projected if bias is None else projected + bias[expert]
            output = experts.down_proj[expert] @ experts.activation(projected[None])[0]
            bias = experts.down_proj_bias
            outputs.append(output if bias is None else output + bias[expert])
        start += count
    return torch.stack(outputs) if outputs else rows[:0] * 1


def run(experts: GroupedExperts, forward, rows: Tensor, counts: list[int]):
    """The output and all gradients of a loss in which every value weighs differently."""
    rows = rows.clone().requires_grad_()
    experts.zero_grad(set_to_none=True)
    out = forward(rows, counts)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    (out * weights).sum().backward()
    grads = {n: None if p.grad is None else p.grad.clone() for n, p in experts.named_parameters()}
    return out.detach(), {"rows": rows.grad, **grads}


OPTIONS = {
    "aligned": {},
    "unaligned": {"hidden_size": 7, "intermediate_size": 5},
    "biases": {"expert_bias": True},
    "unaligned biases": {"hidden_size": 7, "expert_bias": True},
    "no gate": {"activation": "relu2", "expert_bias": True},
    "latent": {"latent_size": 4},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@counts_of
def test_forward_and_backward_have_the_numbers_of_a_loop(options, counts) -> None:
    torch.manual_seed(0)
    experts = GroupedExperts(config(**options)).double()
    width = experts.down_proj.shape[1]
    rows = torch.randn(sum(counts), width, dtype=torch.float64)
    for dtype, tolerance in {torch.float64: 1e-12, torch.float32: 1e-5}.items():
        experts, rows = experts.to(dtype), rows.to(dtype)
        out, grads = run(experts, experts, rows, counts)
        expected, plain_grads = run(experts, partial(plain, experts), rows, counts)
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
        for name, grad in grads.items():
            assert grad is not None, f"{name} has no gradient"
            other = plain_grads[name]
            other = torch.zeros_like(grad) if other is None else other
            torch.testing.assert_close(grad, other, rtol=tolerance, atol=tolerance, msg=name)


@counts_of
@pytest.mark.parametrize("fp32_product", [False, True])
def test_bf16_is_near_fp32(counts, fp32_product) -> None:
    torch.manual_seed(0)
    experts = GroupedExperts(config(fp32_product=fp32_product, expert_bias=True)).bfloat16()
    rows = torch.randn(sum(counts), 8).bfloat16()
    out, grads = run(experts, experts, rows, counts)
    assert out.dtype == torch.bfloat16
    exact, exact_grads = run(experts.float(), experts, rows.float(), counts)
    torch.testing.assert_close(out.float(), exact, rtol=0.05, atol=0.05)
    for name, grad in grads.items():
        assert grad.dtype == torch.bfloat16
        torch.testing.assert_close(grad.float(), exact_grads[name], rtol=0.05, atol=0.1)


def grouped_calls(monkeypatch) -> list[torch.Size]:
    """The shapes of the rows of every grouped product from now on."""
    calls: list[torch.Size] = []
    original = F.grouped_mm

    def counted(rows, *args, **kwargs):
        calls.append(rows.shape)
        return original(rows, *args, **kwargs)

    monkeypatch.setattr(grouped_matmul.F, "grouped_mm", counted)
    return calls


ROWS = {
    "aligned": (torch.randn(9, 8), True),
    "bf16": (torch.randn(9, 8).bfloat16(), True),
    "fp16": (torch.randn(9, 8).half(), True),
    "fp64": (torch.randn(9, 8).double(), False),
    "bf16 of 8 bytes": (torch.randn(9, 4).bfloat16(), False),
    "fp32 of 28 bytes": (torch.randn(9, 7), False),
    "strided": (torch.randn(9, 16)[:, ::2], False),
    "an odd address": (torch.randn(9 * 8 + 1)[1:].view(9, 8), False),
}


@pytest.mark.parametrize("name", ROWS)
def test_the_grouped_product_is_used_where_it_takes_the_operands(monkeypatch, name) -> None:
    rows, uses = ROWS[name]
    calls = grouped_calls(monkeypatch)
    groups = RowGroups([3, 0, 5, 1], CPU)
    weight = torch.randn(4, 8, rows.shape[1]).to(rows.dtype)
    out = grouped_linear(rows, weight, groups)
    assert bool(calls) == uses
    starts = [0, 3, 3, 8, 9]
    for group, matrix in enumerate(weight):
        part = slice(starts[group], starts[group + 1])
        torch.testing.assert_close(out[part], rows[part] @ matrix.t(), rtol=0.02, atol=0.02)


def test_an_output_that_torch_would_not_take_a_gradient_for_is_looped(monkeypatch) -> None:
    calls = grouped_calls(monkeypatch)
    weight = torch.randn(4, 7, 8, requires_grad=True)
    grouped_linear(
        torch.randn(9, 8), weight, RowGroups([3, 0, 5, 1], CPU)
    ).square().sum().backward()
    assert not calls
    assert weight.grad is not None


def test_autocast_decides_the_dtype(monkeypatch) -> None:
    calls = grouped_calls(monkeypatch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = grouped_linear(torch.randn(9, 8), torch.randn(4, 8, 8), RowGroups([3, 0, 5, 1], CPU))
    assert out.dtype == torch.bfloat16
    assert not calls


@pytest.mark.parametrize("width", [8, 7], ids=["grouped", "looped"])
def test_rows_of_nobody_give_zeros_and_get_zero_gradients(width) -> None:
    """Rows after the last group, NaN ones too, leave no trace."""
    weight = torch.randn(2, 8, width, requires_grad=True)
    bias = torch.randn(2, 8, requires_grad=True)
    rows = torch.randn(6, width)
    rows[4:] = math.nan
    rows.requires_grad_()
    out = grouped_linear(rows, weight, RowGroups([1, 3], CPU), bias)
    assert torch.equal(out[4:], torch.zeros(2, 8))
    out.sum().backward()
    assert torch.equal(rows.grad[4:], torch.zeros(2, width))
    for tensor in (rows, weight, bias):
        assert tensor.grad.isfinite().all()


@pytest.mark.parametrize("width", [8, 7], ids=["grouped", "looped"])
def test_an_expanded_gradient_is_taken(width) -> None:
    weight = torch.randn(2, 8, width, requires_grad=True)
    rows = torch.randn(4, width, requires_grad=True)
    grouped_linear(rows, weight, RowGroups([1, 3], CPU)).sum().backward()
    expected = torch.stack([rows[:1].sum(0).expand(8, -1), rows[1:].sum(0).expand(8, -1)])
    torch.testing.assert_close(weight.grad, expected)


def test_frozen_weights_pass_gradients_on() -> None:
    experts = GroupedExperts(config(expert_bias=True)).requires_grad_(False)
    rows = torch.randn(9, 8, requires_grad=True)
    experts(rows, [3, 0, 5, 1]).sum().backward()
    assert rows.grad.abs().sum() > 0
    assert all(p.grad is None for p in experts.parameters())


def test_counts_may_be_a_tensor() -> None:
    experts, rows = GroupedExperts(config()), torch.randn(9, 8)
    assert torch.equal(experts(rows, torch.tensor([3, 0, 5, 1])), experts(rows, [3, 0, 5, 1]))


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([3, 0, 5], "3 counts were given for 4 experts"),
        ([3, 0, 5, 2], "add up to 10 rows, and there are 9"),
        ([3, -1, 5, 2], "must be 0 or more"),
    ],
)
def test_counts_that_do_not_fit_are_refused(counts, message) -> None:
    with pytest.raises(ValueError, match=message):
        GroupedExperts(config())(torch.randn(9, 8), counts)


def test_it_works_with_the_weights_it_is_shown() -> None:
    """A rank's share of the experts may stand in for the weights during a call."""
    from shardwalk.parallelizer_core.tensor_parallel.local_parameters import shown

    experts = GroupedExperts(config(expert_bias=True))
    rows = torch.randn(6, 8)
    whole = experts(rows, [0, 0, 5, 1])
    share = {name: p[2:] for name, p in experts.named_parameters()}
    with shown(experts, **share):
        part = experts(rows, [5, 1])
    torch.testing.assert_close(part, whole)


# Activations


def gate_and_up() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    gate, up = (4 * torch.randn(5, 6, generator=generator) for _ in range(2))
    return gate, up


FORMULAS = {
    "swiglu": lambda g, u: g / (1 + math.exp(-g)) * u,
    "geglu": lambda g, u: g * 0.5 * (1 + math.erf(g / math.sqrt(2))) * u,
    "geglu_tanh": lambda g, u: (
        0.5 * g * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) * u
    ),
    "quick_geglu": lambda g, u: g / (1 + math.exp(-1.702 * g)) * u,
    "swiglu_clamped": lambda g, u: min(g, 2) / (1 + math.exp(-min(g, 2))) * max(-2, min(u, 2)),
    "swiglu_oai": lambda g, u: (
        min(g, 2) / (1 + math.exp(-1.5 * min(g, 2))) * (max(-2, min(u, 2)) + 1)
    ),
    "relu2": lambda _, u: max(u, 0) ** 2,
}
SETTINGS = {
    "swiglu_clamped": {"limit": 2.0},
    "swiglu_oai": {"limit": 2.0, "alpha": 1.5},
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_its_formula(name) -> None:
    gate, up = gate_and_up()
    activation = Activation(name=name, **SETTINGS.get(name, {}))
    given = torch.cat([gate, up], -1) if activation.is_gated else up
    pairs = zip(gate.flatten().tolist(), up.flatten().tolist(), strict=True)
    expected = torch.tensor([FORMULAS[name](g, u) for g, u in pairs]).view(gate.shape)
    torch.testing.assert_close(activation(given), expected, rtol=1e-5, atol=1e-5)


def test_no_limit_clamps_nothing() -> None:
    gate, up = gate_and_up()
    clamped = Activation(name="swiglu_clamped").product(gate, up)
    assert torch.equal(clamped, Activation(name="swiglu").product(gate, up))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_fp32_product_is_rounded_once(name) -> None:
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(50, 64, generator=generator).bfloat16() for _ in range(2))
    settings = SETTINGS.get(name, {})
    activation = Activation(name=name, fp32_product=True, **settings)
    given = torch.cat([gate, up], -1) if activation.is_gated else up
    rounded_often = Activation(name=name, **settings)(given)
    exact = Activation(name=name, **settings)(given.double())
    errors = [(out - exact).norm() for out in (activation(given), rounded_often)]
    if name == "relu2":  # is rounded once in any case
        assert torch.equal(activation(given), rounded_often)
    else:
        assert errors[0] < 0.8 * errors[1]
    torch.testing.assert_close(activation(given).double(), exact, rtol=2**-8, atol=1e-3)


def test_the_experts_of_gpt_oss() -> None:
    """With interleaved rows sorted into gate and up, the numbers of its own module."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    theirs = GptOssExperts(
        transformers.GptOssConfig(hidden_size=8, intermediate_size=12, num_local_experts=4)
    )
    torch.manual_seed(0)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=2.0)
    ours = GroupedExperts(
        config(activation="swiglu_oai", activation_limit=theirs.limit, expert_bias=True)
    )
    first, bias = theirs.gate_up_proj.transpose(1, 2), theirs.gate_up_proj_bias
    with torch.no_grad():
        ours.gate_up_proj.copy_(torch.cat([first[:, ::2], first[:, 1::2]], 1))
        ours.gate_up_proj_bias.copy_(torch.cat([bias[:, ::2], bias[:, 1::2]], 1))
        ours.down_proj.copy_(theirs.down_proj.transpose(1, 2))
        ours.down_proj_bias.copy_(theirs.down_proj_bias)
    rows = torch.randn(9, 8)
    experts = torch.tensor([[0], [0], [0], [2], [2], [2], [2], [2], [3]])
    expected = theirs.forward(rows, experts, torch.ones(9, 1))
    torch.testing.assert_close(ours(rows, [3, 0, 5, 1]), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("module", ["deepseek_v4", "minimax_m3_vl"])
def test_the_clamped_activation_of_published_models(module) -> None:
    import importlib

    pytest.importorskip("transformers")
    models = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    cls = next(
        value
        for name, value in vars(models).items()
        if name.endswith("Experts") and hasattr(value, "_apply_gate")
    )
    theirs = cls.__new__(cls)
    torch.nn.Module.__init__(theirs)
    theirs.limit = theirs.swiglu_limit = 2.0
    theirs.swiglu_alpha = theirs.alpha = 1.702
    theirs.act_fn = F.silu
    gate_up = torch.cat(gate_and_up(), -1)
    name = "swiglu_clamped" if module == "deepseek_v4" else "swiglu_oai"
    ours = Activation(name=name, limit=2.0)(gate_up)
    torch.testing.assert_close(ours, theirs._apply_gate(gate_up))


# Initial values


def test_each_expert_is_drawn_as_a_linear_layer() -> None:
    torch.manual_seed(0)
    experts = GroupedExperts(config(hidden_size=64, intermediate_size=100, expert_bias=True))
    for name, inputs in {"gate_up_proj": 64, "down_proj": 100}.items():
        weight = getattr(experts, name)
        bound = 1 / math.sqrt(inputs)
        assert weight.abs().max() <= bound
        assert torch.allclose(weight.std((1, 2)), torch.tensor(bound / math.sqrt(3)), rtol=0.05)
        assert getattr(experts, f"{name}_bias").abs().max() <= bound
    assert not torch.equal(experts.down_proj[0], experts.down_proj[1])


def test_an_init_function_draws_expert_by_expert() -> None:
    """So that a rank draws its own experts only, and every mesh has the same."""
    drawn = []

    def init(name: str, tensor: Tensor, generator: torch.Generator) -> None:
        drawn.append((name, tuple(tensor.shape)))
        tensor.normal_(generator=generator)

    with torch.device("meta"):
        experts = GroupedExperts(config(expert_bias=True))
    materialize(experts, init=init)
    assert sorted(set(drawn)) == [
        ("down_proj", (8, 12)),
        ("down_proj_bias", (8,)),
        ("gate_up_proj", (24, 8)),
        ("gate_up_proj_bias", (24,)),
    ]
    assert len(drawn) == 4 * 4
    with torch.device("meta"):
        fewer = GroupedExperts(config(expert_bias=True, num_experts=2))
    materialize(fewer, init=init)
    assert torch.equal(fewer.down_proj, experts.down_proj[:2])


def test_reset_parameters_after_a_start_on_meta() -> None:
    made = []
    for _ in range(2):
        with torch.device("meta"):
            experts = GroupedExperts(config(activation="relu2", expert_bias=True))
        materialize(experts, init="reset_parameters", seed=3)
        made.append(experts)
    for one, other in zip(made[0].parameters(), made[1].parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.std() > 0


def test_it_prints_its_sizes() -> None:
    assert "gate_up_proj=4x24x8, activation=swiglu" in repr(GroupedExperts(config()))
