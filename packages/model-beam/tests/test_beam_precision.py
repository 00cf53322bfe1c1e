"""Three kinds of test that see a rounded rotary table, each shown to fail on one.

End-to-end tolerances do not: in bf16, the noise between two right kernels is as large. So: the
dtypes at the border of the attention; equality with the unsharded model, kernel by kernel; and
arithmetic in fp32 inside of the blocks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from beam_sharding_toys import (
    BF16,
    CastingBeam,
    build,
    full,
    mean_gradients,
    plain_name,
    relative,
    rows_of_rank,
    sharded,
    train,
)
from torch import Tensor

from shardwalk.model_beam import BeamForCausalLM
from shardwalk.parallelizer_core.testing import run_on_ranks

FP32 = torch.float32
EP2: dict[str, Any] = {"sizes": {"ep_size": 2}}


def dtypes_seen(model: type[BeamForCausalLM], options: dict[str, Any]) -> dict[str, set[Any]]:
    """What attention is called with, and what the router's forward reads."""
    parallel = sharded(model, **options)
    seen: dict[str, set[Any]] = {}

    def note(**values: Tensor | None) -> None:
        for name, value in values.items():
            if value is not None:
                seen.setdefault(name, set()).add(value.dtype)

    def at_attention(module: Any, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        cos, sin = kwargs["rotary"] or (None, None)
        note(x=args[0], cos=cos, sin=sin, scale=kwargs["query_scale"], q=module.q_proj.weight)

    def at_router(module: Any, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        bias = module.e_score_correction_bias
        note(router=module.weight, bias=bias, bare=module.weight.data)

    for block in parallel.model.blocks:
        block.self_attn.register_forward_pre_hook(at_attention, with_kwargs=True)
        if block.is_sparse:
            block.mlp.gate.register_forward_pre_hook(at_router, with_kwargs=True)
    logits = train(parallel)
    note(logits=logits)
    return seen


KEPT = {"cos", "sin", "scale", "router", "bias", "bare", "logits"}


@pytest.mark.parametrize(
    "options",
    [{}, {"activation_checkpointing": "selective"}, {"wrapped": "inside"}, EP2, {"moe": {}}],
    ids=["dense path", "selective", "wrapped", "ep 2", "experts apart"],
)
def test_attention_gets_fp32_tables_and_the_router_has_fp32_weights(
    options: dict[str, Any],
) -> None:
    for seen in run_on_ranks(2, dtypes_seen, BeamForCausalLM, options):
        assert {name for name, dtypes in seen.items() if dtypes == {FP32}} == KEPT
        assert seen["x"] == seen["q"] == {torch.bfloat16}


def test_a_cast_at_the_block_rounds_the_tables_and_is_seen() -> None:
    seen = run_on_ranks(2, dtypes_seen, CastingBeam, {})[0]
    assert seen["cos"] == seen["sin"] == seen["scale"] == {torch.bfloat16}
    assert seen["router"] == {FP32}


def differences(
    model: type[BeamForCausalLM], built: dict[str, Any], options: dict[str, Any]
) -> dict[str, float]:
    """How far logits and gradients are from those of the unsharded bf16 model."""
    kept = {**built, "dtype": torch.bfloat16}
    reference = build(**kept)
    expected = train(reference)
    means = mean_gradients(reference)
    parallel = sharded(model, built=built, **options)
    found = train(parallel)
    gradients = {plain_name(n): p.grad for n, p in parallel.named_parameters()}
    trained = {name: full(grad) for name, grad in gradients.items() if grad is not None}
    assert trained.keys() == means.keys()
    stored = {name: mean.to(trained[name].dtype) for name, mean in means.items()}
    worst = max(relative(trained[name], mean) for name, mean in stored.items() if mean.any())
    equal = all(torch.equal(trained[name], mean) for name, mean in stored.items())
    return {
        "logits": 0.0 if torch.equal(found, expected) else relative(found, expected),
        "gradients": 0.0 if equal else worst,
    }


ONE_EXPERT = {"num_experts_per_tok": 1, "norm_topk_prob": False}
FROZEN = {"frozen": "mlp.gate."}
EXACT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "stored in bf16": ({"dtype": torch.bfloat16}, {}),
    "a frozen router": (FROZEN, {}),
    "a frozen router, stored in bf16": ({**FROZEN, "dtype": torch.bfloat16}, {}),
    "in a dict": ({"in_dict": True}, {}),
    "tied": ({"tie_word_embeddings": True}, {}),
    "full checkpointing": ({}, {"activation_checkpointing": "full"}),
    "selective checkpointing": ({}, {"activation_checkpointing": "selective"}),
    "wrapped inside": ({}, {"wrapped": "inside"}),
    "wrapped outside": ({}, {"wrapped": "outside"}),
    "experts apart": ({}, {"moe": {}}),
    "the inner model as the root": ({}, {"moe": {"wrap_outer_model": False}}),
    "a frozen router, experts apart": (FROZEN, {"moe": {}}),
}


@pytest.mark.parametrize("kind", EXACT)
def test_the_numbers_are_those_of_the_unsharded_bf16_model(kind: str) -> None:
    """Logits equal, gradients equal to the fp32 mean of what each rank has alone in bf16."""
    for found in run_on_ranks(2, differences, BeamForCausalLM, *EXACT[kind]):
        assert found == {"logits": 0.0, "gradients": 0.0}


@pytest.mark.parametrize("mode", [False, "selective"])
def test_experts_on_other_ranks_give_the_same_logits(mode: Any) -> None:
    """With one expert for each token, since each rank rounds the sum of its experts of a token.

    The weights of an expert get the gradient of all its tokens in one product, rounded once.
    """
    options = {**EP2, "activation_checkpointing": mode}
    for found in run_on_ranks(2, differences, BeamForCausalLM, ONE_EXPERT, options):
        assert found["logits"] == 0.0
        assert found["gradients"] < 5e-3


@pytest.mark.parametrize("options", [{}, EP2], ids=["dense path", "ep 2"])
def test_a_cast_at_the_block_changes_logits_and_gradients(options: dict[str, Any]) -> None:
    for found in run_on_ranks(2, differences, CastingBeam, ONE_EXPERT, options):
        assert found["logits"] > 1e-2
        assert found["gradients"] > 1e-2


class InFP32(BeamForCausalLM):
    """All but the embedding computes in fp32, so that nothing but the inputs can be rounded."""

    @property
    def _keep_in_fp32_modules_strict(self) -> list[str]:
        return ["layers", "norm", "lm_head"]


class CastingInFP32(InFP32):
    parallelizer = CastingBeam.parallelizer


def fp32_difference(model: type[BeamForCausalLM]) -> float:
    """How far logits are from the unsharded model that gets the same hidden states."""
    reference = build(mlp_layer_types=["dense"] * 6)
    embedding = reference.model.embed_tokens.weight
    embedding.data = embedding.data.to(torch.bfloat16)
    for block in reference.model.blocks:
        block.register_forward_pre_hook(lambda module, args: args[0].to(torch.bfloat16))
        block.input_layernorm.register_forward_pre_hook(lambda module, args: args[0].float())
    expected = reference(rows_of_rank()).logits.detach()
    parallel = sharded(model, built={"mlp_layer_types": ["dense"] * 6}, mp_policy=BF16)
    return relative(parallel(rows_of_rank()).logits.detach(), expected)


def test_blocks_that_compute_in_fp32_see_tables_of_fp32() -> None:
    assert max(run_on_ranks(2, fp32_difference, InFP32)) < 1e-6


def test_a_cast_at_the_block_is_seen_by_blocks_that_compute_in_fp32() -> None:
    assert min(run_on_ranks(2, fp32_difference, CastingInFP32)) > 1e-3
