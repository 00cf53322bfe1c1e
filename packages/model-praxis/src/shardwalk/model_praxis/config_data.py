"""The sections of the document that say what the policy sees and does, and in which numbers."""

from __future__ import annotations

from dataclasses import dataclass

from shardwalk.model_praxis.config_sections import Section, require

TEMPORAL_COMPRESSION = 4  # raw frames in one latent frame of the video autoencoder


@dataclass(frozen=True, kw_only=True)
class ActionSpaceConfig(Section):
    """The layout of actions.

    Attributes:
        row_dim: numbers of the action of one raw frame.
        proprio_dim: numbers of the pose at the start of a chunk.
        rows_per_token: rows that one action token (a latent frame) holds.
    """

    row_dim: int
    proprio_dim: int
    rows_per_token: int

    @property
    def token_dim(self) -> int:
        """Numbers of one action token."""
        return self.row_dim * self.rows_per_token


@dataclass(frozen=True, kw_only=True)
class NormalizationConfig(Section):
    """Statistics of the data.

    Attributes:
        action_q01: 1st percentile of each number of an action row.
        action_q99: the 99th.
        proprio_mean: mean of each number of a pose.
        proprio_std: standard deviation.
    """

    action_q01: tuple[float, ...]
    action_q99: tuple[float, ...]
    proprio_mean: tuple[float, ...]
    proprio_std: tuple[float, ...]

    def _check(self) -> None:
        _same_length("action_q99", self.action_q99, "action_q01", self.action_q01)
        _same_length("proprio_std", self.proprio_std, "proprio_mean", self.proprio_mean)
        pairs = zip(self.action_q01, self.action_q99, strict=True)
        require(all(low < high for low, high in pairs), "action_q99", "must be above action_q01")
        require(all(std > 0 for std in self.proprio_std), "proprio_std", "must be above 0")


@dataclass(frozen=True, kw_only=True)
class ChunkingConfig(Section):
    """A window in raw frames and in latent ones.

    Attributes:
        chunk_frames: raw frames of a chunk.
        latents_per_chunk: latent frames of a chunk.
        window_chunks: chunks of a window.
        window_frames: raw frames of a window: the anchor and the chunks.
    """

    chunk_frames: int
    latents_per_chunk: int
    window_chunks: int
    window_frames: int

    def _check(self) -> None:
        expected = TEMPORAL_COMPRESSION * self.latents_per_chunk
        require(
            self.chunk_frames == expected, "chunk_frames",
            f"{self.chunk_frames} must be {TEMPORAL_COMPRESSION} x latents_per_chunk = {expected}",
        )  # fmt: skip
        frames = 1 + self.window_chunks * self.chunk_frames
        require(
            self.window_frames == frames, "window_frames",
            f"{self.window_frames} must be 1 + window_chunks x chunk_frames = {frames}",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class VideoConfig(Section):
    """The size of a frame, raw and as latents."""

    canvas_height: int
    canvas_width: int
    latent_channels: int
    latent_height: int
    latent_width: int

    def _check(self) -> None:
        height, width = self.canvas_height, self.canvas_width
        is_whole = height % self.latent_height == 0 and width % self.latent_width == 0
        is_square = height * self.latent_width == width * self.latent_height
        require(
            is_whole and is_square, "canvas_height",
            f"a canvas of {height} x {width} is no whole multiple of the latents, "
            f"{self.latent_height} x {self.latent_width}, that is the same for both sides",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TextEncoderConfig(Section):
    """The frozen text encoder, which stays outside of the policy.

    Attributes:
        name: what it is called.
        hidden_dim: width of its states.
        max_tokens: the longest caption.
        unconditional_caption: stands for no text.
    """

    name: str
    hidden_dim: int
    max_tokens: int
    unconditional_caption: str


def _same_length(path: str, value: tuple[float, ...], other: str, than: tuple[float, ...]) -> None:
    require(len(value) == len(than), path, f"{len(value)} numbers, but {len(than)} in {other}")
