"""Which tensor-parallel plan a model gets: the one asked for, its sidecar's, or the default."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from shardwalk.parallelizer_core.tensor_parallel.cuts import splits_sequence
from shardwalk.parallelizer_core.tensor_parallel.default_plans import default_plan
from shardwalk.parallelizer_core.tensor_parallel.patterns import expand_patterns, plan_styles
from shardwalk.parallelizer_core.tensor_parallel.replica_requests import requested_styles

PlanFunction = Callable[[nn.Module, bool], Mapping[str, Any]]
"""A plan that depends on the model: called with it and with `sequence_parallel`."""

SidecarPlan = Callable[[nn.Module, bool], Mapping[str, Any] | None]
"""The same of a sidecar, which may have none."""

_registered: dict[str, Mapping[str, Any] | PlanFunction] = {}


def register_tp_plan(name: str, plan: Mapping[str, Any] | PlanFunction) -> None:
    """Give a tensor-parallel plan a name that `tp_plan=` understands; the last call wins.

    Args:
        name: any text; a registered name goes before an import path.
        plan: module-path patterns -> a ParallelStyle or a tuple of them, or a function
            `(model, sequence_parallel)` that returns such a dict.

    Raises:
        TypeError: `name` is no text, or `plan` neither a dict of styles nor callable.
    """
    if not (isinstance(name, str) and name.strip()):
        raise TypeError(f"a tensor-parallel plan is registered under a name, not under {name!r}")
    _check_plan(name, plan)
    _registered[name] = plan


def resolve_plan(
    model: nn.Module,
    tp_mesh_size: int,
    requested: Mapping[str, Any] | str | None,
    sequence_parallel: bool,
    sidecar_plan: SidecarPlan | None = None,
) -> dict[str, tuple[ParallelStyle, ...]]:
    """The styles of every planned module by its path, in the order of the model's modules.

    What is asked for goes before the sidecar's plan, that before the one which the model declares,
    and that before the structural default.

    Args:
        tp_mesh_size: the number of tensor-parallel ranks, named in errors.
        requested: a dict of module-path patterns, a registered name, an import path
            (`pkg.module.attribute` or `pkg.module:attribute`) of a dict or function, or None.
        sequence_parallel: whether hidden states must be split over the sequence between layers.
        sidecar_plan: the plan of the model's sidecar; it returns None where it has none.

    Raises:
        ValueError: a pattern or name that matches nothing, a module that two patterns match, a plan
            without sequence parallelism where it was asked for, a model that the structural default
            does not fit, a module that asks for a gradient reduction that does not exist.
        TypeError: a value that is no style.
    """
    requested_styles(model)  # before a plan fails for want of what such a module asks for
    if isinstance(requested, str):
        source, patterns = (
            f"tp_plan={requested!r}",
            _named_plan(requested, model, sequence_parallel),
        )
    elif requested is not None:
        source, patterns = "tp_plan", requested
    else:
        source = "the sidecar's tensor-parallel plan"
        given = _called(sidecar_plan, source, model, sequence_parallel) if sidecar_plan else None
        if given is None:
            return default_plan(model, tp_mesh_size, sequence_parallel)
        patterns = given
    plan = expand_patterns(model, patterns, source)
    if not plan:
        raise ValueError(
            f"{source} is empty, so all {tp_mesh_size} tensor-parallel ranks would do the same "
            f"work; name modules in it, or use tp_size=1"
        )
    _check_sequence(plan, sequence_parallel, source)
    return plan


def check_plan_with_sidecar(
    sidecar: object, model: nn.Module, plan: Mapping[str, tuple[ParallelStyle, ...]]
) -> None:
    """Let the sidecar's `validate_tp_plan(model, plan)`, where it has one, refuse the plan."""
    validate = getattr(sidecar, "validate_tp_plan", None)
    if callable(validate):
        validate(model, plan)


def _check_sequence(
    plan: Mapping[str, tuple[ParallelStyle, ...]], sequence_parallel: bool, source: str
) -> None:
    if not sequence_parallel:
        return
    if not any(splits_sequence(style) for styles in plan.values() for style in styles):
        raise ValueError(
            f"sequence_parallel=True, but {source} splits no sequence, and the plan decides; add "
            f"styles that do (RowParallel(sequence_parallel=True) with a SequenceBoundary at both "
            f"ends of the blocks, or torch's SequenceParallel), or use sequence_parallel=False"
        )


def _named_plan(name: str, model: nn.Module, sequence_parallel: bool) -> Mapping[str, Any]:
    plan = _registered[name] if name in _registered else _import_plan(name)
    _check_plan(name, plan)
    if isinstance(plan, Mapping):
        return plan
    source = f"tp_plan={name!r}"
    made = _called(plan, source, model, sequence_parallel)
    if made is None:
        raise TypeError(f"{source} returned None; it must return a dict of module paths to styles")
    return made


def _called(
    plan: SidecarPlan, source: str, model: nn.Module, sequence_parallel: bool
) -> Mapping[str, Any] | None:
    """What a plan function returns; its errors pass, with a note that names it."""
    try:
        made = plan(model, sequence_parallel)
    except Exception as error:
        error.add_note(f"raised by {source}, called with (model, {sequence_parallel})")
        raise
    if made is not None and not isinstance(made, Mapping):
        raise TypeError(f"{source} returned {made!r}; it must return a dict of module paths")
    return made


def _import_plan(path: str) -> Any:
    module, separator, attribute = path.partition(":")
    if not separator:
        module, _, attribute = path.rpartition(".")
    if not (module and attribute):
        raise ValueError(
            f"tp_plan={path!r} is no registered plan ({_known(path)}) and no import path such as "
            f"'package.module.PLAN'; call register_tp_plan({path!r}, plan), or give the plan itself"
        )
    try:
        return _imported(module, attribute)
    except _NotThereError as error:
        raise ValueError(
            f"tp_plan={path!r} is no registered plan ({_known(path)}), and as an import path "
            f"it leads nowhere: {error.__cause__}; correct it, or call "
            f"register_tp_plan({path!r}, plan)"
        ) from error.__cause__
    except Exception as error:
        error.add_note(
            f"raised while tp_plan={path!r} was imported, which is no registered plan "
            f"({_known(path)})"
        )
        raise


class _NotThereError(Exception):
    """A module or attribute of an import path does not exist; its cause says which."""


def _imported(module: str, attribute: str) -> Any:
    """What stands at an import path; an error raised inside a module that exists comes through."""
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise _NotThereError from error
    for name in attribute.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            if error.name != name or error.obj is not found:
                raise
            raise _NotThereError from error
    return found


def _known(name: str) -> str:
    near = difflib.get_close_matches(name, _registered, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"registered: {', '.join(sorted(_registered)) or 'none'}{hint}"


def _check_plan(name: str, plan: object) -> None:
    if isinstance(plan, Mapping):
        for key, value in plan.items():
            plan_styles(f"tp_plan {name!r}", key, value)
    elif not callable(plan):
        raise TypeError(
            f"tp_plan={name!r} is {plan!r}; a plan is a dict of module paths to styles, or a "
            f"function (model, sequence_parallel) that returns one"
        )
