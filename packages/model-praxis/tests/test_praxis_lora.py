from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from praxis_toys import randomize, tiny_config
from praxis_windows import small_inputs, small_policy, small_window
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardwalk.model_praxis import (
    LoraLinear,
    LoraSettings,
    ObjectiveSettings,
    PraxisPolicy,
    apply_lora,
    draw,
    merge_lora,
    praxis_loss,
    trains_backbone,
)
from shardwalk.parallelizer_core import export_safetensors, materialize
from shardwalk.parallelizer_core.testing import run_on_ranks

SETTINGS = LoraSettings(rank=3, alpha=6.0)


def test_fresh_adapters_change_nothing() -> None:
    policy = small_policy()
    inputs = small_inputs(policy.config)
    before, names = policy(**inputs), set(policy.state_dict())
    apply_lora(policy, SETTINGS)
    after = policy(**inputs)
    assert torch.equal(before.velocity, after.velocity)
    assert torch.equal(before.action_velocity, after.action_velocity)
    assert names < set(policy.state_dict())  # what was there keeps its name
    linear = policy.action_expert.get_submodule("layers.0.attn.q_proj")
    assert isinstance(linear, LoraLinear)
    assert linear.lora_a.shape == (3, 32)
    assert linear.lora_b.shape == (32, 3)


def test_adapters_alone_are_trained_and_the_decoder_never_runs() -> None:
    policy = apply_lora(small_policy(), SETTINGS)
    _shake_adapters(policy)
    assert not trains_backbone(policy)
    ran: list[object] = []
    policy.backbone.decoder.register_forward_pre_hook(lambda *_: ran.append(None))
    settings = ObjectiveSettings(proprio_dropout=0.0, action_guard=math.inf)
    generator = torch.Generator().manual_seed(0)
    loss = praxis_loss(
        policy, small_window(policy.config), draw(policy.config, settings, generator), settings
    )
    assert loss.video is None
    assert torch.equal(loss.total, loss.action)
    assert not ran
    loss.mean().backward()
    trained = {name for name, p in policy.named_parameters() if p.grad is not None}
    assert trained == {name for name, _ in policy.named_parameters() if ".lora_" in name}
    assert all(p.grad.any() for p in policy.parameters() if p.grad is not None)


def test_merged_weights_equal_live_adapters() -> None:
    policy = apply_lora(small_policy(), SETTINGS)
    _shake_adapters(policy)
    inputs = small_inputs(policy.config)
    before = policy(**inputs).action_velocity
    assert merge_lora(policy) is policy
    torch.testing.assert_close(policy(**inputs).action_velocity, before, rtol=1e-4, atol=1e-5)
    assert not any(isinstance(module, LoraLinear) for module in policy.modules())
    assert set(policy.state_dict()) == set(small_policy().state_dict())
    plain = small_policy()(**inputs).action_velocity
    assert (plain - before).abs().max() > 0.01


def test_adapter_adds_alpha_over_rank_times_b_a() -> None:
    base = nn.Linear(5, 4)
    adapted = LoraLinear(base, rank=3, alpha=6.0)
    nn.init.normal_(adapted.lora_a)
    nn.init.normal_(adapted.lora_b)
    x = torch.randn(2, 5)
    expected = x @ (base.weight + 2 * adapted.lora_b @ adapted.lora_a).T + base.bias
    torch.testing.assert_close(adapted(x), expected)
    adapted.fold()
    torch.testing.assert_close(adapted.plain()(x), expected)
    assert adapted.plain().weight is base.weight


def test_export_holds_the_merged_weights_and_no_adapters(tmp_path: Path) -> None:
    policy = apply_lora(small_policy(), SETTINGS)
    _shake_adapters(policy)
    inputs = small_inputs(policy.config)
    live = policy(**inputs)
    with pytest.raises((ValueError, RuntimeError), match="merge_lora"):
        export_safetensors(policy, tmp_path / "early")
    export_safetensors(merge_lora(policy), tmp_path / "merged")
    loaded = PraxisPolicy(tiny_config())
    materialize(loaded, checkpoint=tmp_path / "merged")
    out = loaded(**inputs)
    assert torch.equal(out.velocity, live.velocity)
    torch.testing.assert_close(out.action_velocity, live.action_velocity, rtol=1e-4, atol=1e-5)


def test_adapters_on_meta_start_like_those_on_real_weights(tmp_path: Path) -> None:
    policy = small_policy()
    export_safetensors(policy, tmp_path)
    with torch.device("meta"):
        late = PraxisPolicy(tiny_config())
    materialize(apply_lora(late, SETTINGS, seed=5), checkpoint=tmp_path)
    early = apply_lora(policy, SETTINGS, seed=5).state_dict()
    assert early.keys() == late.state_dict().keys()
    for name, value in late.state_dict().items():
        assert torch.equal(value, early[name]), name
    starts = {name for name in early if name.endswith("lora_a")}
    assert all(early[name].std() > 0.01 for name in starts)


def test_adapters_leave_the_rule_of_their_layer() -> None:
    with torch.device("meta"):
        policy = apply_lora(PraxisPolicy(tiny_config()), SETTINGS)
    materialize(policy, init="reset_parameters")
    state = policy.state_dict()
    assert not state["action_expert.norm.proj.weight"].any()
    assert not state["action_expert.head.lora_b"].any()
    assert state["action_expert.head.lora_a"].std() > 0
    assert state["action_expert.head.weight"].std() > 0


def test_targets_choose_layers() -> None:
    policy = apply_lora(small_policy(), LoraSettings(rank=2, targets=("layers.*.attn.?_proj",)))
    adapted = [n for n, m in policy.named_modules() if isinstance(m, LoraLinear)]
    assert len(adapted) == 4 * 4
    with pytest.raises(ValueError, match="match no linear layer"):
        apply_lora(small_policy(), LoraSettings(targets=("blocks.*",)))


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ({"rank": 0}, ValueError),
        ({"rank": 2.0}, TypeError),
        ({"alpha": math.nan}, ValueError),
        ({"alpha": True}, TypeError),
        ({"targets": ()}, ValueError),
        ({"targets": "*"}, TypeError),
    ],
)
def test_refuses_settings_of_adapters(option: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(option))):
        LoraSettings(**option)


def test_refuses_what_has_adapters_and_what_has_none() -> None:
    policy = small_policy()
    with pytest.raises(ValueError, match="no adapters to merge"):
        merge_lora(policy)
    apply_lora(policy, SETTINGS)
    with pytest.raises(ValueError, match="has adapters already"):
        apply_lora(policy, SETTINGS)
    with torch.device("meta"):
        empty = apply_lora(PraxisPolicy(tiny_config()), SETTINGS)
    with pytest.raises(ValueError, match="no values yet"):
        merge_lora(empty)


def test_merges_and_exports_when_sharded(tmp_path: Path) -> None:
    run_on_ranks(2, _merge_sharded, tmp_path)
    policy = apply_lora(small_policy(), SETTINGS)
    _shake_adapters(policy)
    expected = merge_lora(policy).state_dict()
    loaded = PraxisPolicy(tiny_config())
    materialize(loaded, checkpoint=tmp_path / "merged")
    for name, value in loaded.state_dict().items():
        torch.testing.assert_close(value, expected[name], msg=name)


def _merge_sharded(folder: Path) -> None:
    policy = apply_lora(small_policy(), SETTINGS)
    _shake_adapters(policy)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in policy.action_expert.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    with pytest.raises(ValueError, match="has adapters already"):
        apply_lora(policy, SETTINGS)
    inputs = small_inputs(policy.config)
    with torch.no_grad():
        before = policy(**inputs).action_velocity
        after = merge_lora(policy)(**inputs).action_velocity
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    export_safetensors(policy, folder / "merged")


def _shake_adapters(policy: PraxisPolicy) -> None:
    for module in policy.modules():
        if isinstance(module, LoraLinear):
            adapter = nn.ParameterDict({"a": module.lora_a, "b": module.lora_b})
            randomize(adapter, seed=module.in_features)
