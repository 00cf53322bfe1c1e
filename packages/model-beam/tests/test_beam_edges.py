"""Calls at the edge on every kind of mesh: rows without a batch, some positions, no tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from beam_sharding_toys import BF16, FULL, build, full, sharded
from beam_toys import FULL as NOT_SLIDING
from beam_toys import SLIDING, token_ids
from torch import Tensor, nn

from shardwalk.parallelizer_core.testing import run_on_ranks

SMALL = {
    "num_hidden_layers": 2,
    "layer_types": [SLIDING, NOT_SLIDING],
    "mlp_layer_types": ["dense", "sparse"],
}
IDS = token_ids(2, 9)
CALLS: dict[str, dict[str, Any]] = {
    "one row": {"input_ids": IDS[0], "labels": IDS[0], "output_hidden_states": True},
    "the end of one row": {"input_ids": IDS[0], "logits_to_keep": 2},
    "some positions": {"input_ids": IDS, "logits_to_keep": torch.tensor([0, 5])},
    "no length": {"input_ids": IDS[:, :0], "labels": IDS[:, :0]},
    "no rows": {"input_ids": IDS[:0], "labels": IDS[:0]},
    "neither": {"input_ids": IDS[:0, :0], "labels": IDS[:0, :0]},
    "an empty row": {"input_ids": IDS[0, :0], "output_hidden_states": True},
}


def results(model: nn.Module) -> dict[str, Tensor]:
    """What every call gives, and the gradients of all of them together."""
    found: dict[str, Tensor] = {}
    total = torch.zeros(())
    for name, call in CALLS.items():
        output = model(**call)
        states = output.hidden_states or ()
        tensors = [output.logits, *(full(state) for state in states)]
        assert all(tensor._base is None for tensor in (output.logits, *states))
        total = total + sum(tensor.float().square().sum() for tensor in tensors)
        if output.loss is not None:
            total, found[f"{name}: loss"] = total + output.loss, output.loss.detach()
        found |= {f"{name}: {i}": tensor.detach() for i, tensor in enumerate(tensors)}
    total.backward()
    return found | {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def compare(options: dict[str, Any]) -> None:
    """Every rank has the same rows, so that the mean of gradients is that of one process."""
    expected = results(build(**SMALL))
    found = results(sharded(built=SMALL, mp_policy=FULL, **options))
    assert found.keys() == expected.keys()
    assert expected["no length: loss"] == 0
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def embeddings_under(policy: dict[str, Any]) -> torch.dtype:
    """Of the weights' own dtype, and of another one where the policy casts."""
    model = sharded(built=SMALL, mp_policy=policy)
    given = torch.zeros(2, 3, 64, dtype=torch.bfloat16 if policy == BF16 else torch.float32)
    model(inputs_embeds=given).logits.sum().backward()
    return model(inputs_embeds=given.float()).logits.dtype  # type: ignore[no-any-return]


def test_a_policy_casts_embeddings_of_any_dtype() -> None:
    assert run_on_ranks(2, embeddings_under, BF16) == [torch.float32] * 2
    assert run_on_ranks(2, embeddings_under, {**BF16, "cast_forward_inputs": False})
    assert run_on_ranks(2, embeddings_under, FULL)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sizes": {"ep_size": 2}},
        {"sizes": {"tp_size": 2}},
        {"sizes": {"tp_size": 2}, "sequence_parallel": True},
    ],
    ids=["fsdp", "ep", "tp", "sequence"],
)
def test_rows_alone_and_rows_without_tokens_are_those_of_one_process(options) -> None:
    """Without a warning of torch that a unit returned a view, on any rank."""
    run_on_ranks(2, compare, options)
