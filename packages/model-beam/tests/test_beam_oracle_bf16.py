"""A bfloat16 Beam against transformers, layer by layer.

A sparse model turns any rounding into other experts further up, so each block gets the hidden
states and the routes that transformers had there.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from beam_toys import VARIANTS, oracle_pair, token_ids
from torch import Tensor, nn

from shardwalk.model_beam.inputs import Rows
from shardwalk.moe_ep import RecordedRoutes, replay_routes

pytest.importorskip("transformers")

MOST_ULPS = 2
MOST_UNEQUAL = 1e-3  # share of elements; a rounding at another place changes far more of them


class Call(NamedTuple):
    args: tuple
    out: Tensor


def calls_of(oracle: nn.Module, ids: Tensor) -> dict[str, Call]:
    """What every module of the oracle got and gave, by name, and its logits under ``""``."""
    calls: dict[str, Call] = {}
    for name, module in oracle.named_modules():
        if name:
            module.register_forward_hook(
                lambda _, args, out, name=name: calls.__setitem__(name, Call(args, out))
            )
    with torch.no_grad():
        calls[""] = Call((ids,), oracle(ids, use_cache=False).logits)
    return calls


def ulps(got: Tensor, wanted: Tensor) -> Tensor:
    """How many bfloat16 numbers lie between each two elements."""
    assert got.dtype == wanted.dtype == torch.bfloat16
    bits = (tensor.contiguous().view(torch.int16).int() for tensor in (got, wanted))
    first, second = (torch.where(each < 0, -(each & 0x7FFF), each) for each in bits)
    return (first - second).abs()


def routes_of(calls: dict[str, Call]) -> RecordedRoutes:
    chosen = {name: [call.out[2]] for name, call in calls.items() if name.endswith("mlp.gate")}
    return RecordedRoutes(layers=chosen)


@pytest.mark.parametrize("variant", ["t6", "swapped_rope", "no_norm", "attention_bias", "gelu"])
def test_each_block_is_that_of_transformers(variant):
    oracle, ours = oracle_pair(dtype=torch.bfloat16, **VARIANTS[variant])
    calls = calls_of(oracle, token_ids())
    rows = Rows.of(calls["model.embed_tokens"].out)
    with torch.no_grad(), replay_routes(ours, routes_of(calls)):
        for layer, block in enumerate(ours.model.blocks):
            name = f"model.layers.{layer}"
            (x, *_), wanted = calls[name]
            got = block(x, **rows.for_layer(ours.config, block.layer_type))
            off = ulps(got, wanted)
            assert off.max() <= MOST_ULPS, name
            assert (off > 0).float().mean() <= MOST_UNEQUAL, name
            if not block.is_sparse:
                assert torch.equal(got, wanted), name


def test_what_has_the_same_kernels_is_equal_bit_for_bit():
    """All of a block but the sum over experts, whose fp32 additions are fused here."""
    oracle, ours = oracle_pair(dtype=torch.bfloat16)
    calls = calls_of(oracle, token_ids())
    rows = Rows.of(calls["model.embed_tokens"].out)
    for layer, block in enumerate(ours.model.blocks):
        name = f"model.layers.{layer}"
        arguments = rows.for_layer(ours.config, block.layer_type)
        del arguments["token_mask"]
        with torch.no_grad():
            normed = block.input_layernorm(calls[name].args[0])
            assert torch.equal(normed, calls[f"{name}.input_layernorm"].out)
            mixed = block.self_attn(normed, **arguments)
            assert torch.equal(mixed, calls[f"{name}.self_attn"].out[0]), name
            if block.is_sparse:
                (tokens, *_), (_, weights, experts) = calls[f"{name}.mlp.gate"]
                routing = block.mlp.gate(tokens)
                assert torch.equal(routing.experts, experts)
                assert torch.equal(routing.weights, weights)


@pytest.mark.parametrize("variant", ["dense", "top_1"])
def test_a_model_without_sums_over_experts_is_equal_bit_for_bit(variant):
    """One expert per token has the weight 1, so nothing is added."""
    oracle, ours = oracle_pair(dtype=torch.bfloat16, **VARIANTS[variant])
    wanted = calls_of(oracle, token_ids())[""].out
    with torch.no_grad():
        got = ours(token_ids()).logits
    assert got.dtype == torch.float32
    assert torch.equal(got, wanted)
