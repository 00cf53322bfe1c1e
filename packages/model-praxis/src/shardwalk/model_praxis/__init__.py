"""The Praxis video-action policy, and its parallelization with the numbers of one process."""

from shardwalk.model_praxis.backbone import Backbone, BackboneOutput
from shardwalk.model_praxis.config import (
    ActionExpertConfig,
    ActionSpaceConfig,
    AttentionConfig,
    BackboneConfig,
    ChunkingConfig,
    ExpertRopeConfig,
    FlexKernelOptions,
    MoeSectionConfig,
    MoeTrainingSettings,
    NormalizationConfig,
    PraxisConfig,
    ProjectionConfig,
    RopeConfig,
    TextEncoderConfig,
    TowerConfig,
    VideoConfig,
)
from shardwalk.model_praxis.config_sections import PraxisConfigError

__all__ = [
    "ActionExpertConfig",
    "ActionSpaceConfig",
    "AttentionConfig",
    "Backbone",
    "BackboneConfig",
    "BackboneOutput",
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
