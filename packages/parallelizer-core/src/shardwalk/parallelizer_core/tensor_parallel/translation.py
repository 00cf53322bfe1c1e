"""A model's declared plan in shardwalk's styles, where each entry has a safe translation.

What a declared plan does not name stays whole. It is trusted in what is cut, and not in the rest:
fused layers need a layout proven from the source, and the checks of every plan hold here too. Where
the structural default cuts a layer the same way, its styles are taken, which share collectives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from shardwalk.parallelizer_core.tensor_parallel.declared import (
    Entry,
    declared_entries,
    places_of,
    stated_integer,
)
from shardwalk.parallelizer_core.tensor_parallel.embedding_styles import (
    FeatureParallel,
    VocabularyParallel,
)
from shardwalk.parallelizer_core.tensor_parallel.layer_proofs import (
    proven_layers,
    whole_latents,
)
from shardwalk.parallelizer_core.tensor_parallel.partial_styles import (
    LocalParameters,
    SharedTail,
    SumOutput,
)
from shardwalk.parallelizer_core.tensor_parallel.replicas import (
    SplitInput,
    TokenParallel,
    WholeInput,
)
from shardwalk.parallelizer_core.tensor_parallel.styles import ColumnParallel, RowParallel
from shardwalk.parallelizer_core.tensor_parallel.tables import is_cuttable

Plan = dict[str, tuple[ParallelStyle, ...]]

_OF_EXPERTS = ("moe_tp_experts", "moe_identity_expert", "grouped_gemm", "ep_dispatch_experts")
_BARE = "local_params"


class UntranslatableError(Exception):
    """A declared plan with entries that have no safe translation.

    Attributes:
        problems: a clause for each, which names it.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


def declared_plan(model: nn.Module) -> Plan | None:
    """The styles of every module that the plan which `model` declares names; None without one.

    Raises:
        UntranslatableError: some of its entries cannot be carried out with the numbers of one
            process, or none names anything.
        ValueError: an entry that was given to this model alone names nothing, or an unknown style.
    """
    entries = declared_entries(model)
    if not entries:
        return None
    draft = _Draft(model=model)
    for entry in sorted(entries, key=lambda entry: entry.style not in _OF_EXPERTS):
        draft.add(entry)
    draft.cut_bare_parameters()
    if draft.problems:
        raise UntranslatableError(list(dict.fromkeys(draft.problems)))
    if not draft.styles:
        keys = ", ".join(repr(entry.key) for entry in entries)
        raise UntranslatableError([f"none of its entries names anything in the model ({keys})"])
    return _finished(model, draft.styles)


def _finished(model: nn.Module, styles: Plan) -> Plan:
    layers, problems = proven_layers(model, styles)
    if problems:
        raise UntranslatableError(problems)
    plan = {**styles, **layers}
    plan |= {path: (WholeInput(),) for path in whole_latents(model, plan)}
    order = {module: path for path, module in model.named_modules()}
    return {path: plan[path] for path in order.values() if path in plan}


@dataclass(kw_only=True)
class _Draft:
    """The entries of a declared plan in styles, one by one."""

    model: nn.Module
    styles: Plan = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    bare: dict[str, dict[str, tuple[int, Entry]]] = field(default_factory=lambda: defaultdict(dict))
    bare_owners: set[str] = field(default_factory=set)
    experts: set[str] = field(default_factory=set)

    def add(self, entry: Entry) -> None:
        """Take up one entry; one that names nothing is an alternative that this model lacks."""
        places = places_of(self.model, entry)
        if entry.is_own:
            self._check_own(entry, bool(places))
        if not places:
            return
        if entry.style in _OF_EXPERTS:
            self.experts.update(places.modules)
            self.problems.append(f"{entry} splits experts, which tensor parallelism leaves to "
                                 f"expert parallelism")  # fmt: skip
            return
        if entry.style == _BARE:
            self.bare_owners.update(places.modules)
            return
        translate = TRANSLATIONS.get(str(entry.style))
        if translate is None:
            self.problems.append(f"{entry} has a style that is not known here")
            return
        for path in places.modules:
            self._add_module(entry, path, translate)
        for owner, name in places.parameters:
            if owner not in self.experts:
                self._add_parameter(entry, owner, name)

    def _check_own(self, entry: Entry, names_something: bool) -> None:
        known = sorted((*TRANSLATIONS, *_OF_EXPERTS, _BARE))
        if entry.style not in known:
            raise ValueError(
                f"_tp_plan of {type(self.model).__name__}: {entry} has an unknown style; the known "
                f"ones are {', '.join(known)}"
            )
        if not names_something:
            raise ValueError(
                f"_tp_plan of {type(self.model).__name__}: {entry} names no module or parameter of "
                f"it; correct the key (relative to the model, * for the number of a layer)"
            )

    def _add_module(self, entry: Entry, path: str, translate: Translation) -> None:
        module = self.model.get_submodule(path)
        translated = translate(self.model, path, module)
        if isinstance(translated, str):
            self.problems.append(f"{entry} at {path}: {translated}")
        elif path in self.styles:
            self.problems.append(f"{entry} names {path}, which another entry names too")
        else:
            self.styles[path] = translated

    def _add_parameter(self, entry: Entry, owner: str, name: str) -> None:
        parameter = self.model.get_submodule(owner).get_parameter(name)
        dims = {"colwise": max(parameter.ndim - 2, 0), "rowwise": parameter.ndim - 1}
        dim = dims.get(str(entry.style))
        if entry.style == "rowwise" and (name == "bias" or parameter.ndim < 2):
            dim = None
        if dim is None:
            self.problems.append(f"{entry} names a parameter, which this style cannot cut alone")
        else:
            self.bare[owner][name] = (dim, entry)

    def cut_bare_parameters(self) -> None:
        """Give the owner of each cut parameter the style that shows it the local part."""
        for owner, cuts in self.bare.items():
            if owner not in self.bare_owners:
                entries = "; ".join(str(entry) for _, entry in cuts.values())
                self.problems.append(f"{entries}: {owner} has no entry {_BARE!r}, so that its "
                                     f"forward would see a distributed parameter")  # fmt: skip
                continue
            style = LocalParameters(cuts={name: dim for name, (dim, _) in cuts.items()})
            self.styles[owner] = (style, *self.styles.get(owner, ()))


Translated = tuple[ParallelStyle, ...] | str
Translation = Callable[[nn.Module, str, nn.Module], Translated]
"""From model, path and module to styles, or to why there are none."""


def _linear(make: Callable[[nn.Linear], ParallelStyle]) -> Translation:
    def translate(model: nn.Module, path: str, module: nn.Module) -> Translated:
        if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
            return f"a {type(module).__name__} is no nn.Linear with its own forward"
        return (make(module),)

    return translate


def _packed(make: Callable[[tuple[int, int]], ParallelStyle], name: str) -> Translation:
    """A layer of two components of one size."""

    def translate(model: nn.Module, path: str, module: nn.Module) -> Translated:
        size = getattr(module, name, 1)
        if size % 2:
            return f"its {name}={size} are no two components of one size"
        return _linear(lambda _: make((size // 2, size // 2)))(model, path, module)

    return translate


def _table(style: ParallelStyle) -> Translation:
    def translate(model: nn.Module, path: str, module: nn.Module) -> Translated:
        if not isinstance(module, nn.Embedding) or not is_cuttable(module):
            return f"a {type(module).__name__} is no nn.Embedding that looks rows up and no more"
        return (style,)

    return translate


def _any(style: ParallelStyle) -> Translation:
    return lambda model, path, module: (style,)


def _latent(model: nn.Module, path: str, module: nn.Module) -> Translated:
    """A projection whose last features are the rotary part of the keys of all heads."""
    if not isinstance(module, nn.Linear):
        return f"a {type(module).__name__} is no nn.Linear"
    size = stated_integer(model, path, "qk_rope_head_dim")
    if size is None or not 0 < size < module.out_features:
        return "the config has no qk_rope_head_dim, so that nothing says which features are rotary"
    return (SharedTail(features=size),)


_GATHERED = _linear(lambda _: ColumnParallel(gather_output=True))
_OF_WHOLE = _linear(lambda _: RowParallel(split_input=True))

TRANSLATIONS: dict[str, Translation] = {
    "colwise": _linear(lambda _: ColumnParallel()),
    "colwise_gather_output": _GATHERED,
    "colwise_rep": _GATHERED,
    "rowwise": _linear(lambda _: RowParallel()),
    "rowwise_split_input": _OF_WHOLE,
    "rowwise_rep": _OF_WHOLE,
    "embedding_rowwise": _table(VocabularyParallel()),
    "embedding_colwise": _table(FeatureParallel()),
    "packed_colwise": _packed(lambda sizes: ColumnParallel(components=sizes), "out_features"),
    "packed_rowwise": _packed(lambda sizes: RowParallel(components=sizes), "in_features"),
    "sequence_parallel": _any(TokenParallel()),
    "replicated_with_grad_allreduce": _any(SplitInput()),
    "mla_kv_a_proj": _latent,
    "all_reduce": _any(SumOutput()),
    "replicate": _any(WholeInput()),
}
