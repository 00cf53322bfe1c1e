"""Dropout of models of transformers and of adapters under tensor parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from shardwalk.mesh import (
    DistributedSetup,
    FSDP2Config,
    MeshContext,
    ParallelismSizes,
    seed_everything,
)
from shardwalk.parallelizer_core import parallelize_model
from shardwalk.parallelizer_core.testing import cached, run_on_ranks
from tests.matrix.case_models import FULL, gradients, logits_of, seeded, tokens
from tests.matrix.lora_models import with_adapters
from tests.matrix.tiny_transformers import MODELS


def bart() -> nn.Module:
    """Functions that drop weights, split features and whole hidden states, in the block itself."""
    counts = {
        f"{part}_{key}": value
        for part in ("encoder", "decoder")
        for key, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 40))
    }
    shares = {"dropout": 0.1, "attention_dropout": 0.2, "activation_dropout": 0.3}
    config = transformers.BartConfig(
        vocab_size=61, d_model=24, attn_implementation="sdpa", use_cache=False, **counts, **shares
    )
    return transformers.BartForConditionalGeneration(config)


def adapted() -> nn.Module:
    """Weights that attention drops by a function, and the inputs of adapters."""
    base = MODELS["llama"](False, num_hidden_layers=2, attention_dropout=0.2)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]
    return with_adapters(base, target_modules=targets, lora_dropout=0.3)


KINDS: dict[str, tuple[Any, bool]] = {
    "bart": (bart, False),
    "adapters": (adapted, False),
    "adapters, split sequences": (adapted, True),
}


def context(sequence_parallel: bool, mode: Any) -> MeshContext:
    def make() -> Any:
        config = FSDP2Config(mp_policy=FULL)
        return DistributedSetup.build(config, parallelism_sizes=ParallelismSizes(tp_size=2))

    mesh = cached("models with dropout", make).mesh_context.device_mesh
    config = FSDP2Config(mp_policy=FULL, sequence_parallel=sequence_parallel)
    return MeshContext.from_meshes(mesh, strategy_config=config, activation_checkpointing=mode)


def every(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def dropped(model: nn.Module) -> dict[str, Tensor]:
    """What the dropout modules of adapters see fit to drop in the next forward."""
    found: dict[str, Tensor] = {}

    def record(name: str) -> Any:
        return lambda module, args, output: found.update({name: (output == 0).detach()})

    for name, module in model.named_modules():
        if ".lora_dropout." in name and isinstance(module, nn.Dropout):
            module.register_forward_hook(record(name))
    return found


def step(kind: str, mode: Any) -> tuple[Tensor, dict[str, Tensor | None], dict[str, Tensor]]:
    make, sequence_parallel = KINDS[kind]
    mesh_context = context(sequence_parallel, mode)
    model = parallelize_model(seeded(make), mesh_context)
    masks = dropped(model)
    seed_everything(mesh_context, 3)
    ids = tokens(rows=2, length=9)
    logits = logits_of(model.train(), ids[:, :-1])
    F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    return logits.detach(), gradients(model), masks


def compared(kind: str) -> None:
    logits, grads, masks = step(kind, False)
    ranks = every((logits, grads))
    assert torch.equal(ranks[0][0], ranks[1][0])
    for name, grad in grads.items():
        assert grad is None or torch.equal(grad, ranks[0][1][name]), name
    seen = every(masks)
    for name, mask in seen[0].items():
        takes_part = any(part in name for part in ("o_proj", "down_proj"))
        assert torch.equal(mask, seen[1][name]) is not takes_part, name
        assert mask.float().mean() == pytest.approx(0.3, abs=0.1), name
        assert not [n for n, other in seen[0].items() if n != name and torch.equal(mask, other)]
    for mode in ("full", "selective"):
        others = step(kind, mode)
        assert torch.equal(logits, others[0]), mode
        for name, grad in grads.items():
            assert grad is None or torch.equal(grad, others[1][name]), (mode, name)


@pytest.mark.parametrize("kind", KINDS)
def test_peers_agree_and_a_recompute_changes_no_bit(kind: str) -> None:
    run_on_ranks(2, compared, kind)
