"""Initial values from the modules' own initializers, for one module at a time.

``reset_parameters`` and Hugging Face's ``_init_weights`` write to a module's tensors in place from
the global generator. Here they run on a shadow of the model: the same modules, never their forward
or their hooks, with every tensor on meta except those of the one module whose values are wanted,
which are full CPU tensors. What a rank draws for a module thus depends on the seed and on names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwalk.parallelizer_core._torch_compat import RecordWrites
from shardwalk.parallelizer_core.initialization import (
    has_unset_values,
    named_seed,
    unset_tensor,
)
from shardwalk.parallelizer_core.model_tensors import ModelTensor, canonical_name, write_full
from shardwalk.parallelizer_core.parallel_state import unwrap_model

_OWN_INITIALIZERS = ("reset_parameters", "_reset_parameters")
Run = Callable[[], object]


class ModuleInitializers:
    """Knows which initializer writes which tensor of a model, and runs them for one module."""

    def __init__(self, models: Sequence[nn.Module], seed: int) -> None:
        self._models = [unwrap_model(model) for model in models]
        self._seed = seed
        self._shadows: dict[int, nn.Module] = {}
        self._names: dict[int, str] = {}
        self._by_model: list[_Initializer] = []
        self._by_module: list[_Initializer] = []

    def _prepare(self) -> None:
        """Build the shadows and try the initializers on meta, once they are asked for."""
        models, self._models = self._models, []
        for model in models:
            root = self._shadow(model)
            for name, module in model.named_modules():
                self._names[id(module)] = canonical_name(name)
            self._by_model += _dry_run(_model_initializers(root))
            self._by_module += _dry_run(_own_initializers(root))

    def knows(self, module: nn.Module, attribute: str) -> bool:
        """Whether some initializer writes this tensor."""
        return bool(self._writers(module, attribute))

    def values(self, module: nn.Module, attributes: Sequence[str]) -> Mapping[str, Tensor]:
        """Full CPU tensors as the initializers leave them; what they leave unset is left out."""
        writers = {
            writer.name: writer
            for attribute in attributes
            for writer in self._writers(module, attribute)
        }
        shadow = self._shadows[id(module)]
        name = self._names[id(module)]
        with _real_tensors(shadow, attributes) as tensors:
            for writer in writers.values():
                with _seeded(named_seed(self._seed, f"{writer.name} {name}")):
                    writer.run()
        return {key: tensor for key, tensor in tensors.items() if not has_unset_values(tensor)}

    def _writers(self, module: nn.Module, attribute: str) -> list[_Initializer]:
        """What writes a tensor, children before parents; the model's rule before a module's own."""
        self._prepare()
        place = (id(self._shadows[id(module)]), attribute)
        for initializers in (self._by_model, self._by_module):
            found = [initializer for initializer in initializers if place in initializer.writes]
            if found:
                return found
        return []

    def _shadow(self, module: nn.Module) -> nn.Module:
        if id(module) in self._shadows:
            return self._shadows[id(module)]
        shadow = object.__new__(original_class(module))
        self._shadows[id(module)] = shadow
        state = vars(shadow)
        state.update(vars(module))
        state["_parameters"] = {
            name: None if parameter is None else nn.Parameter(_meta(parameter), requires_grad=False)
            for name, parameter in state["_parameters"].items()
        }
        state["_buffers"] = {
            name: None if buffer is None else _meta(buffer)
            for name, buffer in state["_buffers"].items()
        }
        state["_modules"] = {
            name: None if child is None else self._shadow(child)
            for name, child in state["_modules"].items()
        }
        return shadow


class ModuleSource:
    """Fills parameters by the initializers of their modules."""

    def __init__(self, initializers: ModuleInitializers) -> None:
        self._initializers = initializers

    def check(self, entries: Sequence[ModelTensor]) -> None:
        """Raise a ValueError that names every tensor nothing initializes."""
        unknown = [
            entry.name
            for entry in entries
            if _has_elements(entry) and not self._initializers.knows(*entry.places[0])
        ]
        if unknown:
            raise ValueError(
                f"no reset_parameters or _init_weights of the model writes {', '.join(unknown)}; "
                "define one, or pass init= a function"
            )

    def fill(self, entries: Sequence[ModelTensor]) -> None:
        """Run the initializers module by module and keep this rank's part."""
        by_module: dict[int, list[ModelTensor]] = {}
        for entry in filter(_has_elements, entries):
            by_module.setdefault(id(entry.places[0][0]), []).append(entry)
        for group in by_module.values():
            attributes = [entry.places[0][1] for entry in group]
            values = self._initializers.values(group[0].places[0][0], attributes)
            for entry, attribute in zip(group, attributes, strict=True):
                if attribute not in values:
                    raise ValueError(f"the initializers leave values of {entry.name!r} unset")
                write_full(entry.tensor, values[attribute])


def _has_elements(entry: ModelTensor) -> bool:
    return entry.tensor.numel() > 0


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class the module was built as; FSDP2 puts a subclass of it in its place."""
    cls = type(module)
    if not isinstance(module, FSDPModule):
        return cls
    return next(base for base in cls.__bases__ if base is not FSDPModule)


@dataclass(frozen=True, kw_only=True)
class _Initializer:
    """One initializer of one shadow module, and the (shadow, attribute) pairs it writes."""

    name: str
    shadow: nn.Module
    run: Run
    writes: frozenset[tuple[int, str]] = frozenset()


def _own_initializers(root: nn.Module) -> Iterator[_Initializer]:
    for name, shadow in _children_first(root):
        own = (getattr(shadow, method, None) for method in _OWN_INITIALIZERS)
        run = next(filter(callable, own), None)
        if run is not None and any(True for _ in _own_tensors(shadow)):
            yield _Initializer(name=name, shadow=shadow, run=run)


def _model_initializers(root: nn.Module) -> Iterator[_Initializer]:
    """``_init_weights(module)`` of the nearest module around (or at) each module that has it."""
    owners: dict[str, nn.Module] = {
        name: shadow
        for name, shadow in root.named_modules()
        if callable(getattr(shadow, "_init_weights", None))
    }
    for name, shadow in _children_first(root):
        parts = name.split(".") if name else []
        around = (".".join(parts[:length]) for length in range(len(parts), -1, -1))
        owner = next((owners[prefix] for prefix in around if prefix in owners), None)
        if owner is not None:
            yield _Initializer(name=name, shadow=shadow, run=_call(owner, shadow))


def _call(owner: nn.Module, shadow: nn.Module) -> Run:
    initialize: Callable[[nn.Module], object] = getattr(owner, "_init_weights")  # noqa: B009
    return lambda: initialize(shadow)


def _children_first(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules once each, under their first name, children before parents as ``apply`` goes."""
    seen: set[int] = set()

    def visit(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        for name, child in module.named_children():
            yield from visit(f"{prefix}.{name}" if prefix else name, child)
        yield canonical_name(prefix), module

    return visit("", root)


def _dry_run(initializers: Iterator[_Initializer]) -> list[_Initializer]:
    """Find out on meta what each initializer writes; one that cannot run there writes its own."""
    found = []
    for initializer in initializers:
        shadow = initializer.shadow
        try:
            with _seeded(0), RecordWrites() as recorder:
                initializer.run()
            writes = frozenset(
                (id(module), name)
                for module in shadow.modules()
                for name, tensor in _own_tensors(module)
                if recorder.wrote(tensor)
            )
        except (NotImplementedError, RuntimeError):
            writes = frozenset((id(shadow), name) for name, _ in _own_tensors(shadow))
        if writes:
            found.append(replace(initializer, writes=writes))
    return found


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _as_constructed(buffer: Tensor) -> Tensor:
    """A buffer that was cast along with the model is computed in float32 all the same."""
    is_short = buffer.dtype in {torch.bfloat16, torch.float16}
    return buffer.to(torch.float32) if is_short else buffer


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


@contextmanager
def _real_tensors(shadow: nn.Module, attributes: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Give the shadow full CPU tensors under these names for a while."""
    before = {name: getattr(shadow, name) for name in attributes}
    tensors = {
        name: nn.Parameter(unset_tensor(value), requires_grad=False)
        if isinstance(value, nn.Parameter)
        else unset_tensor(_as_constructed(value))
        for name, value in before.items()
    }
    for name, tensor in tensors.items():
        setattr(shadow, name, tensor)
    try:
        yield tensors
    finally:
        for name, value in before.items():
            setattr(shadow, name, value)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the CPU generator for a while, without gradients."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(seed)
        yield
