"""Trains a small mixture-of-experts model on two ranks, and draws how full its experts are.

    python examples/expert_loads.py                        starts its own ranks
    torchrun --nproc-per-node 2 examples/expert_loads.py   trains on the ranks that are there

A few words make up most of the text, and at first a few experts get most of the tokens. Each step
ends with an update of the routers' correction biases, which favors the experts that got few. It
prints imbalance (the fullest expert / the mean) and entropy (1 is balance) of all blocks.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from launch import launch
from options import use_cores
from rich.console import Console
from torch import Tensor, nn

from shardwalk.mesh import DistributedSetup, ParallelismSizes, initialize_distributed
from shardwalk.moe_ep import (
    ExpertLoadReport,
    LayerLoad,
    MoE,
    MoEConfig,
    attach_router_bias_update,
    expert_load_report,
)
from shardwalk.parallelizer_core import materialize, parallelize_model


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train a model with experts, and draw their loads in the first and in the last step."""

    figure: Path = Path("expert_loads.png")
    """File for the figure; its ending says which format."""
    ranks: int = int(os.environ.get("WORLD_SIZE", "2"))
    """Processes to start, each with a part of the experts (torchrun has started them)."""
    steps: int = 80
    """Optimizer steps."""
    rows: int = 8
    """Sequences of a step on each rank."""
    length: int = 64
    """Tokens of a sequence."""
    vocabulary: int = 128
    """Different tokens, the first of which fill most of the text."""
    layers: int = 3
    """Blocks with experts."""
    experts: int = 8
    """Experts of each block, over all ranks."""
    top_k: int = 2
    """Experts that a token goes to."""
    speed: float = 0.003
    """What an update adds to or takes from the bias of each expert."""
    seed: int = 0
    """Start of all random numbers."""

    def __post_init__(self) -> None:
        for name in ("ranks", "steps", "rows", "length", "layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)} must be at least 1")
        if self.vocabulary < 2:
            raise ValueError(f"--vocabulary {self.vocabulary} must be at least 2")
        if self.speed <= 0:
            raise ValueError(f"--speed {self.speed} must be above 0")
        if self.experts % self.ranks:
            raise ValueError(f"--experts {self.experts} must be a multiple of --ranks {self.ranks}")
        self.config()  # says which numbers do not fit

    def config(self) -> MoEConfig:
        """Give what the layers of experts are made of."""
        return MoEConfig(
            hidden_size=64,
            intermediate_size=64,
            num_experts=self.experts,
            top_k=self.top_k,
            score_function="sigmoid",
            correction_bias=True,
            bias_update_speed=self.speed,
        )


class Block(nn.Module):
    """Causal attention, then experts."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.attention_norm, self.experts_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.moe = MoE(config)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, length, width] to the same shape."""
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*qkv.unbind(), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.moe(self.experts_norm(x))


class Decoder(nn.Module):
    """Embedding, blocks, norm and head."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        config = options.config()
        self.embed = nn.Embedding(options.vocabulary, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(options.layers))
        self.norm = nn.RMSNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, options.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [rows, length, vocabulary] of int64 [rows, length]."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def train(options: Options) -> list[ExpertLoadReport]:
    """Train on this rank, together with the others; the loads in the first and the last step."""
    job = initialize_distributed("gloo", timeout_minutes=2)
    use_cores(options.ranks)
    console = Console(quiet=not job.is_main)
    context = DistributedSetup.build(
        "fsdp2", parallelism_sizes=ParallelismSizes(ep_size=options.ranks)
    ).mesh_context
    with torch.device("meta"):
        model: nn.Module = Decoder(options)
    model = parallelize_model(model, context)
    materialize(model, init="reset_parameters", seed=options.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    attach_router_bias_update(model, optimizer)
    text = SkewedText(options, context.data_rank)
    reports = []
    for step in range(options.steps):
        tokens = text.batch()
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        if step % max(options.steps // 5, 1) == 0 or step == options.steps - 1:
            reports.append(expert_load_report(model))  # the update begins to count anew
            print_step(console, step, loss, reports[-1])
        optimizer.step()
        optimizer.zero_grad()
    return [reports[0], reports[-1]]


class SkewedText:
    """Text of unequal words: the n-th is drawn in proportion to 1 / n, or follows from the last.

    Args:
        options: its sizes and seed.
        rank: whose part of the text it gives.
    """

    def __init__(self, options: Options, rank: int) -> None:
        self._rows, self._length = options.rows, options.length
        self._frequencies = 1 / torch.arange(1, options.vocabulary + 1)
        language = torch.Generator().manual_seed(options.seed)  # the same on all ranks
        self._followers = self._draw(options.vocabulary, language)
        self._generator = torch.Generator().manual_seed(options.seed + 1 + rank)

    def batch(self) -> Tensor:
        """Draw the tokens of the next step, int64 [rows, length + 1]."""
        shape = self._rows, self._length + 1
        tokens = self._draw(self._rows * (self._length + 1), self._generator).view(shape)
        follows = torch.rand(shape, generator=self._generator) < 0.6
        for place in range(1, shape[1]):
            follower = self._followers[tokens[:, place - 1]]
            tokens[:, place] = torch.where(follows[:, place], follower, tokens[:, place])
        return tokens

    def _draw(self, count: int, generator: torch.Generator) -> Tensor:
        return self._frequencies.multinomial(count, replacement=True, generator=generator)


def print_step(console: Console, step: int, loss: Tensor, report: ExpertLoadReport) -> None:
    """Print one line: this rank's loss, and how even loads are over all ranks."""
    console.print(
        f"step {step:2}  loss {loss.item():.3f}  imbalance {report.mean_imbalance:.2f}, at worst "
        f"{report.worst_imbalance:.2f}  entropy {report.mean_entropy:.3f}  idle experts "
        f"{report.dead_experts}",
        soft_wrap=True,
    )


def draw(path: Path, before: ExpertLoadReport, after: ExpertLoadReport) -> None:
    """Draw the loads of every layer before and after, beside the line of perfect balance."""
    from matplotlib.figure import Figure

    count = len(before.layers)
    columns = min(count, 3)
    rows = -(-count // columns)
    figure = Figure(figsize=(3.6 * columns + 0.6, 3.6 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten()
    for unused in axes[count:]:
        unused.set_visible(False)
    for index, (axis, name) in enumerate(zip(axes, before.layers, strict=False)):
        first, last = before.layers[name], after.layers[name]
        order = first.load.argsort(descending=True)
        places = torch.arange(len(order))
        series = ((first, -0.21, "#b8bcc4", "first step"), (last, 0.21, "#2563a8", "last step"))
        for load, shift, color, label in series:
            heights = relative(load)[order].tolist()
            axis.bar((places + shift).tolist(), heights, width=0.42, color=color, label=label)
        axis.axhline(1, color="#c2410c", linewidth=1.2, linestyle="--", label="balance")
        axis.set_title(
            f"block {index}: imbalance {first.imbalance:.1f} to {last.imbalance:.1f}", fontsize=10
        )
        axis.set_xticks(places.tolist(), [str(expert) for expert in order.tolist()], fontsize=8)
        axis.set_xlabel("expert, by its load in the first step", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#e5e7eb", linewidth=0.8)
        axis.set_axisbelow(True)
    for first_of_row in axes[::columns]:
        first_of_row.set_ylabel("tokens / mean of all experts")
    axes[count - 1].legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def relative(load: LayerLoad) -> Tensor:
    """Loads in units of their mean."""
    return load.load / load.load.double().mean()


def main() -> None:
    """Train under torchrun; without it, start the ranks. The first of them draws."""
    options = tyro.cli(Options)
    if find_spec("matplotlib") is None:
        raise SystemExit("the figure is drawn with matplotlib: python -m pip install matplotlib")
    if "RANK" in os.environ:
        before, after = train(options)
        if os.environ["RANK"] != "0":
            return
    else:
        before, after = launch(options.ranks, train, options)[0]
    draw(options.figure, before, after)
    Console(soft_wrap=True).print(f"loads of the first and the last step: {options.figure}")


if __name__ == "__main__":
    main()
