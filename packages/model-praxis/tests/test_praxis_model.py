from __future__ import annotations

from typing import Any

import pytest
import torch
from praxis_toys import randomize, tiny_config
from praxis_windows import small_inputs, small_policy
from torch import Tensor

from shardwalk.model_praxis import (
    MoeTrainingSettings,
    PraxisOutput,
    PraxisPolicy,
    trains_backbone,
)
from shardwalk.moe_ep import Gate
from shardwalk.parallelizer_core import materialize

CHUNKS, PER_CHUNK = 3, 2
_VIDEO, _ACTIONS = ("noised", "times"), ("actions", "action_times", "proprio")
_FRAME_AXIS = {"noised": 2, "clean": 2, "actions": 1}


@pytest.mark.parametrize("seed", range(3))
def test_a_chunk_sees_itself_and_the_clean_chunks_before_it(seed: int) -> None:
    policy = small_policy(seed=seed).eval()
    inputs = small_inputs(policy.config, windows=2, seed=seed)
    before = _run(policy, inputs)
    for changed in range(CHUNKS):
        for name in (*_VIDEO, *_ACTIONS, "clean"):
            if name == "clean" and changed == CHUNKS - 1:
                continue
            after = _run(policy, _with_change(inputs, name, changed))
            for chunk in range(CHUNKS):
                is_seen = changed < chunk if name == "clean" else changed == chunk
                _compare(_of_chunk(before, chunk)[1], _of_chunk(after, chunk)[1], is_seen)
                is_seen = is_seen and name not in _ACTIONS
                _compare(_of_chunk(before, chunk)[0], _of_chunk(after, chunk)[0], is_seen)


@pytest.mark.parametrize("name", ["anchor", "text", "offsets"])
def test_every_chunk_sees_what_is_global(name: str) -> None:
    policy = small_policy().eval()
    inputs = small_inputs(policy.config)
    before = _run(policy, inputs)
    change = torch.tensor([[3, 700, 41]]) if name == "offsets" else inputs[name] + 1
    after = _run(policy, inputs | {name: change})
    for chunk in range(CHUNKS):
        for old, new in zip(_of_chunk(before, chunk), _of_chunk(after, chunk), strict=True):
            _compare(old, new, changes=True)


def test_expert_never_changes_the_video() -> None:
    policy = small_policy().eval()
    inputs = small_inputs(policy.config)
    before = _run(policy, inputs)
    randomize(policy.action_expert, seed=7)
    after = _run(policy, inputs | {"actions": inputs["actions"] + 1})
    assert before.velocity is not None
    assert after.velocity is not None
    assert torch.equal(before.velocity, after.velocity)
    assert not torch.equal(before.action_velocity, after.action_velocity)


def test_actions_are_the_same_without_decoding() -> None:
    policy = small_policy()
    inputs = small_inputs(policy.config)
    ran: list[object] = []
    for block in policy.backbone.decoder.blocks:
        block.register_forward_hook(lambda *_: ran.append(None))
    short = policy(**inputs, decode=False)
    assert short.velocity is None
    assert not ran
    assert torch.equal(short.action_velocity, policy(**inputs).action_velocity)
    assert ran


def test_one_chunk_has_no_clean_tokens() -> None:
    policy = small_policy(tiny_config(chunking__window_chunks=1, chunking__window_frames=9))
    inputs = small_inputs(policy.config)
    out = policy(**inputs)
    assert inputs["clean"] is None
    assert out.velocity.shape == (1, 6, PER_CHUNK, 4, 4)
    assert out.action_velocity.shape == (1, PER_CHUNK, 20)


def test_windows_do_not_see_each_other() -> None:
    policy = small_policy().eval()
    inputs = small_inputs(policy.config, windows=2)
    inputs["offsets"] = torch.tensor([[1, 2, 3], [500, 20, 70]])
    both = _run(policy, inputs)
    alone = _run(policy, {name: value[1:] for name, value in inputs.items()})
    assert both.velocity is not None
    assert alone.velocity is not None
    torch.testing.assert_close(both.velocity[1:], alone.velocity, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(both.action_velocity[1:], alone.action_velocity)


def test_frozen_backbone_runs_without_a_graph() -> None:
    policy = small_policy()
    assert trains_backbone(policy)
    policy.backbone.requires_grad_(False)
    assert not trains_backbone(policy)
    out = policy(**small_inputs(policy.config))
    assert not out.velocity.requires_grad
    out.action_velocity.square().sum().backward()
    assert all(p.grad is not None for p in policy.action_expert.parameters())
    assert all(p.grad is None for p in policy.backbone.parameters())
    policy.backbone.decoder.requires_grad_(True)
    assert trains_backbone(policy)


def test_every_trainable_parameter_is_trained() -> None:
    policy = small_policy()
    out = policy(**small_inputs(policy.config, windows=2))
    (out.velocity.square().mean() + out.action_velocity.square().mean()).backward()
    idle = [
        name for name, p in policy.named_parameters()
        if p.requires_grad and (p.grad is None or not p.grad.any())
    ]  # fmt: skip
    assert idle == []


def test_close_to_float32_with_bfloat16_parameters() -> None:
    policy = small_policy().eval()
    policy.backbone.to(torch.bfloat16).float()  # weights that bfloat16 has, so that it routes alike
    inputs = small_inputs(policy.config)
    wide = _run(policy, inputs)
    short = _run(policy.to(torch.bfloat16), inputs)
    assert wide.velocity is not None
    assert short.velocity is not None
    for mine, exact in (
        (short.velocity, wide.velocity),
        (short.action_velocity, wide.action_velocity),
    ):
        assert mine.dtype == torch.bfloat16
        error = (mine.float() - exact).square().mean() / exact.square().mean()
        assert error < 0.01


def test_training_settings_reach_the_routers() -> None:
    settings = MoeTrainingSettings(balance_loss_weight=0.4, bias_update_speed=0.01)
    trained = PraxisPolicy(tiny_config(), training=settings)
    gates = [m for m in trained.modules() if isinstance(m, Gate)]
    assert {gate.config.balance_loss_coefficient for gate in gates} == {0.4 / len(gates)}
    idle = [m for m in PraxisPolicy(tiny_config()).modules() if isinstance(m, Gate)]
    assert all(gate.balance_loss is None for gate in idle)


def test_longest_sequence_of_a_window() -> None:
    policy = PraxisPolicy(tiny_config())
    encoder = 3 + 4 + 12 + (2 * CHUNKS - 1) * PER_CHUNK * 4
    decoder = 2 + CHUNKS * PER_CHUNK * 16
    assert policy.max_tokens_per_window == max(encoder, decoder)
    longer = PraxisPolicy(tiny_config(text_encoder__max_tokens=500))
    assert longer.max_tokens_per_window == encoder + 488


def test_starts_on_the_meta_device() -> None:
    with torch.device("meta"):
        policy = PraxisPolicy(tiny_config())
    materialize(policy, init="reset_parameters")
    torch.manual_seed(0)
    built = PraxisPolicy(tiny_config())
    for (name, mine), (_, theirs) in zip(
        policy.state_dict().items(), built.state_dict().items(), strict=True
    ):
        assert not mine.is_meta, name
        assert (mine.std() > 0 if theirs.numel() > 1 else True) == (
            theirs.std() > 0 if theirs.numel() > 1 else True
        ), name
    assert policy(**small_inputs(policy.config)).action_velocity.isfinite().all()


def test_refuses_documents_in_place_of_a_config() -> None:
    config = tiny_config()
    with pytest.raises(TypeError, match="not dict; read a document with PraxisConfig.from_dict"):
        PraxisPolicy(config.to_dict())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not dict; .* MoeTrainingSettings.from_dict"):
        PraxisPolicy(config, training={})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["actions", "action_times", "proprio"])
def test_refuses_actions_of_another_shape(name: str) -> None:
    policy = PraxisPolicy(tiny_config())
    inputs = small_inputs(policy.config)
    with pytest.raises(ValueError, match=f"{name} has shape"):
        policy(**inputs | {name: inputs[name][:, 1:]})


def _run(policy: PraxisPolicy, inputs: dict[str, Any]) -> PraxisOutput:
    with torch.no_grad():
        out: PraxisOutput = policy(**inputs)
    return out


def _with_change(inputs: dict[str, Any], name: str, chunk: int) -> dict[str, Any]:
    """The same inputs with other values in one chunk of one of them."""
    changed = inputs[name].clone()
    axis = _FRAME_AXIS.get(name)
    part = changed[:, chunk] if axis is None else _chunk(changed, chunk, axis)
    part.copy_(1 - part)
    return inputs | {name: changed}


def _chunk(x: Tensor, chunk: int, axis: int) -> Tensor:
    return x.narrow(axis, chunk * PER_CHUNK, PER_CHUNK)


def _of_chunk(out: PraxisOutput, chunk: int) -> tuple[Tensor, Tensor]:
    assert out.velocity is not None
    return _chunk(out.velocity, chunk, 2), _chunk(out.action_velocity, chunk, 1)


def _compare(before: Tensor, after: Tensor, changes: bool) -> None:
    """Other rows of an expert's product may change the order of its sums, no more."""
    difference = (before - after).abs().max() / before.abs().max()
    assert difference > 1e-3 if changes else difference < 2e-5
