"""Tiny mixture-of-experts models of transformers, for the parity tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "use_cache": False,
    "attn_implementation": "eager",
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def _config(config: type, **sizes: Any) -> Any:
    return config(**{**SIZES, **sizes})


def mixtral(**sizes: Any) -> nn.Module:
    given = {"intermediate_size": 16, "num_local_experts": 8, "num_experts_per_tok": 2}
    return MixtralForCausalLM(_config(MixtralConfig, **given, sliding_window=None, **sizes))


def qwen3_moe(**sizes: Any) -> nn.Module:
    """The first layer is dense."""
    given = {
        "intermediate_size": 40,
        "moe_intermediate_size": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    }
    return Qwen3MoeForCausalLM(_config(Qwen3MoeConfig, **given, **sizes))


def deepseek_v3(**sizes: Any) -> nn.Module:
    """Groups of experts, a selection bias, shared experts; the first layer is dense."""
    given = {
        "num_key_value_heads": 4,
        "intermediate_size": 40,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "head_dim": 4,
    }
    return DeepseekV3ForCausalLM(_config(DeepseekV3Config, **{**given, **sizes}))


def gpt_oss(**sizes: Any) -> nn.Module:
    """Biases everywhere, experts transposed and interleaved, attention sinks."""
    given = {"intermediate_size": 16, "num_local_experts": 8, "num_experts_per_tok": 2}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = _config(GptOssConfig, **given, sliding_window=4, rope_parameters=rope, **sizes)
    return GptOssForCausalLM(config)


def ernie(**sizes: Any) -> nn.Module:
    """The selection bias stands in a module of its own inside the router, which is pinned to fp32."""
    given = {
        "intermediate_size": 40,
        "moe_intermediate_size": 16,
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_layer_interval": 1,
    }
    return Ernie4_5_MoeForCausalLM(_config(Ernie4_5_MoeConfig, **given, **sizes))


MODELS = {
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "deepseek_v3": deepseek_v3,
    "gpt_oss": gpt_oss,
    "ernie": ernie,
}


def build(name: str, seed: int = 0, **sizes: Any) -> nn.Module:
    """A model with weights that leave none of its choices close to a tie."""
    model = MODELS[name](**sizes)
    generator = torch.Generator().manual_seed(seed)
    for parameter_name, parameter in model.named_parameters():
        fill(parameter_name, parameter, generator)
    return model


@torch.no_grad()
def fill(name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
    """An init function: norms at one, routers wide, everything else small and random."""
    if "norm" in name:
        tensor.fill_(1.0)
    elif not tensor.is_meta:
        std = 0.5 if "gate.weight" in name or "router" in name else 0.1
        tensor.copy_(torch.empty(tensor.shape).normal_(0.0, std, generator=generator))
