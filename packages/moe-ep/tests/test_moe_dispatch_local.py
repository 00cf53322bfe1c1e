"""The dispatcher of one rank: the sums and gradients of the plain formula."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_dispatch_toys import HIDDEN, by_formula, inputs, run, scales, through

from shardwalk.moe_ep.dispatcher import LocalDispatcher

EXPERTS = 6


@pytest.mark.parametrize(
    ("tokens", "top_k", "dropped"),
    [(13, 2, 0.0), (13, 3, 0.4), (1, 1, 0.0), (5, 6, 1.0), (0, 2, 0.0), (40, 6, 0.1)],
)
def test_sums_and_gradients_are_those_of_the_formula(
    tokens: int, top_k: int, dropped: float
) -> None:
    torch.manual_seed(0)
    x, experts, weights = inputs(tokens, top_k, EXPERTS, dropped=dropped)
    scale = scales(EXPERTS)
    ours = run(
        lambda *leaves: through(LocalDispatcher(EXPERTS), leaves[0], experts, leaves[1], leaves[2]),
        x,
        weights,
        scale,
    )
    x, weights = (each.detach().requires_grad_() for each in (x, weights))
    scale = scales(EXPERTS)
    expected = run(
        lambda *leaves: by_formula(leaves[0], experts, leaves[1], leaves[2]), x, weights, scale
    )
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_rows_are_sorted_by_expert_and_counted_on_the_host() -> None:
    x, experts, weights = inputs(20, 3, EXPERTS, dropped=0.2)
    rows, metadata = LocalDispatcher(EXPERTS).dispatch(x, experts, weights)
    assert metadata.counts == [int((experts == expert).sum()) for expert in range(EXPERTS)]
    for expert, piece in enumerate(rows.split(metadata.counts)):
        torch.testing.assert_close(piece, x[(experts == expert).any(1)], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_rows_are_summed_in_fp32_and_rounded_once(dtype: torch.dtype) -> None:
    """Output and gradients are the exact ones of the same narrow values, rounded once."""
    torch.manual_seed(0)
    x, experts, weights = inputs(50, 6, EXPERTS, dtype=dtype)
    outputs = torch.randn(300, HIDDEN).to(dtype).requires_grad_()
    rows, metadata = LocalDispatcher(EXPERTS).dispatch(x, experts, weights)
    result = LocalDispatcher(EXPERTS).combine(outputs, metadata)
    upstream = torch.randn(50, HIDDEN).to(dtype)
    result.backward(upstream)
    of_rows = torch.randn(300, HIDDEN).to(dtype)
    rows.backward(of_rows)
    order = metadata.slots.order
    by_slot = torch.empty(300, HIDDEN, dtype=torch.float64)
    by_slot[order] = outputs.detach().double()
    exact = (by_slot.view(50, 6, HIDDEN) * weights.detach().double()[..., None]).sum(1)
    torch.testing.assert_close(result, exact.to(dtype))
    assert x.grad is not None
    assert outputs.grad is not None
    assert weights.grad is not None
    sent = (upstream.double()[:, None] * weights.detach().double()[..., None]).view(300, HIDDEN)
    torch.testing.assert_close(outputs.grad, sent[order].to(dtype))
    products = (by_slot.view(50, 6, HIDDEN) * upstream.double()[:, None]).sum(-1)
    torch.testing.assert_close(weights.grad, products.float())
    by_slot[order] = of_rows.double()
    torch.testing.assert_close(
        x.grad, by_slot.view(50, 6, HIDDEN).sum(1).to(dtype), rtol=1e-2, atol=1e-2
    )


def test_a_sum_of_many_small_bf16_rows_keeps_them() -> None:
    """Added up in bf16, 1 + 256 times 1/256 would stay 1."""
    x = torch.ones(1, HIDDEN, dtype=torch.bfloat16)
    dispatcher = LocalDispatcher(257)
    experts, weights = torch.arange(257)[None], torch.full((1, 257), 1 / 256)
    weights[0, 0] = 1.0
    rows, metadata = dispatcher.dispatch(x.requires_grad_(), experts, weights)
    assert dispatcher.combine(rows, metadata).unique().tolist() == [2.0]
    rows.backward(
        torch.where(torch.arange(257)[:, None] == 0, 1.0, 1 / 256).bfloat16().expand(257, HIDDEN)
    )
    assert x.grad is not None
    assert x.grad.unique().tolist() == [2.0]


@pytest.mark.parametrize(
    ("x_needs", "weights_need", "scale_needs"), list(itertools.product([True, False], repeat=3))
)
def test_only_what_needs_a_gradient_gets_one(
    x_needs: bool, weights_need: bool, scale_needs: bool
) -> None:
    x, experts, weights = inputs(9, 2, EXPERTS)
    leaves = [
        each.detach().requires_grad_(needs)
        for each, needs in zip(
            (x, weights, scales(EXPERTS)), (x_needs, weights_need, scale_needs), strict=True
        )
    ]
    output = through(LocalDispatcher(EXPERTS), leaves[0], experts, leaves[1], leaves[2])
    assert output.requires_grad == any((x_needs, weights_need, scale_needs))
    if output.requires_grad:
        output.sum().backward()
    assert [leaf.grad is not None for leaf in leaves] == [x_needs, weights_need, scale_needs]


def test_the_derivatives_are_those_of_differences() -> None:
    torch.manual_seed(0)
    _, experts, _ = inputs(5, 2, EXPERTS, dropped=0.2)
    x = torch.randn(5, HIDDEN, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(5, 2, dtype=torch.float64, requires_grad=True)
    scale = scales(EXPERTS, dtype=torch.float64).detach().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, weights, scale: through(LocalDispatcher(EXPERTS), x, experts, weights, scale),
        (x, weights, scale),
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 12), st.integers(1, EXPERTS), st.floats(0, 1), st.integers(0, 10**6))
def test_any_routing(tokens: int, top_k: int, dropped: float, seed: int) -> None:
    torch.manual_seed(seed)
    x, experts, weights = inputs(tokens, top_k, EXPERTS, dropped=dropped)
    scale = scales(EXPERTS).detach()
    ours = through(LocalDispatcher(EXPERTS), x, experts, weights, scale)
    torch.testing.assert_close(ours, by_formula(x, experts, weights, scale), rtol=1e-6, atol=1e-6)


def test_wrong_shapes_and_types_are_refused() -> None:
    dispatcher = LocalDispatcher(EXPERTS)
    x, experts, weights = inputs(4, 2, EXPERTS)
    with pytest.raises(
        ValueError, match=r"x \[T, H\], experts \[T, k\].*not x \[3, 24\], experts \[4, 2\]"
    ):
        dispatcher.dispatch(x[:3], experts, weights)
    with pytest.raises(ValueError, match=r"one shape \[T, k\].*weights \[4, 1\]"):
        dispatcher.dispatch(x, experts, weights[:, :1])
    with pytest.raises(ValueError, match=r"numbers of 6 and more.*in 8 slots.*-1 drops a slot"):
        dispatcher.dispatch(x, experts + EXPERTS, weights)
    with pytest.raises(TypeError, match="not torch.float32 and torch.float32"):
        dispatcher.dispatch(x, experts.float(), weights)
    rows, metadata = dispatcher.dispatch(x, experts, weights)
    with pytest.raises(ValueError, match=r"8 dispatched rows, not a tensor of shape \[7, 24\]"):
        dispatcher.combine(rows[:7], metadata)
    with pytest.raises(ValueError, match="num_experts=0"):
        LocalDispatcher(0)
