"""The sections of the document that say what the action expert is made of."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from shardwalk.model_praxis.config_sections import Section, at_least, require


@dataclass(frozen=True, kw_only=True)
class ExpertRopeConfig(Section):
    """Where the action expert's positions come from.

    Attributes:
        positions: "trunk": a token has the position of its frame in the encoder.
    """

    positions: Literal["trunk"] = "trunk"


@dataclass(frozen=True, kw_only=True)
class FlexKernelOptions(Section):
    """Pinned parameters of the flex-attention kernels; None leaves one to the compiler.

    Attributes:
        block_m: queries of a tile.
        block_n: keys of a tile.
        num_stages: depth of the pipeline.
        num_warps: warps of a tile.
    """

    block_m: int | None = None
    block_n: int | None = None
    num_stages: int | None = None
    num_warps: int | None = None

    def kernel_options(self) -> dict[str, int]:
        """The pinned ones under the names that `flex_attention` has for them."""
        names = {"block_m": "BLOCK_M", "block_n": "BLOCK_N"}
        return {names.get(key, key): value for key, value in self.to_dict().items() if value}


@dataclass(frozen=True, kw_only=True)
class ActionExpertConfig(Section):
    """The transformer that denoises actions.

    Attributes:
        dim: width; even.
        num_heads: attention heads.
        head_dim: that of the towers.
        mlp_dim: inner width of the feed-forwards.
        taps: the encoder blocks whose outputs it reads, counted from 0; one for each pair of its
            layers.
        num_future_tokens: learned tokens of a chunk.
        time_features: width of the sinusoidal time features; even.
        rope: where its positions come from.
        flex_kernel_options: of its attention on CUDA.
    """

    dim: int
    num_heads: int
    head_dim: int
    mlp_dim: int
    taps: tuple[int, ...] = at_least(0)
    num_future_tokens: int
    time_features: int
    rope: ExpertRopeConfig = ExpertRopeConfig()
    flex_kernel_options: FlexKernelOptions = FlexKernelOptions()

    def _check(self) -> None:
        taps = self.taps
        is_rising = all(first < second for first, second in pairwise(taps))
        require(bool(taps) and is_rising, "taps", f"{list(taps)} must rise, and hold one or more")
        require(self.dim % 2 == 0, "dim", f"{self.dim} is odd, use even: half are sines of a time")
        require(
            self.time_features % 2 == 0, "time_features", f"{self.time_features} is odd, use even"
        )

    @property
    def num_layers(self) -> int:
        """Layers: a cross attention for each tap, and a self attention behind each."""
        return 2 * len(self.taps)
