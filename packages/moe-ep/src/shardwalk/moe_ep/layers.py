"""A mixture-of-experts layer: route, dispatch, compute, combine."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from shardwalk.moe_ep.config import MoEConfig
from shardwalk.moe_ep.dispatcher import LocalDispatcher, TokenDispatcher
from shardwalk.moe_ep.experts import GroupedExperts, activation_of
from shardwalk.moe_ep.router import Gate
from shardwalk.parallelizer_core import replay_contexts


class MoE(nn.Module):
    """The feed-forward part of a block, of which each token uses `top_k` experts.

    Attributes:
        gate: the `Gate` that chooses.
        experts: the `GroupedExperts`; all of them, until a walk leaves each rank its own.
        shared_experts: a `SharedExperts` that every token goes to, or None.
        shared_gate: the projection (weight [1, H]) whose sigmoid weighs them, or None.
        latent_in, latent_out: projections around dispatch and combine, or None.
        dispatcher: how tokens reach their experts; not part of the state.

    Args:
        config: what the layer is made of.
    """

    # A recompute takes the routes and the layout of the forward.
    checkpoint_context = staticmethod(replay_contexts)

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = Gate(config)
        self.experts = GroupedExperts(config)
        has_shared = config.num_shared_experts > 0
        self.shared_experts = SharedExperts(config) if has_shared else None
        self.shared_gate = (
            nn.Linear(config.hidden_size, 1, bias=False) if config.shared_gate else None
        )
        latent = config.latent_size
        self.latent_in = nn.Linear(config.hidden_size, latent, bias=False) if latent else None
        self.latent_out = nn.Linear(latent, config.hidden_size, bias=False) if latent else None
        self.dispatcher: TokenDispatcher = LocalDispatcher(config.num_experts)

    def set_dispatcher(self, dispatcher: TokenDispatcher) -> None:
        """Let tokens take another way to their experts."""
        self.dispatcher = dispatcher

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> Tensor:
        """What the experts make of every token, the shared ones included.

        Args:
            x: [..., H]; with three dimensions or more, the last but one is the position in a
                sequence.
            token_mask: bool of the leading shape of `x`, False for tokens that no routed expert is
                to see (padding); the shared experts see every token.

        Returns:
            The shape and dtype of `x`.

        Raises:
            ValueError: for a mask of another shape or dtype.
        """
        _check_mask(x, token_mask)
        tokens = x.reshape(-1, x.shape[-1])
        mask = None if token_mask is None else token_mask.reshape(-1)
        routing = self.gate(tokens, token_mask=mask, sequences=math.prod(x.shape[:-2]))
        out = self._routed(tokens, routing.experts, routing.weights)
        if self.shared_experts is not None:
            out = out + self._shared(tokens)
        return out.view(x.shape)

    def _routed(self, tokens: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        inputs = tokens if self.latent_in is None else self.latent_in(tokens)
        rows, metadata = self.dispatcher.dispatch(inputs, experts, weights)
        out = self.dispatcher.combine(self.experts(rows, metadata.counts), metadata)
        return out if self.latent_out is None else self.latent_out(out)

    def _shared(self, tokens: Tensor) -> Tensor:
        assert self.shared_experts is not None
        out: Tensor = self.shared_experts(tokens)
        if self.shared_gate is not None:
            out = torch.sigmoid(self.shared_gate(tokens)) * out
        return out


class SharedExperts(nn.Module):
    """The experts that every token goes to: one dense network of their width together.

    ``gate_proj`` (where the activation has a gate), ``up_proj`` and ``down_proj`` are `nn.Linear`
    without bias.

    Args:
        config: its `hidden_size`, activation and the width of shared experts are read here.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.activation = activation_of(config)
        width = config.hidden_size
        inner = (
            config.shared_intermediate_size or config.num_shared_experts * config.intermediate_size
        )
        gated = self.activation.is_gated
        self.gate_proj = nn.Linear(width, inner, bias=False) if gated else None
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to [..., H]."""
        up = self.up_proj(x)
        if self.gate_proj is None:
            activated = self.activation(up)
        else:
            activated = self.activation.product(self.gate_proj(x), up)
        out: Tensor = self.down_proj(activated)
        return out


def _check_mask(x: Tensor, token_mask: Tensor | None) -> None:
    if token_mask is None:
        return
    if token_mask.dtype != torch.bool or token_mask.shape != x.shape[:-1]:
        raise ValueError(
            f"token_mask must be bool of shape {list(x.shape[:-1])}, one per token, got "
            f"{token_mask.dtype} of shape {list(token_mask.shape)}"
        )
