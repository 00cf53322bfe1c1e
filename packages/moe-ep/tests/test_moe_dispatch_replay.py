"""A recompute takes the layout of its forward, exchanges none, and gives the same gradients."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from moe_dispatch_toys import Exchanges, HostCopies, block, inputs, loss_of, scales, through
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from shardwalk.moe_ep.dispatcher import AllToAllDispatcher, LocalDispatcher
from shardwalk.parallelizer_core import replay_contexts
from shardwalk.parallelizer_core.testing import run_on_ranks

EXPERTS, TOKENS, TOP_K = 8, 7, 3


class Layer:
    """Dispatch, experts, combine; every call after the first routes some tokens otherwise."""

    def __init__(self, dispatcher: Any, scale: Tensor, *, reroutes: bool = True) -> None:
        self.dispatcher, self.scale, self.reroutes, self.calls = dispatcher, scale, reroutes, 0

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        if self.reroutes and self.calls:
            experts = (experts + self.calls) % EXPERTS
        self.calls += 1
        return through(self.dispatcher, x.sin(), experts, weights * 1, self.scale)


def gradients(leaves: list[Tensor]) -> list[Tensor]:
    found = []
    for leaf in leaves:
        assert leaf.grad is not None
        found.append(leaf.grad.clone())
        leaf.grad = None
    return found


def subject(ranks: int) -> tuple[Any, Tensor]:
    if ranks == 1:
        return LocalDispatcher(EXPERTS), scales(EXPERTS)
    return AllToAllDispatcher(EXPERTS, dist.group.WORLD), block(scales(EXPERTS))


def checkpointed(layer: Layer, *args: Tensor) -> Tensor:
    output: Tensor = checkpoint(layer, *args, use_reentrant=False, context_fn=replay_contexts)
    return output


def recomputed_equals_kept(ranks: int, early_stop: bool, in_thread: bool) -> None:
    torch.manual_seed(0 if ranks == 1 else dist.get_rank())
    dispatcher, scale = subject(ranks)
    first, second = inputs(TOKENS, TOP_K, EXPERTS), inputs(TOKENS + 2, TOP_K, EXPERTS, dropped=0.3)
    leaves = [first[0], first[2], second[0], second[2], scale]
    kept = [Layer(dispatcher, scale, reroutes=False)(*call) for call in (first, second)]
    (loss_of(kept[0]) + loss_of(kept[1])).backward()
    expected = gradients(leaves)
    with set_checkpoint_early_stop(early_stop):
        # Two forwards before one backward; each recompute is the second call of its layer.
        layers = [Layer(dispatcher, scale), Layer(dispatcher, scale)]
        outputs = [
            checkpointed(layer, *call) for layer, call in zip(layers, (first, second), strict=True)
        ]
        loss = loss_of(outputs[0]) + loss_of(outputs[1])
        if in_thread:
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        else:
            loss.backward()
    assert [layer.calls for layer in layers] == [2, 2]
    for one, other in zip(gradients(leaves), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("ranks", [2, 4])
def test_b53_a_recompute_that_routes_otherwise_keeps_the_forward_layout(
    ranks: int, early_stop: bool, in_thread: bool
) -> None:
    run_on_ranks(ranks, recomputed_equals_kept, ranks, early_stop, in_thread)


@pytest.mark.parametrize("early_stop", [True, False])
def test_b53_on_one_rank(early_stop: bool) -> None:
    recomputed_equals_kept(1, early_stop, False)


def exchanges_of_a_recompute(early_stop: bool) -> tuple[list[str], list[str], list[str]]:
    dispatcher, scale = subject(2)
    call = inputs(TOKENS, TOP_K, EXPERTS)
    layer = Layer(dispatcher, scale)
    with set_checkpoint_early_stop(early_stop):
        with Exchanges() as forward:
            loss = loss_of(checkpointed(layer, *call))
        with Exchanges() as backward, HostCopies() as copies:
            loss.backward()
    return forward.kinds(), backward.kinds(), copies.names


def test_a_recompute_exchanges_no_counts_and_no_slots() -> None:
    """With early stop not even the results: what follows in the block needs none of them."""
    for early_stop, recompute in ((True, ["rows"]), (False, ["rows", "rows"])):
        for forward, backward, copies in run_on_ranks(2, exchanges_of_a_recompute, early_stop):
            assert forward == ["counts", "slots", "rows", "rows"]
            assert backward == [*recompute, "rows", "rows", "weights"]
            assert copies == []


def test_a_recompute_with_other_tokens_is_refused() -> None:
    scale, call = scales(EXPERTS), inputs(TOKENS, TOP_K, EXPERTS)
    layer = Layer(LocalDispatcher(EXPERTS), scale)

    def fewer_the_second_time(x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        tokens = slice(0, TOKENS - layer.calls)
        return layer(x[tokens], experts[tokens], weights[tokens])

    output = checkpoint(
        fewer_the_second_time, *call, use_reentrant=False, context_fn=replay_contexts
    )
    with pytest.raises(RuntimeError, match=r"shape \[6, 3\], its forward of shape \[7, 3\]"):
        output.sum().backward()


def two_layers_in_one_call() -> None:
    torch.manual_seed(dist.get_rank())
    dispatcher, scale = subject(2)
    x, experts, weights = inputs(TOKENS, TOP_K, EXPERTS)

    def block_of_two(first: Layer, second: Layer) -> Any:
        return lambda x: second(first(x, experts, weights), experts.flip(0), weights)

    plain = [Layer(dispatcher, scale, reroutes=False) for _ in range(2)]
    loss_of(block_of_two(*plain)(x)).backward()
    expected = gradients([x, weights, scale])
    rerouting = [Layer(dispatcher, scale) for _ in range(2)]
    output = checkpoint(
        block_of_two(*rerouting), x, use_reentrant=False, context_fn=replay_contexts
    )
    loss_of(output).backward()
    for one, other in zip(gradients([x, weights, scale]), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_each_dispatch_of_a_call_keeps_its_own_layout() -> None:
    run_on_ranks(2, two_layers_in_one_call)
