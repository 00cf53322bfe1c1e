"""The options of finetune.py, checked before any process starts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwalk.mesh import DDPConfig, FSDP2Config, ParallelismSizes


@dataclass(frozen=True, kw_only=True)
class Options:
    """Fine-tune a language model on several ranks, and compare them with one process."""

    mesh: Literal["hsdp", "fsdp", "ddp"] = "hsdp"
    """Two copies of the model, each sharded; one sharded copy; or a copy on every rank."""
    model: Literal["smollm2", "tiny"] = "smollm2"
    """SmolLM2-135M-Instruct, or a random model for trying things out."""
    ranks: int = int(os.environ.get("WORLD_SIZE", "4"))
    """Processes to start (torchrun has started them)."""
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
        for name in ("ranks", "steps", "batch", "accumulate", "length"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)} must be at least 1")
        if self.lr <= 0:
            raise ValueError(f"--lr {self.lr} must be above 0")
        if self.resume and not self.resume.is_dir():
            raise ValueError(f"--resume {self.resume} is no folder")
        self.sizes.resolve(self.ranks)  # says which numbers do not fit
        if self.batch % (self.ranks * self.accumulate):
            raise ValueError(
                f"--batch {self.batch} must be a multiple of --ranks x --accumulate "
                f"= {self.ranks} x {self.accumulate}"
            )

    @property
    def sizes(self) -> ParallelismSizes:
        """How many copies of the model there are; the ranks left over shard each of them."""
        return ParallelismSizes(dp_replicate_size=2 if self.mesh == "hsdp" else 1)

    @property
    def strategy(self) -> FSDP2Config | DDPConfig:
        """How to parallelize: in full precision, so that one process gives the same numbers."""
        if self.mesh == "ddp":
            return DDPConfig()
        return FSDP2Config(mp_policy=MixedPrecisionPolicy())


def use_cores(ranks: int) -> None:
    """Share the cores of this machine between its ranks."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
