"""The Praxis video-action policy, and its parallelization with the numbers of one process."""

from shardwalk.model_praxis.action_expert import (
    ActionExpert,
    ActionTauEncoder,
    ScaleAdaLN,
    SinusoidalTimestep,
    geglu,
)
from shardwalk.model_praxis.action_space import decode_actions, encode_actions, normalize_proprio
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
from shardwalk.model_praxis.draws import (
    Draws,
    ObjectiveSettings,
    PraxisWindow,
    draw,
    shift_time,
    step_generator,
)
from shardwalk.model_praxis.lora import LoraLinear, LoraSettings, apply_lora, merge_lora
from shardwalk.model_praxis.model import PraxisOutput, PraxisPolicy, trains_backbone
from shardwalk.model_praxis.objective import (
    NoisedWindow,
    PraxisLoss,
    guarded_action_loss,
    noise_window,
    praxis_loss,
)
from shardwalk.model_praxis.parallelize import (
    PraxisModelParallelizer,
    replicate_router_biases,
    shard_policy,
)
from shardwalk.model_praxis.pretrained import save_pretrained
from shardwalk.model_praxis.sampling import PraxisSample, sample
from shardwalk.model_praxis.state_dict import PraxisStateDictAdapter

__all__ = [
    "ActionExpert",
    "ActionExpertConfig",
    "ActionSpaceConfig",
    "ActionTauEncoder",
    "AttentionConfig",
    "Backbone",
    "BackboneConfig",
    "BackboneOutput",
    "ChunkingConfig",
    "Draws",
    "ExpertRopeConfig",
    "FlexKernelOptions",
    "LoraLinear",
    "LoraSettings",
    "MoeSectionConfig",
    "MoeTrainingSettings",
    "NoisedWindow",
    "NormalizationConfig",
    "ObjectiveSettings",
    "PraxisConfig",
    "PraxisConfigError",
    "PraxisLoss",
    "PraxisModelParallelizer",
    "PraxisOutput",
    "PraxisPolicy",
    "PraxisSample",
    "PraxisStateDictAdapter",
    "PraxisWindow",
    "ProjectionConfig",
    "RopeConfig",
    "ScaleAdaLN",
    "SinusoidalTimestep",
    "TextEncoderConfig",
    "TowerConfig",
    "VideoConfig",
    "apply_lora",
    "decode_actions",
    "draw",
    "encode_actions",
    "geglu",
    "guarded_action_loss",
    "merge_lora",
    "noise_window",
    "normalize_proprio",
    "praxis_loss",
    "replicate_router_biases",
    "sample",
    "save_pretrained",
    "shard_policy",
    "shift_time",
    "step_generator",
    "trains_backbone",
]
