"""Logits, losses, routes and gradients of a float32 Beam against transformers."""

from __future__ import annotations

import pytest
import torch
from beam_toys import VARIANTS, oracle_pair, token_ids
from torch import Tensor, nn

from shardwalk.moe_ep import record_routes

pytest.importorskip("transformers")

LOGITS = {"atol": 5e-6, "rtol": 1e-5}
GRADIENTS = 1e-5


def assert_gradients_equal(ours: nn.Module, oracle: nn.Module) -> None:
    """No element is off by more than 1e-5 of the largest one of its tensor.

    A gradient that nearly cancels out (a gate's bias: float32 is 1.3e-5 off float64 in both models;
    the router of top 1, which has none) is held to a hundredth of the model's largest one instead.
    """
    wanted = {name: parameter.grad for name, parameter in oracle.named_parameters()}
    largest = max(gradient.abs().max().item() for gradient in wanted.values())
    found = dict(ours.named_parameters())
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        scale = max(gradient.abs().max().item(), 1e-2 * largest)
        off = (found[name].grad - gradient).abs().max().item() / scale
        assert off <= GRADIENTS, f"{name}: {off:.1e}"


def oracle_routes(oracle: nn.Module) -> dict[str, list[Tensor]]:
    """What its routers choose from now on, by name."""
    found: dict[str, list[Tensor]] = {}
    for name, module in oracle.named_modules():
        if name.endswith("mlp.gate"):
            chosen = found.setdefault(name, [])
            module.register_forward_hook(lambda _, __, out, chosen=chosen: chosen.append(out[2]))
    return found


def assert_routes_equal(ours: dict[str, list[Tensor]], wanted: dict[str, list[Tensor]]) -> None:
    assert ours.keys() == wanted.keys()
    for name, records in wanted.items():
        for record, other in zip(ours[name], records, strict=True):
            assert torch.equal(record.long().sort(-1).values, other.sort(-1).values), name


def run_both(oracle: nn.Module, ours: nn.Module, **inputs):
    routes = oracle_routes(oracle)
    wanted = oracle(**inputs, use_cache=False)
    if not routes:
        return wanted, ours(**inputs)
    with record_routes(ours) as found:
        got = ours(**inputs)
    assert_routes_equal(found.layers, routes)
    return wanted, got


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_loss_routes_and_gradients_are_those_of_transformers(variant):
    oracle, ours = oracle_pair(**VARIANTS[variant])
    ids = token_ids()
    labels = torch.where(token_ids(seed=2) % 5 == 0, -100, ids)
    wanted, got = run_both(oracle, ours, input_ids=ids, labels=labels)

    torch.testing.assert_close(got.logits, wanted.logits, **LOGITS)
    torch.testing.assert_close(got.loss, wanted.loss, atol=1e-6, rtol=1e-6)
    wanted.loss.backward()
    got.loss.backward()
    assert_gradients_equal(ours, oracle)
    if variant == "dense":  # the same kernels throughout
        assert torch.equal(got.logits, wanted.logits)
        gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
        for name, parameter in oracle.named_parameters():
            assert torch.equal(gradients[name], parameter.grad), name


def test_eager_attention_of_transformers_gives_the_same():
    oracle, ours = oracle_pair(attention="eager")
    wanted, got = run_both(oracle, ours, input_ids=token_ids())
    torch.testing.assert_close(got.logits, wanted.logits, **LOGITS)


def test_packed_and_padded_rows_are_those_of_transformers():
    oracle, ours = oracle_pair()
    ids = token_ids(2, 40)
    positions = torch.cat([torch.arange(13), torch.arange(20), torch.arange(7)]).expand(2, -1)
    wanted, got = run_both(oracle, ours, input_ids=ids, position_ids=positions)
    torch.testing.assert_close(got.logits, wanted.logits, **LOGITS)

    mask = torch.ones_like(ids)
    mask[0, 25:] = 0
    with torch.no_grad():
        wanted, got = oracle(ids, attention_mask=mask), ours(ids, mask)
    kept = mask.bool()
    torch.testing.assert_close(got.logits[kept], wanted.logits[kept], **LOGITS)


def test_hidden_states_are_those_of_transformers():
    oracle, ours = oracle_pair()
    embeddings = ours.model.embed_tokens(token_ids(2, 24)).detach()
    wanted = oracle(inputs_embeds=embeddings, output_hidden_states=True)
    got = ours(inputs_embeds=embeddings, output_hidden_states=True)
    assert len(got.hidden_states) == len(wanted.hidden_states) == 7
    for mine, other in zip(got.hidden_states, wanted.hidden_states, strict=True):
        torch.testing.assert_close(mine, other, atol=5e-6, rtol=1e-5)
    assert ours(token_ids(2, 24)).hidden_states is None


def test_experts_of_dropped_groups_are_never_chosen():
    """Neither when all that may be chosen scores below 0, nor when the best expert is dropped."""
    oracle, ours = oracle_pair()
    shift = torch.full((8,), -2.0)
    shift[:2] += torch.tensor([0.6, -1.5])  # the best expert, in the worst group
    with torch.no_grad():
        for model in (oracle, ours):
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer += shift
    with torch.no_grad():
        wanted, got = run_both(oracle, ours, input_ids=token_ids())
    torch.testing.assert_close(got.logits, wanted.logits, **LOGITS)
