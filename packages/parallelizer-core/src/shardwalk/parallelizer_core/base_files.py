"""A model with adapters around its layers, filled from files of the base model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from shardwalk.parallelizer_core.base_models import base_model_of
from shardwalk.parallelizer_core.checkpoint_source import ReaderSource
from shardwalk.parallelizer_core.initialization import FunctionSource
from shardwalk.parallelizer_core.model_tensors import ModelTensor, canonical_name, model_tensors
from shardwalk.parallelizer_core.parallel_state import unwrap_model
from shardwalk.parallelizer_core.state_dict_adapter import Index, ReadSlice, StateDictAdapter
from shardwalk.parallelizer_core.wrapped_layers import is_of_adapter, names_of_layers


class BaseFiles:
    """A `StateDictAdapter` for the files of the base: names there are those without wrappers.

    A copy of a layer that trains in its place starts from the layer's values.
    """

    def __init__(self, models: Sequence[nn.Module], files: StateDictAdapter) -> None:
        self._files = files
        self._names: dict[str, str] = {}
        self._added: set[str] = set()
        for model in map(unwrap_model, models):
            self._learn(model)

    def _learn(self, model: nn.Module) -> None:
        base = base_model_of(model)
        path = next(name for name, module in model.named_modules() if module is base)
        prefix = f"{canonical_name(path)}.".lstrip(".")
        plain, added = names_of_layers(model), is_of_adapter(model)
        for name in (name for entry in model_tensors([model]) for name in entry.names):
            if added(name):
                self._added.add(name)
            else:
                self._names[name] = plain(name).removeprefix(prefix)

    @property
    def has_adapters(self) -> bool:
        """Whether there is anything that no file of the base holds."""
        return bool(self._added)

    def adds(self, entry: ModelTensor) -> bool:
        """Whether a tensor belongs to an adapter, so that no file of the base holds it."""
        return entry.name in self._added

    def file_shapes(self, name: str, shape: Sequence[int]) -> Mapping[str, Sequence[int]]:
        """The keys that hold a tensor of the base."""
        return self._files.file_shapes(self._names[name], shape)

    def read(self, name: str, shape: Sequence[int], index: Index, read: ReadSlice) -> Tensor:
        """A block of a tensor of the base."""
        return self._files.read(self._names[name], shape, index, read)

    def to_file(self, name: str, tensor: Tensor) -> Mapping[str, Tensor]:
        """The file tensors of a tensor of the base."""
        return self._files.to_file(self._names[name], tensor)


class BaseSource:
    """Fills what the base holds from its files, and what adapters add by a function."""

    def __init__(self, base: BaseFiles, files: ReaderSource, drawn: FunctionSource) -> None:
        self._base, self._files, self._drawn = base, files, drawn

    def check(self, entries: Sequence[ModelTensor]) -> None:
        """Raise for whatever does not fit, before anything is written."""
        self._files.check([entry for entry in entries if not self._base.adds(entry)])

    def fill(self, entries: Sequence[ModelTensor]) -> None:
        """Read and draw this rank's parts."""
        self._files.fill([entry for entry in entries if not self._base.adds(entry)])
        self._drawn.fill([entry for entry in entries if self._base.adds(entry)])
