"""What a policy is made of: the sections of config.json as frozen dataclasses.

A document is refused where it holds an unknown key, lacks one, or where values do not fit together,
so that another variant is never read as this one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch

from shardwalk.model_praxis.config_sections import (
    PraxisConfigError,
    Section,
    at_least,
    require,
)
from shardwalk.moe_ep import MoEConfig
from shardwalk.moe_ep.config import BalanceLossScope

FORMAT_VERSION = 2
MODEL_TYPE = "praxis"
FP32_TENSORS = ("*.ffn.expert_bias",)
TEMPORAL_COMPRESSION = 4  # raw frames in one latent frame of the video autoencoder

VIDEO, TEXT = "VideoTensor", "TextEncodingTensor"


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


@dataclass(frozen=True, kw_only=True)
class ExpertRopeConfig(Section):
    """Where the action expert's positions come from.

    Attributes:
        positions: "trunk": a token has the position of its frame in the encoder.
    """

    positions: Literal["trunk"] = "trunk"


@dataclass(frozen=True, kw_only=True)
class FlexKernelOptions(Section):
    """Pinned parameters of the flex-attention kernels; None leaves one to the compiler.

    Attributes:
        block_m: queries of a tile.
        block_n: keys of a tile.
        num_stages: depth of the pipeline.
        num_warps: warps of a tile.
    """

    block_m: int | None = None
    block_n: int | None = None
    num_stages: int | None = None
    num_warps: int | None = None

    def kernel_options(self) -> dict[str, int]:
        """The pinned ones under the names that `flex_attention` has for them."""
        names = {"block_m": "BLOCK_M", "block_n": "BLOCK_N"}
        return {names.get(key, key): value for key, value in self.to_dict().items() if value}


@dataclass(frozen=True, kw_only=True)
class ActionExpertConfig(Section):
    """The transformer that denoises actions.

    Attributes:
        dim: width; even.
        num_heads: attention heads.
        head_dim: that of the towers.
        mlp_dim: inner width of the feed-forwards.
        taps: the encoder blocks whose outputs it reads, counted from 0; one for each pair of its
            layers.
        num_future_tokens: learned tokens of a chunk.
        time_features: width of the sinusoidal time features; even.
        rope: where its positions come from.
        flex_kernel_options: of its attention on CUDA.
    """

    dim: int
    num_heads: int
    head_dim: int
    mlp_dim: int
    taps: tuple[int, ...] = at_least(0)
    num_future_tokens: int
    time_features: int
    rope: ExpertRopeConfig = ExpertRopeConfig()
    flex_kernel_options: FlexKernelOptions = FlexKernelOptions()

    def _check(self) -> None:
        taps = self.taps
        is_rising = all(first < second for first, second in pairwise(taps))
        require(bool(taps) and is_rising, "taps", f"{list(taps)} must rise, and hold one or more")
        require(self.dim % 2 == 0, "dim", f"{self.dim} is odd, use even: half are sines of a time")
        require(
            self.time_features % 2 == 0, "time_features", f"{self.time_features} is odd, use even"
        )

    @property
    def num_layers(self) -> int:
        """Layers: a cross attention for each tap, and a self attention behind each."""
        return 2 * len(self.taps)


@dataclass(frozen=True, kw_only=True)
class ActionSpaceConfig(Section):
    """The layout of actions.

    Attributes:
        row_dim: numbers of the action of one raw frame.
        proprio_dim: numbers of the pose at the start of a chunk.
        rows_per_token: rows that one action token (a latent frame) holds.
    """

    row_dim: int
    proprio_dim: int
    rows_per_token: int

    @property
    def token_dim(self) -> int:
        """Numbers of one action token."""
        return self.row_dim * self.rows_per_token


@dataclass(frozen=True, kw_only=True)
class NormalizationConfig(Section):
    """Statistics of the data.

    Attributes:
        action_q01: 1st percentile of each number of an action row.
        action_q99: the 99th.
        proprio_mean: mean of each number of a pose.
        proprio_std: standard deviation.
    """

    action_q01: tuple[float, ...]
    action_q99: tuple[float, ...]
    proprio_mean: tuple[float, ...]
    proprio_std: tuple[float, ...]

    def _check(self) -> None:
        _same_length("action_q99", self.action_q99, "action_q01", self.action_q01)
        _same_length("proprio_std", self.proprio_std, "proprio_mean", self.proprio_mean)
        pairs = zip(self.action_q01, self.action_q99, strict=True)
        require(all(low < high for low, high in pairs), "action_q99", "must be above action_q01")
        require(all(std > 0 for std in self.proprio_std), "proprio_std", "must be above 0")


@dataclass(frozen=True, kw_only=True)
class ChunkingConfig(Section):
    """A window in raw frames and in latent ones.

    Attributes:
        chunk_frames: raw frames of a chunk.
        latents_per_chunk: latent frames of a chunk.
        window_chunks: chunks of a window.
        window_frames: raw frames of a window: the anchor and the chunks.
    """

    chunk_frames: int
    latents_per_chunk: int
    window_chunks: int
    window_frames: int

    def _check(self) -> None:
        expected = TEMPORAL_COMPRESSION * self.latents_per_chunk
        require(
            self.chunk_frames == expected, "chunk_frames",
            f"{self.chunk_frames} must be {TEMPORAL_COMPRESSION} x latents_per_chunk = {expected}",
        )  # fmt: skip
        frames = 1 + self.window_chunks * self.chunk_frames
        require(
            self.window_frames == frames, "window_frames",
            f"{self.window_frames} must be 1 + window_chunks x chunk_frames = {frames}",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class VideoConfig(Section):
    """The size of a frame, raw and as latents."""

    canvas_height: int
    canvas_width: int
    latent_channels: int
    latent_height: int
    latent_width: int

    def _check(self) -> None:
        height, width = self.canvas_height, self.canvas_width
        is_whole = height % self.latent_height == 0 and width % self.latent_width == 0
        is_square = height * self.latent_width == width * self.latent_height
        require(
            is_whole and is_square, "canvas_height",
            f"a canvas of {height} x {width} is no whole multiple of the latents, "
            f"{self.latent_height} x {self.latent_width}, that is the same for both sides",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TextEncoderConfig(Section):
    """The frozen text encoder, which stays outside of the policy.

    Attributes:
        name: what it is called.
        hidden_dim: width of its states.
        max_tokens: the longest caption.
        unconditional_caption: stands for no text.
    """

    name: str
    hidden_dim: int
    max_tokens: int
    unconditional_caption: str


@dataclass(frozen=True, kw_only=True)
class PraxisConfig(Section):
    """The whole document."""

    action_expert: ActionExpertConfig
    action_space: ActionSpaceConfig
    backbone: BackboneConfig
    chunking: ChunkingConfig
    normalization: NormalizationConfig
    text_encoder: TextEncoderConfig
    video: VideoConfig
    embodiment: Literal["single_arm"] = "single_arm"
    format_version: int = FORMAT_VERSION
    model_type: str = MODEL_TYPE
    torch_dtype: str = "bfloat16"
    pose_frame: Literal["flange"] = "flange"
    fp32_tensors: tuple[str, ...] = FP32_TENSORS

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> PraxisConfig:
        """Read `folder`/config.json.

        Raises:
            FileNotFoundError: there is none.
            PraxisConfigError: it holds no JSON, or no configuration of this model.
        """
        file = Path(folder) / "config.json"
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise PraxisConfigError("", f"{file} holds no JSON: {error}") from error
        return cls.from_dict(document)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        dtype = getattr(torch, self.torch_dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def _check(self) -> None:
        self._check_identity()
        self._check_expert()
        self._check_frames()
        self._check_widths()

    def _check_identity(self) -> None:
        for name, wanted in (
            ("format_version", FORMAT_VERSION),
            ("model_type", MODEL_TYPE),
            ("fp32_tensors", FP32_TENSORS),
        ):
            value = getattr(self, name)
            require(value == wanted, name, f"{value!r} is not supported, only {wanted!r} is")
        allowed = ("bfloat16", "float16", "float32", "float64")
        require(
            self.torch_dtype in allowed, "torch_dtype",
            f"{self.torch_dtype!r} is not supported; use one of {list(allowed)}",
        )  # fmt: skip

    def _check_expert(self) -> None:
        layers, last = self.backbone.encoder.num_layers, self.action_expert.taps[-1]
        require(
            last < layers, "action_expert.taps",
            f"{last} is beyond the {layers} blocks of the encoder, which count from 0",
        )  # fmt: skip
        mine, trunk = self.action_expert.head_dim, self.backbone.attention.head_dim
        require(
            mine == trunk, "action_expert.head_dim",
            f"{mine} differs from backbone.attention.head_dim={trunk}; they share positions",
        )  # fmt: skip
        rows = self.action_space.rows_per_token * self.chunking.latents_per_chunk
        require(
            rows == self.chunking.chunk_frames, "action_space.rows_per_token",
            f"a chunk's action tokens hold {rows} rows for its {self.chunking.chunk_frames} frames",
        )  # fmt: skip

    def _check_frames(self) -> None:
        video, rope, patch = self.video, self.backbone.rope, self.backbone.patch_size
        for name in ("latent_height", "latent_width"):
            size = getattr(video, name)
            require(
                size % patch == 0, f"video.{name}",
                f"backbone.patch_size={patch} does not divide {size}",
            )  # fmt: skip
        require(
            video.latent_width <= rope.row_stride, "backbone.rope.row_stride",
            f"{rope.row_stride} is less than video.latent_width={video.latent_width}",
        )  # fmt: skip
        needed = (video.latent_height - 1) * rope.row_stride + video.latent_width
        require(
            needed < rope.frame_stride, "backbone.rope.frame_stride",
            f"{rope.frame_stride} must be above the {needed} positions of a frame",
        )  # fmt: skip
        require(
            self.text_encoder.max_tokens < rope.frame_stride, "text_encoder.max_tokens",
            f"{self.text_encoder.max_tokens} must be below "
            f"backbone.rope.frame_stride={rope.frame_stride}",
        )  # fmt: skip

    def _check_widths(self) -> None:
        inputs, space, stats = (
            self.backbone.input_projections, self.action_space, self.normalization,
        )  # fmt: skip
        for path, value, other, wanted in (
            (f"backbone.input_projections.{VIDEO}.features", inputs[VIDEO].features,
             "video.latent_channels", self.video.latent_channels),
            (f"backbone.input_projections.{TEXT}.features", inputs[TEXT].features,
             "text_encoder.hidden_dim", self.text_encoder.hidden_dim),
            ("normalization.action_q01", len(stats.action_q01),
             "action_space.row_dim", space.row_dim),
            ("normalization.proprio_mean", len(stats.proprio_mean),
             "action_space.proprio_dim", space.proprio_dim),
        ):  # fmt: skip
            require(value == wanted, path, f"{value} numbers, but {other}={wanted}")


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


def _same_length(path: str, value: tuple[float, ...], other: str, than: tuple[float, ...]) -> None:
    require(len(value) == len(than), path, f"{len(value)} numbers, but {len(than)} in {other}")


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
