"""Record the choices of one forward and replay them in another, as reinforcement learning does.

A policy that is trained on what another engine (or an older copy of it) generated must send each
token to the experts it went to then, or ratios of probabilities mean little::

    with record_routes(old_policy) as routes:
        old_policy(tokens)
    with replay_routes(policy, routes):
        loss(policy(tokens)).backward()

Only the choice is replayed; the weights are those of the replaying forward's own scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shardwalk.moe_ep._torch_compat import in_backward
from shardwalk.moe_ep.router import Gate
from shardwalk.parallelizer_core import is_recomputing
from shardwalk.parallelizer_core.model_tensors import canonical_name
from shardwalk.parallelizer_core.parallel_state import unwrap_model

Models = nn.Module | Sequence[nn.Module]
Choose = Callable[[], Tensor]

_DTYPES = (torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, kw_only=True)
class RecordedRoutes:
    """The experts of every token, of one rank.

    Attributes:
        layers: by the name of a gate in its model, one tensor [T, k] per forward, in order: ids of
            experts, int16, int32 or int64; -1 is no expert.
    """

    layers: dict[str, list[Tensor]] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Tensor]:
        """All tensors, on the CPU, under ``<gate>.<forward>``."""
        return {
            f"{name}.{index}": tensor.cpu()
            for name, tensors in self.layers.items()
            for index, tensor in enumerate(tensors)
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor]) -> RecordedRoutes:
        """The routes that `state_dict` gave, in whatever order the names come.

        Raises:
            ValueError: for a name of another form, or a forward that is missing.
        """
        found: dict[str, dict[int, Tensor]] = {}
        for key, tensor in state.items():
            name, _, index = key.rpartition(".")
            if not name or not index.isdecimal():
                raise ValueError(f"{key!r} is no name of recorded routes; those are gate.forward")
            found.setdefault(name, {})[int(index)] = tensor
        for name, tensors in found.items():
            missing = [index for index in range(max(tensors) + 1) if index not in tensors]
            if missing:
                raise ValueError(f"the routes of {name} lack the forwards {missing}")
        return cls(
            layers={name: [tensors[i] for i in sorted(tensors)] for name, tensors in found.items()}
        )


@contextmanager
def record_routes(model_or_models: Models) -> Iterator[RecordedRoutes]:
    """Record what every gate chooses while this is entered; recomputes are not recorded again.

    Args:
        model_or_models: the model, or the pipeline stages of this rank.

    Yields:
        The routes, which grow with each forward, on the device of the gates.

    Raises:
        ValueError: for a model without a `Gate`, or one that records or replays already.
    """
    gates = _named_gates(model_or_models)
    routes = RecordedRoutes(layers={name: [] for name in gates})
    recorders = {name: _Recorder(gate, routes.layers[name]) for name, gate in gates.items()}
    with _overridden(gates, recorders):
        yield routes


@contextmanager
def replay_routes(model_or_models: Models, routes: RecordedRoutes) -> Iterator[None]:
    """Let every gate choose what was recorded, one record per forward, in their order.

    A token that the replaying forward masks goes nowhere, whatever was recorded for it. The load of
    experts, the balance loss and everything else follow the replayed choice.

    Args:
        model_or_models: the model, or the pipeline stages of this rank.
        routes: of the same layers, for the same tokens on this rank.

    Raises:
        TypeError: for tensors of another dtype.
        ValueError: when layers, top_k or ids do not fit the model; in a forward, when it has
            another number of tokens than the record or no record is left; at the end, when records
            were not used.
        RuntimeError: in a recompute that does not take the choice of its forward.
    """
    gates = _named_gates(model_or_models)
    _check_layers(gates, routes)
    players = {name: _Player(name, gate, routes.layers[name]) for name, gate in gates.items()}
    with _overridden(gates, players):
        yield
    for player in players.values():
        player.check_end()


class _Recorder:
    """Stands in a gate's `override` and appends to `found`."""

    def __init__(self, gate: Gate, found: list[Tensor]) -> None:
        self._found = found
        fits = gate.config.num_experts <= torch.iinfo(torch.int16).max
        self._dtype = torch.int16 if fits else torch.int32

    def __call__(self, choose: Choose) -> Tensor:
        experts = choose()
        if not _reruns():
            self._found.append(experts.detach().to(self._dtype))
        return experts


class _Player:
    """Stands in a gate's `override` and gives one record per forward."""

    def __init__(self, name: str, gate: Gate, records: list[Tensor]) -> None:
        self._name, self._records = name, records
        self._used = 0
        for record in records:
            _check_record(name, gate, record)

    def __call__(self, choose: Choose) -> Tensor:
        if _reruns():
            raise RuntimeError(
                f"the recompute of {self._name} asks for a choice of its own; replayed routes need "
                f"replay_routing=True of the gate, and checkpoint_context = replay_contexts"
            )
        if self._used == len(self._records):
            raise ValueError(
                f"the routes of {self._name} hold {len(self._records)} forwards, and this is one "
                f"more; replay as many micro-batches as were recorded"
            )
        own, record = choose(), self._records[self._used]
        if own.shape != record.shape:
            raise ValueError(
                f"the routes of {self._name} are for {len(record)} tokens in forward {self._used}, "
                f"and it has {len(own)}; replay the micro-batches that were recorded, in their "
                f"order"
            )
        self._used += 1
        return record.to(own)

    def check_end(self) -> None:
        """Raise unless every record was used."""
        if self._used != len(self._records):
            raise ValueError(
                f"the routes of {self._name} hold {len(self._records)} forwards, and {self._used} "
                f"ran; replay as many micro-batches as were recorded"
            )


@contextmanager
def _overridden(
    gates: Mapping[str, Gate], overrides: Mapping[str, Callable[[Choose], Tensor]]
) -> Iterator[None]:
    taken = [name for name, gate in gates.items() if gate.override is not None]
    if taken:
        raise ValueError(
            f"routes of {taken} are recorded or replayed already; leave that context first"
        )
    for name, gate in gates.items():
        gate.override = overrides[name]
    try:
        yield
    finally:
        for gate in gates.values():
            gate.override = None


def _reruns() -> bool:
    """Whether this is a recompute, under shardwalk's checkpointing or another."""
    return is_recomputing() or in_backward()


def _named_gates(model_or_models: Models) -> dict[str, Gate]:
    models = [model_or_models] if isinstance(model_or_models, nn.Module) else model_or_models
    gates: dict[str, Gate] = {}
    for model in models:
        for path, module in unwrap_model(model).named_modules():
            if isinstance(module, Gate):
                name = canonical_name(path)
                if name in gates:
                    raise ValueError(f"two stages have a gate {name}; give them the model's names")
                gates[name] = module
    if not gates:
        raise ValueError("the model has no Gate, whose routes could be recorded or replayed")
    return gates


def _check_layers(gates: Mapping[str, Gate], routes: RecordedRoutes) -> None:
    missing = [name for name in gates if name not in routes.layers]
    unexpected = [name for name in routes.layers if name not in gates]
    if missing or unexpected:
        raise ValueError(
            f"the routes are of other layers than the model's: missing {missing}, unexpected "
            f"{unexpected}"
        )


def _check_record(name: str, gate: Gate, record: Tensor) -> None:
    if record.dtype not in _DTYPES:
        raise TypeError(f"the routes of {name} are {record.dtype}; use one of {list(_DTYPES)}")
    config = gate.config
    if record.ndim != 2 or record.shape[1] != config.top_k:
        raise ValueError(
            f"the routes of {name} have shape {list(record.shape)}; it must be [tokens, "
            f"{config.top_k}], one column per expert of a token"
        )
    if record.numel() and not (record.min() >= -1 and record.max() < config.num_experts):
        raise ValueError(
            f"the routes of {name} name experts from {int(record.min())} to {int(record.max())}; "
            f"the gate has 0 to {config.num_experts - 1}, and -1 is none"
        )
