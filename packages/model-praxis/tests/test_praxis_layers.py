"""The layers against formulas written out by hand."""

import math

import pytest
import torch
from praxis_toys import randomize, tiny_config
from torch import nn

from shardwalk.model_praxis import MoeTrainingSettings
from shardwalk.model_praxis.embeddings import (
    ModulationOut,
    TextIn,
    TimeFeatures,
    patchify,
    unpatchify,
)
from shardwalk.model_praxis.layers import (
    Block,
    GatedAttention,
    Modulation,
    ZeroCenteredRMSNorm,
    attend,
    modulate,
    rotary_table,
    rotate,
)
from shardwalk.moe_ep import MoE, update_router_biases
from shardwalk.parallelizer_core import apply_activation_checkpointing

BACKBONE = tiny_config().backbone
TOKENS, DIM = 7, 64


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def block(*, index: int = 1, sparse: bool = False, **training) -> Block:
    moe = BACKBONE.layer_moe(BACKBONE.encoder, MoeTrainingSettings(**training)) if sparse else None
    made = Block(BACKBONE.encoder, BACKBONE.attention, moe, index=index)
    randomize(made)
    return made


def inputs(windows: int = 2, tokens: int = TOKENS):
    x = torch.randn(windows, tokens, DIM)
    table = rotary_table(torch.randint(5000, (windows, tokens)), 16, 10000.0)
    mask = torch.rand(tokens, tokens) > 0.4
    return x, {"rotary": table, "mask": mask | torch.eye(tokens, dtype=torch.bool)}


def modulation(windows: int = 2, tokens: int = TOKENS) -> Modulation:
    return Modulation(*torch.randn(2, windows, tokens, DIM))


def test_the_norm_scales_by_one_plus_its_weight():
    norm, x = ZeroCenteredRMSNorm(DIM, 1e-6), torch.randn(3, DIM)
    plain = x / x.square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(norm(x), plain)
    nn.init.constant_(norm.weight, 0.25)
    torch.testing.assert_close(norm(x), plain * 1.25)


def test_modulation_has_no_hidden_one_and_keeps_the_dtype():
    x, ones, zeros = torch.randn(3, DIM), torch.ones(DIM), torch.zeros(DIM)
    assert torch.equal(modulate(x, ones, zeros), x)
    assert not modulate(x, zeros, zeros).any()
    assert torch.equal(modulate(x, 3 * ones, ones), x * 3 + 1)
    assert modulate(x.bfloat16(), ones, zeros).dtype == torch.bfloat16


@pytest.mark.parametrize("start", [0, 1_000_000])
def test_rotated_products_depend_on_the_distance_alone(start):
    query, key = torch.randn(2, 1, 1, 1, 16)

    def turned(x, position):
        return rotate(x, rotary_table(torch.tensor([[position]]), 16, 10000.0))

    products = [
        (turned(query, start + shift + 3) * turned(key, start + shift)).sum()
        for shift in (0, 17, 999)
    ]
    expected = (turned(query, 3) * key).sum()
    torch.testing.assert_close(torch.stack(products), expected.expand(3), rtol=1e-5, atol=1e-5)
    assert abs(expected - (query * key).sum()) > 1e-2
    torch.testing.assert_close(turned(query, start + 5).norm(), query.norm())


def test_an_attention_gate_closes_its_head_alone():
    attention = GatedAttention(DIM, BACKBONE.attention)
    randomize(attention)
    x, arguments = inputs()
    x = x.abs()
    expected = attention(x, **arguments)
    with torch.no_grad():
        without = attention.o_proj.weight.clone()
        without[:, 16:32] = 0
        attention.gate_proj.weight[1] = -1e4
        closed = attention(x, **arguments)
        attention.o_proj.weight.copy_(without)
        attention.gate_proj.weight[1] = 0
    torch.testing.assert_close(closed, attention(x, **arguments))
    assert (closed - expected).abs().max() > 1e-3


def attention_by_hand(attn: GatedAttention, x, positions, mask):
    """One head after the other, turning complex numbers."""
    turns = torch.polar(
        torch.ones(1), (positions[:, None] * 10000.0 ** (-torch.arange(8) / 8)).float()
    )

    def placed(head, norm):
        turned = torch.complex(head[:, :8], head[:, 8:]) * turns
        turned = torch.cat((turned.real, turned.imag), 1)
        size = (turned.square().mean(1, keepdim=True) + 1e-6).sqrt()
        return turned / size * (1 + norm.weight)

    out = 0
    for head in range(4):
        rows, shared = (
            slice(16 * head, 16 * head + 16),
            slice(16 * (head // 2), 16 * (head // 2) + 16),
        )
        query = placed(x @ attn.q_proj.weight[rows].T, attn.q_norm)
        key = placed(x @ attn.k_proj.weight[shared].T, attn.k_norm)
        scores = (query @ key.T / 4).masked_fill(~mask, -math.inf).softmax(-1)
        gate = (x @ attn.gate_proj.weight[head]).sigmoid()[:, None]
        values = scores @ (x @ attn.v_proj.weight[shared].T)
        out = out + gate * values @ attn.o_proj.weight[:, rows].T
    return out


@pytest.mark.parametrize("modulated", [False, True])
def test_a_block_is_what_the_formula_says(modulated):
    made, index = block(index=5), 5
    positions, (x, arguments) = torch.randint(300, (2, TOKENS)), inputs()
    arguments["rotary"] = rotary_table(positions, 16, 10000.0)
    shift, scale = modulation() if modulated else (torch.zeros(()), torch.ones(()))

    def normed(value, norm):
        size = (value.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return (value / size * (1 + norm.weight) * scale + shift) / index**0.5

    read = normed(x, made.norm1)
    mask = arguments["mask"]
    rows = zip(read, positions, strict=True)
    middle = x + torch.stack([attention_by_hand(made.attn, *row, mask) for row in rows])
    read, ffn = normed(middle, made.norm2), made.ffn
    gate, up = read @ ffn.gate_proj.weight.T, read @ ffn.up_proj.weight.T
    expected = middle + (gate * gate.sigmoid() * up) @ ffn.down_proj.weight.T
    given = Modulation(shift, scale) if modulated else None
    out = made(x, **arguments, modulation=given)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_a_block_whose_halves_give_nothing_is_the_identity():
    made = block(index=3)
    nn.init.zeros_(made.attn.o_proj.weight)
    nn.init.zeros_(made.ffn.down_proj.weight)
    x, arguments = inputs()
    assert torch.equal(made(x, **arguments, modulation=modulation()), x)


def test_norm_and_rotation_can_change_places():
    x, arguments = inputs()
    outputs = []
    for first in (True, False):
        config = tiny_config(backbone__attention__rotate_before_norm=first).backbone.attention
        attention = GatedAttention(DIM, config)
        randomize(attention)
        outputs.append(attention(x, **arguments))
        nn.init.zeros_(attention.q_norm.weight)
        nn.init.zeros_(attention.k_norm.weight)
        outputs.append(attention(x, **arguments))
    assert (outputs[0] - outputs[2]).abs().max() > 1e-3
    torch.testing.assert_close(outputs[1], outputs[3])  # without weights they commute


def test_the_router_bias_changes_the_choice_and_never_the_weights():
    made = block(sparse=True)
    gate, x = made.ffn.gate, torch.randn(30, DIM)
    assert isinstance(made.ffn, MoE)
    nn.init.zeros_(gate.e_score_correction_bias)
    scores, free = (x @ gate.weight.T).sigmoid(), gate(x).experts
    gate.e_score_correction_bias[6] = 10.0
    routing = gate(x)
    assert (routing.experts == 6).any(1).all()
    assert not torch.equal(routing.experts.sort(1).values, free.sort(1).values)
    weights = scores.gather(1, routing.experts)
    torch.testing.assert_close(routing.weights, 1.5 * weights / weights.sum(1, keepdim=True))
    torch.testing.assert_close(routing.weights.sum(1), torch.full((30,), 1.5))


def test_a_sparse_block_adds_the_weighted_experts_and_the_shared_one():
    moe, x = block(sparse=True).ffn, torch.randn(1, 5, DIM)
    routing = moe.gate(x)
    rows = []
    for token, chosen, weights in zip(x[0], routing.experts, routing.weights, strict=True):
        total = moe.shared_experts(token)
        for expert, weight in zip(chosen, weights, strict=True):
            gate, up = (moe.experts.gate_up_proj[expert] @ token).chunk(2)
            total = total + weight * (moe.experts.down_proj[expert] @ (gate * gate.sigmoid() * up))
        rows.append(total)
    assert moe.shared_experts.down_proj.weight.shape == (DIM, 48)
    torch.testing.assert_close(moe(x)[0], torch.stack(rows), rtol=1e-4, atol=1e-5)


def test_an_update_lowers_the_bias_of_the_crowded_and_raises_that_of_the_empty():
    made = block(sparse=True, bias_update_speed=0.5)
    x, arguments = inputs()
    made(x, **arguments)
    gate = made.ffn.gate
    load, before = gate.load.clone(), gate.e_score_correction_bias.clone()
    assert load.sum() == 2 * TOKENS * 2
    update_router_biases(made)
    step = 0.5 * (load.float().mean() - load).sign()
    torch.testing.assert_close(gate.e_score_correction_bias, before + step)
    assert not gate.load.any()


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_checkpointing_changes_no_gradient_and_counts_no_token_twice(mode):
    training = {"balance_loss_weight": 0.3, "bias_update_speed": 0.1}
    results = []
    for checkpointed in (False, True):
        stack = nn.Module()
        stack.blocks = nn.ModuleList(block(index=i, sparse=True, **training) for i in (1, 2))
        if checkpointed:
            apply_activation_checkpointing(stack, mode)
        torch.manual_seed(0)
        x, arguments = inputs()
        shift, scale = modulation()
        moves = Modulation(shift.requires_grad_(), scale.requires_grad_())
        x.requires_grad_()
        hidden = x
        for made in stack.blocks:
            hidden = made(hidden, **arguments, modulation=moves)
        hidden.square().mean().backward()
        loads = torch.stack([made.ffn.gate.load for made in stack.blocks])
        gradients = [tensor.grad for tensor in (x, *moves, *stack.parameters())]
        results.append((gradients, loads))
    (expected, loads), (found, again) = results
    torch.testing.assert_close(found, expected)
    assert torch.equal(loads, again)
    assert loads.sum() == 2 * 2 * TOKENS * 2


def test_islands_of_a_bfloat16_block_compute_in_float32(monkeypatch):
    made, (x, arguments) = block(index=2, sparse=True).bfloat16(), inputs()
    inside = []
    rsqrt, cat = torch.rsqrt, torch.cat
    monkeypatch.setattr(torch, "rsqrt", lambda t: inside.append(("norm", t.dtype)) or rsqrt(t))
    monkeypatch.setattr(
        torch, "cat", lambda t, dim=0: inside.append(("rotation", t[0].dtype)) or cat(t, dim=dim)
    )
    made.compute_dtype = torch.bfloat16
    moves = modulation()
    out = made(x, **arguments, modulation=moves)
    names = [name for name, _ in inside]
    assert (names.count("norm"), names.count("rotation") >= 2) == (4, True)
    assert {dtype for _, dtype in inside} == {torch.float32}
    assert out.dtype == torch.bfloat16
    assert (made.ffn.gate.weight.dtype, made.ffn.gate(x).weights.dtype) == (torch.float32,) * 2
    # one rounding at the end: that of the result of float32 arithmetic
    normed = made.norm1(x.bfloat16())
    exact = (normed.float() * moves.scale + moves.shift).bfloat16()
    assert torch.equal(modulate(normed, moves.scale, moves.shift), exact)
    table = rotary_table(torch.tensor([[2_000_001]]), 16, 10000.0)
    assert table.cos.dtype == torch.float32
    assert abs(table.cos[0, 0, 0] - math.cos(2_000_001)) < 1e-6


def test_a_norm_computes_in_the_dtype_it_is_told():
    x = torch.randn(40, DIM).double()
    assert ZeroCenteredRMSNorm(DIM, 0.0)(x).dtype == torch.float64
    coarse = ZeroCenteredRMSNorm(DIM, 0.0, cast_dtype=torch.bfloat16)(x)
    exact = x / x.square().mean(-1, keepdim=True).sqrt()
    assert coarse.dtype == torch.float64
    assert (coarse - exact).abs().max() > 1e-3
    torch.testing.assert_close(ZeroCenteredRMSNorm(DIM, 0.0)(x), exact)


def test_attention_without_a_mask_hides_nothing():
    query, key, value = (torch.randn(1, 5, heads, 16) for heads in (4, 2, 2))
    everything = torch.ones(5, 5, dtype=torch.bool)
    torch.testing.assert_close(
        attend(query, key, value, None), attend(query, key, value, everything)
    )


def test_time_features_are_bounded_and_not_trained():
    features = TimeFeatures(DIM)
    out = features(torch.rand(3, 4, requires_grad=True))
    assert out.shape == (3, 4, DIM)
    assert out.abs().max() <= 0.5
    assert not list(features.parameters())
    assert set(features.state_dict()) == {"frequencies", "phases"}
    phases = features.phases * 2 * math.pi
    torch.testing.assert_close(features(torch.zeros(())), phases.cos() / 2)
    turned = (features.phases + 0.25 * features.frequencies) * 2 * math.pi
    torch.testing.assert_close(features(torch.tensor(0.25)), turned.cos() / 2)


def test_text_passes_two_layers_and_a_norm():
    text_in = TextIn(BACKBONE.input_projections["TextEncodingTensor"], DIM, 1e-6)
    randomize(text_in)
    states = torch.randn(2, 3, 20)
    hidden = states @ text_in.fc1.weight.T + text_in.fc1.bias
    out = (hidden * hidden.sigmoid()) @ text_in.fc2.weight.T + text_in.fc2.bias
    out = out / (out.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + text_in.norm.weight)
    torch.testing.assert_close(text_in(states), out)


def test_patches_go_row_by_row_and_come_apart_again():
    latents = torch.arange(2 * 3 * 2 * 4 * 6).view(2, 3, 2, 4, 6)
    patches = patchify(latents, 2)
    assert patches.shape == (2, 2, 6, 12)
    corner = latents[1, :, 1, 2:4, 4:6]  # second row, third column of patches
    assert torch.equal(patches[1, 1, 5], corner.flatten())
    by_cell = patches.unflatten(-1, (3, 4)).transpose(-1, -2).flatten(-2)
    cells = unpatchify(by_cell, 2, 2)
    assert torch.equal(cells, latents.permute(0, 2, 3, 4, 1).flatten(2, 3))


def test_a_new_modulation_changes_nothing_and_can_be_trained():
    out = ModulationOut(DIM, 2, 10)
    shift, scale = out.modulation(torch.randn(1, 3, 4, DIM), 2)
    assert shift.shape == scale.shape == (1, 3 * 16, 10)
    assert not shift.any()
    assert (scale == 1).all()
    scale.sum().backward()
    assert out.weight.grad.any()
