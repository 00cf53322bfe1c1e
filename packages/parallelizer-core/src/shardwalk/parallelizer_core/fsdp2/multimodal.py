"""Where the parameters of frozen vision and audio towers live, and how whole ones compute.

A rank without an image skips its tower, so what a tower holds must be in the root unit, or in no
unit at all. A parameter in no unit is plain and whole on every rank. A forward of the model sees it
in the dtype in which the policy computes; the parameter itself stays as it is stored.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwalk.mesh import FrozenMultimodalSharding
from shardwalk.parallelizer_core._torch_compat import after_backward
from shardwalk.parallelizer_core.fp32_pins import is_pinned
from shardwalk.parallelizer_core.fsdp2.nested import map_tensors, tensors_in
from shardwalk.parallelizer_core.fsdp2.policies import cast_floats
from shardwalk.parallelizer_core.layers import frozen_towers, has_forward, has_towers, tower_paths
from shardwalk.parallelizer_core.parallel_state import current_device

Place = tuple[nn.Module, str]


def refuse_frozen_sharding(
    model: nn.Module, sharding: str, option: str = "frozen_multimodal_sharding"
) -> None:
    """Refuse a placement of frozen towers that is none, or a model without any tower.

    Raises:
        ValueError: names the option, its value and the way out.
    """
    allowed = get_args(FrozenMultimodalSharding)
    if sharding not in allowed:
        raise ValueError(f"{option}={sharding!r} must be one of {', '.join(map(repr, allowed))}")
    if sharding != "root" and not has_towers(model):
        raise ValueError(
            f"{option}={sharding!r} places frozen vision and audio towers, and "
            f"{type(model).__name__} has none by the names of its modules or its configuration; "
            f"use {option}='root'"
        )


def parameters_kept_whole(
    model: nn.Module,
    sharding: FrozenMultimodalSharding,
    given: Collection[nn.Parameter] | None = None,
) -> set[nn.Parameter]:
    """The parameters that no unit may take.

    Those that were `given`, which may not be trainable; with "replicate", all of frozen towers;
    with "root", those of frozen towers that cannot be in one unit with the rest: pinned to fp32, or
    not floating.

    Raises:
        ValueError: a given parameter is trainable, by name.
    """
    whole = set(given or ())
    trained = [n for n, p in model.named_parameters() if p in whole and p.requires_grad]
    if trained:
        raise ValueError(
            f"ignored_multimodal_params holds {', '.join(trained[:3])}, which is trainable: nobody "
            f"would reduce its gradient; freeze it before, or leave it out"
        )
    for _, tower in frozen_towers(model):
        for parameter in tower.parameters():
            apart = is_pinned(parameter) or not parameter.is_floating_point()
            if sharding == "replicate" or (sharding == "root" and apart):
                whole.add(parameter)
    return whole


def pass_gradients_through(model: nn.Module, blocks: Iterable[tuple[str, nn.Module]]) -> None:
    """Let the backward of every rank pass through all blocks of the language model.

    Where a projector or a tower trains and the embedding does not, hidden states need a gradient on
    ranks with an image only. Those without would end their backward at another block, and reduce
    what they trained in another order.
    """
    is_in_tower = tower_paths(model)
    if any(p.requires_grad and is_in_tower(name) for name, p in model.named_parameters()):
        for name, block in blocks:
            if not is_in_tower(name):
                block.register_forward_pre_hook(_need_gradients, prepend=True, with_kwargs=True)


def _need_gradients(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Make the first floating input need a gradient, where none does."""
    floats = [t for t in tensors_in([args, kwargs]) if t.is_floating_point()]
    if not torch.is_grad_enabled() or not floats or any(t.requires_grad for t in floats):
        return None

    def mark(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_() if tensor is floats[0] else tensor

    return map_tensors(mark, args), map_tensors(mark, kwargs)


def keep_whole(
    root: nn.Module, whole: Collection[nn.Parameter], mesh: DeviceMesh, policy: MixedPrecisionPolicy
) -> None:
    """Bring the parameters that no unit took to the device, and let forwards see them as computed.

    Args:
        root: the root unit, which every forward goes through.
        whole: plain parameters, on meta or the same on every rank.
    """
    if not whole:
        return
    places: dict[nn.Parameter, list[Place]] = defaultdict(list)
    for module in root.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in whole:
                places[parameter].append((module, name))
    for parameter in places:
        if not parameter.is_meta:
            parameter.data = parameter.data.to(current_device(mesh.device_type))
    for module in _pinned_parts(root, whole):
        module.register_forward_pre_hook(_cast_up, with_kwargs=True)
    shown = _Shown(list(places.values()), policy.param_dtype)
    root.register_forward_pre_hook(shown.show)
    root.register_forward_hook(shown.hide_without_backward, always_call=True)
    after_backward(root, shown.hide)


@dataclass(frozen=True)
class _Shown:
    """Whole parameters, each by its places; they are looked up there, since others may replace it.

    An instance attribute hides the parameter of the same name, which stays registered.
    """

    places: list[list[Place]]
    dtype: torch.dtype | None

    def show(self, *unused: Any) -> None:
        self.hide()
        for places in self.places:
            module, name = places[0]
            parameter = module.get_parameter(name)
            if parameter.requires_grad:
                raise ValueError(
                    f"{name} of {type(module).__name__} is whole on every rank, since it was "
                    f"frozen when parallelize_model was called, and nobody would reduce its "
                    f"gradient now; make it trainable before"
                )
            computed = self._computed(parameter)
            for place, name in places if computed is not None else ():
                vars(place)[name] = computed

    def _computed(self, parameter: nn.Parameter) -> Tensor | None:
        """The parameter in the dtype it computes in; None where it does as it is."""
        casts = self.dtype is not None and parameter.is_floating_point()
        if not casts or is_pinned(parameter) or parameter.dtype == self.dtype:
            return None
        return parameter.detach().to(self.dtype)

    def hide(self) -> None:
        for places in self.places:
            for module, name in places:
                vars(module).pop(name, None)

    def hide_without_backward(self, *unused: Any) -> None:
        if not torch.is_grad_enabled():
            self.hide()


def _pinned_parts(module: nn.Module, whole: Collection[nn.Parameter]) -> Iterator[nn.Module]:
    """The largest submodules that hold nothing but whole parameters pinned to fp32."""
    for child in module.children():
        own = list(child.parameters())
        if own and has_forward(child) and all(p in whole and is_pinned(p) for p in own):
            yield child
        else:
            yield from _pinned_parts(child, whole)


_cast_up: Callable[..., Any] = cast_floats(torch.float32)
