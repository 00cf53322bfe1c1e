"""The balance loss reaches the router, and is as strong on every mesh as in one process."""

import copy

import pytest
import torch
import torch.distributed as dist
from moe_router_toys import EXPERTS, WIDTH, context, moe_config, train, train_on_mesh
from torch.utils.checkpoint import checkpoint

from shardwalk.mesh import MeshContext
from shardwalk.moe_ep import router
from shardwalk.moe_ep.balance_loss import BalanceScale, normalize_balance_loss
from shardwalk.moe_ep.gate_groups import GateGroups
from shardwalk.moe_ep.router import Gate
from shardwalk.parallelizer_core.testing import run_on_ranks

LAYOUTS = [
    (1, {}, {}),
    (2, {}, {}),
    (2, {}, {"micro_batches": 2}),
    (2, {"checkpointing": "full"}, {}),
    (2, {"checkpointing": "selective"}, {"micro_batches": 2}),
    (2, {"strategy": "ddp"}, {"micro_batches": 2}),
    (2, {"strategy": "ddp", "checkpointing": "full"}, {}),
    (4, {"dp_replicate_size": 2}, {}),
]
BALANCED = {"balance_loss_coefficient": 1.0}


def gate_gradients(seen):
    return {name: grad for name, grad in seen["gradients"].items() if ".gate." in name}


def assert_gradients(actual, expected, factor=1.0):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert value.abs().max() > 1e-4, name
        torch.testing.assert_close(
            actual[name], value * factor, rtol=0, atol=1e-5 * float(value.abs().max()) * factor
        )


@pytest.mark.parametrize(("ranks", "layout", "options"), LAYOUTS)
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_b06_routers_get_the_gradient_of_one_process(ranks, layout, options, scores):
    """With a main loss of 0 x output all of it is the balance loss's."""
    config = {**BALANCED, "score_function": scores}
    expected = gate_gradients(train(config, steps=1, only_balance=True))
    for seen in run_on_ranks(
        ranks, train_on_mesh, config, layout, steps=1, only_balance=True, **options
    ):
        assert_gradients(gate_gradients(seen), expected)


@pytest.mark.parametrize(
    ("ranks", "layout", "options"), [(2, {}, {}), (2, {"checkpointing": "full"}, {}), (4, {}, {})]
)
def test_per_micro_batch_the_same_micro_batches_give_the_same_gradient(ranks, layout, options):
    config = {**BALANCED, "balance_loss_scope": "micro_batch"}
    options = {"steps": 1, "only_balance": True, "micro_batches": 2, **options}
    expected = gate_gradients(train(config, **options))
    for seen in run_on_ranks(ranks, train_on_mesh, config, layout, **options):
        assert_gradients(gate_gradients(seen), expected)
    other = gate_gradients(train(config, **{**options, "micro_batches": 1}))
    name = next(iter(other))
    assert not torch.allclose(other[name], expected[name], rtol=1e-3)


def test_doubling_the_coefficient_doubles_the_gradient():
    once = gate_gradients(train(BALANCED, steps=1, only_balance=True))
    twice = {"balance_loss_coefficient": 2.0}
    assert_gradients(gate_gradients(train(twice, steps=1, only_balance=True)), once, factor=2.0)


def test_beside_a_main_loss_gradients_add_up():
    both = train({"balance_loss_coefficient": 0.5}, steps=1)
    main = train({}, steps=1)
    alone = train({"balance_loss_coefficient": 0.5}, steps=1, only_balance=True)
    for name in gate_gradients(both):
        added = main["gradients"][name] + alone["gradients"][name]
        torch.testing.assert_close(both["gradients"][name], added, rtol=1e-4, atol=1e-7)


def gate(**changes):
    torch.manual_seed(0)
    return Gate(moe_config(**{**BALANCED, **changes}))


def written_out(module, x, scores):
    """The mean over sequences of sum_i f_i P_i, one token at a time."""
    total = torch.zeros(())
    for sequence in x:
        logits = sequence @ module.weight.T
        if scores == "softmax":
            p = logits.softmax(-1)
            best = p
        else:
            best = logits.sigmoid()
            p = best / best.sum(-1, keepdim=True)
        f = torch.zeros(EXPERTS)
        for token in best:
            f[token.topk(2).indices] += EXPERTS / (2 * len(sequence))
        total = total + (f * p.mean(0)).sum()
    return total / len(x)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_value_and_gradient_are_those_of_the_formula(scores):
    module = gate(score_function=scores)
    x = torch.randn(3, 5, WIDTH)
    expected = written_out(module, x, scores)
    (gradient,) = torch.autograd.grad(expected, module.weight)
    (module(x).weights.sum() * 0).backward()
    torch.testing.assert_close(module.last_balance_loss, expected.detach())
    torch.testing.assert_close(module.weight.grad, gradient)


def balance_gradient(module, x, **kwargs):
    module = copy.deepcopy(module)
    (module(x, **kwargs).weights.sum() * 0).backward()
    return module.weight.grad, module.last_balance_loss


def test_masked_tokens_weigh_nothing():
    module, x = gate(), torch.randn(2, 5, WIDTH)
    short = x[:, :3].contiguous()
    mask = (torch.arange(5) < 3).expand(2, 5)
    x[:, 3:] = float("nan")
    for actual, expected in zip(
        balance_gradient(module, x, token_mask=mask), balance_gradient(module, short), strict=True
    ):
        torch.testing.assert_close(actual, expected)


def test_sequences_of_other_lengths_are_told_by_their_ids():
    module, x = gate(), torch.randn(7, WIDTH)
    ids = torch.tensor([0, 0, 1, 1, 1, 1, 0])
    found = balance_gradient(module, x, sequences=2, sequence_ids=ids)
    parts = [balance_gradient(module, x[ids == which]) for which in (0, 1)]
    for index in (0, 1):
        torch.testing.assert_close(found[index], (parts[0][index] + parts[1][index]) / 2)


def test_flattened_tokens_need_the_number_of_sequences():
    module, x = gate(), torch.randn(2, 4, WIDTH)
    expected = balance_gradient(module, x)
    found = balance_gradient(module, x.view(-1, WIDTH), sequences=2)
    as_one = balance_gradient(module, x.view(-1, WIDTH))
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(as_one[0], expected[0])


def test_no_tokens_and_no_sequences_give_zero():
    module = gate()
    for x in (torch.zeros(0, 4, WIDTH), torch.zeros(3, 0, WIDTH), torch.zeros(0, WIDTH)):
        gradient, value = balance_gradient(module, x)
        assert value == 0
        assert not gradient.any()


def test_nothing_is_added_in_eval_or_without_gradients():
    module, x = gate(), torch.randn(2, 5, WIDTH)
    with torch.no_grad():
        module(x)
    module.eval()(x)
    assert module.last_balance_loss is None


def test_another_checkpointing_adds_it_once_too():
    module, x = gate(), torch.randn(2, 5, WIDTH)
    expected, _ = balance_gradient(module, x)
    weights = checkpoint(lambda x: module(x).weights, x, use_reentrant=False)
    (weights.sum() * 0).backward()
    torch.testing.assert_close(module.weight.grad, expected)


def test_the_scale_is_that_of_all_sequences_of_the_step():
    module = gate()
    normalize_balance_loss(module, MeshContext(), [3, 2])
    assert module.balance_loss.scale == BalanceScale(per_sequence=1 / 5, micro_batches=2)
    normalize_balance_loss([module], MeshContext(), [0])
    assert module.balance_loss.scale.per_sequence == 0


def scales(counts):
    module = gate()
    try:
        normalize_balance_loss(module, context(), counts[dist.get_rank()])
    except ValueError as error:
        return str(error)
    return module.balance_loss.scale.per_sequence


def test_ranks_of_unequal_batches_share_one_scale_and_one_error():
    assert run_on_ranks(2, scales, [[3, 2], [1]]) == [2 / 6, 2 / 6]
    assert all("valid_token_counts" in found for found in run_on_ranks(2, scales, [[3], [-1]]))


@pytest.mark.parametrize("sequences", [[], 3, torch.tensor([3])])
def test_sequences_must_be_a_list(sequences):
    with pytest.raises(ValueError, match="sequences="):
        normalize_balance_loss(gate(), MeshContext(), sequences)


def split_over_ranks(split):
    """Both ranks hold parts of each sequence; what they add together is the whole."""
    module = gate()
    torch.manual_seed(1)
    x = torch.randn(2, 5, WIDTH)
    expected, value = balance_gradient(module, x)
    router._groups[module] = GateGroups(sequence=(dist.group.WORLD,))
    rank = dist.get_rank()
    if split == "length":
        parts, ids = x.tensor_split(2, dim=1)[rank], None
    else:  # tokens cut regardless of sequences
        parts, ids = x.view(-1, WIDTH).tensor_split([3])[rank], torch.arange(10) // 5
        ids = ids.tensor_split([3])[rank]
    (module(parts, sequences=2, sequence_ids=ids).weights.sum() * 0).backward()
    for mine, whole in ((module.weight.grad, expected), (module.last_balance_loss, value)):
        dist.all_reduce(mine)
        torch.testing.assert_close(mine, whole)


@pytest.mark.parametrize("split", ["length", "tokens"])
def test_the_parts_of_split_sequences_add_up(split):
    run_on_ranks(2, split_over_ranks, split)


SEQUENCES, TOKENS = 4, 6


def share_of_a_mesh(sizes, split_over_tp, scope):
    """This rank's gradient, added over tp and averaged over dp x cp as training does, and groups."""
    mesh_context = context(**sizes)
    mesh, module = mesh_context.device_mesh, gate(balance_loss_scope=scope)
    module.tokens_split_over_tp = split_over_tp
    module.finalize_parallelization(mesh_context)
    rows = torch.randn(2, SEQUENCES, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    data, cp = mesh_context.data_world_size, mesh_context.cp_size
    batches = [
        batch.tensor_split(data)[mesh_context.data_rank].tensor_split(cp, dim=1)[
            mesh_context.axis_rank("cp")
        ]
        for batch in rows
    ]
    normalize_balance_loss(module, mesh_context, [len(batch) for batch in batches])
    for batch in batches:
        length = batch.shape[1]
        tokens, ids = batch.reshape(-1, WIDTH), torch.arange(len(batch)).repeat_interleave(length)
        if split_over_tp:  # one token more on the first rank, wherever its sequence ends
            at, rank = len(tokens) // 2 + 1, mesh_context.axis_rank("tp")
            tokens, ids = tokens.tensor_split([at])[rank], ids.tensor_split([at])[rank]
        routing = module(tokens, sequences=len(batch), sequence_ids=ids)
        (routing.weights.sum() * 0).backward()
    gradient = module.weight.grad
    if split_over_tp:
        dist.all_reduce(gradient, group=mesh["tp"].get_group())
    dist.all_reduce(gradient)  # over tp too: equal there
    return gradient / dist.get_world_size()


@pytest.mark.parametrize("scope", ["sequence", "micro_batch"])
@pytest.mark.parametrize(
    ("sizes", "split_over_tp"),
    [
        ({"cp_size": 2}, False),
        ({"tp_size": 2}, False),
        ({"tp_size": 2}, True),
        ({"tp_size": 2, "cp_size": 2}, True),
    ],
)
def test_b06_sequences_split_over_cp_and_tp_weigh_what_they_do_in_one_process(
    sizes, split_over_tp, scope
):
    module = gate(balance_loss_scope=scope)
    rows = torch.randn(2, SEQUENCES, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    normalize_balance_loss(module, MeshContext(), [SEQUENCES, SEQUENCES])
    for batch in rows:
        (module(batch).weights.sum() * 0).backward()
    for gradient in run_on_ranks(4, share_of_a_mesh, sizes, split_over_tp, scope):
        torch.testing.assert_close(gradient, module.weight.grad, rtol=1e-4, atol=1e-7)
