"""From a request for tensor parallelism to a model whose layers are split over its axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from shardwalk.parallelizer_core.tensor_parallel.adapters import without_wrappers
from shardwalk.parallelizer_core.tensor_parallel.apply import apply_plan
from shardwalk.parallelizer_core.tensor_parallel.component_checks import (
    refuse_unnamed_components,
)
from shardwalk.parallelizer_core.tensor_parallel.coverage import check_uncovered
from shardwalk.parallelizer_core.tensor_parallel.dropout import check_first_numbers, split_dropout
from shardwalk.parallelizer_core.tensor_parallel.dropout_checks import refuse_unknown_dropout
from shardwalk.parallelizer_core.tensor_parallel.equal_inputs import check_first_inputs
from shardwalk.parallelizer_core.tensor_parallel.lora import refuse_unsplittable_adapters
from shardwalk.parallelizer_core.tensor_parallel.open_cuts import refuse_open_cuts
from shardwalk.parallelizer_core.tensor_parallel.plans import (
    SidecarPlan,
    check_plan_with_sidecar,
    resolve_plan,
)
from shardwalk.parallelizer_core.tensor_parallel.repeated_blocks import (
    refuse_unpaired_boundaries,
)
from shardwalk.parallelizer_core.tensor_parallel.replica_requests import with_requests
from shardwalk.parallelizer_core.tensor_parallel.sequence_lengths import refuse_uneven_sequences
from shardwalk.parallelizer_core.tensor_parallel.validation import validate_tp_sizes

Plan = dict[str, tuple[ParallelStyle, ...]]


def plan_tensors(
    model: nn.Module,
    tp_size: int,
    *,
    requested: Mapping[str, Any] | str | None,
    sequence_parallel: bool,
    sidecar: object,
    sidecar_plan: SidecarPlan | None = None,
) -> Plan:
    """The styles of every module that takes part in tensor parallelism; changes nothing.

    On an axis of one rank a plan that was asked for is checked, and the result is empty.

    Args:
        requested: what `tp_plan` says.
        sidecar: may have a `validate_tp_plan(model, plan)` that refuses a plan, and a
            `_validate_tp_sizes(model, tp_size, plan)` instead of `validate_tp_sizes`.
        sidecar_plan: the plan of the model itself, for when none is requested.

    Raises:
        ValueError: the plan does not fit the model or the number of ranks.
    """
    if tp_size == 1 and requested is None:
        return {}
    with without_wrappers(model) as wrapped:
        plan = _plan(model, tp_size, requested, sequence_parallel, sidecar, sidecar_plan)
        refuse_unknown_dropout(model, tp_size, plan, wrapped)
    refuse_unsplittable_adapters(wrapped, plan)
    return plan


def _plan(
    model: nn.Module,
    tp_size: int,
    requested: Mapping[str, Any] | str | None,
    sequence_parallel: bool,
    sidecar: object,
    sidecar_plan: SidecarPlan | None,
) -> Plan:
    plan = resolve_plan(model, tp_size, requested, sequence_parallel, sidecar_plan)
    plan = with_requests(model, plan)
    check_plan_with_sidecar(sidecar, model, plan)
    if tp_size == 1:
        return {}
    refuse_unnamed_components(model, plan)
    getattr(sidecar, "_validate_tp_sizes", validate_tp_sizes)(model, tp_size, plan)
    refuse_open_cuts(model, plan)
    refuse_unpaired_boundaries(model, plan)
    return plan | check_uncovered(model, plan)


def parallelize_tensors(model: nn.Module, mesh: DeviceMesh, plan: Plan) -> None:
    """Split `model` over the tensor-parallel axis in place; nothing is communicated."""
    apply_plan(model, mesh, plan)
    with without_wrappers(model) as wrapped:
        drops = split_dropout(model, mesh, plan, wrapped)
    if drops:
        check_first_numbers(model, mesh)
    check_first_inputs(model, mesh)
    refuse_uneven_sequences(model, plan, mesh.size())


def describe_plan(plan: Plan) -> str:
    """What must be the same on every rank: which styles each module has."""
    return "; ".join(
        f"{path}: {', '.join(type(style).__qualname__ for style in styles)}"
        for path, styles in plan.items()
    )
