"""The transformer that denoises actions, reading what the video stream computes, never writing it.

Its tokens are, of every chunk, one of the proprioceptive pose, some learned ones for the future,
and one for each latent frame's actions. Even layers attend to the tapped encoder blocks, odd ones
to the tokens of the chunk itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwalk.model_praxis.action_layers import (
    ActionTauEncoder,
    GegluMLP,
    ScaleAdaLN,
    SinusoidalTimestep,
    ZeroLinear,
    finite_gradient,
    geglu,
    rms_normed,
    sinusoidal_features,
    widened,
)
from shardwalk.model_praxis.backbone import BackboneOutput
from shardwalk.model_praxis.config import ActionExpertConfig, PraxisConfig
from shardwalk.model_praxis.layers import (
    RotaryTable,
    ZeroCenteredRMSNorm,
    attend,
    rotary_table,
    rotate,
)
from shardwalk.model_praxis.masks import (
    Layout,
    Mask,
    Slot,
    attention_mask,
    expert_cross_rule,
    expert_self_rule,
)

__all__ = [
    "ActionExpert",
    "ActionTauEncoder",
    "ExpertAttention",
    "ExpertLayer",
    "GegluMLP",
    "ScaleAdaLN",
    "SinusoidalTimestep",
    "ZeroLinear",
    "finite_gradient",
    "geglu",
    "rms_normed",
    "sinusoidal_features",
    "widened",
]


class ExpertAttention(nn.Module):
    """Attention over heads of a shared position space: `q_proj`, `k_proj`, `v_proj`, `o_proj`.

    Queries and keys are rotated, then normed over a head (`q_norm`, `k_norm`). No biases, no gate.

    Args:
        config: of the expert.
        memory_dim: width of what keys and values are made of.
        eps: of the norms.
    """

    def __init__(self, config: ActionExpertConfig, memory_dim: int, eps: float) -> None:
        super().__init__()
        inner = config.num_heads * config.head_dim
        self.head_dim = config.head_dim
        self.kernel_options = config.flex_kernel_options.kernel_options()
        self.q_proj = nn.Linear(config.dim, inner, bias=False)
        self.k_proj = nn.Linear(memory_dim, inner, bias=False)
        self.v_proj = nn.Linear(memory_dim, inner, bias=False)
        self.o_proj = nn.Linear(inner, config.dim, bias=False)
        self.q_norm = ZeroCenteredRMSNorm(config.head_dim, eps)
        self.k_norm = ZeroCenteredRMSNorm(config.head_dim, eps)

    def forward(
        self, x: Tensor, memory: Tensor, *, rotary: RotaryTable, memory_rotary: RotaryTable,
        mask: Mask,
    ) -> Tensor:  # fmt: skip
        """Queries of `x` [B, n, dim] over keys and values of `memory` [B, m, memory_dim]."""
        q, k, v = (
            projected.unflatten(-1, (-1, self.head_dim))
            for projected in (self.q_proj(x), self.k_proj(memory), self.v_proj(memory))
        )
        q = self.q_norm(rotate(widened(q), rotary)).to(v.dtype)
        k = self.k_norm(rotate(widened(k), memory_rotary)).to(v.dtype)
        heads = attend(q, k, v, mask, kernel_options=self.kernel_options)
        out: Tensor = self.o_proj(heads.flatten(-2))
        return out


class ExpertLayer(nn.Module):
    """Attention, then a feed-forward, each behind a `ScaleAdaLN` and added to its input.

    Attributes:
        compute_dtype: what the layer casts its hidden states to; None leaves them.
        is_cross: whether it attends to a memory, or to its own tokens.

    Args:
        config: of the expert.
        memory_dim: width of the memory that it attends to; None for its own tokens.
        eps: of the norms.
    """

    compute_dtype: torch.dtype | None = None

    def __init__(self, config: ActionExpertConfig, memory_dim: int | None, eps: float) -> None:
        super().__init__()
        self.is_cross, self.eps = memory_dim is not None, eps
        self.norm1 = ScaleAdaLN(config.dim, eps)
        self.attn = ExpertAttention(config, memory_dim or config.dim, eps)
        self.norm2 = ScaleAdaLN(config.dim, eps)
        self.mlp = GegluMLP(config.dim, config.mlp_dim)

    def forward(
        self, x: Tensor, condition: Tensor, *, rotary: RotaryTable, mask: Mask,
        memory: Tensor | None = None, memory_rotary: RotaryTable | None = None,
    ) -> Tensor:  # fmt: skip
        """Tokens [B, n, dim] to the same.

        Args:
            x: the tokens.
            condition: of each token, [B, n, dim].
            rotary: of the tokens.
            mask: [n, n], or [n, m] with a memory.
            memory: [B, m, memory_dim], of a cross layer; it is normed here.
            memory_rotary: of the memory.
        """
        assert (memory is not None) == self.is_cross, "a memory is for cross layers, and only them"
        dtype = self.compute_dtype or x.dtype
        x, condition = x.to(dtype), condition.to(dtype)
        normed = self.norm1(x, condition)
        seen = normed if memory is None else rms_normed(memory, self.eps).to(dtype)
        x = x + self.attn(
            normed, seen, rotary=rotary, memory_rotary=memory_rotary or rotary, mask=mask
        )
        out: Tensor = x + self.mlp(self.norm2(x, condition))
        return out


class ActionExpert(nn.Module):
    """Denoises the actions of a window from what the backbone's encoder computed.

    Attributes:
        action_encoder, embed_proprio, head: depend on the rig, the first one in `w1` alone.
        future: learned tokens, [F, dim], the same in every chunk.
        timestep: the conditions.
        layers: two for each tap, cross attention first.
        norm: before the head.

    Args:
        config: the whole configuration.
    """

    def __init__(self, config: PraxisConfig) -> None:
        super().__init__()
        expert, space, tower = config.action_expert, config.action_space, config.backbone.encoder
        self.head_dim, self.theta = expert.head_dim, config.backbone.rope.theta
        self.num_future = expert.num_future_tokens
        self.frames_per_chunk = config.chunking.latents_per_chunk
        self.action_encoder = ActionTauEncoder(space.token_dim, expert.dim)
        self.embed_proprio = nn.Linear(space.proprio_dim, expert.dim)
        self.future = nn.Parameter(torch.empty(self.num_future, expert.dim))
        self.timestep = SinusoidalTimestep(expert.time_features, expert.dim)
        self.layers = nn.ModuleList(
            ExpertLayer(expert, None if index % 2 else tower.dim, tower.norm_eps)
            for index in range(expert.num_layers)
        )
        self.norm = ScaleAdaLN(expert.dim, tower.norm_eps)
        self.head = nn.Linear(expert.dim, space.token_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the future tokens; the modules inside draw what is theirs."""
        nn.init.normal_(self.future, std=0.02)

    def forward(
        self, *, actions: Tensor, action_times: Tensor, proprio: Tensor, video: BackboneOutput
    ) -> Tensor:
        """The velocity of the actions.

        Args:
            actions: noised action tokens, [B, T, token_dim].
            action_times: of each chunk, [B, K].
            proprio: normalized poses at the starts of the chunks, [B, K, proprio_dim].
            video: of the same window.

        Returns:
            [B, T, token_dim] in the dtype of the weights.
        """
        x = self._queries(actions, action_times, proprio)
        condition = self._to_tokens(self.timestep(action_times), actions=True)
        calls = self._calls(video)
        for layer, call in zip(self.layers, calls, strict=True):
            x = layer(x, condition, **call)
        is_action = slice(x.shape[1] - actions.shape[1], None)
        x, condition = x[:, is_action].to(condition.dtype), condition[:, is_action]
        out: Tensor = self.head(self.norm(x, condition))
        return out

    def _to_tokens(self, per_chunk: Tensor, *, actions: bool) -> Tensor:
        """What each chunk has, [B, K, ...], once for each of its tokens, in their order."""
        counts = (1, self.num_future, self.frames_per_chunk if actions else 0)
        return torch.cat([per_chunk.repeat_interleave(count, 1) for count in counts], 1)

    def _queries(self, actions: Tensor, action_times: Tensor, proprio: Tensor) -> Tensor:
        times = action_times.repeat_interleave(self.frames_per_chunk, 1)
        batch, chunks = action_times.shape
        poses = self.embed_proprio(proprio.to(self.embed_proprio.weight.dtype))
        future = self.future.repeat(chunks, 1).expand(batch, -1, -1)
        return torch.cat([poses, future, self.action_encoder(actions, times)], 1)

    def _calls(self, video: BackboneOutput) -> list[dict[str, Any]]:
        """What each layer is given beside tokens and conditions."""
        frames = video.frame_positions
        firsts = frames[:, :: self.frames_per_chunk]
        positions = torch.cat([self._to_tokens(firsts, actions=False), frames], 1)
        rotary = rotary_table(positions, self.head_dim, self.theta)
        queries, keys = self._layout(firsts.shape[1]), video.key_layout
        cross = attention_mask(expert_cross_rule, queries, keys, device=frames.device)
        own = attention_mask(expert_self_rule, queries, device=frames.device)
        calls: list[dict[str, Any]] = []
        for tap in video.taps:
            memory = finite_gradient(torch.cat([video.globals_in, tap], 1))
            of_memory = {"memory": memory, "memory_rotary": video.key_rotary}
            calls += [{"rotary": rotary, "mask": cross} | of_memory]
            calls += [{"rotary": rotary, "mask": own}]
        return calls

    def _layout(self, chunks: int) -> Layout:
        """The slots of [proprio | future | actions]."""
        per_chunk = self.frames_per_chunk
        proprio = Slot(kind="noised", frames=chunks, tokens_per_frame=1)
        future = Slot(kind="noised", frames=chunks, tokens_per_frame=self.num_future)
        actions = Slot(
            kind="noised", frames=chunks * per_chunk, tokens_per_frame=1, frames_per_chunk=per_chunk
        )
        return proprio, future, actions
