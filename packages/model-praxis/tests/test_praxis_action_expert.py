from __future__ import annotations

import math
from dataclasses import replace

import torch
from praxis_toys import randomize, tiny_config
from praxis_windows import small_inputs, small_policy
from torch import nn
from torch.nn import functional as F

from shardwalk.model_praxis import (
    ActionTauEncoder,
    BackboneOutput,
    PraxisPolicy,
    ScaleAdaLN,
    SinusoidalTimestep,
    geglu,
)
from shardwalk.model_praxis.action_expert import finite_gradient, sinusoidal_features
from shardwalk.model_praxis.layers import rotary_table


def test_time_features_are_cosines_then_sines_of_falling_frequencies() -> None:
    t = torch.tensor([[0.0, 0.3], [0.7, 1.0]])
    found = sinusoidal_features(t, 6)
    frequencies = [10000 ** (-i / 3) for i in range(3)]
    expected = torch.tensor([
        [
            [math.cos(x * f) for f in frequencies] + [math.sin(x * f) for f in frequencies]
            for x in row
        ]
        for row in t.tolist()
    ])
    torch.testing.assert_close(found, expected)


def test_condition_of_a_time_goes_through_two_layers_with_silu_between() -> None:
    module = SinusoidalTimestep(8, 4)
    t = torch.rand(2, 3)
    hidden = F.silu(sinusoidal_features(t, 8) @ module.fc1.weight.T + module.fc1.bias)
    torch.testing.assert_close(module(t), hidden @ module.fc2.weight.T + module.fc2.bias)


def test_action_token_meets_its_time_behind_the_first_layer() -> None:
    module = ActionTauEncoder(5, 8)
    actions, t = torch.randn(2, 3, 5), torch.rand(2, 3)
    both = torch.cat([module.w1(actions), sinusoidal_features(t, 8)], -1)
    torch.testing.assert_close(module(actions, t), module.w3(F.silu(module.w2(both))))
    dependent = [name for name, p in module.named_parameters() if 5 in p.shape]
    assert dependent == ["w1.weight"]


def test_scale_of_a_condition_multiplies_a_weightless_norm() -> None:
    module = ScaleAdaLN(6, 1e-6)
    x, condition = torch.randn(2, 3, 6), torch.randn(2, 3, 6)
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(module(x, condition), normed)  # proj starts at 0
    randomize(module)
    expected = (1 + module.proj(F.silu(condition))) * normed
    torch.testing.assert_close(module(x, condition), expected)
    short = module.to(torch.bfloat16)(x.bfloat16(), condition.bfloat16())
    assert short.dtype == torch.bfloat16
    exact = (1 + module.proj(F.silu(condition.bfloat16())).float()) * normed
    torch.testing.assert_close(short.float(), exact, rtol=2**-7, atol=0.01)


def test_geglu_gates_with_the_first_half() -> None:
    x = torch.randn(3, 8)
    expected = F.gelu(x[:, :4], approximate="tanh") * x[:, 4:]
    assert torch.equal(geglu(x), expected)


def test_layers_alternate_between_a_tap_and_their_own_tokens() -> None:
    config = tiny_config(action_expert__taps=[0, 1, 3])
    layers = PraxisPolicy(config).action_expert.layers
    assert len(layers) == 2 * 3
    widths = [layer.attn.k_proj.in_features for layer in layers]  # type: ignore[union-attr]
    assert widths == [64, 32] * 3


def test_six_tensors_alone_depend_on_the_rig() -> None:
    def shapes(**changes: object) -> dict[str, torch.Size]:
        policy = PraxisPolicy(tiny_config(**changes))
        return {name: p.shape for name, p in policy.named_parameters()}

    stats = {
        "normalization__action_q01": [-1.0] * 4,
        "normalization__action_q99": [1.0] * 4,
        "normalization__proprio_mean": [0.0] * 3,
        "normalization__proprio_std": [1.0] * 3,
    }
    ours = shapes()
    other = shapes(action_space__row_dim=4, action_space__proprio_dim=3, **stats)
    parts = [f"action_expert.{name}" for name in ("action_encoder.w1", "embed_proprio", "head")]
    differing = {name for name in ours if ours[name] != other[name]}
    assert differing <= {f"{part}.{kind}" for part in parts for kind in ("weight", "bias")}
    assert {f"{part}.weight" for part in parts} <= differing


def test_only_differences_of_positions_matter_to_the_expert() -> None:
    policy = small_policy()
    for name, parameter in policy.action_expert.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):  # act behind the rotation
            nn.init.zeros_(parameter)
    inputs = small_inputs(policy.config)
    video = _video(policy, inputs)
    actions = _actions(policy, inputs, video)

    def moved(frames: int, keys: int) -> torch.Tensor:
        positions = video.key_positions + keys
        table = rotary_table(positions, 16, policy.config.backbone.rope.theta)
        there = replace(
            video, key_rotary=table, key_positions=positions,
            frame_positions=video.frame_positions + frames,
        )  # fmt: skip
        return _actions(policy, inputs, there)

    torch.testing.assert_close(moved(70000, 70000), actions, rtol=1e-4, atol=1e-5)
    assert (moved(70, 0) - actions).abs().max() > 1e-3


def test_proprio_and_future_tokens_stand_where_their_chunk_begins() -> None:
    policy = small_policy()
    expert, inputs = policy.action_expert, small_inputs(policy.config)
    tables = []
    handle = expert.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: tables.append(kwargs["rotary"]), with_kwargs=True
    )
    video = _video(policy, inputs)
    _actions(policy, inputs, video)
    handle.remove()
    frames = video.frame_positions[0].tolist()
    firsts = frames[::2]
    order = [*firsts, *[p for p in firsts for _ in range(2)], *frames]
    expected = rotary_table(torch.tensor([order]), 16, policy.config.backbone.rope.theta)
    assert torch.equal(tables[0].cos, expected.cos)


def test_layer_casts_what_it_is_given_to_its_compute_dtype() -> None:
    policy = small_policy().to(torch.bfloat16)
    seen: list[torch.dtype] = []
    for layer in policy.action_expert.layers:
        layer.compute_dtype = torch.bfloat16  # type: ignore[assignment]
        layer.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    inputs = small_inputs(policy.config)
    video = _video(policy, inputs)
    wide = replace(
        video, taps=tuple(tap.float() for tap in video.taps), globals_in=video.globals_in.float()
    )
    assert _actions(policy, inputs, wide).dtype == torch.bfloat16
    assert seen == [torch.bfloat16] * 4
    torch.testing.assert_close(_actions(policy, inputs, wide), _actions(policy, inputs, video))


def test_gradient_that_is_not_finite_goes_no_further() -> None:
    x = torch.ones(3, requires_grad=True)
    y = finite_gradient(x)
    y.backward(torch.tensor([2.0, math.nan, math.inf]))
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 0.0, 0.0]


def _video(policy: PraxisPolicy, inputs: dict[str, torch.Tensor]) -> BackboneOutput:
    names = ("noised", "clean", "anchor", "text", "times")
    video: BackboneOutput = policy.backbone(**{name: inputs[name] for name in names})
    return video


def _actions(
    policy: PraxisPolicy, inputs: dict[str, torch.Tensor], video: BackboneOutput
) -> torch.Tensor:
    names = ("actions", "action_times", "proprio")
    expert: nn.Module = policy.action_expert
    out: torch.Tensor = expert(**{name: inputs[name] for name in names}, video=video)
    return out
