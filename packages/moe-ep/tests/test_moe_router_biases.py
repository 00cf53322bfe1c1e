"""Correction biases are equal on every rank, from the loads of all of them."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from moe_router_toys import (
    AUX_FREE,
    EXPERTS,
    WIDTH,
    context,
    full,
    moe_config,
    routed_model,
    rows_of,
    train,
    train_on_mesh,
)
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from shardwalk.mesh import MeshContext
from shardwalk.moe_ep import load_watch
from shardwalk.moe_ep.load_balance import expert_load_report
from shardwalk.moe_ep.router import Gate, find_gates
from shardwalk.moe_ep.router_biases import (
    attach_router_bias_update,
    replicate_router_biases,
    update_router_biases,
)
from shardwalk.parallelizer_core import (
    load_checkpoint,
    load_model_state_dict,
    materialize,
    model_state_dict,
    parallelize_model,
    save_checkpoint,
)
from shardwalk.parallelizer_core.testing import cached, run_on_ranks
from shardwalk.parallelizer_core.testing.collectives import CountCollectives

LAYOUTS = [
    (1, {}, {}),
    (2, {}, {}),
    (4, {}, {}),
    (4, {"dp_replicate_size": 2}, {"micro_batches": 2}),
    (2, {"checkpointing": "full"}, {"micro_batches": 2}),
    (2, {"checkpointing": "selective"}, {}),
    (2, {"strategy": "ddp"}, {}),
    (2, {"strategy": "ddp", "checkpointing": "full"}, {"micro_batches": 2}),
]


@pytest.mark.parametrize(("ranks", "layout", "options"), LAYOUTS)
def test_p2_loads_and_biases_are_those_of_one_process_on_every_rank(ranks, layout, options):
    """Stepped from its own load alone, each rank's bias would go its own way."""
    expected = train(AUX_FREE)
    assert any(bias.any() for bias in expected["biases"])
    found = run_on_ranks(ranks, train_on_mesh, AUX_FREE, layout, **options)
    for seen in found:
        for actual, wanted in zip(seen["loads"], expected["loads"], strict=True):
            assert torch.equal(actual, wanted)
        for actual, wanted in zip(seen["biases"], expected["biases"], strict=True):
            assert torch.equal(actual, wanted)
    if ranks > 1:
        assert not torch.equal(found[0]["local loads"][0], found[1]["local loads"][0])


def a_gate(**changes):
    torch.manual_seed(0)
    return Gate(moe_config(**{**AUX_FREE, **changes}))


def test_a_bias_moves_by_the_speed_towards_the_mean():
    gate = a_gate()
    gate._load = torch.tensor([0, 10, 5, 5, 4, 6, 5, 5])  # the mean is 5
    update_router_biases(gate)
    expected = torch.tensor([1.0, -1, 0, 0, 1, -1, 0, 0]) * 0.01
    torch.testing.assert_close(gate.e_score_correction_bias, expected, rtol=0, atol=0)
    assert not gate.load.any()
    update_router_biases(gate)
    assert torch.equal(gate.e_score_correction_bias, expected)


def test_loads_beyond_int32_are_compared_exactly():
    gate = a_gate()
    gate._load = torch.full((EXPERTS,), 3_000_000_000) + torch.tensor([1, -1] + [0] * 6)
    update_router_biases(gate)
    assert gate.e_score_correction_bias.sign().tolist() == [-1.0, 1.0] + [0.0] * 6


def test_a_speed_of_zero_leaves_the_bias_and_counts_anew():
    gate = a_gate(bias_update_speed=0.0)
    gate(torch.randn(5, WIDTH))
    update_router_biases([gate])
    assert not gate.e_score_correction_bias.any()
    assert not gate.load.any()


def layouts_of_biases(strategy):
    mesh_context = context(strategy)
    model = parallelize_model(routed_model(**AUX_FREE), mesh_context)
    found = [gate.e_score_correction_bias for gate in find_gates(model)]
    before = [id(bias) for bias in found]
    for gate in find_gates(model):
        gate.finalize_parallelization(mesh_context)
    same = before == [id(gate.e_score_correction_bias) for gate in find_gates(model)]
    return [tuple(b.placements) if isinstance(b, DTensor) else None for b in found], same


def test_biases_are_replicated_dtensors_on_one_rank_too_and_plain_under_ddp():
    for ranks in (1, 2):
        for placements, same in run_on_ranks(ranks, layouts_of_biases, "fsdp2"):
            assert placements == [(Replicate(),)] * 2
            assert same
    assert run_on_ranks(2, layouts_of_biases, "ddp")[0][0] == [None, None]


def replicated_by_hand():
    """A sidecar of one's own: no `parallelize_model`, and a 2-D mesh."""
    mesh = cached("biases 2x2", lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")))
    model = routed_model(**AUX_FREE)
    replicate_router_biases(model, mesh)
    first = [gate.e_score_correction_bias for gate in find_gates(model)]
    replicate_router_biases(model, mesh)
    assert all(
        a is g.e_score_correction_bias for a, g in zip(first, find_gates(model), strict=True)
    )
    model(rows_of(0).tensor_split(4)[dist.get_rank()])
    update_router_biases(model)
    return [full(gate.e_score_correction_bias) for gate in find_gates(model)]


def test_biases_replicated_by_hand_are_updated_over_that_mesh():
    model = routed_model(**AUX_FREE)
    model(rows_of(0))
    update_router_biases(model)
    for found in run_on_ranks(4, replicated_by_hand):
        for bias, gate in zip(found, find_gates(model), strict=True):
            assert torch.equal(bias, gate.e_score_correction_bias)


def counted_over():
    mesh = cached(("by hand", 2), lambda: init_device_mesh("cpu", (2,), mesh_dim_names=("data",)))
    gate = a_gate()
    before = gate.counts_over
    replicate_router_biases(nn.ModuleList([gate]), mesh)
    groups = gate.counts_over
    return before.data_ranks, before.stage, groups.data_ranks, groups.stage == (mesh.get_group(),)


def test_without_a_context_a_gate_counts_over_the_mesh_of_its_bias():
    assert run_on_ranks(2, counted_over)[0] == (1, (), 2, True)


def test_the_mesh_must_be_one():
    with pytest.raises(TypeError, match="mesh must be a DeviceMesh"):
        replicate_router_biases(nn.Linear(2, 2), None)


def collectives_of_an_update(split):
    mesh_context = context(tp_size=2)
    gates = nn.ModuleList([a_gate(), a_gate(num_experts=4, num_groups=1, top_k_groups=1)])
    x = rows_of(0).view(-1, WIDTH)
    for gate in gates:
        gate.tokens_split_over_tp = split
        gate.finalize_parallelization(mesh_context)
        rank, parts = (dist.get_rank(), 4) if split else (mesh_context.data_rank, 2)
        gate(x.tensor_split(parts)[rank])
    report = expert_load_report(gates)
    with CountCollectives() as counted:
        update_router_biases(gates)
    loads = [layer.load for layer in report.layers.values()]
    return loads, dict(counted.calls), [full(gate.e_score_correction_bias) for gate in gates]


@pytest.mark.parametrize("split", [False, True])
def test_tensor_parallel_ranks_count_once_and_one_exchange_serves_all_gates(split):
    gates = nn.ModuleList([a_gate(), a_gate(num_experts=4, num_groups=1, top_k_groups=1)])
    for gate in gates:
        gate(rows_of(0).view(-1, WIDTH))
    expected = [gate.load for gate in gates]
    update_router_biases(gates)
    for loads, calls, biases in run_on_ranks(4, collectives_of_an_update, split):
        assert list(calls.values()) == [1]
        for load, wanted in zip(loads, expected, strict=True):
            assert torch.equal(load, wanted)
        for bias, gate in zip(biases, gates, strict=True):
            assert torch.equal(bias, gate.e_score_correction_bias)


def start_on_meta(folder):
    mesh_context = context()
    with torch.device("meta"):
        model = routed_model(**AUX_FREE)
    parallelize_model(model, mesh_context)
    biases = [gate.e_score_correction_bias for gate in find_gates(model)]
    assert all(isinstance(bias, DTensor) and bias.is_meta for bias in biases)
    results = []
    for how in ({"checkpoint": folder}, {"init": "reset_parameters"}):
        with torch.device("meta"):
            model = routed_model(**AUX_FREE)
        parallelize_model(model, mesh_context)
        materialize(model, **how)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        attach_router_bias_update(model, optimizer)
        start = [full(gate.e_score_correction_bias) for gate in find_gates(model)]
        model(rows_of(0).tensor_split(dist.get_world_size())[dist.get_rank()]).sum().backward()
        optimizer.step()
        ends = [gate.e_score_correction_bias for gate in find_gates(model)]
        assert all(isinstance(bias, DTensor) and bias.dtype == torch.float32 for bias in ends)
        results.append((start, [full(bias) for bias in ends]))
    return results


def test_a_meta_start_gives_the_biases_of_the_checkpoint_or_zeros_and_they_move(tmp_path):
    model = routed_model(**AUX_FREE)
    for gate in find_gates(model):
        nn.init.normal_(gate.e_score_correction_bias, std=0.1)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    start = [gate.e_score_correction_bias.clone() for gate in find_gates(model)]
    model(rows_of(0))
    update_router_biases(model)
    for (loaded, moved), (zeros, _) in run_on_ranks(2, start_on_meta, tmp_path):
        for gate, was, first, then, zero in zip(
            find_gates(model), start, loaded, moved, zeros, strict=True
        ):
            assert torch.equal(first, was)
            assert torch.equal(then, gate.e_score_correction_bias)
            assert not zero.any()


def through_state_dicts(folder):
    model = parallelize_model(routed_model(**AUX_FREE), context())
    plain = routed_model(**AUX_FREE)
    for gate in find_gates(plain):
        nn.init.normal_(gate.e_score_correction_bias, std=0.1)
    wanted = [gate.e_score_correction_bias.clone() for gate in find_gates(plain)]

    def assert_has(model):
        for gate, bias in zip(find_gates(model), wanted, strict=True):
            assert torch.equal(full(gate.e_score_correction_bias), bias)

    load_model_state_dict(model, plain.state_dict())
    assert_has(model)
    other = parallelize_model(routed_model(**AUX_FREE), context())
    load_model_state_dict(other, model_state_dict(model))
    assert_has(other)
    other = routed_model(**AUX_FREE)
    other.load_state_dict(model_state_dict(model, full=True))
    assert_has(other)
    save_checkpoint(folder, model)
    other = parallelize_model(routed_model(**AUX_FREE), context())
    load_checkpoint(folder, other)
    assert_has(other)
    # What was loaded is what an update moves: there is no second copy of a bias.
    x = rows_of(0).tensor_split(2)[dist.get_rank()]
    for each in (model, other):
        each(x)
        update_router_biases(each)
    for mine, theirs, was in zip(find_gates(model), find_gates(other), wanted, strict=True):
        moved = full(mine.e_score_correction_bias)
        assert torch.equal(moved, full(theirs.e_score_correction_bias))
        assert 0 < (moved - was).abs().max() <= 0.0101


def test_biases_survive_state_dicts_plain_and_sharded(tmp_path):
    run_on_ranks(2, through_state_dicts, tmp_path / "checkpoint")


def test_the_update_is_part_of_the_step_until_its_handle_is_removed():
    model = routed_model(**AUX_FREE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    handle = attach_router_bias_update(model, optimizer)
    model(rows_of(0)).sum().backward()
    optimizer.step()
    before = [gate.e_score_correction_bias.clone() for gate in find_gates(model)]
    assert all(bias.any() for bias in before)
    handle.remove()
    model(rows_of(0)).sum().backward()
    optimizer.step()
    for gate, bias in zip(find_gates(model), before, strict=True):
        assert torch.equal(gate.e_score_correction_bias, bias)


def test_a_second_update_would_move_biases_twice():
    model = routed_model(**AUX_FREE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = attach_router_bias_update(model, optimizer)
    for other in (optimizer, torch.optim.SGD(model.parameters(), lr=0.1)):
        with pytest.raises(ValueError, match="attached to an optimizer already"):
            attach_router_bias_update(model.layers[0], other)
    handle.remove()
    attach_router_bias_update(model, optimizer)
    attach_router_bias_update(copy.deepcopy(model), optimizer)


@pytest.mark.parametrize("config", [{}, {**AUX_FREE, "bias_update_speed": 0.0}])
def test_there_must_be_a_bias_to_update(config):
    model = routed_model(**config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="no gate of the model has a correction bias to update"):
        attach_router_bias_update(model, optimizer)
    with pytest.raises(TypeError, match="optimizer must be a torch.optim.Optimizer"):
        attach_router_bias_update(model, model)


def steps(model, count, attach):
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    if attach:
        attach_router_bias_update(model, optimizers[-1])
    for step in range(count):
        for part in rows_of(step).chunk(2):
            model(part).sum().backward()
        for optimizer in optimizers:
            optimizer.step()


def test_loads_that_pile_up_without_an_update_are_warned_of_once(monkeypatch):
    monkeypatch.setattr(load_watch, "_warned", [])
    steps(routed_model(**AUX_FREE), 8, attach=True)
    steps(routed_model(), 8, attach=False)
    model = routed_model(**AUX_FREE)
    with pytest.warns(UserWarning, match="attach_router_bias_update"):
        steps(model, 4, attach=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(model, 4, attach=False)


def test_gates_of_different_meshes_are_refused():
    run_on_ranks(2, gates_of_two_meshes)


def gates_of_two_meshes():
    gates = nn.ModuleList([a_gate(), a_gate()])
    gates[0].finalize_parallelization(context())
    gates[1].finalize_parallelization(MeshContext())
    with pytest.raises(ValueError, match="count over different ranks"):
        update_router_biases(gates)
