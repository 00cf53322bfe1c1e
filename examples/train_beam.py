"""Trains a small Beam on real text with experts spread over ranks, and checks the numbers.

    python examples/train_beam.py                            starts its own ranks, runs all checks
    torchrun --nproc-per-node 4 examples/train_beam.py       trains on the ranks that are there

Four ranks hold half of the experts each in pairs, and everything else in quarters. It draws how
full the experts are in the first and in the last step. The checks: ranks without expert parallelism
go on from the checkpoint with the same loss, and transformers loads what is exported and gives
the same logits.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from data import IGNORED, Batch, micro_batches, samples
from expert_loads import draw
from launch import launch
from options import use_cores
from report import StepProgress, equal, print_units
from rich.console import Console
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwalk.mesh import (
    DistributedSetup,
    FSDP2Config,
    MeshContext,
    ParallelismSizes,
    initialize_distributed,
)
from shardwalk.model_beam import BeamConfig, BeamForCausalLM
from shardwalk.moe_ep import ExpertLoadReport, attach_router_bias_update, expert_load_report
from shardwalk.parallelizer_core import (
    TokenNormalizer,
    clip_grad_norm_,
    load_checkpoint,
    materialize,
    parallelize_model,
    save_checkpoint,
)

SHOWN = "The import statement finds a module, and then binds names in the local scope."


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train a small Beam on several ranks, and compare with other ranks and with transformers."""

    ranks: int = int(os.environ.get("WORLD_SIZE", "4"))
    """Processes to start (torchrun has started them)."""
    ep: int = 2
    """Ranks over which the experts are spread; more ranks shard what each of these holds."""
    steps: int = 40
    """Optimizer steps until the checkpoint is saved."""
    batch: int = 16
    """Paragraphs per step, over all ranks."""
    length: int = 128
    """Tokens (bytes) of a paragraph, at most."""
    size: int = 256
    """Width of the hidden states, a multiple of 64."""
    layers: int = 7
    """Blocks, the first of which is dense."""
    experts: int = 16
    """Experts of each sparse block."""
    lr: float = 1e-3
    """Learning rate."""
    speed: float = 0.02
    """What an update adds to or takes from the bias of each expert."""
    checkpointing: bool = True
    """Recompute in the backward what costs little (selective checkpointing)."""
    figure: Path = Path("beam_expert_loads.png")
    """File for the figure of the loads; its ending says which format."""
    save: Path | None = None
    """Folder for the checkpoint; without one it is not kept."""
    export: Path | None = None
    """Folder for the exported model in the files of Hugging Face; without one it is not kept."""
    resume: Path | None = None
    """Checkpoint to go on from, on this or any other mesh."""

    def __post_init__(self) -> None:
        for name in ("ranks", "ep", "steps", "batch", "length", "layers", "experts"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)} must be at least 1")
        if self.size < 64 or self.size % 64:
            raise ValueError(f"--size {self.size} must be a multiple of 64")
        for name in ("lr", "speed"):
            if getattr(self, name) <= 0:
                raise ValueError(f"--{name} {getattr(self, name)} must be above 0")
        if self.batch % self.ranks:
            raise ValueError(f"--batch {self.batch} must be a multiple of --ranks {self.ranks}")
        if self.experts % self.ep:
            raise ValueError(f"--experts {self.experts} must be a multiple of --ep {self.ep}")
        if self.resume and not self.resume.is_dir():
            raise ValueError(f"--resume {self.resume} is no folder")
        self.sizes.resolve(self.ranks)  # says which numbers do not fit
        self.config()

    @property
    def sizes(self) -> ParallelismSizes:
        """How many ranks share the experts; the others shard."""
        return ParallelismSizes(ep_size=self.ep)

    def config(self) -> BeamConfig:
        """The sizes of the model: by default 31 million parameters, 16 experts, 2 for a token."""
        return BeamConfig(
            vocab_size=256,
            hidden_size=self.size,
            intermediate_size=3 * self.size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.size // 64,
            num_key_value_heads=self.size // 64,
            head_dim=64,
            sliding_window=32,
            mlp_layer_types=("dense", *["sparse"] * (self.layers - 1)),
            moe_intermediate_size=self.size * 3 // 2,
            num_experts=self.experts,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            max_position_embeddings=4096,
        )

    def mesh_context(self) -> MeshContext:
        """Build the meshes, on every rank, for full precision: other meshes give equal numbers."""
        mode = "selective" if self.checkpointing else False
        strategy = FSDP2Config(mp_policy=MixedPrecisionPolicy())
        return DistributedSetup.build(
            strategy, self.sizes, activation_checkpointing=mode
        ).mesh_context


@dataclass(kw_only=True)
class Report:
    """What a rank came to.

    Attributes:
        losses: of all ranks, in each step.
        loads: of the experts in the first and the last step.
        logits: of `SHOWN` after the last step, [1, S, V].
    """

    losses: list[float] = field(default_factory=list)
    loads: list[ExpertLoadReport] = field(default_factory=list)
    logits: Tensor | None = None


def train(options: Options, last: int) -> Report:
    """Train on this rank, together with the others, until `last` steps are done in all."""
    job = initialize_distributed("gloo", timeout_minutes=10)
    use_cores(options.ranks)
    console = Console(quiet=not job.is_main)
    context = options.mesh_context()
    with torch.device("meta"):
        model = BeamForCausalLM(options.config(), bias_update_speed=options.speed)
    parallelize_model(model, context)
    materialize(model, init="reset_parameters")
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    attach_router_bias_update(model, optimizer)
    print_units(console, model)
    first = load_checkpoint(options.resume, model, optimizer).step or 0 if options.resume else 0
    tokens, report = samples(encode, options.length), Report()
    with StepProgress(console, last - first) as progress:
        for step in range(first, last):
            [batch] = micro_batches(
                tokens,
                step=step,
                size=options.batch,
                count=1,
                rank=context.data_rank,
                ranks=context.data_world_size,
            )
            start = time.monotonic()
            loss, norm, count = train_step(model, optimizer, context, batch, report)
            report.losses.append(loss)
            progress.done(step, loss, norm, count / (time.monotonic() - start))
            if step + 1 == options.steps:
                keep(options, model, optimizer, report)
    return report


def train_step(
    model: BeamForCausalLM,
    optimizer: torch.optim.Optimizer,
    context: MeshContext,
    batch: Batch,
    report: Report,
) -> tuple[float, float, int]:
    """Make one step; give the loss, the gradient norm and the number of targets of all ranks."""
    inputs, labels = batch
    normalizer = TokenNormalizer(context, [(labels != IGNORED).sum()])
    loss = normalizer(token_losses(model, inputs, labels))
    loss.backward()
    report.loads[1:] = [expert_load_report(model)]  # the optimizer's step begins to count anew
    norm = clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return normalizer.global_loss(loss.detach()).item(), norm.item(), normalizer.global_tokens


def token_losses(model: BeamForCausalLM, inputs: Tensor, labels: Tensor) -> Tensor:
    """Give the loss of every token, 0 where it is no target."""
    # Padding stands behind the text, so that its mask would only spare experts some tokens.
    logits = model(inputs, attention_mask=labels != IGNORED).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")


def keep(
    options: Options,
    model: BeamForCausalLM,
    optimizer: torch.optim.Optimizer,
    report: Report,
) -> None:
    """Save a checkpoint, and export the model with the logits it gives now."""
    if options.save:
        save_checkpoint(options.save, model, optimizer, step=options.steps)
    if options.export:
        model.save_pretrained(options.export)
        with torch.no_grad():
            report.logits = model.eval()(torch.tensor([encode(SHOWN)])).logits
        model.train()


def encode(text: str) -> list[int]:
    """Give the tokens of a text: its bytes."""
    return [*text.encode()]


def logits_of_transformers(folder: Path) -> Tensor:
    """Let transformers load the exported model, in its own process, and run it."""
    import transformers

    model = transformers.BeamForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits: Tensor = model.eval()(torch.tensor([encode(SHOWN)])).logits
    return logits


def main() -> None:
    """Train under torchrun; without it, start the ranks and check what they come to."""
    options = tyro.cli(Options)
    if "RANK" in os.environ:
        report = train(options, options.steps)
        if os.environ["RANK"] == "0":
            draw(options.figure, report.loads[0], report.loads[-1])
        return
    if options.resume:
        sys.exit("--resume needs torchrun: the checks start from the first step")
    with tempfile.TemporaryDirectory(prefix="train-beam-") as folder:
        kept = {"save": options.save or Path(folder, "checkpoint")}
        kept["export"] = options.export or Path(folder, "export")
        passed = prove(replace(options, **kept))
    sys.exit(0 if passed else 1)


def prove(options: Options) -> bool:
    """Train, and compare with other ranks and with transformers; say whether all is equal."""
    console = Console(soft_wrap=True)
    console.rule(f"{options.ranks} ranks, experts over {options.ep}")
    many = launch(options.ranks, train, options, options.steps + 1)[0]
    draw(options.figure, many.loads[0], many.loads[-1])
    fewer = max(options.ranks // 2, 1)
    console.rule(f"{fewer} ranks without expert parallelism resume from the checkpoint")
    other = replace(options, ranks=fewer, ep=1, resume=options.save, save=None, export=None)
    resumed = launch(fewer, train, other, options.steps + 1)[0]
    console.rule("transformers loads the export")
    assert options.export is not None
    [logits] = launch(1, logits_of_transformers, options.export)
    console.rule("what came out")
    first, final = many.loads[0], many.loads[-1]
    console.print(
        f"imbalance of the experts' loads: {first.mean_imbalance:.2f} in the first step, "
        f"{final.mean_imbalance:.2f} in the last, drawn in {options.figure}"
    )
    console.print(
        f"loss: {many.losses[0]:.3f} in the first step, {many.losses[-1]:.3f} in the last"
    )
    verdicts = [
        equal(console, "loss of the next step, resumed", resumed.losses[0], many.losses[-1]),
        same_logits(console, logits, many.logits),
    ]
    return all(verdicts)


def same_logits(console: Console, found: Tensor, expected: Tensor | None) -> bool:
    """Print how far two sets of logits are apart, and say whether that is rounding."""
    assert expected is not None
    difference = (found - expected).abs().max().item()
    verdict = "equal" if difference <= 1e-4 else "DIFFERENT"
    console.print(f"logits of transformers: {verdict} (largest difference {difference:.0e})")
    return difference <= 1e-4


if __name__ == "__main__":
    main()
