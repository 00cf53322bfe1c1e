"""The options of train_praxis.py, checked before any process starts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from chase import document
from options import use_cores
from rich.console import Console
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwalk.mesh import (
    DistributedSetup,
    FSDP2Config,
    MeshContext,
    ParallelismSizes,
    initialize_distributed,
)
from shardwalk.model_praxis import PraxisConfig


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train a small Praxis policy on several ranks, adapt it, and compare with other ranks."""

    ranks: int = int(os.environ.get("WORLD_SIZE", "4"))
    """Processes to start (torchrun has started them)."""
    ep: int = 2
    """Ranks over which the experts are spread; more ranks shard what each of these holds."""
    steps: int = 180
    """Optimizer steps until the checkpoint is saved."""
    lora_steps: int = 40
    """Optimizer steps of the adapters."""
    batch: int = 16
    """Windows per step, over all ranks."""
    size: int = 128
    """Width of the towers and of the action expert, a multiple of 64."""
    experts: int = 8
    """Experts of each sparse block."""
    lora_rank: int = 8
    """Inner width of the adapters."""
    lr: float = 3e-3
    """Learning rate, reached over ten steps; it falls over the last third."""
    lora_lr: float = 1e-2
    """Learning rate of the adapters, which rises and falls likewise."""
    speed: float = 0.01
    """What an update adds to or takes from the bias of each expert."""
    checkpointing: bool = False
    """Recompute the blocks in the backward."""
    figure: Path = Path("praxis_tracks.png")
    """File for the tracks; its ending says which format."""
    save: Path | None = None
    """Folder for the checkpoint; without one it is not kept."""
    export: Path | None = None
    """Folder for the exported weights, which the adapters start from; else they are not kept."""
    adapted: Path | None = None
    """Folder for the weights with the adapters in them; under torchrun, adapts only if given."""
    resume: Path | None = None
    """Checkpoint to go on from, on this or any other mesh."""

    def __post_init__(self) -> None:
        for name in ("ranks", "ep", "steps", "lora_steps", "batch", "experts", "lora_rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"{_option(name)} {getattr(self, name)} must be at least 1")
        for name in ("lr", "lora_lr", "speed"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{_option(name)} {getattr(self, name)} must be above 0")
        if self.size < 64 or self.size % 64:
            raise ValueError(f"--size {self.size} must be a multiple of 64")
        if self.batch % self.ranks:
            raise ValueError(f"--batch {self.batch} must be a multiple of --ranks {self.ranks}")
        if self.experts % self.ep:
            raise ValueError(f"--experts {self.experts} must be a multiple of --ep {self.ep}")
        if self.resume and not self.resume.is_dir():
            raise ValueError(f"--resume {self.resume} is no folder")
        if self.adapted and not self.export:
            raise ValueError(f"--adapted {self.adapted} needs --export, where adapters start from")
        self.sizes.resolve(self.ranks)  # says which numbers do not fit
        self.config()

    @property
    def sizes(self) -> ParallelismSizes:
        """How many ranks share the experts; the others shard."""
        return ParallelismSizes(ep_size=self.ep)

    def config(self) -> PraxisConfig:
        """Say what the policy is made of: by default 5 million parameters."""
        return PraxisConfig.from_dict(document(size=self.size, experts=self.experts))

    @property
    def tokens(self) -> int:
        """Cells of video that a step denoises."""
        config = self.config()
        video, chunking = config.video, config.chunking
        cells = video.latent_height * video.latent_width
        return self.batch * chunking.window_chunks * chunking.latents_per_chunk * cells

    def start(self) -> tuple[MeshContext, Console]:
        """Build the meshes on every rank, for full precision: other meshes give equal numbers."""
        job = initialize_distributed("gloo", timeout_minutes=10)
        use_cores(self.ranks)
        strategy = FSDP2Config(mp_policy=MixedPrecisionPolicy())
        setup = DistributedSetup.build(
            strategy, self.sizes, activation_checkpointing=self.checkpointing
        )
        wide = max(100, Console().width)  # the table of units needs it
        return setup.mesh_context, Console(quiet=not job.is_main, soft_wrap=True, width=wide)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
