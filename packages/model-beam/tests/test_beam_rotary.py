"""Rotary tables have every bit of transformers', and one rounding follows them."""

import pytest
import torch

from shardwalk.model_beam.rotary import query_scale, rotary_table, rotate

pytest.importorskip("transformers")
from transformers import BeamConfig
from transformers.models.beam.modeling_beam import (
    BeamRotaryEmbedding,
    apply_rotary_pos_emb,
    compute_attention_scaling,
)

CONTEXT = 100
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ROTATIONS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.3},
    "yarn": YARN,
    "yarn, two slopes": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.1},
    "yarn, given factor": {**YARN, "attention_factor": 1.3},
    "yarn, own bounds": {**YARN, "beta_fast": 4, "beta_slow": 2.5},
    "yarn, a ramp of no width": {**YARN, "beta_fast": 12, "beta_slow": 11.2},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip
POSITIONS = {
    "short": torch.arange(64)[None],
    "to the context": torch.arange(CONTEXT)[None],
    "one further": torch.arange(CONTEXT + 1)[None],
    "large, in any order": torch.tensor([[0, 200_000, 7], [131_071, 1, 16_777_217]]),
}


def oracle(parameters, positions, head_dim):
    config = BeamConfig(
        head_dim=head_dim, max_position_embeddings=CONTEXT, num_hidden_layers=2,
        rope_parameters={"sliding_attention": dict(parameters), "full_attention": None},
    )  # fmt: skip
    return BeamRotaryEmbedding(config)(torch.zeros(1), positions, "sliding_attention")


def table(parameters, positions, head_dim=16):
    return rotary_table(
        positions, parameters, head_dim=head_dim, max_position_embeddings=CONTEXT
    )  # fmt: skip


def equal(ours, theirs):
    return all(
        left.dtype == right.dtype == torch.float32 and torch.equal(left, right)
        for left, right in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("rotation", ROTATIONS.values(), ids=ROTATIONS)
def test_tables_have_every_bit_of_the_oracle(rotation):
    for theta in (10_000.0, 500_000, 12_345.678):
        for head_dim in (4, 16, 128):
            for name, positions in POSITIONS.items():
                parameters = {**rotation, "rope_theta": theta}
                expected = oracle(parameters, positions, head_dim)
                assert equal(table(parameters, positions, head_dim), expected), (theta, name)


def test_tables_differ_between_types():
    positions = POSITIONS["one further"]
    tables = [table({**r, "rope_theta": 1e4}, positions)[0] for r in ROTATIONS.values()]
    for first, left in enumerate(tables):
        assert not any(torch.equal(left, right) for right in tables[first + 1 :])


def test_a_long_call_leaves_no_trace_in_the_next_and_stretches_by_its_longest_row():
    parameters = {**ROTATIONS["dynamic"], "rope_theta": 1e4}
    plain = table(PLAIN, POSITIONS["to the context"])
    before = table(parameters, POSITIONS["to the context"])
    both = torch.stack((torch.arange(50), torch.arange(1000, 1050)))
    together, alone = table(parameters, both), table(parameters, both[:1])
    assert not torch.equal(together[0][0], alone[0][0])
    after = table(parameters, POSITIONS["to the context"])
    assert equal(before, after)
    assert equal(before, plain)
    assert table(parameters, both[:, :0])[0].shape == (2, 0, 16)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_positions_may_be_of_any_integer_dtype(dtype):
    positions = torch.arange(CONTEXT, 256 if dtype == torch.uint8 else 30_000, 31)[None]
    positions = torch.cat((positions, positions.amax(keepdim=True)), dim=1)
    positions[0, -1] = torch.iinfo(dtype).max if dtype != torch.int32 else 150_000
    for rotation in ("default", "dynamic"):
        parameters = {**ROTATIONS[rotation], "rope_theta": 1e4}
        assert equal(table(parameters, positions.to(dtype)), table(parameters, positions))
    assert torch.equal(query_scale(positions.to(dtype)), query_scale(positions))


@pytest.mark.parametrize("rotation", ROTATIONS.values(), ids=ROTATIONS)
def test_a_lower_default_dtype_and_autocast_round_nothing(rotation):
    parameters, positions = {**rotation, "rope_theta": 1e4}, POSITIONS["large, in any order"]
    expected, scale = table(parameters, positions), query_scale(positions)
    torch.set_default_dtype(torch.bfloat16)
    try:
        ours, lower = table(parameters, positions), query_scale(positions)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = table(parameters, positions)
    assert equal(ours, expected)
    assert equal(cast, expected)
    assert torch.equal(lower, scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_rotation_rounds_once_as_the_oracle_does(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 40, 16, generator=generator, dtype=torch.float64).to(dtype)
    positions = torch.randint(0, 100_000, (2, 40), generator=generator)
    ours = table(PLAIN, positions)
    rotated = rotate(x, ours)
    assert rotated.dtype == dtype
    assert torch.equal(rotated, apply_rotary_pos_emb(x, x, *ours)[0])
    assert torch.equal(rotate(x[:1], ours)[0], rotated[0])


def test_a_rounded_table_shows_in_the_rotation():
    x = torch.ones(1, 1, 40, 16, dtype=torch.bfloat16)
    cos, sin = table(PLAIN, torch.arange(40)[None])
    rounded = (cos.bfloat16(), sin.bfloat16())
    assert not torch.equal(rotate(x, (cos, sin)), rotate(x, rounded))


def test_the_gradient_of_the_rotation_is_rounded_once():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 40, 16, generator=generator).bfloat16().requires_grad_()
    upstream = torch.randn(1, 2, 40, 16, generator=generator).bfloat16()
    cos, sin = table(PLAIN, torch.arange(40)[None])
    rotate(x, (cos, sin)).backward(upstream)
    back = rotate(upstream.float(), (cos, -sin))  # the transpose turns the other way
    assert torch.equal(x.grad, back.bfloat16())


def test_queries_without_a_rotation_grow_with_their_position_plus_one():
    positions = torch.tensor([[0, 2047, 100_000]])
    scale = query_scale(positions)
    assert scale.dtype == torch.float32
    expected = torch.tensor([[1.0000488, 1.0717735, 1.4782500]])
    torch.testing.assert_close(scale, expected, rtol=2e-7, atol=0)
    many = torch.arange(0, 200_000, 17)[None]
    assert torch.equal(query_scale(many), compute_attention_scaling(many)[:, 0, :, 0])


@pytest.mark.parametrize("call", [query_scale, lambda p: table(PLAIN, p)], ids=["scale", "table"])
def test_what_are_no_positions_is_refused(call):
    for wrong in (torch.zeros(1, 4), torch.zeros(1, 4, dtype=torch.bool)):
        with pytest.raises(TypeError, match="hand in integers"):
            call(wrong)
    with pytest.raises(
        ValueError, match=r"position_ids of shape \[4\] must be \[batch, sequence\]"
    ):
        call(torch.arange(4))
