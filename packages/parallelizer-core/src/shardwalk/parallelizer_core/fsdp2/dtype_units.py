"""Units of one dtype: what `fully_shard` needs, for blocks that mix dtypes.

torch reduces the gradients of a unit in one buffer, so the trainable parameters of a unit must
share their storage dtype, and one policy casts all of a unit's parameters, so they must share their
compute dtype too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from shardwalk.parallelizer_core._torch_compat import is_view, own_linear_outputs
from shardwalk.parallelizer_core.direct_reads import reads_parameters
from shardwalk.parallelizer_core.fp32_pins import is_pinned
from shardwalk.parallelizer_core.fsdp2.nested import map_tensors
from shardwalk.parallelizer_core.fsdp2.policies import pinned_policy, stream_cast, torch_policy
from shardwalk.parallelizer_core.fsdp2.replicated_parameters import replicate_parameters
from shardwalk.parallelizer_core.layers import has_forward

Door = Callable[..., nn.Module]


@dataclass(frozen=True)
class UnitDtypes:
    """What the parameters of one unit share.

    Attributes:
        compute: dtype in the forward; None where the policy casts nothing, so that each parameter
            keeps its own and frozen ones of any dtype may sit beside the trainable ones.
        storage: dtype of the trainable parameters, None for a parameter that is frozen and fits any
            unit of its compute dtype.
        pinned: whether the compute dtype is pinned against the policy.
    """

    compute: torch.dtype | None
    storage: torch.dtype | None
    pinned: bool

    def fits(self, unit: UnitDtypes) -> bool:
        """Whether a parameter of these dtypes may live in a unit of those."""
        same_compute = (self.compute, self.pinned) == (unit.compute, unit.pinned)
        return same_compute and self.storage in (None, unit.storage)


def shard_unit(module: nn.Module, door: Door, **kwargs: Any) -> nn.Module:
    """Make `module` one unit, or several of one dtype each where its parameters differ.

    `kwargs` are those of torch's `fully_shard`. Only parameters that no unit holds yet are looked
    at. `door` is called for each part when the module has to be split.
    """
    policy = kwargs.get("mp_policy") or MixedPrecisionPolicy()
    ignored = kwargs.get("ignored_params") or set()
    kinds = [_dtypes(p, policy) for p in unheld_parameters(module) if p not in ignored]
    unit = _prevailing((kind, 1) for kind in kinds)
    if unit is not None and (
        any(not kind.fits(unit) for kind in kinds)
        or _scalars(module, ignored)
        or (unit.pinned and _holds_unit(module))
    ):
        return fully_shard_by_dtype(module, door, **kwargs)
    cast = stream_cast(policy)
    kwargs["mp_policy"] = torch_policy(policy)
    if unit is not None and unit.pinned:
        assert unit.compute is not None
        cast, kwargs["mp_policy"] = None, pinned_policy(unit.compute)
    own_linear_outputs(module)
    module.register_forward_hook(_own_outputs)
    attributes = {place: vars(p) for place, p in _places(module) if p not in ignored}
    fully_shard(module, **kwargs)
    for place, parameter in _places(module):
        vars(parameter).update(attributes.get(place, {}))  # such as a mark for the optimizer
    if cast is not None:
        module.register_forward_pre_hook(cast, with_kwargs=True)
    return module


def fully_shard_by_dtype(module: nn.Module, door: Door, **kwargs: Any) -> nn.Module:
    """Split `module` into units of one dtype each: what differs first, then the rest.

    The rest has the dtypes that most elements have of those that are not pinned: a unit of pinned
    ones casts what comes in, and around other parts that would change what they compute. A
    parameter that differs and sits bare beside others in its module (or has no dimension to shard)
    stays whole, equal on every rank, and its gradient is averaged by a hook.

    Args:
        module: the block; parameters that a unit holds already are left alone.
        door: called with each submodule that becomes a unit of its own, and last with `module`.
        kwargs: those of torch's `fully_shard`; `mesh` is needed.
    """
    policy = kwargs.get("mp_policy") or MixedPrecisionPolicy()
    ignored: set[nn.Parameter] = set(kwargs.get("ignored_params") or ())
    rest = _prevailing(
        (_dtypes(p, policy), p.numel())
        for p in unheld_parameters(module)
        if p not in ignored and not is_pinned(p)
    )
    for part in _parts(module, rest, policy, ignored):
        door(part, **kwargs)
    bare = [  # in an order that is the same on every rank: one buffer reduces them
        p
        for p in unheld_parameters(module)
        if p not in ignored and (p.ndim == 0 or not _fits(p, rest, policy))
    ]
    kwargs["ignored_params"] = ignored.union(bare)
    door(module, **kwargs)
    replicate_parameters(bare, unit=module, mesh=kwargs["mesh"])
    return module


def _own_outputs(module: nn.Module, args: Any, output: Any) -> Any:
    """Copies of outputs that are views: an in-place op on one would drop FSDP2's backward hook."""
    if not torch.is_grad_enabled():
        return None
    return map_tensors(lambda t: t.clone() if t.requires_grad and is_view(t) else t, output)


def unheld_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of `module` that no unit inside it holds yet, each once."""
    return list(dict.fromkeys(_walk_unheld(module)))


def _walk_unheld(module: nn.Module) -> Iterator[nn.Parameter]:
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _walk_unheld(child)


def _places(module: nn.Module) -> Iterator[tuple[tuple[nn.Module, str], nn.Parameter]]:
    """Every parameter of `module` by the module and the name it stands under."""
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            yield (owner, name), parameter


def _dtypes(parameter: nn.Parameter, policy: MixedPrecisionPolicy) -> UnitDtypes:
    pinned = is_pinned(parameter)
    compute = parameter.dtype if pinned or not parameter.is_floating_point() else policy.param_dtype
    storage = parameter.dtype if parameter.requires_grad else None
    return UnitDtypes(compute, storage, pinned)


def _prevailing(weighed: Iterable[tuple[UnitDtypes, int]]) -> UnitDtypes | None:
    """The dtypes of the largest weight; trainable ones first, since frozen ones fit in."""
    weights: Counter[UnitDtypes] = Counter()
    for kind, weight in weighed:
        weights[kind] += weight
    by_compute: Counter[tuple[torch.dtype | None, bool]] = Counter()
    for kind, weight in weights.items():
        by_compute[kind.compute, kind.pinned] += weight
    if not by_compute:
        return None
    (compute, pinned), _ = by_compute.most_common(1)[0]
    members = [k for k in weights if (k.compute, k.pinned) == (compute, pinned)]
    return max(members, key=lambda kind: (kind.storage is not None, weights[kind]))


def _parts(
    module: nn.Module,
    rest: UnitDtypes | None,
    policy: MixedPrecisionPolicy,
    ignored: set[nn.Parameter],
) -> list[nn.Module]:
    """The largest submodules whose parameters all differ from `rest` in the same way.

    None of them holds a unit already, which would get inputs that the part's policy casts, and none
    is read by its parent instead of being called, as only a call gathers it.
    """
    found: list[nn.Module] = []
    for name, child in module.named_children():
        own = [p for p in unheld_parameters(child) if p not in ignored]
        if isinstance(child, FSDPModule) or all(_fits(p, rest, policy) for p in own):
            continue
        kinds = [_dtypes(p, policy) for p in own]
        unit = _prevailing((kind, 1) for kind in kinds)
        assert unit is not None
        is_part = all(kind.fits(unit) for kind in kinds) and has_forward(child)
        is_part = is_part and not _holds_unit(child) and all(p.ndim for p in own)
        if is_part and not reads_parameters(module, name):
            found.append(child)
        else:
            found.extend(_parts(child, rest, policy, ignored))
    return list(dict.fromkeys(found))


def _fits(parameter: nn.Parameter, unit: UnitDtypes | None, policy: MixedPrecisionPolicy) -> bool:
    """Whether a parameter may live in a unit of these dtypes; None is one that holds none."""
    return unit is not None and _dtypes(parameter, policy).fits(unit)


def _holds_unit(module: nn.Module) -> bool:
    return any(isinstance(inner, FSDPModule) for inner in module.modules() if inner is not module)


def _scalars(module: nn.Module, ignored: set[nn.Parameter]) -> bool:
    return any(p.ndim == 0 and p not in ignored for p in unheld_parameters(module))
