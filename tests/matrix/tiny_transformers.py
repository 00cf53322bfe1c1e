"""Tiny models of transformers, with odd sizes, for the parity tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "use_cache": False,
    "attn_implementation": "eager",
    "pad_token_id": 0,
}


def llama(tied: bool, **sizes: Any) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **sizes}, tie_word_embeddings=tied))


def qwen3(tied: bool, **sizes: Any) -> nn.Module:
    return Qwen3ForCausalLM(Qwen3Config(**{**SIZES, **sizes}, tie_word_embeddings=tied))


def gemma3(tied: bool, **sizes: Any) -> nn.Module:
    """Sliding and full attention layers, each kind with rotary frequencies of its own."""
    config = Gemma3TextConfig(
        **{**SIZES, **sizes},
        tie_word_embeddings=tied,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        query_pre_attn_scalar=6,
    )
    return Gemma3ForCausalLM(config)


def gemma3n() -> nn.Module:
    """The last two of four layers read the keys and values of the two before."""
    config = Gemma3nTextConfig(
        **{**SIZES, "num_hidden_layers": 4},
        vocab_size_per_layer_input=61,
        hidden_size_per_layer_input=5,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=4,
        altup_num_inputs=2,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 4,
    )
    return Gemma3nForCausalLM(config)


MODELS = {"llama": llama, "qwen3": qwen3, "gemma3": gemma3}


def normal_weights(name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
    """An init function: norms at one, everything else small and random."""
    if tensor.ndim == 1:
        tensor.fill_(1.0)
    else:
        tensor.normal_(0.0, 0.1, generator=generator)
