"""Beam with adapters: they train, the router stays in fp32, and units are those of the sidecar."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from beam_sharding_toys import build, context, full, mean_gradients, relative, train
from beam_toys import FULL as NOT_SLIDING
from beam_toys import SLIDING
from torch import nn

from shardwalk.mesh import DistributedSetup
from shardwalk.parallelizer_core import describe_units, export_safetensors, parallelize_model
from shardwalk.parallelizer_core.testing import run_on_ranks
from tests.matrix.lora_models import adapter_names, with_adapters

TARGETS = ["q_proj", "v_proj", "o_proj", "down_proj"]
ONE_EXPERT = {"num_experts_per_tok": 1, "norm_topk_prob": False}
TWO_LAYERS = {
    "layer_types": [SLIDING, NOT_SLIDING], "mlp_layer_types": ["dense", "sparse"]
}  # fmt: skip
EXPERT_WEIGHTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def adapted() -> nn.Module:
    """A frozen model stored in bf16, its adapters in fp32; the experts are not linear layers."""
    torch.manual_seed(0)
    base = build(dtype=torch.bfloat16, **ONE_EXPERT)
    model: nn.Module = with_adapters(base, target_modules=TARGETS)
    return model


def differences(sizes: dict[str, int]) -> dict[str, Any]:
    """How far a model with adapters is from the unsharded one that computes them in bf16 too."""
    reference = adapted()
    for name, parameter in reference.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(torch.bfloat16)
    expected = train(reference)
    means = mean_gradients(reference)
    model = parallelize_model(adapted(), context(sizes=sizes))
    routers = [block.mlp.gate for block in model.get_base_model().model.blocks if block.is_sparse]
    seen: set[torch.dtype] = set()
    for router in routers:
        router.register_forward_pre_hook(lambda module, args: seen.add(module.weight.dtype))
    logits = train(model)
    trained = {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    assert trained.keys() == means.keys() == set(adapter_names(model))
    return {
        "logits": relative(logits, expected),
        "gradients": max(relative(trained[name], mean) for name, mean in means.items()),
        "routers": seen,
        "units": [unit.name for unit in describe_units(model.get_base_model())],
    }


@pytest.mark.parametrize("sizes", [{}, {"ep_size": 2}], ids=["dense path", "ep 2"])
def test_adapters_train_to_the_numbers_of_the_unsharded_model(sizes: dict[str, int]) -> None:
    for found in run_on_ranks(2, differences, sizes):
        assert found["logits"] == 0.0
        assert found["gradients"] == 0.0
        assert found["routers"] == {torch.float32}
        assert {"model.layers.0", "model.layers.1.mlp.gate"} <= set(found["units"])
        assert not any("lora" in name for name in found["units"])


def with_a_router_that_trains() -> Any:
    """bf16 but for adapters and routers, of which copies train."""
    torch.manual_seed(0)
    base = build(dtype=torch.bfloat16, num_hidden_layers=2, **ONE_EXPERT, **TWO_LAYERS)
    return with_adapters(base, target_modules=["q_proj"], modules_to_save=["gate"])


def trained_routers(sizes: dict[str, int] | None, folder: Path) -> None:
    model = with_a_router_that_trains()
    routers = [m for m in model.modules() if type(m).__name__ == "Gate"]
    ddp = DistributedSetup.build("ddp").mesh_context if sizes is None else None
    model = parallelize_model(model, ddp or context(sizes=sizes))
    seen: set[torch.dtype] = set()
    for router in routers:
        router.register_forward_pre_hook(lambda module, args: seen.add(module.weight.dtype))
    train(model)
    found = {name: parameter for name, parameter in model.named_parameters() if "gate." in name}
    copies = {name: p for name, p in found.items() if "modules_to_save" in name}
    assert len(found) == 2 * len(copies) == 2
    assert seen == {torch.float32}
    assert {parameter.dtype for parameter in found.values()} == {torch.float32}
    assert all(full(parameter.grad).any() for parameter in copies.values())
    inner = model if sizes is not None else model.module
    for given in (model, inner.get_base_model()):
        with pytest.raises(
            ValueError, match=r"self_attn\.q_proj \(of 3 layers\) has an adapter around it"
        ):
            export_safetensors(given, folder)
    assert not folder.exists()


@pytest.mark.parametrize("sizes", [{}, {"ep_size": 2}, None], ids=["fsdp", "ep 2", "ddp"])
def test_a_copy_of_a_router_trains_in_fp32(sizes: dict[str, int] | None, tmp_path: Path) -> None:
    run_on_ranks(2, trained_routers, sizes, tmp_path / "out")


def adapted_experts() -> None:
    base = build(num_hidden_layers=2, **TWO_LAYERS)
    model = with_adapters(base, target_modules=["q_proj"], target_parameters=EXPERT_WEIGHTS)
    name = r"model\.layers\.1\.mlp\.experts\.(base_layer\.)?lora_A\.default\.weight"
    with pytest.raises(ValueError, match=f"^ep_size=2: {name} .* use ep_size=1"):
        parallelize_model(model, context(sizes={"ep_size": 2}))


def test_adapters_of_experts_are_refused_by_name() -> None:
    run_on_ranks(2, adapted_experts)
