"""Tiny Beam models with weights that matter everywhere, and the same in transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwalk.model_beam import BeamConfig, BeamForCausalLM

SLIDING, FULL = "sliding_attention", "full_attention"
ROPE = {"rope_type": "default", "rope_theta": 10000.0}

T6: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 8,
    "layer_types": [SLIDING, SLIDING, FULL] * 2,
    "mlp_layer_types": ["dense", *["sparse"] * 5],
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 64,
}

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
        "original_max_position_embeddings": 16}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 32}  # fmt: skip

VARIANTS: dict[str, dict[str, Any]] = {
    "t6": {},
    "top_1": {"num_experts_per_tok": 1},
    "no_norm": {"norm_topk_prob": False},
    "no_softcap": {"final_logit_softcapping": None},
    "swapped_rope": {"rope_parameters": {SLIDING: None, FULL: ROPE}},
    "absent_rope": {"rope_parameters": {SLIDING: None, FULL: None}},
    "rope_everywhere": {"rope_parameters": {SLIDING: ROPE, FULL: ROPE}},
    "one_group": {"n_group": 1, "topk_group": 1},
    "dense": {"mlp_layer_types": ["dense"] * 6},
    "tied": {"tie_word_embeddings": True},
    "attention_bias": {"attention_bias": True},
    "gelu": {"hidden_act": "gelu"},
    "rope_linear": {
        "rope_parameters": {
            SLIDING: {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
            FULL: None,
        }
    },
    "rope_dynamic": {
        "rope_parameters": {
            SLIDING: {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
            FULL: None,
        }
    },
    "rope_yarn": {"rope_parameters": {SLIDING: YARN, FULL: None}},
    "rope_llama3": {"rope_parameters": {SLIDING: LLAMA3, FULL: YARN}},
}


def beam_config(**changes) -> BeamConfig:
    """T6 with changes."""
    return BeamConfig.from_dict({**T6, **changes})


def tiny_beam(seed: int = 0, *, dtype: torch.dtype = torch.float32, **changes) -> BeamForCausalLM:
    """A model of `beam_config` whose weights `randomize` drew, the router float32 in any dtype."""
    model = BeamForCausalLM(beam_config(**changes))
    randomize(model, seed)
    return model.to(dtype)


@torch.no_grad()
def randomize(model: nn.Module, seed: int = 0) -> None:
    """Draw every parameter and buffer, those that a fresh model leaves at 0 or 1 included.

    The values depend on the seed and on the order of names alone.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        values = torch.randn(tensor.shape, generator=generator)
        tensor.copy_(_scaled(name, values))
    if model.config.tie_word_embeddings:
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)


def _scaled(name: str, values: Tensor) -> Tensor:
    if name.endswith("norm.weight"):
        return 1 + 0.2 * values
    if name.endswith("mlp.gate.weight"):
        return 0.2 * values
    if name.endswith("gate_bias"):
        return 0.5 * values
    return (0.1 if values.ndim == 1 else 0.08) * values


def token_ids(rows: int = 4, length: int = 128, *, seed: int = 1, vocab: int = 256) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (rows, length), generator=generator)


def oracle_pair(
    *, dtype: torch.dtype = torch.float32, attention: str = "sdpa", seed: int = 0, **changes
) -> tuple[nn.Module, BeamForCausalLM]:
    """The model of transformers and ours, with equal weights, in float32 or with its islands."""
    ours = tiny_beam(seed, dtype=dtype, **changes)
    return oracle_of(ours, dtype=dtype, attention=attention), ours


def oracle_of(
    ours: BeamForCausalLM, *, dtype: torch.dtype = torch.float32, attention: str = "sdpa"
) -> nn.Module:
    """The model of transformers with the weights of ours.

    Only parameters outside the router are cast: `.to(dtype)` on it would round the router and the
    rotary frequencies too.
    """
    from transformers import BeamConfig as OracleConfig
    from transformers import BeamForCausalLM as OracleBeam

    config = OracleConfig(**{k: v for k, v in ours.config.to_dict().items() if k != "model_type"})
    config._attn_implementation = attention
    oracle = OracleBeam(config)
    for name, parameter in oracle.named_parameters():
        if not name.endswith("mlp.gate.weight"):
            parameter.data = parameter.data.to(dtype)
    oracle.load_state_dict(ours.state_dict(), strict=True)
    if ours.config.tie_word_embeddings:
        assert oracle.lm_head.weight is oracle.model.embed_tokens.weight
    return oracle.train(ours.training)
