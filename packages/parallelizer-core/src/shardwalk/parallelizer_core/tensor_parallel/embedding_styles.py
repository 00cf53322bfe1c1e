"""Parallel styles of embedding tables, cut along their rows or along their features."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ParallelStyle

from shardwalk.parallelizer_core.tensor_parallel.layouts import gather_features, sum_parts
from shardwalk.parallelizer_core.tensor_parallel.local_parameters import (
    Forward,
    distribute_parameter,
    local_values,
    shown,
)


@dataclass(kw_only=True)
class VocabularyParallel(ParallelStyle):
    """An embedding table cut along its rows."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        table = _plain_table(module, type(self).__name__)
        distribute_parameter(table, "weight", device_mesh, Shard(0))
        module.forward = _EmbeddingForward(table, table.forward, device_mesh)
        return module


@dataclass
class _EmbeddingForward:
    table: nn.Embedding
    inner: Forward
    mesh: DeviceMesh

    def __call__(self, input: Tensor) -> Tensor:
        rows = local_values(self.table, {"weight": Shard(0)})["weight"]
        first = self._first_row()
        own = input - first
        # An id outside the vocabulary stays one, for the lookup to fail on as it does unsplit.
        known = (input >= 0) & (input < self.table.num_embeddings)
        elsewhere = known & ((own < 0) | (own >= rows.shape[0]))
        padding = self.table.padding_idx
        local_padding = None
        if padding is not None and 0 <= padding - first < rows.shape[0]:
            local_padding = padding - first
        with shown(self.table, weight=rows, padding_idx=local_padding):
            found = self.inner(own.masked_fill(elsewhere, 0))
        return sum_parts(found.masked_fill(elsewhere.unsqueeze(-1), 0), self.mesh)

    def _first_row(self) -> int:
        size = -(-self.table.num_embeddings // self.mesh.size())
        return min(self.mesh.get_local_rank() * size, self.table.num_embeddings)


@dataclass(kw_only=True)
class FeatureParallel(ParallelStyle):
    """An embedding table cut along its features, of which every rank gets all."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        table = _plain_table(module, type(self).__name__)
        distribute_parameter(table, "weight", device_mesh, Shard(1))
        module.forward = _FeatureForward(table, table.forward, device_mesh)
        return module


@dataclass
class _FeatureForward:
    table: nn.Embedding
    inner: Forward
    mesh: DeviceMesh

    def __call__(self, input: Tensor) -> Tensor:
        with shown(self.table, **local_values(self.table, {"weight": Shard(1)})):
            found: Tensor = self.inner(input)
        return gather_features(found, self.mesh, self.table.embedding_dim)


def _plain_table(module: nn.Module, style: str) -> nn.Embedding:
    if not isinstance(module, nn.Embedding):
        raise TypeError(f"{style} cuts an nn.Embedding, not a {type(module).__name__}")
    if module.scale_grad_by_freq or module.max_norm is not None or module.sparse:
        raise ValueError(
            f"{style} cuts no embedding with scale_grad_by_freq, max_norm or sparse; "
            f"unset them, or use tp_size=1"
        )
    return module
