"""How evenly tokens fell on experts: numbers to log, made only when asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwalk.moe_ep.balance_loss import Models
from shardwalk.moe_ep.router import Gate
from shardwalk.moe_ep.router_biases import global_loads
from shardwalk.parallelizer_core.model_tensors import canonical_name
from shardwalk.parallelizer_core.parallel_state import unwrap_model


@dataclass(frozen=True, kw_only=True)
class LayerLoad:
    """The load of one layer, over all ranks.

    Attributes:
        load: slots that each expert got, int64 [E], on the CPU.
        imbalance: the largest load / the mean; 1 is balance, E is all on one expert.
        entropy: entropy of the shares / log E, between 0 (all on one expert) and 1 (balance).
        dead_experts: experts without a token.
    """

    load: Tensor
    imbalance: float
    entropy: float
    dead_experts: int

    @classmethod
    def of(cls, load: Tensor) -> LayerLoad:
        """The metrics of a load; without any token, those of balance and no dead experts."""
        total, experts = int(load.sum()), len(load)
        if total == 0:
            return cls(load=load, imbalance=1.0, entropy=1.0, dead_experts=0)
        shares = load.double() / total
        entropy = float(torch.special.entr(shares).sum() / torch.tensor(float(experts)).log())
        return cls(
            load=load,
            imbalance=float(shares.max() * experts),
            entropy=entropy if experts > 1 else 1.0,
            dead_experts=int((load == 0).sum()),
        )


@dataclass(frozen=True, kw_only=True)
class ExpertLoadReport:
    """The loads of all layers since the last update of the biases (or the last reset).

    Attributes:
        layers: by the name of the gate in the model as it was built.
        mean_imbalance, worst_imbalance: over the layers.
        mean_entropy: over the layers.
        dead_experts: of all layers together.
    """

    layers: Mapping[str, LayerLoad]
    mean_imbalance: float
    worst_imbalance: float
    mean_entropy: float
    dead_experts: int

    def scalars(self, prefix: str = "moe") -> dict[str, float]:
        """Everything but the loads under flat names, for a logger."""
        found = {
            f"{prefix}/{name}": float(getattr(self, name))
            for name in ("mean_imbalance", "worst_imbalance", "mean_entropy", "dead_experts")
        }
        for layer, load in self.layers.items():
            for name in ("imbalance", "entropy", "dead_experts"):
                found[f"{prefix}/{layer}/{name}"] = float(getattr(load, name))
        return found


def expert_load_report(model_or_models: Models, *, reset: bool = False) -> ExpertLoadReport:
    """How the tokens of all ranks of the stage fell on the experts of each layer.

    All ranks call it together: one all-reduce, and one copy to the CPU. Nothing is done for it
    where it is not called. Updates of the router biases reset loads, so call it before the
    optimizer's step where one is attached; without updates loads grow until `reset`.

    Args:
        model_or_models: the model, or the pipeline stages of this rank.
        reset: begin to count anew; not for gates whose biases an update moves by these loads.

    Raises:
        ValueError: the model has no gate; a reset would take the loads from an update.
    """
    gates = _named_gates(model_or_models)
    if not gates:
        raise ValueError("the model has no Gate whose load could be reported")
    if reset and any(gate.config.bias_update_speed > 0 for gate in gates.values()):
        raise ValueError(
            "reset=True would take the loads that update_router_biases works with; leave it to that"
        )
    summed = global_loads(list(gates.values()))
    sizes = [len(load) for load in summed]
    on_host = torch.cat(summed).cpu().split(sizes)
    if reset:
        for gate in gates.values():
            gate.reset_load()
    return _report({name: LayerLoad.of(load) for name, load in zip(gates, on_host, strict=True)})


def _report(layers: dict[str, LayerLoad]) -> ExpertLoadReport:
    imbalances = [layer.imbalance for layer in layers.values()]
    return ExpertLoadReport(
        layers=layers,
        mean_imbalance=sum(imbalances) / len(layers),
        worst_imbalance=max(imbalances),
        mean_entropy=sum(layer.entropy for layer in layers.values()) / len(layers),
        dead_experts=sum(layer.dead_experts for layer in layers.values()),
    )


def _named_gates(model_or_models: Models) -> dict[str, Gate]:
    models: Sequence[nn.Module]
    models = [model_or_models] if isinstance(model_or_models, nn.Module) else model_or_models
    return {
        f"{index}.{canonical_name(name)}" if len(models) > 1 else canonical_name(name): module
        for index, model in enumerate(models)
        for name, module in unwrap_model(model).named_modules()
        if isinstance(module, Gate)
    }
