"""One model, two ways to shard it: `parallelize_model`, and a script written by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from shardwalk.mesh import DistributedSetup, FSDP2Config, ParallelismSizes, get_fsdp_dp_mesh
from shardwalk.parallelizer_core import parallelize_model
from shardwalk.parallelizer_core.testing import (
    TinyDecoder,
    TokenBatches,
    cached,
    causal_token_losses,
)

Checkpointing = Literal[False, "full", "selective"]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A model, a mesh and the options of both sides.

    Attributes:
        world_size: number of ranks.
        replicas: size of the replica axis; above 1 the mesh has two axes.
        bf16: bf16 compute with fp32 reduction instead of fp32 throughout.
        prefetch: explicit chains, one block ahead in forward and two in backward.
        checkpointing: what blocks recompute in the backward, on the walked side.
        vocabulary, dim, heads, ffn, layers: sizes of the decoder, whose tables are not tied.
        rows, length: samples of each rank and their tokens.
    """

    world_size: int = 2
    replicas: int = 1
    bf16: bool = False
    prefetch: bool = False
    checkpointing: Checkpointing = False
    vocabulary: int = 2048
    dim: int = 256
    heads: int = 8
    ffn: int = 704
    layers: int = 6
    rows: int = 2
    length: int = 64

    def model(self) -> nn.Module:
        """The unsharded model, with the same weights in every process."""
        torch.manual_seed(0)
        return self.build()

    def build(self) -> nn.Module:
        """A decoder with weights of torch's random state."""
        return TinyDecoder(
            vocabulary=self.vocabulary,
            dim=self.dim,
            heads=self.heads,
            ffn=self.ffn,
            layers=self.layers,
        )

    def setup(self) -> DistributedSetup:
        """Mesh and strategy, made once per rank."""
        return cached(self, self._setup)

    def _setup(self) -> DistributedSetup:
        return DistributedSetup.build(strategy=self.config(), parallelism_sizes=self.sizes())

    def config(self) -> FSDP2Config:
        """The strategy of the walked side."""
        return FSDP2Config(
            mp_policy=self.precision(),
            enable_fsdp2_prefetch=self.prefetch,
            activation_checkpointing=self.checkpointing,
        )

    def sizes(self) -> ParallelismSizes:
        """The sizes of the mesh."""
        return ParallelismSizes(dp_replicate_size=self.replicas)

    def mesh(self) -> DeviceMesh:
        """The data-parallel mesh of both sides."""
        device_mesh = self.setup().mesh_context.device_mesh
        assert device_mesh is not None
        return get_fsdp_dp_mesh(device_mesh)

    def precision(self) -> MixedPrecisionPolicy:
        """The precision policy of both sides."""
        if not self.bf16:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def batch(self) -> dict[str, Tensor]:
        """This rank's samples; all ranks may as well have the same."""
        return TokenBatches(vocabulary=self.vocabulary, rows=self.rows, length=self.length)(0)[0]


def walked(variant: Variant) -> nn.Module:
    """The model as shardwalk parallelizes it."""
    return parallelize_model(variant.model(), variant.setup().mesh_context)


def by_hand(variant: Variant, own_tables: bool = True) -> nn.Module:
    """The model as a script would shard it that names its modules.

    Without `own_tables` the embedding and the head are left to the root unit.
    """
    model = variant.model()
    assert isinstance(model, TinyDecoder)
    mesh, precision = variant.mesh(), variant.precision()
    *firsts, last = model.layers
    for layer in firsts:
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    fully_shard(last, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    if own_tables:
        fully_shard(model.embed, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
        fully_shard(model.head, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    if variant.prefetch:
        _prefetch([layer for layer in model.layers if isinstance(layer, FSDPModule)])
    return model


def by_hand_in_root(variant: Variant) -> nn.Module:
    """`by_hand` with both tables in the root unit."""
    return by_hand(variant, own_tables=False)


def _prefetch(layers: list[FSDPModule]) -> None:
    for index, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 2])
        layer.set_modules_to_backward_prefetch(layers[max(0, index - 2) : index][::-1])


class Trainer:
    """A sharded model, its optimizer and one batch."""

    def __init__(self, variant: Variant, shard: Callable[[Variant], nn.Module]) -> None:
        self.model = shard(variant)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.batch = variant.batch()

    def step(self) -> Tensor:
        """Forward, backward and update; the loss of this rank."""
        loss = causal_token_losses(self.model, self.batch).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()
