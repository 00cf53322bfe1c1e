"""The options of finetune.py, checked before any process starts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwalk.mesh import DDPConfig, DistributedSetup, FSDP2Config, MeshContext, ParallelismSizes


@dataclass(frozen=True, kw_only=True)
class Options:
    """Fine-tune a language model on several ranks, and compare them with one process."""

    mesh: Literal["hsdp", "fsdp", "ddp", "tp"] = "hsdp"
    """Two sharded copies of the model; one sharded copy; a copy on every rank; or split layers."""
    tp: int | None = None
    """Ranks that split each layer, by default 3; only with --mesh tp."""
    sequence_parallel: bool = False
    """Split the sequence too, between the split layers; only with --mesh tp."""
    checkpointing: Literal["off", "full", "selective"] = "off"
    """Recompute blocks in the backward: all of each, or what costs little; compares the memory."""
    model: Literal["smollm2", "tiny"] = "smollm2"
    """SmolLM2-135M-Instruct, or a random model for trying things out."""
    ranks: int | None = None
    """Processes: 4, or --tp with --mesh tp, where more also shard (torchrun has started them)."""
    steps: int = 3
    """Optimizer steps until the checkpoint is saved."""
    batch: int = 8
    """Paragraphs per step, over all ranks."""
    accumulate: int = 2
    """Micro-batches into which a rank splits its share of the paragraphs."""
    length: int = 64
    """Tokens of a paragraph, at most."""
    lr: float = 3e-5
    """Learning rate."""
    save: Path | None = None
    """Folder for the checkpoint; without one it is not kept."""
    resume: Path | None = None
    """Checkpoint to go on from, on this or any other mesh."""

    def __post_init__(self) -> None:
        if (
            self.ranks is None
        ):  # settled here: a process that this one starts has its own WORLD_SIZE
            default = self.tp_size if self.mesh == "tp" else 4
            object.__setattr__(self, "ranks", int(os.environ.get("WORLD_SIZE", default)))
        for name in ("tp", "ranks", "steps", "batch", "accumulate", "length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} {value} must be at least 1")
        if self.lr <= 0:
            raise ValueError(f"--lr {self.lr} must be above 0")
        if self.resume and not self.resume.is_dir():
            raise ValueError(f"--resume {self.resume} is no folder")
        if self.mesh != "tp" and (self.tp is not None or self.sequence_parallel):
            option = f"--tp {self.tp}" if self.tp is not None else "--sequence-parallel"
            raise ValueError(f"{option} means nothing with --mesh {self.mesh}; use --mesh tp")
        self.sizes.resolve(self.world_size)  # says which numbers do not fit
        if self.batch % (self.data_ranks * self.accumulate):
            raise ValueError(
                f"--batch {self.batch} must be a multiple of --accumulate x the ranks with data of "
                f"their own = {self.accumulate} x {self.data_ranks}"
            )

    @property
    def tp_size(self) -> int:
        """How many ranks split each layer."""
        return (self.tp or 3) if self.mesh == "tp" else 1

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        assert self.ranks is not None
        return self.ranks

    @property
    def data_ranks(self) -> int:
        """How many ranks have data of their own; those that split a layer see the same."""
        return self.world_size // self.tp_size

    @property
    def sizes(self) -> ParallelismSizes:
        """How many copies of the model and parts of a layer; the ranks left over shard them."""
        replicas = 2 if self.mesh == "hsdp" else 1
        return ParallelismSizes(dp_replicate_size=replicas, tp_size=self.tp_size)

    @property
    def strategy(self) -> FSDP2Config | DDPConfig:
        """How to parallelize: in full precision, so that one process gives the same numbers."""
        if self.mesh == "ddp":
            return DDPConfig()
        return FSDP2Config(
            mp_policy=MixedPrecisionPolicy(), sequence_parallel=self.sequence_parallel
        )

    def mesh_context(self) -> MeshContext:
        """Build the meshes, on every rank."""
        mode = False if self.checkpointing == "off" else self.checkpointing
        setup = DistributedSetup.build(self.strategy, self.sizes, activation_checkpointing=mode)
        return setup.mesh_context


def use_cores(ranks: int) -> None:
    """Share the cores of this machine between its ranks."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
