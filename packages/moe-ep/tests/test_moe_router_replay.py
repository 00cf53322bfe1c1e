"""Recorded routes: the choices of one forward in another, weighed by its own scores."""

from __future__ import annotations

import io

import pytest
import torch
from moe_layer_toys import MoEDecoder, token_ids
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwalk.moe_ep.router import find_gates
from shardwalk.moe_ep.router_replay import RecordedRoutes, record_routes, replay_routes
from shardwalk.parallelizer_core import apply_activation_checkpointing

GATES = ["layers.0.mlp.gate", "layers.1.mlp.gate"]
IDS = [token_ids(2, 5, seed=1), token_ids(1, 3, seed=2)]


def model(seed: int = 0, **options) -> nn.Module:
    torch.manual_seed(seed)
    return MoEDecoder(**options)


def recorded(of: nn.Module) -> RecordedRoutes:
    with record_routes(of) as routes:
        for ids in IDS:
            of(ids)
    return routes


def routings(of: nn.Module) -> list:
    """What the gates return from now on."""
    seen = []
    for gate in find_gates(of):
        gate.register_forward_hook(lambda module, args, routing: seen.append(routing))
    return seen


def test_routes_are_recorded_by_layer_and_forward() -> None:
    old = model()
    seen = routings(old)
    routes = recorded(old)
    assert list(routes.layers) == GATES
    for layer, name in enumerate(GATES):
        for forward, tensor in enumerate(routes.layers[name]):
            assert tensor.dtype == torch.int16
            assert torch.equal(tensor.long(), seen[2 * forward + layer].experts)
    old(IDS[0])
    assert len(routes.layers[GATES[0]]) == 2


def test_other_weights_replay_the_choices_with_scores_of_their_own() -> None:
    routes = recorded(model(0))
    new = model(1)
    free = recorded(new)
    assert any(not torch.equal(free.layers[n][0], routes.layers[n][0]) for n in GATES)
    seen = routings(new)
    with replay_routes(new, routes):
        for ids in IDS:
            new(ids)
    for index, routing in enumerate(seen):
        gate_name = GATES[index % 2]
        assert torch.equal(routing.experts, routes.layers[gate_name][index // 2].long())
    # The first layer's scores can be told from outside.
    block = new.layers[0]
    x = new.embed(IDS[0])
    x = block.norm(x + torch.tanh(block.mix(x))).view(-1, 8)
    scores = (x @ block.mlp.gate.weight.T).softmax(-1).gather(1, seen[0].experts)
    torch.testing.assert_close(seen[0].weights, scores / scores.sum(-1, keepdim=True))
    seen.clear()
    new(IDS[0])
    assert torch.equal(seen[0].experts, free.layers[GATES[0]][0].long())


def gradients(of: nn.Module, routes: RecordedRoutes) -> list[Tensor]:
    with replay_routes(of, routes):
        losses = [of(ids).logsumexp(-1).square().mean() for ids in IDS]
        for loss in reversed(losses):
            loss.backward()
    return [*losses, *(p.grad for p in of.parameters())]


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_recompute_uses_up_no_record(mode) -> None:
    routes = recorded(model(0))
    expected = gradients(model(1), routes)
    checkpointed = model(1)
    apply_activation_checkpointing(checkpointed, mode)
    for ours, theirs in zip(gradients(checkpointed, routes), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_recompute_is_not_recorded(mode) -> None:
    old = model(0)
    expected = recorded(old).state_dict()
    apply_activation_checkpointing(old, mode)
    with record_routes(old) as routes:
        for ids in IDS:
            old(ids).sum().backward()
    assert_same_routes(routes, expected)


def test_a_recompute_that_chooses_anew_is_not_recorded() -> None:
    old = model(0)
    for gate in find_gates(old):
        gate.replay_routing = False
    apply_activation_checkpointing(old, "full")
    with record_routes(old) as routes:
        old(IDS[0]).sum().backward()
    assert [len(routes.layers[name]) for name in GATES] == [1, 1]


def test_a_recompute_that_chooses_anew_is_refused() -> None:
    routes = recorded(model(0))
    new = model(1)
    for gate in find_gates(new):
        gate.replay_routing = False
    with pytest.raises(RuntimeError, match="replay_routing=True"), replay_routes(new, routes):
        checkpoint(new.layers[0], new.embed(IDS[0]), use_reentrant=False).sum().backward()


def assert_same_routes(routes: RecordedRoutes, expected: dict[str, Tensor]) -> None:
    state = routes.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], tensor) for key, tensor in expected.items())


def test_routes_survive_a_file_whatever_the_order() -> None:
    routes = recorded(model(0))
    state = routes.state_dict()
    assert list(state) == [f"{name}.{index}" for name in GATES for index in (0, 1)]
    buffer = io.BytesIO()
    torch.save(dict(reversed(state.items())), buffer)
    buffer.seek(0)
    loaded = RecordedRoutes.from_state_dict(torch.load(buffer))
    assert_same_routes(loaded, state)
    new, other = model(1), model(1)
    for ours, theirs in zip(gradients(new, loaded), gradients(other, routes), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_integer_dtypes(dtype) -> None:
    routes = recorded(model(0))
    wide = {name: [t.to(dtype) for t in tensors] for name, tensors in routes.layers.items()}
    new = model(1)
    seen = routings(new)
    with replay_routes(new, RecordedRoutes(layers=wide)):
        for ids in IDS:
            new(ids)
    assert torch.equal(seen[0].experts, routes.layers[GATES[0]][0].long())


def test_masked_tokens_stay_masked() -> None:
    layer = model(0).layers[0].mlp
    x, mask = torch.randn(3, 8), torch.tensor([True, False, True])
    with record_routes(layer) as routes:
        layer(x, mask)
    seen = routings(layer)
    with replay_routes(layer, routes):
        layer(x, mask)
    assert (seen[0].experts[1] == -1).all()
    assert (seen[0].experts[[0, 2]] >= 0).all()


def test_loads_count_the_replayed_choice() -> None:
    routes = recorded(model(0))
    new = model(1).train()
    with replay_routes(new, routes):
        for ids in IDS:
            new(ids)
    for gate, name in zip(find_gates(new), GATES, strict=True):
        chosen = torch.cat([t.flatten() for t in routes.layers[name]]).long()
        assert torch.equal(gate.load, chosen.bincount(minlength=4))


def replay(of: nn.Module, routes: RecordedRoutes, ids: list[Tensor]) -> None:
    with replay_routes(of, routes):
        for each in ids:
            of(each)


def test_routes_that_do_not_fit_are_refused() -> None:
    routes = recorded(model(0))

    def refused(message: str, other: RecordedRoutes, ids=IDS, error=ValueError) -> None:
        new = model(1)
        with pytest.raises(error, match=message):
            replay(new, other, ids)
        assert all(gate.override is None for gate in find_gates(new))

    def changed(change, name: str = GATES[1]) -> RecordedRoutes:
        tensors = [change(t) for t in routes.layers[name]]
        return RecordedRoutes(layers={**routes.layers, name: tensors})

    first = {GATES[0]: routes.layers[GATES[0]]}
    refused(r"missing \['layers.1.mlp.gate'\], unexpected \[\]", RecordedRoutes(layers=first))
    more = RecordedRoutes(layers={**routes.layers, "layers.2.mlp.gate": []})
    refused(r"missing \[\], unexpected \['layers.2.mlp.gate'\]", more)
    refused("hold 2 forwards, and this is one more", routes, [*IDS, IDS[0]])
    refused("hold 2 forwards, and 1 ran", routes, IDS[:1])
    refused("for 10 tokens in forward 0, and it has 3", routes, IDS[::-1])
    refused(r"layers.1.mlp.gate have shape \[10, 1\]", changed(lambda t: t[:, :1]))
    refused("name experts from 1 to 4; the gate has 0 to 3", changed(lambda t: t % 4 + 1))
    refused("name experts from -2", changed(lambda t: t * 0 - 2))
    refused("torch.float32; use one of", changed(lambda t: t.float()), error=TypeError)


def test_an_error_inside_is_the_one_that_is_raised() -> None:
    new = model(1)
    routes = recorded(new)
    with pytest.raises(KeyError), replay_routes(new, routes):
        raise KeyError
    assert all(gate.override is None for gate in find_gates(new))


def test_one_context_at_a_time() -> None:
    old = model()
    routes = recorded(old)
    with record_routes(old), pytest.raises(ValueError, match="recorded or replayed already"):
        replay(old, routes, IDS)


def test_a_model_without_gates_is_refused() -> None:
    with pytest.raises(ValueError, match="has no Gate"), record_routes(nn.Linear(2, 2)):
        pass


def test_names_that_are_none_of_routes() -> None:
    for state, message in (
        ({"gate.x": torch.zeros(1, 1)}, "'gate.x' is no name"),
        ({"gate.0": torch.zeros(1, 1), "gate.2": torch.zeros(1, 1)}, r"lack the forwards \[1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            RecordedRoutes.from_state_dict(state)


def test_stages_of_a_pipeline_are_one_model() -> None:
    whole = model(0)
    blocks: list[nn.Module] = list(whole.layers)
    stages = [nn.Module(), nn.Module()]
    for index, stage in enumerate(stages):
        stage.layers = nn.ModuleDict({str(index): blocks[index]})
    with record_routes(stages) as routes:
        whole(IDS[0])
    assert list(routes.layers) == GATES
    with pytest.raises(ValueError, match="two stages have a gate"), record_routes([whole, whole]):
        pass
