"""What the values of a Beam configuration may be, alone and beside each other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

from shardwalk.moe_ep.config import Activation

if TYPE_CHECKING:
    from shardwalk.model_beam.config import BeamConfig

SLIDING, FULL = "sliding_attention", "full_attention"
ACTIVATIONS: dict[str, Activation] = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "quick_gelu": "quick_geglu",
}
"""Values of ``hidden_act``, and the name that its product with another projection has."""

_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings",
)  # fmt: skip
_SPARSE_SIZES = (
    "moe_intermediate_size", "num_experts", "num_experts_per_tok", "n_group", "topk_group",
)  # fmt: skip
_MLP_TYPES = ("dense", "sparse")
_RULES = ("layer_types", "mlp_layer_types", "rope_parameters")


def check_types(config: BeamConfig) -> None:
    """Refuse values of another type, before anything is computed from them.

    Raises:
        TypeError: naming the field.
        ValueError: for a number of layers below 1, from which the layer types would follow.
    """
    for field in fields(config):
        value = getattr(config, field.name)
        kinds = str(field.type).split(" | ")
        if value is None and ("None" in kinds or field.name in _RULES):
            continue
        wanted = _wanted(kinds[0])
        if not _fits(value, kinds):
            raise TypeError(f"{field.name}={value!r} must be {wanted}")
    _at_least_one(config, "num_hidden_layers")


def _wanted(kind: str) -> str:
    return {
        "int": "an integer",
        "float": "a number",
        "bool": "True or False",
        "str": "a string",
        "tuple[str, ...]": "a list of strings",
    }.get(kind, "a mapping")


def _fits(value: object, kinds: list[str]) -> bool:
    if "tuple[int, ...]" in kinds and isinstance(value, list | tuple):
        return all(_fits(item, ["int"]) for item in value)
    if kinds[0] == "tuple[str, ...]":
        return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
    if kinds[0] == "bool" or isinstance(value, bool):
        return kinds[0] == "bool" and isinstance(value, bool)
    types: dict[str, type | tuple[type, ...]] = {"int": int, "float": (int, float), "str": str}
    return isinstance(value, types.get(kinds[0], Mapping))


def check_values(config: BeamConfig) -> None:
    """Refuse values that cannot work, or that would compute something else than they say.

    Args:
        config: with its types checked and its rules resolved.

    Raises:
        ValueError: naming the field, its value, what is allowed and the way out.
    """
    for name in _SIZES:
        _at_least_one(config, name)
    _check_layers(config)
    _check_attention(config)
    _check_numbers(config)
    _check_tokens(config)
    if config.hidden_act not in ACTIVATIONS:
        raise ValueError(
            f"hidden_act={config.hidden_act!r} is not supported; use one of {list(ACTIVATIONS)}"
        )
    if config.has_sparse_layers:
        _check_experts(config)


def _at_least_one(config: BeamConfig, name: str) -> None:
    value = getattr(config, name)
    if value < 1:
        raise ValueError(f"{name}={value} is not allowed; use 1 or more")


def _check_layers(config: BeamConfig) -> None:
    for name, allowed in (("layer_types", (SLIDING, FULL)), ("mlp_layer_types", _MLP_TYPES)):
        given = getattr(config, name)
        for layer, value in enumerate(given):
            if value not in allowed:
                raise ValueError(
                    f"{name}[{layer}]={value!r} is not allowed; use one of {list(allowed)}"
                )
        if len(given) != config.num_hidden_layers:
            raise ValueError(
                f"{name} has {len(given)} entries for num_hidden_layers="
                f"{config.num_hidden_layers}; give one per layer, or None for the usual pattern"
            )


def _check_attention(config: BeamConfig) -> None:
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    if heads % shared:
        raise ValueError(
            f"num_key_value_heads={shared} does not divide num_attention_heads={heads}; use one "
            f"of {_divisors(heads)}"
        )
    window = config.sliding_window
    if SLIDING in config.layer_types and (window is None or window < 1):
        raise ValueError(
            f"sliding_window={window!r} leaves the sliding layers of layer_types without keys to "
            f"see; use 1 or more, or make every layer {FULL!r}"
        )
    if not 0 <= config.attention_dropout < 1:
        raise ValueError(
            f"attention_dropout={config.attention_dropout!r} is not allowed; use a share from 0 "
            f"to below 1"
        )


def _check_numbers(config: BeamConfig) -> None:
    _finite(config, "initializer_range", above=None)
    _finite(config, "rms_norm_eps", above=None)
    if config.final_logit_softcapping is not None:
        _finite(config, "final_logit_softcapping", above=0.0, way_out=", or None for no cap")


def _finite(config: BeamConfig, name: str, *, above: float | None, way_out: str = "") -> None:
    value = getattr(config, name)
    if not math.isfinite(value) or value < 0 or (above is not None and value <= above):
        bound = "0 or more" if above is None else f"above {above:g}"
        raise ValueError(
            f"{name}={value!r} is not allowed; it must be {bound}, and finite{way_out}"
        )


def _check_tokens(config: BeamConfig) -> None:
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value = getattr(config, name)
        for token in value if isinstance(value, tuple) else (value,):
            if token is not None and not 0 <= token < config.vocab_size:
                raise ValueError(
                    f"{name}={value!r} is no token of vocab_size={config.vocab_size}; use 0 to "
                    f"{config.vocab_size - 1}, or None"
                )


def _check_experts(config: BeamConfig) -> None:
    for name in _SPARSE_SIZES:
        if getattr(config, name) is None:
            raise ValueError(
                f"{name}=None leaves the sparse layers without groups of experts; use 1 for no "
                f"limit to the choice"
            )
        _at_least_one(config, name)
    _finite(config, "routed_scaling_factor", above=0.0)
    _check_groups(config, config.n_group or 1, config.topk_group or 1)


def _check_groups(config: BeamConfig, groups: int, chosen: int) -> None:
    experts, top_k = config.num_experts, config.num_experts_per_tok
    usable = [count for count in _divisors(experts) if 2 * count <= experts]
    if experts % groups:
        raise ValueError(
            f"n_group={groups} does not divide num_experts={experts}; use one of {usable}"
        )
    if experts < 2 * groups:
        raise ValueError(
            f"n_group={groups} leaves one expert per group of num_experts={experts}, and a group "
            f"counts by its two best; use one of {usable}, or at least {2 * groups} experts"
        )
    if chosen > groups:
        raise ValueError(f"topk_group={chosen} is more than n_group={groups}; use 1 to {groups}")
    left = chosen * (experts // groups)
    if top_k > left:
        raise ValueError(
            f"num_experts_per_tok={top_k} is more than the {left} experts that topk_group={chosen} "
            f"of n_group={groups} groups hold; lower num_experts_per_tok, or raise topk_group"
        )


def _divisors(number: int) -> list[int]:
    return [count for count in range(1, number + 1) if not number % count]
