"""The load metrics: known values, over all ranks, one collective."""

import math

import pytest
import torch
import torch.distributed as dist
from moe_router_toys import AUX_FREE, EXPERTS, WIDTH, context, moe_config, routed_model, rows_of
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from shardwalk.mesh import DistributedSetup
from shardwalk.moe_ep.load_balance import LayerLoad, expert_load_report
from shardwalk.moe_ep.router import Gate, find_gates
from shardwalk.parallelizer_core import parallelize_model
from shardwalk.parallelizer_core.testing import run_on_ranks
from shardwalk.parallelizer_core.testing.collectives import CountCollectives


@pytest.mark.parametrize(
    ("load", "imbalance", "entropy", "dead"),
    [
        ([5, 5, 5, 5], 1.0, 1.0, 0),
        ([12, 0, 0, 0], 4.0, 0.0, 3),
        ([6, 6, 0, 0], 2.0, 0.5, 2),
        ([0, 0, 0, 0], 1.0, 1.0, 0),
        ([7], 1.0, 1.0, 0),
    ],
)
def test_metrics_of_known_loads(load, imbalance, entropy, dead):
    found = LayerLoad.of(torch.tensor(load))
    assert found.imbalance == pytest.approx(imbalance)
    assert found.entropy == pytest.approx(entropy)
    assert found.dead_experts == dead


def report_on_mesh(config):
    model = parallelize_model(routed_model(**config), context())
    model(rows_of(0).tensor_split(dist.get_world_size())[dist.get_rank()])
    with CountCollectives() as counted:
        report = expert_load_report(model)
    return report, sum(counted.calls.values())


@pytest.mark.parametrize("config", [{}, AUX_FREE], ids=["softmax", "grouped"])
def test_a_report_covers_all_ranks_by_one_collective(config):
    model = routed_model(**config)
    model(rows_of(0))
    expected = expert_load_report(model)
    assert list(expected.layers) == ["layers.0.gate", "layers.1.gate"]
    for report, collectives in run_on_ranks(2, report_on_mesh, config):
        assert collectives == 1
        assert report.scalars() == expected.scalars()
        for name, layer in report.layers.items():
            assert torch.equal(layer.load, expected.layers[name].load)


def test_aggregates_and_flat_names():
    gates = nn.ModuleDict({"a": Gate(moe_config()), "b": Gate(moe_config(num_experts=4))})
    gates["a"]._load = torch.tensor([8] + [0] * (EXPERTS - 1))
    gates["b"]._load = torch.tensor([1, 1, 1, 1])
    report = expert_load_report(gates)
    assert report.mean_imbalance == pytest.approx(4.5)
    assert report.worst_imbalance == pytest.approx(8.0)
    assert report.mean_entropy == pytest.approx(0.5)
    assert report.dead_experts == 7
    scalars = report.scalars("load")
    assert scalars["load/a/imbalance"] == pytest.approx(8.0)
    assert scalars["load/dead_experts"] == 7
    assert all(math.isfinite(value) for value in scalars.values())


def names_under_ddp():
    built = DistributedSetup.build("ddp").mesh_context
    model = routed_model()
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    return list(expert_load_report(parallelize_model(model, built)).layers)


def test_layers_have_the_names_of_the_model_as_it_was_built():
    assert run_on_ranks(2, names_under_ddp) == [["layers.0.gate", "layers.1.gate"]] * 2


def test_stages_are_told_apart():
    stages = [nn.ModuleDict({"gate": Gate(moe_config())}) for _ in range(2)]
    assert list(expert_load_report(stages).layers) == ["0.gate", "1.gate"]


def test_a_report_leaves_the_loads_unless_they_are_reset():
    model = routed_model()
    model(rows_of(0))
    slots = rows_of(0)[..., 0].numel() * 2
    for reset in (False, True):
        report = expert_load_report(model, reset=reset)
        assert [int(layer.load.sum()) for layer in report.layers.values()] == [slots, slots]
    assert not any(gate.load.any() for gate in find_gates(model))


def test_a_reset_must_not_take_the_loads_of_an_update():
    with pytest.raises(ValueError, match="reset=True would take the loads"):
        expert_load_report(routed_model(**AUX_FREE), reset=True)


def test_a_model_without_gates_has_no_report():
    with pytest.raises(ValueError, match="no Gate"):
        expert_load_report(nn.Linear(WIDTH, 2))
