"""The default plan and layers whose own source works over heads or features that would be split."""

from __future__ import annotations

import pytest
import torch
import tp_toys as toys
from torch import nn
from torch.nn import functional as F

from shardwalk.parallelizer_core.tensor_parallel import ColumnParallel, SplitInput
from shardwalk.parallelizer_core.tensor_parallel.structure import structural_plan


def plan_with(attention=toys.Attention, mlp=toys.Gated):
    model = toys.meta(toys.Decoder, lambda: toys.Block(attention=attention, mlp=mlp))
    return structural_plan(model, 2, False)


class NormPerHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(toys.HEAD_DIM) for _ in range(toys.HEADS)])

    def forward(self, x):
        return torch.stack([n(h) for n, h in zip(self.norms, x.unbind(2), strict=False)], 2)


class ListOfNorms(toys.Attention):
    def __init__(self):
        super().__init__()
        self.q_norm = NormPerHead()


def test_one_norm_for_each_head_is_refused_by_name():
    """Each rank would train the norms of the first heads, on its own heads."""
    with pytest.raises(ValueError, match="attention.q_norm .*NormPerHead is neither a projection"):
        plan_with(ListOfNorms)


def mix(x):
    return F.normalize(x, dim=-1)


def calm(x, width):
    return x * width


class NormOfQueries(toys.Attention):
    def forward(self, x):
        q = self.q_proj(x)
        return self.o_proj(F.rms_norm(q, (q.shape[-1],)))


class NormOfOutput(toys.Attention):
    def forward(self, x):
        return self.o_proj(self.rescaled(self.q_proj(x)))

    def rescaled(self, x):
        return mix(x)


class TopHeads(toys.Attention):
    def forward(self, x):
        return self.o_proj(self.q_proj(x).topk(2).values)


class NumberedHeads(toys.Attention):
    def forward(self, x):
        q = self.q_proj(x).view(*x.shape[:2], -1, self.head_dim)
        return self.o_proj((q * torch.arange(q.shape[2]).view(-1, 1)).flatten(2))


class CountedHeads(toys.Attention):
    def forward(self, x):
        return self.o_proj(self.q_proj(x) * torch.arange(self.heads).repeat_interleave(4))


class GroupNormChild(toys.Attention):
    def __init__(self):
        super().__init__()
        self.act = nn.GroupNorm(2, 16, affine=False)


@pytest.mark.parametrize(
    ("attention", "call"),
    [
        (NormOfQueries, r"attention .*NormOfQueries calls F.rms_norm\(q, \(q.shape\[-1\],\)\)"),
        (NormOfOutput, r"attention .*NormOfOutput calls F.normalize\(x, dim=-1\)"),
        (TopHeads, r"attention .*TopHeads calls self.q_proj\(x\).topk\(2\)"),
        (NumberedHeads, r"attention .*NumberedHeads calls torch.arange\(q.shape\[2\]\)"),
        (CountedHeads, r"attention .*CountedHeads calls torch.arange\(self.heads\)"),
        (GroupNormChild, r"attention.act .*GroupNorm calls F.group_norm"),
    ],
)
def test_functions_over_several_heads_are_refused_with_the_call(attention, call):
    """They have no parameters and fail on no shape: the numbers would be wrong without a word."""
    with pytest.raises(ValueError, match=f"layers.0.{call}.*may work over heads .*tp_plan="):
        plan_with(attention)


class WithinHeads(toys.Attention):
    """What an attention may do: its own softmax, norms of one head, ranges over the length."""

    def forward(self, x):
        rows, length, _ = x.shape
        q, k = (calm(p(x).view(rows, length, -1, self.head_dim), 1) for p in (self.q_proj,) * 2)
        q = F.rms_norm(q, (self.head_dim,))
        k = F.layer_norm(k, normalized_shape=[self.head_dim])
        scores = (q.transpose(1, 2) @ k.transpose(1, 2).mT).sub(torch.arange(x.shape[1]))
        scores = scores - scores.amax(-1, keepdim=True)
        mixed = F.softmax(scores, dim=-1) @ self.v_proj(x).view(rows, length, -1, self.head_dim)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def test_what_an_attention_does_within_its_heads_is_its_own_affair():
    assert plan_with(WithinHeads)["layers.0.attention.q_proj"] == (ColumnParallel(),)


def with_buffer(shape, persistent=True):
    class Buffered(toys.Attention):
        def __init__(self):
            super().__init__()
            self.register_buffer("slopes", torch.ones(shape), persistent=persistent)

    return Buffered


def test_a_buffer_with_a_value_for_each_head_is_refused():
    for shape in ((4,), (1, 4, 1, 1), (2, 1)):
        with pytest.raises(ValueError, match="attention.slopes .*a buffer of .* of the heads"):
            plan_with(with_buffer(shape))
    assert plan_with(with_buffer((1, 1, 9, 9)))


class FeedForward(toys.Gated):
    def forward(self, x):
        return self.down_proj(self.between(self.up_proj(x)))

    def between(self, h):
        return torch.relu(h)


def between(name, function):
    return type(name, (FeedForward,), {"between": function})


def softmax(self, h):
    return F.softmax(h, -1)


def imported_softmax(self, h):
    return torch.softmax(h, dim=2)


def helper(self, h):
    return mix(h)


def top(self, h):
    values, places = h.topk(8, -1)
    return torch.zeros_like(h).scatter(-1, places, values)


def mean(self, h):
    return h - h.mean(-1, keepdim=True)


def total(self, h):
    return h / h.sum()


def gated(self, h):
    return F.glu(torch.cat([h, h], -1))


def largest(self, h):
    return h * (h == torch.max(h, -1, keepdim=True).values)


@pytest.mark.parametrize(
    ("function", "call"),
    [
        (softmax, r"F.softmax\(h, -1\)"),
        (imported_softmax, r"torch.softmax\(h, dim=2\)"),
        (helper, r"F.normalize\(x, dim=-1\)"),
        (top, r"h.topk\(8, -1\)"),
        (mean, r"h.mean\(-1, keepdim=True\)"),
        (total, r"h.sum\(\)"),
        (gated, r"F.glu\("),
        (largest, r"torch.max\(h, -1, keepdim=True\)"),
    ],
)
def test_functions_over_inner_features_are_refused_with_the_call(function, call):
    with pytest.raises(ValueError, match=f"layers.0.mlp .*Mlp calls {call}.*work over features"):
        plan_with(mlp=between("Mlp", function))


class Weighing(nn.Module):
    def forward(self, x):
        return x * x.softmax(-1)


class WithWeighing(toys.Gated):
    def __init__(self):
        super().__init__()
        self.act = Weighing()


def test_a_module_without_parameters_between_the_layers_is_read_too():
    with pytest.raises(ValueError, match=r"mlp.act .*Weighing calls x.softmax\(-1\)"):
        plan_with(mlp=WithWeighing)


def pointwise(self, h):
    bounded = torch.max(h, torch.zeros_like(h)).max(h) + sum([h, h]) + h.mean(dim=(0, -2))
    return torch.minimum(bounded, h) * max(1, 2)


def test_pointwise_functions_between_the_layers_pass():
    assert plan_with(mlp=between("Mlp", pointwise))["layers.0.mlp.up_proj"] == (ColumnParallel(),)


def test_a_norm_of_one_head_keeps_its_place():
    plan = plan_with(lambda: toys.Attention(qk_norm=True))
    assert plan["layers.0.attention.q_norm"] == (SplitInput(),)
