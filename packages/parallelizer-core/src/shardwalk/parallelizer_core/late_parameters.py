"""Parameters that an optimizer steps although nobody reduces their gradients.

Two kinds: those that came into a model after `parallelize_model` (adapters, a new head), which are
in no unit and in no bucket of DDP, and the whole weights that FSDP2 gathers for a forward, which
`parameters()` gives until the backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from shardwalk.parallelizer_core._torch_compat import gathered_parameters
from shardwalk.parallelizer_core.model_tensors import canonical_name
from shardwalk.parallelizer_core.parallel_state import unwrap_model

_SHOWN = 3
_WAY_OUT = (
    "add adapters and other new parameters before parallelize_model, and build the optimizer after"
)


@dataclass(frozen=True)
class _Reduced:
    """The parameters of a model whose gradients `parallelize_model` saw to.

    Attributes:
        plain: names of the whole ones beside FSDP2 units, which were kept out on purpose. Names,
            since `materialize` may put another object in a parameter's place.
        held: those of a DDP wrapper, which goes by the object; None under FSDP2.
    """

    plain: frozenset[str]
    held: WeakIdKeyDictionary | None

    def covers(self, name: str, parameter: nn.Parameter) -> bool:
        if self.held is not None:
            return parameter in self.held
        return isinstance(parameter, DTensor) or canonical_name(name) in self.plain


_models: WeakKeyDictionary[nn.Module, _Reduced] = WeakKeyDictionary()


def remember_reduced(model: nn.Module) -> None:
    """Remember, weakly, which parameters of a parallelized model somebody reduces."""
    inner, held = unwrap_model(model), None
    if isinstance(model, DistributedDataParallel):
        held = WeakIdKeyDictionary(dict.fromkeys(inner.parameters(), True))
    plain = frozenset(
        canonical_name(name)
        for name, parameter in inner.named_parameters(remove_duplicate=False)
        if not isinstance(parameter, DTensor)
    )
    _models[inner] = _Reduced(plain, held)


def refuse_late_parameters(stepped: Iterable[Tensor]) -> bool:
    """Refuse to step what came too late into a parallelized model, or is a gathered copy.

    Returns:
        Whether the answer holds as long as the optimizer steps the same parameters: not while one
        that came too late is frozen.

    Raises:
        ValueError: naming the parameters and the way out.
    """
    held = {id(tensor) for tensor in stepped}
    models = list(_models)
    found = {
        name: parameter
        for model in models
        for name, parameter in _late(model)
        if id(parameter) in held
    }
    trained = [name for name, parameter in found.items() if parameter.requires_grad]
    if trained:
        raise ValueError(
            f"{_listed(trained)} came into the model after parallelize_model: no unit or bucket "
            f"holds them, so that each rank would train them on its own gradients; {_WAY_OUT}"
        )
    copies = [
        name for model in models for name, copy in gathered_parameters(model) if id(copy) in held
    ]
    if copies:
        raise ValueError(
            f"this optimizer holds gathered copies of {_listed(copies)}, and a step would change "
            f"nothing: it was built between a forward and its backward; build it before the forward"
        )
    return not found


def late_parameters_note(part: nn.Module) -> str | None:
    """What to add to the error of a failed forward of `part`, where parameters came too late."""
    models = [m for m in list(_models) if any(part is module for module in m.modules())]
    names = [name for model in models for name, _ in _late(model)]
    if not names:
        return None
    return (
        f"{_listed(names)} came into the model after parallelize_model, when the weights beside "
        f"them were shards already; {_WAY_OUT}"
    )


def _late(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    reduced = _models[model]
    gathered = {id(copy) for _, copy in gathered_parameters(model)}
    for name, parameter in model.named_parameters():
        if not reduced.covers(name, parameter) and id(parameter) not in gathered:
            yield name, parameter


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
