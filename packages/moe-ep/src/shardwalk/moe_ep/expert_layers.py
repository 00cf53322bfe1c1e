"""The mixture-of-experts layers of a model: where they are, and whether they can be spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from shardwalk.moe_ep.expert_units import check_shards
from shardwalk.moe_ep.expert_weights import ExpertMisfitError, ExpertWeights, read_expert_weights
from shardwalk.moe_ep.huggingface import find_expert_modules, find_misfits
from shardwalk.moe_ep.layers import MoE


@dataclass(frozen=True, kw_only=True)
class ExpertLayer:
    """One layer of experts.

    Attributes:
        path: where its experts are in the model.
        weights: those of its experts.
        holder_path: where `holder` is.
        holder: the module that holds the experts and, beside them, whatever else a token meets in
            the layer: the router, shared experts.
    """

    path: str
    weights: ExpertWeights
    holder_path: str
    holder: nn.Module

    @property
    def num_experts(self) -> int:
        """The experts of all ranks."""
        return self.weights.num_experts

    @property
    def moe(self) -> MoE | None:
        """The holder, where it is a layer of this package."""
        return self.holder if isinstance(self.holder, MoE) else None


def find_expert_layers(model: nn.Module, *, ep_size: int) -> list[ExpertLayer]:
    """Every layer of experts in `model`, of this package or with the call of transformers.

    Raises:
        ValueError: a layer of this package holds what cannot be cut by expert, such as adapters.
    """
    own = [
        (f"{path}.experts".lstrip("."), _own_weights(f"{path}.experts".lstrip("."), moe, ep_size))
        for path, moe in model.named_modules()
        if isinstance(moe, MoE)
    ]
    modules = {weights.experts for _, weights in own}
    others = [each for each in find_expert_modules(model) if each[1].experts not in modules]
    layers = []
    for path, weights in (*own, *others):
        holder_path = path.rpartition(".")[0]
        holder = model.get_submodule(holder_path)
        layers.append(
            ExpertLayer(path=path, weights=weights, holder_path=holder_path, holder=holder)
        )
    return layers


def _own_weights(path: str, moe: MoE, ep_size: int) -> ExpertWeights:
    inner: nn.Module = moe.experts
    while "base_layer" in dict(inner.named_children()):
        inner = inner.get_submodule("base_layer")
    layers = {id(parameter) for parameter in inner.parameters()}
    way_out = "use ep_size=1 without a moe_parallel_config"
    for name, parameter in moe.experts.named_parameters():
        if id(parameter) not in layers:
            raise ValueError(
                f"ep_size={ep_size}: {path}.{name} belongs to an adapter around experts, which "
                f"cannot be spread over ranks; leave experts out of the adapter's targets "
                f"(target_parameters), or {way_out}"
            )
    try:
        return read_expert_weights(moe.experts, moe.config.num_experts)
    except ExpertMisfitError as misfit:
        raise ValueError(
            f"ep_size={ep_size}: the experts of {path} cannot be spread over ranks: {misfit.why}; "
            f"{way_out}"
        ) from None


def refuse_layers(
    model: nn.Module, layers: Sequence[ExpertLayer], *, ep_size: int, shard_size: int
) -> None:
    """Refuse experts that cannot be spread over the ranks; changes nothing.

    Raises:
        ValueError: on every rank alike, naming the module, the sizes and the way out.
    """
    for layer in layers:
        if layer.num_experts % ep_size:
            fits = [n for n in range(1, layer.num_experts + 1) if not layer.num_experts % n]
            raise ValueError(
                f"ep_size={ep_size} does not divide num_experts={layer.num_experts} of "
                f"{layer.path}; use one of {fits}"
            )
    if ep_size > 1:
        for path, why in find_misfits(model, {layer.weights.experts for layer in layers}):
            raise ValueError(
                f"ep_size={ep_size}: the experts of {path} cannot be spread over ranks: {why} "
                f"(experts must hold a slice of every weight along dimension 0 and be called as "
                f"experts(hidden_states, top_k_index, top_k_weights)); use ep_size=1"
            )
        if not layers:
            raise ValueError(
                f"ep_size={ep_size}, but {type(model).__name__} has no layer of experts to spread; "
                f"use ep_size=1"
            )
    for layer in layers:
        _refuse_misfit(model, layer, shard_size)


def _refuse_misfit(model: nn.Module, layer: ExpertLayer, shard_size: int) -> None:
    own = {id(parameter) for parameter in layer.weights.parameters()}
    inside = set(layer.weights.experts.modules())
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if module not in inside and id(parameter) in own:
                raise ValueError(
                    f"{path}.{name} is a weight of the experts {layer.path} too; untie them, since "
                    f"experts are spread over other ranks than the rest"
                )
    try:
        check_shards(layer.weights, shard_size)
    except ExpertMisfitError as misfit:
        raise ValueError(f"{layer.path}: {misfit.why}; use a larger ep_size") from None
