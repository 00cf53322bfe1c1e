"""Options of pipeline parallelism."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from shardwalk.mesh.fields import Config, Fields

__all__ = ["PIPELINE_SCHEDULES", "PipelineConfig"]

PIPELINE_SCHEDULES = (
    "1f1b",
    "gpipe",
    "interleaved_1f1b",
    "looped_bfs",
    "dfs",
    "v_schedule",
    "zero_bubble",
)
"""The names of the schedules."""

_POOLED_SCHEDULES = ("1f1b", "interleaved_1f1b")


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(Config):
    """Options of pipeline parallelism, which is on when ``pp_size`` is above one.

    ``pp_schedule_csv`` is the path of a schedule that replaces ``pp_schedule``. ``pp_batch_size``
    is the batch of one stage in samples, a multiple of ``pp_microbatch_size``.
    ``module_fqns_per_model_part`` names the modules of each stage and replaces automatic splitting.
    ``dtype`` (or its name) is that of the activations between stages, None means the model's.
    ``pp_seq_len`` is in tokens. ``pp_recv_buffer_pool`` reuses receive buffers, ``slack`` sets more
    than are in flight; it works with 1f1b and interleaved_1f1b.

    Raises ValueError or TypeError naming the field, the value and what is allowed.
    """

    pp_schedule: str | None = "1f1b"
    pp_schedule_csv: str | None = None
    pp_microbatch_size: int = 1
    pp_batch_size: int = 1
    layers_per_stage: int | None = None
    round_virtual_stages_to_pp_multiple: Literal["up", "down"] | None = None
    module_fqns_per_model_part: list[list[str]] | None = None
    patch_inner_model: bool = True
    patch_causal_lm_model: bool = True
    patch_stage_backward_maybe_with_nosync: bool = False
    dtype: torch.dtype | None = None
    scale_grads_in_schedule: bool = False
    loss_fn: Callable[..., Any] | None = None
    pp_seq_len: int | None = None
    pp_recv_buffer_pool: bool = False
    pp_recv_buffer_pool_slack: int = 2

    def __post_init__(self) -> None:
        fields = Fields(self)
        fields.booleans("patch_inner_model", "patch_causal_lm_model", "scale_grads_in_schedule")
        fields.booleans("patch_stage_backward_maybe_with_nosync", "pp_recv_buffer_pool")
        fields.integer("layers_per_stage", optional=True)
        fields.integer("pp_seq_len", optional=True)
        fields.integer("pp_recv_buffer_pool_slack", minimum=0)
        fields.choice("round_virtual_stages_to_pp_multiple", ("up", "down"), optional=True)
        fields.dtype("dtype")
        fields.convert("module_fqns_per_model_part", _check_stages)
        fields.convert("loss_fn", _check_callable)
        self._check_schedule(fields)
        self._check_batch(fields)

    def _check_schedule(self, fields: Fields) -> None:
        if self.pp_schedule is not None or self.pp_schedule_csv is None:
            fields.convert("pp_schedule", _schedule_name)
            fields.choice("pp_schedule", PIPELINE_SCHEDULES)
        fields.convert("pp_schedule_csv", _check_path)
        csv = self.pp_schedule_csv
        pooled = csv is None and self.pp_schedule in _POOLED_SCHEDULES
        if self.pp_recv_buffer_pool and not pooled:
            name = self.pp_schedule if csv is None else csv
            raise ValueError(
                f"{fields.option('pp_recv_buffer_pool')}=True needs pp_schedule "
                f"{' or '.join(_POOLED_SCHEDULES)}, not {name!r}"
            )

    def _check_batch(self, fields: Fields) -> None:
        fields.integer("pp_microbatch_size")
        fields.integer("pp_batch_size")
        if self.pp_batch_size % self.pp_microbatch_size:
            raise ValueError(
                f"{fields.option('pp_batch_size')}={self.pp_batch_size} must be a multiple of "
                f"pp_microbatch_size={self.pp_microbatch_size}"
            )


def _schedule_name(option: str, value: object) -> object:
    """Return the name in our spelling: torch's ``Interleaved1F1B`` is ``interleaved_1f1b``."""
    if not isinstance(value, str):
        return value
    plain = value.lower().replace("_", "").replace("-", "")
    return next((s for s in PIPELINE_SCHEDULES if s.replace("_", "") == plain), value)


def _check_path(option: str, value: object) -> object:
    if value is not None and not (isinstance(value, str) and value.strip()):
        raise TypeError(f"{option}={value!r} must be the path of a file or None")
    return value


def _check_stages(option: str, value: object) -> list[list[str]] | None:
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or not value:
        raise TypeError(f"{option}={value!r} must be a non-empty list of lists of module names")
    for stage in value:
        if not isinstance(stage, (list, tuple)) or not all(isinstance(n, str) for n in stage):
            raise TypeError(f"{option} has the stage {stage!r}, which must be a list of names")
        if not stage:
            raise ValueError(f"{option} has a stage without modules: {value!r}")
        if len(set(stage)) < len(stage):
            raise ValueError(f"{option} names a module twice in the stage {stage!r}")
    return [list(stage) for stage in value]


def _check_callable(option: str, value: object) -> object:
    if value is not None and not callable(value):
        raise TypeError(f"{option}={value!r} must be a callable or None")
    return value
