"""The plan of a model that nobody gave one: the one that it declares, or its structure's."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from shardwalk.parallelizer_core.direct_reads import modules_read_by_others
from shardwalk.parallelizer_core.layers import find_block_stacks
from shardwalk.parallelizer_core.tensor_parallel.coverage import check_uncovered
from shardwalk.parallelizer_core.tensor_parallel.cuts import CUTTING_STYLES
from shardwalk.parallelizer_core.tensor_parallel.open_cuts import refuse_open_cuts
from shardwalk.parallelizer_core.tensor_parallel.partial_styles import LocalParameters
from shardwalk.parallelizer_core.tensor_parallel.replicas import SplitInput, WholeInput
from shardwalk.parallelizer_core.tensor_parallel.structure import structural_plan
from shardwalk.parallelizer_core.tensor_parallel.translation import (
    UntranslatableError,
    declared_plan,
)
from shardwalk.parallelizer_core.tensor_parallel.validation import (
    refuse_conflicting_ties,
)

Plan = dict[str, tuple[ParallelStyle, ...]]


def default_plan(model: nn.Module, tp_size: int, sequence_parallel: bool) -> Plan:
    """The plan that `model` declares where it can be carried out safely, else the structural one.

    A structural plan that cuts all that the declared one cuts, in the same way, stands for it: it
    shares collectives, splits sequences, and may cut more. Where they differ the declared one
    decides, unless `sequence_parallel` is set, as no declared plan splits sequences.

    Raises:
        ValueError: neither fits; it names the entries of the declared plan that have no safe
            translation, what does not fit the structure, and the way out.
    """
    declared, why = _declared(model, sequence_parallel)
    try:
        structural = structural_plan(model, tp_size, sequence_parallel)
    except ValueError as misfit:
        if declared is not None:
            return declared
        if not why:
            raise
        raise ValueError(
            f"{misfit}. The tensor-parallel plan that {type(model).__name__} declares itself is no "
            f"way either: {why}{_for_experts(why)}"
        ) from None
    return structural if declared is None or _stands_for(structural, declared) else declared


def _declared(model: nn.Module, sequence_parallel: bool) -> tuple[Plan | None, str]:
    """The translated plan of the model itself, or why there is none."""
    try:
        plan = declared_plan(model)
    except UntranslatableError as error:
        return None, str(error)
    if plan is None:
        return None, ""
    if sequence_parallel:
        return None, "it splits no sequence, as sequence_parallel=True asks"
    plan = _without_read_tables(model, plan)
    blocks = [path for stack in find_block_stacks(model) for path, _ in stack.blocks]
    if not any(path == b or path.startswith(f"{b}.") for path in _cuts(plan) for b in blocks):
        return None, "it splits nothing inside the blocks"
    why = _unsafe(model, plan)
    return (None, why) if why else (plan, "")


def _without_read_tables(model: nn.Module, plan: Plan) -> Plan:
    """`plan` with those tables whole whose rows another module reads, and what is tied to them."""
    read = {m for m in modules_read_by_others(model) if isinstance(m, nn.Embedding)}
    weights = {id(parameter) for table in read for parameter in table.parameters()}
    return {
        path: styles
        for path, styles in plan.items()
        if not any(id(p) in weights for p in model.get_submodule(path).parameters(recurse=False))
    }


def _cuts(plan: Plan) -> Plan:
    """What a plan cuts, without what only shares collectives."""
    cutting = (*CUTTING_STYLES, LocalParameters)
    kept = {p: tuple(s for s in styles if isinstance(s, cutting)) for p, styles in plan.items()}
    return {path: styles for path, styles in kept.items() if styles}


def _stands_for(structural: Plan, declared: Plan) -> bool:
    """Whether a structural plan cuts, and keeps whole, all that a declared one names likewise."""
    found = _cuts(structural)
    if any(
        path not in found or [*map(_kind, styles)] != [*map(_kind, found[path])]
        for path, styles in _cuts(declared).items()
    ):
        return False
    whole = (SplitInput(), WholeInput())
    return all(
        structural.get(path, styles) == styles
        for path, styles in declared.items()
        if len(styles) == 1 and styles[0] in whole
    )


def _kind(style: ParallelStyle) -> tuple[object, ...]:
    names = ("gather_output", "split_input", "components", "cuts")
    return (type(style), *(getattr(style, name, None) for name in names))


def _unsafe(model: nn.Module, plan: Plan) -> str:
    """Why a translated plan would not have the numbers of one process; empty if it has."""
    read = modules_read_by_others(model)
    for path in _cuts(plan):
        reader = read.get(model.get_submodule(path))
        if reader is not None:
            return f"it splits {path}, whose weight {reader or 'the model'} reads by itself"
    try:
        refuse_open_cuts(model, plan)
        refuse_conflicting_ties(model, plan)
        check_uncovered(model, plan)
    except ValueError as error:
        return str(error)
    return ""


def _for_experts(why: str) -> str:
    if "experts" not in why:
        return ""
    return " (expert parallelism splits layers of experts: set ep_size, with shardwalk-moe-ep)"
