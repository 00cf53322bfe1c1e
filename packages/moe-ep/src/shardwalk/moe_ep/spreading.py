"""Experts onto the ranks of an ep axis: what every walk does with them before it shards the rest.

Nothing here asks how the rest of a model is built, so that a sidecar with stacks of its own walks
the same way as the shared walk.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from shardwalk.moe_ep.dispatcher import TokenDispatcher, make_dispatcher
from shardwalk.moe_ep.expert_layers import ExpertLayer, find_expert_layers, refuse_layers
from shardwalk.moe_ep.expert_units import ExpertMesh, shard_experts
from shardwalk.moe_ep.expert_weights import LocalExperts, cut_over_ep, run_on_local_weights
from shardwalk.moe_ep.huggingface import exchange_experts, recompute_writers
from shardwalk.parallelizer_core import replay_contexts

Door = Callable[..., nn.Module]


@dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """What a walk asks of its experts.

    Attributes:
        mp_policy: of their units.
        offload_policy: where their shards rest; None is on the device.
        reshard_after_forward: whether they are freed after their forward.
        activation_checkpointing: False, "full" or "selective".
        replays_routing: whether recomputes take the choices of their forwards.
    """

    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy | None
    reshard_after_forward: bool | None
    activation_checkpointing: bool | str
    replays_routing: bool

    @property
    def row_dtype(self) -> torch.dtype | None:
        """What experts' rows are cast to where units cast their inputs."""
        return self.mp_policy.param_dtype if self.mp_policy.cast_forward_inputs else None


@dataclass(frozen=True, kw_only=True)
class ExpertSpread:
    """The layers of experts of a model, and how tokens will reach them on a mesh.

    Attributes:
        layers: every layer of experts.
        dispatchers: one for each.
        mesh: the ranks that hold the experts.
    """

    layers: list[ExpertLayer]
    dispatchers: list[TokenDispatcher]
    mesh: ExpertMesh

    @classmethod
    def plan(cls, model: nn.Module, mesh: ExpertMesh) -> ExpertSpread:
        """Find out whether the experts of `model` can be spread; changes nothing.

        Raises:
            ValueError: on every rank alike, for experts or a dispatcher that do not fit the mesh.
        """
        layers = find_expert_layers(model, ep_size=mesh.ep.size())
        refuse_layers(model, layers, ep_size=mesh.ep.size(), shard_size=mesh.shard_size)
        dispatchers = [_dispatcher_of(layer, mesh) for layer in layers]
        return cls(layers=layers, dispatchers=dispatchers, mesh=mesh)

    def apply(self, options: ExpertOptions, *, door: Door) -> None:
        """Leave each rank its own experts, in units of their own that `door` makes."""
        for layer, dispatcher in zip(self.layers, self.dispatchers, strict=True):
            self._spread(layer, dispatcher, options)
            shard_experts(
                layer.weights,
                self.mesh,
                door=door,
                mp_policy=options.mp_policy,
                offload_policy=options.offload_policy,
                reshard_after_forward=options.reshard_after_forward,
            )

    def _spread(
        self, layer: ExpertLayer, dispatcher: TokenDispatcher, options: ExpertOptions
    ) -> None:
        """Cut the experts of a layer, and let them get their tokens from all ranks of the axis."""
        ep, factor = self.mesh.ep, self.mesh.gradient_factor
        cut_over_ep(layer.weights, ep)
        local = LocalExperts(weights=layer.weights, ep_size=ep.size(), gradient_factor=factor)
        # Recomputes take the layout of the dispatch from their forward in any case.
        vars(layer.holder)["checkpoint_context"] = replay_contexts
        moe = layer.moe
        if moe is not None:
            moe.set_dispatcher(dispatcher)
            moe.gate.replay_routing = options.replays_routing
            run_on_local_weights(local)
            return
        if options.activation_checkpointing == "selective":
            recompute_writers(layer.holder, layer.weights)
        exchange_experts(
            local,
            dispatcher,
            row_dtype=options.row_dtype,
            replays_routing=options.replays_routing and bool(options.activation_checkpointing),
        )


def warn_of_new_routes(option: str, *, stacklevel: int) -> None:
    """Warn that recomputes route tokens anew, as `option` says."""
    warnings.warn(
        f"{option}=False: recomputes route tokens anew, and where a choice comes out otherwise "
        f"than in the forward, gradients are wrong; use ignore_router_for_ac=True",
        UserWarning,
        stacklevel=stacklevel + 1,
    )


def _dispatcher_of(layer: ExpertLayer, mesh: ExpertMesh) -> TokenDispatcher:
    name = "auto" if layer.moe is None else layer.moe.config.dispatcher
    return make_dispatcher(name, layer.num_experts, mesh.ep)
