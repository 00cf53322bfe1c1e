"""Beam with adapters: they train, the router stays in fp32, and units are those of the sidecar."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from beam_sharding_toys import build, context, full, mean_gradients, relative, train
from torch import nn

from shardwalk.parallelizer_core import describe_units, parallelize_model
from shardwalk.parallelizer_core.testing import run_on_ranks
from tests.matrix.lora_models import adapter_names, with_adapters

TARGETS = ["q_proj", "v_proj", "o_proj", "down_proj"]
ONE_EXPERT = {"num_experts_per_tok": 1, "norm_topk_prob": False}


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
