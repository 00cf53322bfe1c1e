"""Dispatchers: how tokens reach the ranks of their experts and come back."""

from shardwalk.moe_ep.dispatcher.all_to_all import AllToAllDispatcher
from shardwalk.moe_ep.dispatcher.deepep import DeepEPDispatcher
from shardwalk.moe_ep.dispatcher.exchange_sizes import ExchangeSizes
from shardwalk.moe_ep.dispatcher.local import LocalDispatcher
from shardwalk.moe_ep.dispatcher.make import make_dispatcher
from shardwalk.moe_ep.dispatcher.protocol import DispatchMetadata, TokenDispatcher

__all__ = [
    "AllToAllDispatcher",
    "DeepEPDispatcher",
    "DispatchMetadata",
    "ExchangeSizes",
    "LocalDispatcher",
    "TokenDispatcher",
    "make_dispatcher",
]
