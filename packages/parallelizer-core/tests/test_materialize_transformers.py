"""Materialization of transformers models: rotary frequencies, ties, initializers (B03, B04, B35)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import state_toys as toys
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from shardwalk.parallelizer_core.materialize import materialize
from shardwalk.parallelizer_core.testing import preload, run_on_ranks

transformers = pytest.importorskip("transformers")
preload(*(f"transformers.models.{kind}.modeling_{kind}" for kind in ("llama", "qwen3", "gemma3")))


def config_of(kind: str) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": 33, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "max_position_embeddings": 64, "tie_word_embeddings": True, "pad_token_id": 0,
    }  # fmt: skip
    if kind == "gemma3":
        layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
        return transformers.Gemma3TextConfig(**sizes, **layers)
    return {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[kind](**sizes)


def causal_lm(kind: str, device: str = "cpu") -> Any:
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config_of(kind))


def huggingface(
    kind: str, path: Path, dtype: torch.dtype
) -> tuple[dict[str, Tensor], Tensor, bool]:
    with toys.nan_in_new_memory():
        model = causal_lm(kind, "meta").to(dtype)
        mesh = toys.mesh_of(2, names=("shard",))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model.model.rotary_emb, mesh=mesh)
        fully_shard(model, mesh=mesh)
        materialize(model, checkpoint=path)
        tokens = toys.batch()[0]
        tied = model.lm_head.weight is model.model.embed_tokens.weight
        return toys.buffers(model), model(tokens).logits.detach(), tied


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_rotary_embeddings_of_transformers(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """B04, B35: from meta, sharded, loaded: frequencies bit-equal in fp32, logits equal."""
    torch.manual_seed(0)
    direct = causal_lm(kind)
    state = {name: tensor.clone() for name, tensor in direct.state_dict().items()}
    del state["lm_head.weight"]
    save_file(state, tmp_path / "model.safetensors")
    expected = toys.buffers(direct)
    assert any("inv_freq" in name for name in expected)
    for parameter in direct.parameters():
        parameter.data = parameter.data.to(dtype)
    logits = direct(toys.batch()[0]).logits.detach()
    for found, measured, tied in run_on_ranks(2, huggingface, kind, tmp_path, dtype):
        assert tied
        assert found.keys() == expected.keys()
        for name, buffer in expected.items():
            assert found[name].dtype == torch.float32
            assert torch.equal(found[name], buffer), name
        torch.testing.assert_close(measured, logits, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_initial_weights_of_transformers(kind: str) -> None:
    """The model's own ``_init_weights``: norms as it wants them, tables with its own width."""
    model = causal_lm(kind, "meta")
    materialize(model, init="reset_parameters", seed=1)
    embed = model.model.embed_tokens.weight
    assert abs(embed[1:].std().item() - model.config.initializer_range) < 5e-3
    assert torch.equal(embed[0], torch.zeros(16))
    norm = 0.0 if kind == "gemma3" else 1.0
    assert torch.equal(model.model.norm.weight, torch.full((16,), norm))
    assert model(toys.batch()[0]).logits.isfinite().all()
