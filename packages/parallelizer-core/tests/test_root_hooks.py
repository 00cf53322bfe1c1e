"""What the root does around a forward: resharding, recovery, dtype errors, `zero_grad`."""

from contextlib import nullcontext

import pytest
import torch
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.tensor import DTensor
from walk_toys import BF16, FULL, Decoder, Wrapper, context, ids, sharded

from shardwalk.parallelizer_core import no_sync, parallelize_model
from shardwalk.parallelizer_core.testing import RankError, run_on_ranks
from shardwalk.parallelizer_core.testing.collectives import CountCollectives


def plain_parameters(model):
    return [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]


def eval_then_change_weights(reshard):
    model = sharded(tied=True, options={"reshard_after_forward": reshard})
    with torch.no_grad():
        before = model(ids())
        left = plain_parameters(model)
        halves = [p.to_local().numel() * 2 - p.numel() for p in model.parameters()]
        for parameter in model.parameters():
            parameter.mul_(0.5)
        after = model(ids())
    return left, halves, before, after


@pytest.mark.parametrize("reshard", [None, False])
def test_a_forward_without_gradients_leaves_every_unit_sharded(reshard):
    """B70: also what the next forward computes must come from the weights as they are then."""
    torch.manual_seed(7)
    reference = Decoder(tied=True)
    with torch.no_grad():
        expected = [reference(ids())]
        for parameter in reference.parameters():
            parameter.mul_(0.5)
        expected.append(reference(ids()))
    for left, halves, *outputs in run_on_ranks(2, eval_then_change_weights, reshard):
        assert left == []
        assert all(abs(rest) <= 6 for rest in halves)  # uneven rows: one row more on rank 0
        torch.testing.assert_close(outputs, expected)


def fail_then_train():
    model = sharded()
    good = ids()
    bad = torch.full_like(good, 99)  # out of range, after the embedding was gathered
    errors = []
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            try:
                model(bad)
            except IndexError as error:
                errors.append(type(error).__name__)
        errors.append(plain_parameters(model))
    fresh = sharded()
    for subject in (model, fresh):
        subject(good).square().mean().backward()
    same = [
        torch.equal(a.grad.to_local(), b.grad.to_local())
        for a, b in zip(model.parameters(), fresh.parameters(), strict=True)
    ]
    return errors, all(same)


def test_a_failed_forward_leaves_a_model_that_trains_on():
    assert run_on_ranks(2, fail_then_train) == [(["IndexError", [], "IndexError", []], True)] * 2


def two_forwards(without_gradients):
    model = sharded()
    first = model(ids())
    with torch.set_grad_enabled(not without_gradients):
        second = model(ids(3))
    (first.square().mean() + second.square().mean()).backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


@pytest.mark.parametrize("without_gradients", [False, True])
def test_two_forwards_before_one_backward(without_gradients):
    """B65: a preference loss, with or without gradients through its second forward."""
    torch.manual_seed(7)
    reference = Decoder()
    loss = reference(ids()).square().mean()
    if not without_gradients:
        loss = loss + reference(ids(3)).square().mean()
    loss.backward()
    for grads in run_on_ranks(2, two_forwards, without_gradients):
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-5, atol=1e-7)


class Dense(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))


def float_inputs_into_bf16(cast):
    model = sharded(Dense, options={"mp_policy": {**BF16, "cast_forward_inputs": cast}})
    return model(torch.ones(2, 4)).dtype


def test_a_dtype_error_of_the_model_names_the_option_that_casts_inputs():
    with pytest.raises(RankError, match=r"float32 inputs .* set\s+cast_forward_inputs=True"):
        run_on_ranks(2, float_inputs_into_bf16, False)
    assert run_on_ranks(2, float_inputs_into_bf16, True) == [torch.bfloat16] * 2


def call_without_values():
    with torch.device("meta"):
        model = sharded()
    return model(ids())


def test_a_call_without_values_names_what_gives_them():
    with pytest.raises(RankError, match=r"call materialize\(model,\s+checkpoint=\.\.\.\)"):
        run_on_ranks(1, call_without_values)


def train_around_a_tracker():
    model = sharded()
    counts = []
    for tracked in (False, True, False):
        with CountCollectives() as counted, FSDPMemTracker(model) if tracked else nullcontext():
            model(ids()).square().mean().backward()
        counts.append(counted.calls)
    return counts


def test_a_forward_whose_hooks_run_in_another_order_is_no_failed_one():
    """torch's memory tracker puts its own post-forward hooks behind ours, and leaves them there."""
    for before, during, after in run_on_ranks(2, train_around_a_tracker):
        assert before == during == after


def frozen_model_left_gathered():
    model = sharded().requires_grad_(False)
    model(ids())
    left = plain_parameters(model)
    inputs = torch.ones(2, 4, requires_grad=True)
    dense = sharded(Dense).requires_grad_(False)
    dense(inputs).sum().backward()
    return left, plain_parameters(dense), inputs.grad


def test_a_frozen_model_is_sharded_after_its_forward():
    """B70: no backward would do it, although gradients are enabled."""
    torch.manual_seed(7)
    inputs = torch.ones(2, 4, requires_grad=True)
    Dense()(inputs).sum().backward()
    for left, left_after_backward, grad in run_on_ranks(2, frozen_model_left_gathered):
        assert left == left_after_backward == []
        torch.testing.assert_close(grad, inputs.grad)


def decoder(wrapper):
    torch.manual_seed(7)
    return wrapper(Decoder()) if wrapper else Decoder()


def clear_between(model, set_to_none):
    """The parameters after three steps, with gradients cleared between forward and backward."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        loss = model(ids(2, 5 + step)).square().mean()
        model.zero_grad(set_to_none=set_to_none)
        loss.backward()
        optimizer.step()
    model(ids())  # no backward follows
    model.zero_grad(set_to_none=set_to_none)
    model(ids()).square().mean().backward()
    return parameters_and_gradients(model)


def parameters_and_gradients(model):
    named = dict(model.named_parameters())
    return {n: (whole(p.detach()), whole(p.grad)) for n, p in named.items()}


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clear_between_on_ranks(wrapper, replicas, set_to_none):
    model = parallelize_model(decoder(wrapper), context(dp_replicate_size=replicas))
    keys = list(model.state_dict())
    found = clear_between(model, set_to_none)
    assert list(model.state_dict()) == keys == list(decoder(wrapper).state_dict())
    return found


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("wrapper", [None, Wrapper])
@pytest.mark.parametrize(("world", "replicas"), [(1, None), (2, None), (2, 2)])
def test_zero_grad_between_forward_and_backward(world, replicas, wrapper, set_to_none):
    """The units that stay gathered for the backward kept the gradients of the step before."""
    expected = clear_between(decoder(wrapper), set_to_none)
    results = run_on_ranks(world, clear_between_on_ranks, wrapper, replicas, set_to_none)
    for found in results:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def clear_blocks(set_to_none):
    model = sharded()
    found = []
    for _ in range(2):
        loss = model(ids()).square().mean()
        for layer in model.layers:
            layer.zero_grad(set_to_none)
        loss.backward()
        found.append({n: p.grad.full_tensor() for n, p in model.layers.named_parameters()})
    return found


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_of_a_block(set_to_none):
    for once, again in run_on_ranks(2, clear_blocks, set_to_none):
        torch.testing.assert_close(once, again, rtol=0, atol=0)


def clear_in_an_accumulation(mp_policy, set_to_none):
    model = sharded(options={"mp_policy": mp_policy})
    found = []
    for abandoned in (False, True):
        if abandoned:
            with no_sync(model):
                model(ids(3)).square().mean().backward()
        model.zero_grad(set_to_none)
        model(ids()).square().mean().backward()
        found.append(parameters_and_gradients(model))
    return found


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("mp_policy", [FULL, BF16], ids=["fp32", "bf16"])
def test_zero_grad_clears_what_was_not_reduced_yet(mp_policy, set_to_none):
    for once, again in run_on_ranks(2, clear_in_an_accumulation, mp_policy, set_to_none):
        torch.testing.assert_close(once, again, rtol=0, atol=0)
