"""Strategies and policies: how a model is wrapped, apart from the sizes of the mesh."""

import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

import torch

from shardwalk.mesh.checkpointing_modes import (
    ActivationCheckpointingMode,
    ActivationCheckpointingScope,
    FrozenMultimodalSharding,
)
from shardwalk.mesh.fields import Config, Fields, string_keys
from shardwalk.mesh.policies import default_mp_policy, parse_mp_policy, parse_offload_policy
from shardwalk.mesh.validation import check_positive_number

if TYPE_CHECKING:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

__all__ = [
    "DDPConfig",
    "DistributedStrategyConfig",
    "FSDP2Config",
    "MegatronFSDPConfig",
    "MoEParallelizerConfig",
    "MultimodalDistributedConfig",
    "MultimodalVisionConfig",
]


@dataclass(frozen=True, kw_only=True)
class MultimodalVisionConfig(Config):
    """Policies for the vision modules of a multimodal model. It has no options yet."""


@dataclass(frozen=True, kw_only=True)
class MultimodalDistributedConfig(Config):
    """Policies for the towers of a multimodal model.

    ``frozen_sharding`` places the parameters of fully frozen towers: ``"root"`` shards them in the
    root unit, which every rank runs; ``"per_layer"`` gives their layers units of their own, so that
    every rank must run or skip a tower alike; ``"replicate"`` keeps a full copy on each rank.
    ``vision`` may be a dict.
    """

    frozen_sharding: FrozenMultimodalSharding = "root"
    vision: MultimodalVisionConfig = field(default_factory=MultimodalVisionConfig)

    def __post_init__(self) -> None:
        fields = Fields(self)
        fields.choice("frozen_sharding", get_args(FrozenMultimodalSharding))
        fields.nested("vision", MultimodalVisionConfig)


@dataclass(frozen=True, kw_only=True)
class FSDP2Config(Config):
    """Options of the FSDP2 strategy. Sizes are in ``ParallelismSizes``.

    ``mp_policy`` is a ``MixedPrecisionPolicy`` or a dict of its fields; None means the default:
    bf16 parameters, fp32 reduction, inputs and outputs untouched. ``offload_policy`` is a
    ``CPUOffloadPolicy``, a dict of its fields, or None. Dtypes may be given by name, ``multimodal``
    as a dict. ``reshard_after_forward`` None reshards every block but the last of a stack, and none
    in a pipeline. A prefetch depth of 0 turns that direction off.
    ``enable_async_tensor_parallel`` sets ``sequence_parallel`` too, with a warning.

    Raises ValueError or TypeError naming the field, the value and what is allowed.
    """

    sequence_parallel: bool = False
    tp_plan: dict[str, Any] | str | None = None
    patch_is_packed_sequence: bool = False
    mp_policy: "MixedPrecisionPolicy | None" = field(default_factory=default_mp_policy)
    offload_policy: "CPUOffloadPolicy | None" = None
    autocast_dtype: torch.dtype | None = None
    activation_checkpointing: ActivationCheckpointingMode = False
    activation_checkpointing_scope: ActivationCheckpointingScope = "all"
    defer_fsdp_grad_sync: bool = True
    reshard_after_forward: bool | None = None
    enable_async_tensor_parallel: bool = False
    enable_compile: bool = False
    enable_fsdp2_prefetch: bool = False
    fsdp2_backward_prefetch_depth: int = 2
    fsdp2_forward_prefetch_depth: int = 1
    multimodal: MultimodalDistributedConfig = field(default_factory=MultimodalDistributedConfig)

    def __post_init__(self) -> None:
        fields = Fields(self)
        fields.booleans("sequence_parallel", "patch_is_packed_sequence", "defer_fsdp_grad_sync")
        fields.booleans("enable_async_tensor_parallel", "enable_compile", "enable_fsdp2_prefetch")
        fields.booleans("reshard_after_forward", optional=True)
        fields.integer("fsdp2_backward_prefetch_depth", minimum=0)
        fields.integer("fsdp2_forward_prefetch_depth", minimum=0)
        fields.convert("tp_plan", _check_tp_plan)
        fields.convert("mp_policy", _mp_policy_or_default)
        if self.offload_policy is not None:
            fields.convert("offload_policy", parse_offload_policy)
        fields.dtype("autocast_dtype")
        fields.activation_checkpointing()
        fields.nested("multimodal", MultimodalDistributedConfig)
        self._force_sequence_parallel()

    def _force_sequence_parallel(self) -> None:
        if self.enable_async_tensor_parallel and not self.sequence_parallel:
            warnings.warn(
                "FSDP2Config.enable_async_tensor_parallel=True overlaps the reduce-scatters of "
                "sequence parallelism: sequence_parallel is set to True as well",
                UserWarning,
                stacklevel=4,
            )
            object.__setattr__(self, "sequence_parallel", True)


@dataclass(frozen=True, kw_only=True)
class DDPConfig(Config):
    """Options of the DDP strategy: every rank holds the whole model, so no other axis is allowed.

    ``bucket_cap_mb`` is in MiB, None means torch's default; ``autocast_dtype`` may be a name.
    """

    activation_checkpointing: ActivationCheckpointingMode = False
    activation_checkpointing_scope: ActivationCheckpointingScope = "all"
    broadcast_buffers: bool = False
    find_unused_parameters: bool = False
    static_graph: bool = False
    bucket_cap_mb: float | None = None
    gradient_as_bucket_view: bool = False
    autocast_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        fields = Fields(self)
        fields.booleans("broadcast_buffers", "find_unused_parameters", "static_graph")
        fields.booleans("gradient_as_bucket_view")
        check_positive_number(fields.option("bucket_cap_mb"), self.bucket_cap_mb, optional=True)
        fields.dtype("autocast_dtype")
        fields.activation_checkpointing()


@dataclass(frozen=True, kw_only=True)
class MegatronFSDPConfig(Config):
    """Options of the Megatron-FSDP strategy, which works with the dp, cp and tp axes only.

    ``megatron_fsdp_unit_modules`` are import paths of the classes to wrap, None means the model's
    own list; ``zero_dp_strategy`` goes from 0 (nothing sharded) to 3 (parameters too).
    ``check_for_nan_in_grad`` is kept for old configs and does nothing in current releases:
    ``report_nan_in_param_grad`` is the check. ``activation_checkpointing`` is on or off here.
    """

    megatron_fsdp_unit_modules: list[str] | None = None
    zero_dp_strategy: int = 3
    init_fsdp_with_meta_device: bool = False
    grad_reduce_in_fp32: bool = False
    preserve_fp32_weights: bool = False
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    check_for_nan_in_grad: bool = True
    report_nan_in_param_grad: bool = False
    average_in_collective: bool = False
    disable_bucketing: bool = False
    calculate_per_token_loss: bool = False
    keep_fp8_transpose_cache: bool = False
    nccl_ub: bool = False
    fsdp_double_buffer: bool = False
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        fields = Fields(self)
        fields.integer("zero_dp_strategy", minimum=0, maximum=3)
        fields.convert("megatron_fsdp_unit_modules", _check_class_paths)
        fields.convert("activation_checkpointing", _full_or_off)
        fields.booleans("init_fsdp_with_meta_device", "grad_reduce_in_fp32")
        fields.booleans("preserve_fp32_weights", "overlap_grad_reduce", "overlap_param_gather")
        fields.booleans("check_for_nan_in_grad", "report_nan_in_param_grad", "disable_bucketing")
        fields.booleans("average_in_collective", "calculate_per_token_loss", "nccl_ub")
        fields.booleans("keep_fp8_transpose_cache", "fsdp_double_buffer")


DistributedStrategyConfig = FSDP2Config | DDPConfig | MegatronFSDPConfig
"""The strategies."""


@dataclass(frozen=True, kw_only=True)
class MoEParallelizerConfig(Config):
    """Options of the walk over a mixture-of-experts model.

    ``ignore_router_for_ac`` saves what the router computed instead of recomputing it;
    ``reshard_after_forward`` applies where ``FSDP2Config.reshard_after_forward`` is None;
    ``lm_head_precision`` puts the head into a unit of that dtype; ``wrap_outer_model`` makes the
    module that holds the inner model the root unit, else the inner model is and the head has its
    own; ``mp_policy``, if not None, replaces that of ``FSDP2Config`` (a dict is accepted).
    """

    ignore_router_for_ac: bool = True
    reshard_after_forward: bool = False
    lm_head_precision: str | torch.dtype | None = None
    wrap_outer_model: bool = True
    mp_policy: "MixedPrecisionPolicy | None" = None

    def __post_init__(self) -> None:
        fields = Fields(self)
        fields.booleans("ignore_router_for_ac", "reshard_after_forward", "wrap_outer_model")
        fields.dtype("lm_head_precision")
        if self.mp_policy is not None:
            fields.convert("mp_policy", parse_mp_policy)


def _mp_policy_or_default(option: str, value: object) -> "MixedPrecisionPolicy":
    return default_mp_policy() if value is None else parse_mp_policy(option, value)


def _check_tp_plan(option: str, value: object) -> object:
    if isinstance(value, dict):
        string_keys(option, value)
    elif value is not None and not (isinstance(value, str) and value.strip()):
        raise TypeError(
            f"{option}={value!r} must be a dict of module paths to parallel styles, "
            "the name or import path of a plan, or None"
        )
    return value


def _check_class_paths(option: str, value: object) -> list[str] | None:
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or not value:
        raise TypeError(
            f"{option}={value!r} must be a non-empty list of class import paths or None"
        )
    for path in value:
        if not isinstance(path, str) or not all(map(str.isidentifier, path.split("."))):
            raise ValueError(f"{option} has {path!r}, which is no import path such as 'pkg.Block'")
    return list(value)


def _full_or_off(option: str, value: object) -> bool:
    if value in (False, True, "full"):
        return bool(value)
    raise ValueError(
        f"{option}={value!r} must be False, True or 'full': "
        "Megatron-FSDP has no selective checkpointing (FSDP2Config and DDPConfig have)"
    )
