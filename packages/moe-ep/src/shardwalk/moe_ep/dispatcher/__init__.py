"""Dispatchers: how tokens reach the ranks of their experts and come back."""

from shardwalk.moe_ep.dispatcher.local import LocalDispatcher
from shardwalk.moe_ep.dispatcher.protocol import DispatchMetadata, TokenDispatcher

__all__ = ["DispatchMetadata", "LocalDispatcher", "TokenDispatcher"]
