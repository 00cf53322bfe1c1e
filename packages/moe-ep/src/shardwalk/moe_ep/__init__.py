"""Mixture-of-experts layers, and experts spread over ranks with the numbers of one process."""

from shardwalk.moe_ep.balance_loss import normalize_balance_loss
from shardwalk.moe_ep.config import MoEConfig
from shardwalk.moe_ep.dispatcher import (
    AllToAllDispatcher,
    DeepEPDispatcher,
    DispatchMetadata,
    ExchangeSizes,
    LocalDispatcher,
    TokenDispatcher,
    make_dispatcher,
)
from shardwalk.moe_ep.experts import GroupedExperts
from shardwalk.moe_ep.layers import MoE, SharedExperts
from shardwalk.moe_ep.load_balance import ExpertLoadReport, LayerLoad, expert_load_report
from shardwalk.moe_ep.router import Gate, Routing
from shardwalk.moe_ep.router_biases import (
    attach_router_bias_update,
    replicate_router_biases,
    update_router_biases,
)
from shardwalk.moe_ep.router_replay import RecordedRoutes, record_routes, replay_routes
from shardwalk.moe_ep.state_dict import PerExpertAdapter
from shardwalk.moe_ep.tokens_over_tp import SplitTokens
from shardwalk.moe_ep.walk import parallelize_experts

__all__ = [
    "AllToAllDispatcher",
    "DeepEPDispatcher",
    "DispatchMetadata",
    "ExchangeSizes",
    "ExpertLoadReport",
    "Gate",
    "GroupedExperts",
    "LayerLoad",
    "LocalDispatcher",
    "MoE",
    "MoEConfig",
    "PerExpertAdapter",
    "RecordedRoutes",
    "Routing",
    "SharedExperts",
    "SplitTokens",
    "TokenDispatcher",
    "attach_router_bias_update",
    "expert_load_report",
    "make_dispatcher",
    "normalize_balance_loss",
    "parallelize_experts",
    "record_routes",
    "replay_routes",
    "replicate_router_biases",
    "update_router_biases",
]
