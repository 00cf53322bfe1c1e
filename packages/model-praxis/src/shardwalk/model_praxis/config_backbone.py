"""The sections of the document that say what the two towers are made of, and their routers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwalk.model_praxis.config_sections import Section, at_least, require
from shardwalk.moe_ep import MoEConfig
from shardwalk.moe_ep.config import BalanceLossScope

VIDEO, TEXT = "VideoTensor", "TextEncodingTensor"


@dataclass(frozen=True, kw_only=True)
class MoeTrainingSettings(Section):
    """What training does to the routers; no part of the document, and nothing at inference.

    Attributes:
        balance_loss_weight: of the balance loss of all sparse layers together.
        balance_loss_scope: whether it asks for balance in each sequence, or in each micro-batch.
        bias_update_speed: what a step adds to or takes from a selection bias.
    """

    balance_loss_weight: float = at_least(0, default=0.0)
    balance_loss_scope: BalanceLossScope = "sequence"
    bias_update_speed: float = at_least(0, default=0.0)


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(Section):
    """Attention of both towers.

    Attributes:
        num_heads: query heads.
        num_kv_heads: key and value heads; divides `num_heads`.
        head_dim: even.
        qk_norm_eps: of the norms of queries and keys.
        rotate_before_norm: whether queries and keys are rotated before they are normed, or after.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm_eps: float = 1e-6
    rotate_before_norm: bool = True

    def _check(self) -> None:
        require(
            self.num_heads % self.num_kv_heads == 0, "num_kv_heads",
            f"{self.num_kv_heads} does not divide num_heads={self.num_heads}",
        )  # fmt: skip
        require(self.head_dim % 2 == 0, "head_dim", f"{self.head_dim} is odd, it must be even")


@dataclass(frozen=True, kw_only=True)
class MoeSectionConfig(Section):
    """The sparse feed-forward of both towers: a sigmoid router with a bias, and a shared expert.

    Attributes:
        num_experts: routed experts of a layer, over all ranks.
        top_k: experts that a token goes to.
        expert_dim: inner width of a routed expert.
        shared_dim: inner width of the shared expert.
        route_scale: multiplies the routing weights.
        norm_topk: whether the weights of a token are divided by their sum.
        num_groups: contiguous groups of experts; 1 limits nothing.
        top_groups: groups that a token may choose from.
    """

    num_experts: int
    top_k: int
    expert_dim: int
    shared_dim: int
    route_scale: float = 1.0
    norm_topk: bool = True
    num_groups: int = 1
    top_groups: int = 1

    def _check(self) -> None:
        experts, groups = self.num_experts, self.num_groups
        require(self.top_k <= experts, "top_k", f"{self.top_k} is more than num_experts={experts}")
        require(
            experts % groups == 0, "num_groups", f"{groups} does not divide num_experts={experts}"
        )
        require(
            self.top_groups <= groups, "top_groups",
            f"{self.top_groups} is more than num_groups={groups}",
        )  # fmt: skip
        left = self.top_groups * experts // groups
        require(
            self.top_k <= left, "top_k",
            f"{self.top_k} is more than the {left} experts of top_groups={self.top_groups} groups",
        )  # fmt: skip
        require(
            self.top_groups == groups or experts // groups >= 2, "num_groups",
            f"{groups} leaves one expert per group, and a group counts by its two best",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RopeConfig(Section):
    """Integer positions of the towers: block x frame_stride + 1 + row x row_stride + column.

    Attributes:
        frame_stride: positions of one frame, or of the text.
        row_stride: positions of one row.
        theta: base of the rotary frequencies.
    """

    frame_stride: int
    row_stride: int
    theta: float = 10000.0


@dataclass(frozen=True, kw_only=True)
class TowerConfig(Section):
    """One stack of blocks.

    Attributes:
        dim: width.
        num_layers: blocks.
        ffn_dim: inner width of the dense feed-forwards.
        dense_layers: how many leading blocks are dense; the rest are sparse.
        num_registers: learned tokens in front of the sequence.
        norm_eps: of the norms.
    """

    dim: int
    num_layers: int
    ffn_dim: int
    dense_layers: int = at_least(0)
    num_registers: int
    norm_eps: float = 1e-6

    def _check(self) -> None:
        require(
            self.dense_layers <= self.num_layers, "dense_layers",
            f"{self.dense_layers} is more than num_layers={self.num_layers}",
        )  # fmt: skip

    @property
    def moe_layers(self) -> int:
        """Sparse blocks."""
        return self.num_layers - self.dense_layers


@dataclass(frozen=True, kw_only=True)
class ProjectionConfig(Section):
    """How one kind of tensor enters or leaves the towers.

    Attributes:
        features: its width outside: channels of a latent, or width of a text state.
        hidden_dim: inner width of a projection with two layers; None for a single layer.
    """

    features: int
    hidden_dim: int | None = None


@dataclass(frozen=True, kw_only=True)
class BackboneConfig(Section):
    """The video transformer of two towers.

    Attributes:
        encoder: the tower that sees patches of the whole window.
        decoder: the tower that sees noised latents, unpatched.
        attention: of both.
        moe: of the sparse blocks of both.
        rope: of both.
        patch_size: side of the square that one encoder token covers.
        input_projections: "VideoTensor" (one layer) and "TextEncodingTensor" (two).
        output_projections: "VideoTensor" (one layer).
    """

    encoder: TowerConfig
    decoder: TowerConfig
    attention: AttentionConfig
    moe: MoeSectionConfig
    rope: RopeConfig
    patch_size: int
    input_projections: Mapping[str, ProjectionConfig]
    output_projections: Mapping[str, ProjectionConfig]

    def _check(self) -> None:
        _check_projections("input_projections", self.input_projections, {VIDEO: 1, TEXT: 2})
        _check_projections("output_projections", self.output_projections, {VIDEO: 1})
        given, made = (
            self.input_projections[VIDEO].features,
            self.output_projections[VIDEO].features,
        )
        require(
            given == made, f"output_projections.{VIDEO}.features",
            f"{made} differs from the {given} of input_projections",
        )  # fmt: skip

    @property
    def moe_layers(self) -> int:
        """Sparse blocks of both towers."""
        return self.encoder.moe_layers + self.decoder.moe_layers

    def layer_moe(self, tower: TowerConfig, training: MoeTrainingSettings) -> MoEConfig:
        """One sparse feed-forward of a tower; its balance loss weighs an equal part of the whole.

        Args:
            tower: gives the width.
            training: for all sparse layers of both towers together.
        """
        section = self.moe
        return MoEConfig(
            hidden_size=tower.dim,
            intermediate_size=section.expert_dim,
            num_experts=section.num_experts,
            top_k=section.top_k,
            score_function="sigmoid",
            correction_bias=True,
            num_groups=section.num_groups,
            top_k_groups=section.top_groups,
            normalize_weights=section.norm_topk,
            scaling_factor=section.route_scale,
            num_shared_experts=1,
            shared_intermediate_size=section.shared_dim,
            balance_loss_coefficient=training.balance_loss_weight / max(self.moe_layers, 1),
            balance_loss_scope=training.balance_loss_scope,
            bias_update_speed=training.bias_update_speed,
        )


def _check_projections(
    path: str, given: Mapping[str, ProjectionConfig], layers: Mapping[str, int]
) -> None:
    require(set(given) == set(layers), path, f"has {sorted(given)}, it must have {sorted(layers)}")
    for name, projection in given.items():
        is_double = projection.hidden_dim is not None
        require(
            is_double == (layers[name] == 2), f"{path}.{name}.hidden_dim",
            f"{projection.hidden_dim} for a projection of {layers[name]} layer(s)",
        )  # fmt: skip
