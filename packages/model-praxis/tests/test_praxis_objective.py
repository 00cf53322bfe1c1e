from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from praxis_toys import tiny_config
from praxis_windows import small_policy, small_window
from torch import Tensor, nn

from shardwalk.model_praxis import (
    Draws,
    ObjectiveSettings,
    PraxisConfig,
    PraxisOutput,
    PraxisPolicy,
    PraxisWindow,
    decode_actions,
    draw,
    encode_actions,
    noise_window,
    normalize_proprio,
    praxis_loss,
    sample,
    shift_time,
    step_generator,
    trains_backbone,
)

_EXACT = {"latent_dtype": torch.float32, "text_dropout": 0.0, "proprio_dropout": 0.0}


def test_shifted_times_keep_their_ends_and_their_order() -> None:
    u = torch.linspace(0, 1, 101)
    assert torch.equal(shift_time(u, 1.0), u)
    for shift in (0.3, 3.0, 12.5):
        t = shift_time(u, shift)
        assert (t[0], t[-1]) == (0, 1)
        assert (t.diff() > 0).all()
        torch.testing.assert_close(t[50].item(), shift / (1 + shift))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-7)])
def test_chunk_is_the_mix_of_data_and_noise_at_its_own_time(
    dtype: torch.dtype, tolerance: float
) -> None:
    config = tiny_config()
    settings = ObjectiveSettings(**_EXACT | {"latent_dtype": dtype, "flow_shift": 3.0})
    window, draws = small_window(config, windows=2), _draws(config, settings)
    noised = noise_window(window, draws, settings)
    t = draws.chunk_times.repeat_interleave(2, 1)[:, None, :, None, None]
    expected = (1 - t) * window.latents + t * draws.window_noise
    largest = torch.maximum(window.latents.abs(), draws.window_noise.abs()).max().item()
    made = noised.inputs["noised"]
    assert made is not None
    torch.testing.assert_close(made, expected, rtol=0, atol=tolerance * largest)
    torch.testing.assert_close(noised.video_target, draws.window_noise - window.latents)
    clean = noised.inputs["clean"]
    assert clean is not None
    torch.testing.assert_close(clean, window.latents[:, :, :4], rtol=0, atol=tolerance * largest)
    # x_t was rounded before chunks went their ways, so all of them lie on one line
    x_t = ((1 - draws.window_time) * window.latents.movedim(0, -1)).movedim(-1, 0)
    x_t = x_t + (draws.window_time * draws.window_noise.movedim(0, -1)).movedim(-1, 0)
    t0 = draws.window_time.view(-1, 1, 1, 1, 1)
    back = made - (t - t0) * noised.video_target
    torch.testing.assert_close(back, x_t, rtol=0, atol=tolerance * largest)
    torch.testing.assert_close(back, back.to(dtype).float(), rtol=0, atol=1e-5)


def test_actions_are_mixed_by_their_own_times() -> None:
    config, settings = tiny_config(), ObjectiveSettings(**_EXACT)
    window, draws = small_window(config, windows=2), _draws(config, settings)
    noised = noise_window(window, draws, settings)
    t = draws.action_times.repeat_interleave(2, 1)[..., None]
    mixed = (1 - t) * window.actions + t * draws.action_noise
    made = noised.inputs["actions"]
    assert made is not None
    torch.testing.assert_close(made, mixed)
    torch.testing.assert_close(noised.action_target, draws.action_noise - window.actions)


def test_dropout_blanks_the_caption_and_zeroes_the_poses() -> None:
    config = tiny_config()
    window = small_window(config, windows=2)
    settings = ObjectiveSettings(text_dropout=0, proprio_dropout=1)
    inputs = noise_window(window, _draws(config, settings), settings).inputs
    assert inputs["text"] is not None
    assert torch.equal(inputs["text"], window.text)
    assert inputs["proprio"] is not None
    assert not inputs["proprio"].any()
    settings = ObjectiveSettings(text_dropout=1, proprio_dropout=0)
    inputs = noise_window(window, _draws(config, settings), settings).inputs
    assert inputs["text"] is not None
    assert torch.equal(inputs["text"], window.blank_text)
    assert inputs["proprio"] is not None
    assert torch.equal(inputs["proprio"], window.proprio)


def test_draws_belong_to_a_step_a_micro_step_and_a_rank() -> None:
    config, settings = tiny_config(), ObjectiveSettings()

    def drawn(**place: int) -> Draws:
        where = {"seed": 0, "step": 1, "micro_step": 0, "rank": 0} | place
        return draw(config, settings, step_generator(**where))

    first = drawn()
    assert _equal(first, drawn())
    for other in ("seed", "step", "micro_step", "rank"):
        assert not _equal(first, drawn(**{other: 7}))


def test_settings_change_only_what_they_are_about() -> None:
    config = tiny_config()
    usual = _draws(config, ObjectiveSettings())
    rates = ObjectiveSettings(text_dropout=1, proprio_dropout=1, move_positions=False)
    other = _draws(config, rates)
    assert other.drop_text.all()
    assert other.drop_proprio.all()
    assert not other.offsets.any()
    kept = [f.name for f in fields(Draws) if f.name not in {"drop_text", "drop_proprio", "offsets"}]
    assert all(torch.equal(getattr(usual, name), getattr(other, name)) for name in kept)
    many = draw(config, ObjectiveSettings(), torch.Generator().manual_seed(0), windows=500)
    assert many.offsets.min() >= 0
    assert many.offsets.max() < config.backbone.rope.frame_stride
    assert 20 <= many.drop_text.sum() <= 85
    assert not torch.equal(many.drop_text, many.drop_proprio)


def test_loss_of_a_window_is_its_weighted_mean_squares() -> None:
    policy = small_policy()
    settings = ObjectiveSettings(video_weight=0.5, action_weight=3.0)
    window, draws = small_window(policy.config, windows=2), _draws(policy.config, settings)
    loss = praxis_loss(policy, window, draws, settings)
    noised = noise_window(window, draws, settings)
    out = policy(**noised.inputs)
    video = (out.velocity - noised.video_target).square().mean((1, 2, 3, 4))
    action = (out.action_velocity - noised.action_target).square().mean((1, 2))
    assert loss.video is not None
    torch.testing.assert_close(loss.video, video)
    torch.testing.assert_close(loss.action, action)
    torch.testing.assert_close(loss.total, 0.5 * video + 3 * action)
    torch.testing.assert_close(loss.mean(), loss.total.mean())
    assert not loss.is_cut.any()


@pytest.mark.parametrize("fault", ["bad data", "bad pose", "large", "bad weights", "overflow"])
def test_guard_cuts_the_actions_of_a_window_and_nothing_else(fault: str) -> None:
    policy, settings = small_policy(), ObjectiveSettings()
    window, draws = small_window(policy.config), _draws(policy.config, settings, windows=1)
    video_only = _gradients(policy, window, draws, replace(settings, action_weight=0.0))
    if fault == "bad data":
        window.actions[0, 3, 2] = math.nan
    if fault == "bad pose":
        window.proprio[0, 1, 2] = math.inf
    if fault == "large":
        settings = replace(settings, action_guard=1e-3)
    if fault == "bad weights":
        nn.init.constant_(policy.action_expert.head.weight, math.nan)
    if fault == "overflow":
        nn.init.constant_(policy.action_expert.head.weight, 1e38)
    found = _gradients(policy, window, draws, settings)
    loss = praxis_loss(policy, window, draws, settings)
    assert loss.is_cut.tolist() == [True]
    assert loss.action.tolist() == [0.0]
    assert loss.video is not None
    assert torch.equal(loss.total, loss.video)
    for name, gradient in found.items():
        if name.startswith("backbone"):
            assert torch.equal(gradient, video_only[name]), name
        elif fault != "bad weights":
            assert not gradient.any(), name


def test_guard_cuts_one_window_of_several() -> None:
    policy, settings = small_policy(), ObjectiveSettings()
    window = small_window(policy.config, windows=2)
    draws = _draws(policy.config, settings)
    window.actions[0] = math.nan
    found = _gradients(policy, window, draws, settings)
    loss = praxis_loss(policy, window, draws, settings)
    assert loss.is_cut.tolist() == [True, False]
    assert loss.action[0] == 0 < loss.action[1]
    second = PraxisWindow(**{f.name: getattr(window, f.name)[1:] for f in fields(window)})
    alone = Draws(**{f.name: getattr(draws, f.name)[1:] for f in fields(draws)})
    expected = _gradients(policy, second, alone, settings)
    for name in filter(lambda name: name.startswith("action_expert"), found):
        torch.testing.assert_close(found[name], expected[name] / 2, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ({"text_dropout": 1.5}, ValueError),
        ({"proprio_dropout": -0.1}, ValueError),
        ({"video_weight": math.inf}, ValueError),
        ({"action_guard": math.nan}, ValueError),
        ({"flow_shift": 0.0}, ValueError),
        ({"flow_shift": "1"}, TypeError),
        ({"move_positions": 1}, TypeError),
        ({"latent_dtype": torch.int32}, TypeError),
    ],
)
def test_refuses_settings(option: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(option))):
        ObjectiveSettings(**option)


def test_refuses_draws_for_other_windows() -> None:
    policy, settings = PraxisPolicy(tiny_config()), ObjectiveSettings()
    draws = _draws(policy.config, settings, windows=1)
    with pytest.raises(ValueError, match="draws.window_time has shape .1., it must have .2."):
        praxis_loss(policy, small_window(policy.config, windows=2), draws, settings)


@pytest.mark.parametrize("windows", [1, 2])
def test_refuses_every_tensor_of_another_shape_or_dtype(windows: int) -> None:
    """Without a check most of these broadcast: a loss of other data, or of one window's."""
    policy, settings = PraxisPolicy(tiny_config()), ObjectiveSettings()
    window = small_window(policy.config, windows=windows)
    draws = _draws(policy.config, settings, windows=windows)

    def refuse(error: type[Exception], name: str, value: Tensor) -> None:
        owner, field = name.split(".")
        given: dict[str, Any] = {"window": window, "draws": draws}
        given[owner] = replace(given[owner], **{field: value})
        with pytest.raises(error, match=name):
            praxis_loss(policy, given["window"], given["draws"], settings)

    for data, owner in ((window, "window"), (draws, "draws")):
        for field in fields(data):
            name, value = f"{owner}.{field.name}", getattr(data, field.name)
            refuse(ValueError, name, value[0])
            refuse(ValueError, name, value[..., None])
            refuse(
                ValueError,
                name,
                torch.cat((value, value)) if field.name != "latents" else value[:0],
            )
            refuse(TypeError, name, value.to(torch.complex64))
            refuse(TypeError, name, value.int())
            if owner == "draws":
                refuse(TypeError, name, value.double())
    refuse(ValueError, "window.latents", window.latents[:, :, :5])
    refuse(ValueError, "draws.chunk_times", draws.chunk_times[:, :1])
    for offset in (-1, policy.config.backbone.rope.frame_stride):
        refuse(ValueError, "draws.offsets", torch.full_like(draws.offsets, offset))


def test_refuses_what_is_no_window_and_no_draws() -> None:
    policy, settings = PraxisPolicy(tiny_config()), ObjectiveSettings()
    window, draws = small_window(policy.config), _draws(policy.config, settings, windows=1)
    cases: list[Any] = [({}, draws, settings), (window, {}, settings), (window, draws, {})]
    for given in cases:
        with pytest.raises(TypeError, match="not dict"):
            praxis_loss(policy, *given)
    with pytest.raises(TypeError, match="window.text must be a tensor, not NoneType"):
        praxis_loss(policy, replace(window, text=None), draws, settings)
    for windows, error in ((0, ValueError), (True, TypeError), (1.0, TypeError)):
        with pytest.raises(error, match="windows="):
            draw(policy.config, settings, torch.Generator(), windows=windows)  # type: ignore[arg-type]


class _Oracle(nn.Module):
    """Knows the data, and so the velocity from any mix of it and noise; notes its calls."""

    def __init__(self, window: PraxisWindow) -> None:
        super().__init__()
        self.policy = PraxisPolicy(tiny_config())  # whose calls it answers
        self.window, self.calls = window, list[dict[str, Any]]()

    def forward(self, **inputs: Any) -> PraxisOutput:
        self.calls.append(inputs)
        told = 1.0 if torch.equal(inputs["text"], self.window.text) else 0.5
        t = inputs["times"].repeat_interleave(2, 1)
        action_t = inputs["action_times"].repeat_interleave(2, 1)
        video = (inputs["noised"] - self.window.latents) / t[:, None, :, None, None]
        actions = (inputs["actions"] - self.window.actions) / action_t[..., None]
        return PraxisOutput(velocity=told * video, action_velocity=told * actions)


@pytest.mark.parametrize("shift", [1.0, 12.5])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_sampling_follows_the_velocity_to_the_data(steps: int, shift: float) -> None:
    window = small_window(tiny_config())
    oracle = _Oracle(window)
    made = sample(oracle, window, steps=steps, flow_shift=shift)
    torch.testing.assert_close(made.latents, window.latents, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(made.actions, window.actions, rtol=1e-4, atol=1e-5)
    assert len(oracle.calls) == steps
    assert torch.equal(oracle.calls[0]["clean"], window.latents[:, :, :4])
    times = [call["times"][0, 0].item() for call in oracle.calls]
    expected = shift_time(1 - torch.arange(steps) / steps, shift).tolist()
    assert times == pytest.approx(expected)


def test_guidance_leads_away_from_the_blank_caption() -> None:
    window = small_window(tiny_config())
    oracle = _Oracle(window)
    # blank says v / 2, so that 2 would say 3 v / 2 and 0 says v / 2: data is at 1
    made = sample(
        oracle, window, steps=1, video_guidance=2.0, action_guidance=0.0,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(window.latents.shape, generator=generator)
    action_noise = torch.randn(window.actions.shape, generator=generator)
    torch.testing.assert_close(made.latents, noise - 1.5 * (noise - window.latents))
    torch.testing.assert_close(made.actions, (action_noise + window.actions) / 2)
    assert len(oracle.calls) == 2


def test_sampling_repeats_with_its_generator() -> None:
    policy = small_policy()
    window = small_window(policy.config)
    first, again, other = (
        sample(policy, window, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
    )
    assert torch.equal(first.actions, again.actions)
    assert not torch.equal(first.actions, other.actions)
    assert first.latents.isfinite().all()


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ({"steps": 0}, ValueError),
        ({"steps": True}, TypeError),
        ({"steps": 2.0}, TypeError),
        ({"flow_shift": 0.0}, ValueError),
        ({"flow_shift": -1.0}, ValueError),
        ({"flow_shift": math.inf}, ValueError),
        ({"flow_shift": "1"}, TypeError),
        ({"video_guidance": math.nan}, ValueError),
        ({"action_guidance": None}, TypeError),
        ({"action_guidance": -math.inf}, ValueError),
    ],
)
def test_sampling_refuses(option: dict[str, Any], error: type[Exception]) -> None:
    oracle = _Oracle(small_window(tiny_config()))
    with pytest.raises(error, match=next(iter(option))):
        sample(oracle, oracle.window, **option)
    assert oracle.calls == []


def test_sampling_refuses_windows_of_other_shapes() -> None:
    oracle = _Oracle(small_window(tiny_config()))
    for name in ("latents", "actions", "proprio"):
        other = replace(
            oracle.window, **{name: getattr(oracle.window, name).repeat_interleave(3, -2)}
        )
        with pytest.raises(ValueError, match=f"window.{name} has shape"):
            sample(oracle, other)
    five = replace(oracle.window, latents=oracle.window.latents[:, :, :5])
    with pytest.raises(ValueError, match="window.latents has shape"):
        sample(oracle, five)


def test_functions_refuse_what_is_no_policy_and_take_a_wrapper_of_one() -> None:
    policy, settings = small_policy(), ObjectiveSettings()
    window, draws = small_window(policy.config), _draws(policy.config, settings, windows=1)
    for given in (nn.Linear(2, 2), nn.ModuleList([policy, small_policy()]), None, policy.config):
        with pytest.raises(TypeError, match="sample takes a PraxisPolicy, or a module that"):
            sample(given, window)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="praxis_loss takes a PraxisPolicy, or a module that"):
            praxis_loss(given, window, draws, settings)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="trains_backbone takes a PraxisPolicy, or a module"):
            trains_backbone(given)  # type: ignore[arg-type]
    wrapper = _Wrapper(policy)
    assert trains_backbone(wrapper)
    with torch.no_grad():
        mine, inner = (praxis_loss(p, window, draws, settings).total for p in (wrapper, policy))
    assert torch.equal(mine, inner)


class _Wrapper(nn.Module):
    def __init__(self, policy: PraxisPolicy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, **inputs: Any) -> PraxisOutput:
        output: PraxisOutput = self.policy(**inputs)
        return output


def test_actions_go_to_tokens_and_back() -> None:
    config = tiny_config(
        normalization__action_q01=[-2.0, 0.0, 0.0, 0.0, 0.0],
        normalization__action_q99=[4.0, 1.0, 1.0, 1.0, 1.0],
        normalization__proprio_mean=[1.0] * 7,
        normalization__proprio_std=[2.0] * 7,
    )
    rows = torch.rand(2, 24, 5)
    rows[0, 0, 0], rows[0, 1, 0], rows[0, 2, 0] = -2.0, 4.0, 1.0
    tokens = encode_actions(rows, config)
    assert tokens.shape == (2, 6, 20)
    assert tokens[0, 0, [0, 5, 10]].tolist() == [-1.0, 1.0, 0.0]
    torch.testing.assert_close(decode_actions(tokens, config), rows)
    assert normalize_proprio(torch.full((1, 7), 3.0), config).tolist() == [[1.0] * 7]
    with pytest.raises(ValueError, match="multiple of 4"):
        encode_actions(rows[:, :23], config)


@pytest.mark.parametrize(
    ("convert", "width"), [(encode_actions, 5), (decode_actions, 20), (normalize_proprio, 7)]
)
def test_conversions_refuse_what_would_broadcast_or_truncate(convert: Any, width: int) -> None:
    config = tiny_config()
    assert convert(torch.zeros(1, 4, width), config).is_floating_point()
    for shape in ((1, 4, 1), (1, 4, 2 * width), (width, 4), ()):
        with pytest.raises(ValueError, match=rf"have shape \[.*{width}"):
            convert(torch.zeros(shape), config)
    with pytest.raises(TypeError, match="are torch.int64, they must be floating"):
        convert(torch.zeros(1, 4, width).long(), config)


def _draws(config: PraxisConfig, settings: ObjectiveSettings, windows: int = 2) -> Draws:
    return draw(config, settings, torch.Generator().manual_seed(0), windows=windows)


def _equal(first: Draws, second: Draws) -> bool:
    return all(torch.equal(getattr(first, f.name), getattr(second, f.name)) for f in fields(Draws))


def _gradients(
    policy: PraxisPolicy, window: PraxisWindow, draws: Draws, settings: ObjectiveSettings
) -> dict[str, Tensor]:
    policy.zero_grad()
    praxis_loss(policy, window, draws, settings).mean().backward()
    return {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}
