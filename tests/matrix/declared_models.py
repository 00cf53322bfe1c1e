"""Tiny models of transformers with tensor-parallel plans of their own, as nobody prepared them."""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn

from tests.matrix.tiny_transformers import SIZES

_NO_DROPOUT = {
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_LATENT = {
    "q_lora_rank": 14, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6,
    "v_head_dim": 5, "head_dim": 4, "num_key_value_heads": 4, "first_k_dense_replace": 9,
}  # fmt: skip
OWN_SIZES: dict[str, dict[str, Any]] = {"DeepseekV2": _LATENT}


def declared_model(name: str, **sizes: Any) -> nn.Module:
    """A causal language model of two layers."""
    config = getattr(transformers, f"{name}Config")(**{
        **SIZES,
        **_NO_DROPOUT,
        "num_hidden_layers": 2,
        **OWN_SIZES.get(name, {}),
        **sizes,
    })
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if name in OWN_SIZES:  # it pins routers, and all layers are dense here
        for module in model.modules():
            if hasattr(module, "_keep_in_fp32_modules_strict"):
                module._keep_in_fp32_modules_strict = None
    return model
