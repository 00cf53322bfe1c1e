"""What a policy is made of: the sections of config.json as frozen dataclasses.

A document is refused where it holds an unknown key, lacks one, or where values do not fit together,
so that another variant is never read as this one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from shardwalk.model_praxis.config_backbone import (
    TEXT,
    VIDEO,
    AttentionConfig,
    BackboneConfig,
    MoeSectionConfig,
    MoeTrainingSettings,
    ProjectionConfig,
    RopeConfig,
    TowerConfig,
)
from shardwalk.model_praxis.config_data import (
    ActionSpaceConfig,
    ChunkingConfig,
    NormalizationConfig,
    TextEncoderConfig,
    VideoConfig,
)
from shardwalk.model_praxis.config_expert import (
    ActionExpertConfig,
    ExpertRopeConfig,
    FlexKernelOptions,
)
from shardwalk.model_praxis.config_sections import PraxisConfigError, Section, require

__all__ = [
    "ActionExpertConfig",
    "ActionSpaceConfig",
    "AttentionConfig",
    "BackboneConfig",
    "ChunkingConfig",
    "ExpertRopeConfig",
    "FlexKernelOptions",
    "MoeSectionConfig",
    "MoeTrainingSettings",
    "NormalizationConfig",
    "PraxisConfig",
    "PraxisConfigError",
    "ProjectionConfig",
    "RopeConfig",
    "TextEncoderConfig",
    "TowerConfig",
    "VideoConfig",
]

FORMAT_VERSION = 2
MODEL_TYPE = "praxis"
FP32_TENSORS = ("*.ffn.expert_bias",)


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
