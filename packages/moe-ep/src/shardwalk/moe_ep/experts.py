"""The experts of one layer as stacked weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardwalk.moe_ep.activations import Activation
from shardwalk.moe_ep.config import MoEConfig
from shardwalk.moe_ep.grouped_matmul import RowGroups, grouped_linear


def activation_of(config: MoEConfig) -> Activation:
    """The activation that the experts of this configuration have."""
    return Activation(
        name=config.activation,
        limit=config.activation_limit,
        alpha=config.activation_alpha,
        fp32_product=config.fp32_product,
    )


class GroupedExperts(nn.Module):
    """Gated (or, for ``relu2``, plain) two-layer networks, one per expert, without routing.

    With E experts of width I on tokens of width H (the latent width where there is one):

    - ``gate_up_proj`` [E, 2 I, H], gate rows first, then up; without a gate ``up_proj`` [E, I, H].
    - ``down_proj`` [E, H, I].
    - with ``expert_bias``: ``gate_up_proj_bias`` [E, 2 I] (or ``up_proj_bias``) and
      ``down_proj_bias`` [E, H].

    Args:
        config: its widths, activation and ``expert_bias`` are read here.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.activation = activation_of(config)
        experts, inner = config.num_experts, config.intermediate_size
        width = config.latent_size or config.hidden_size
        self.first = "gate_up_proj" if self.activation.is_gated else "up_proj"
        outer = 2 * inner if self.activation.is_gated else inner
        self._add(self.first, (experts, outer, width), bias=config.expert_bias)
        self._add("down_proj", (experts, width, inner), bias=config.expert_bias)
        self.reset_parameters()

    @property
    def grouped_parameters(self) -> tuple[str, ...]:
        """Parameters with one expert per index of dim 0, which `materialize` draws one by one."""
        return tuple(name for name, _ in self.named_parameters(recurse=False))

    def forward(self, rows: Tensor, counts: Sequence[int] | Tensor) -> Tensor:
        """What each expert makes of its rows, unweighted.

        Args:
            rows: [N, H], sorted by expert.
            counts: how many rows each expert held here has, on the host; rows after these belong
                to nobody, and come back as zeros.

        Returns:
            [N, H], in the dtype of `rows`. Every weight gets a gradient, zeros for an expert
            without rows, also when N is 0.

        Raises:
            ValueError: counts that do not fit the weights or the rows.
        """
        groups = RowGroups(counts, rows.device)
        activated = self.activation(self._linear(self.first, rows, groups))
        return self._linear("down_proj", activated, groups)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw every expert as `torch.nn.Linear` draws its layer: uniform within 1/sqrt(inputs)."""
        for name in (self.first, "down_proj"):
            weight: Tensor = getattr(self, name)
            bound = 1 / math.sqrt(weight.shape[-1])
            nn.init.uniform_(weight, -bound, bound)
            bias: Tensor | None = getattr(self, f"{name}_bias")
            if bias is not None:
                nn.init.uniform_(bias, -bound, bound)

    def extra_repr(self) -> str:
        """Widths and activation, for `print`."""
        shape = "x".join(str(size) for size in getattr(self, self.first).shape)
        return f"{self.first}={shape}, activation={self.activation.name}"

    def _add(self, name: str, shape: tuple[int, int, int], *, bias: bool) -> None:
        self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        offset = nn.Parameter(torch.empty(shape[:2])) if bias else None
        self.register_parameter(f"{name}_bias", offset)

    def _linear(self, name: str, rows: Tensor, groups: RowGroups) -> Tensor:
        # Weights are looked up for each call: what is on this rank may stand in for them.
        return grouped_linear(
            rows, getattr(self, name), groups, bias=getattr(self, f"{name}_bias", None)
        )
