"""The sizes of one call: how its window becomes sequences of tokens, and what does not fit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwalk.model_praxis.config import PraxisConfig
from shardwalk.model_praxis.masks import Layout, Slot, SlotKind


@dataclass(frozen=True, kw_only=True)
class WindowShape:
    """The sizes of the encoder's sequence, [registers | anchor | text | noised | clean].

    Attributes:
        registers: tokens.
        text: tokens.
        frames: noised latent frames.
        clean_frames: clean latent frames.
        frames_per_chunk: latent frames of a chunk.
        cells: tokens of a frame.
    """

    registers: int
    text: int
    frames: int
    clean_frames: int
    frames_per_chunk: int
    cells: int

    @property
    def globals(self) -> int:
        """Registers, anchor and text."""
        return self.registers + self.cells + self.text

    @property
    def noised(self) -> int:
        """Noised tokens."""
        return self.frames * self.cells

    @property
    def layout(self) -> Layout:
        """The encoder's sequence."""
        return (_front(self.globals), self._video("noised", self.cells), *self._clean)

    @property
    def key_layout(self) -> Layout:
        """The same with the clean frames in front of the noised ones."""
        return (_front(self.globals), *self._clean, self._video("noised", self.cells))

    def decoder_layout(self, registers: int, cells: int) -> Layout:
        """The decoder's sequence, [registers | noised] of `cells` tokens a frame."""
        return (_front(registers), self._video("noised", cells))

    def clean_first(self, tokens: Tensor) -> Tensor:
        """[B, noised + clean, ...] with the clean tokens in front."""
        return torch.cat((tokens[:, self.noised :], tokens[:, : self.noised]), dim=1)

    def key_order(self, tokens: Tensor) -> Tensor:
        """What stands for the encoder's whole sequence, in the order of `key_layout`."""
        front, video = tokens.split((self.globals, tokens.shape[1] - self.globals), dim=1)
        return torch.cat((front, self.clean_first(video)), dim=1)

    @property
    def _clean(self) -> Layout:
        return (self._video("clean", self.cells),) if self.clean_frames else ()

    def _video(self, kind: SlotKind, cells: int) -> Slot:
        return Slot(
            kind=kind,
            frames=self.frames if kind == "noised" else self.clean_frames,
            tokens_per_frame=cells,
            frames_per_chunk=self.frames_per_chunk,
        )


def window_shape(
    config: PraxisConfig,
    *,
    noised: Tensor,
    clean: Tensor | None,
    anchor: Tensor,
    text: Tensor,
    times: Tensor,
    offsets: Tensor | None,
) -> WindowShape:
    """The sizes of a call of the backbone, whose arguments these are.

    Raises:
        ValueError: a shape that does not fit the configuration or the others.
    """
    per_chunk = config.chunking.latents_per_chunk
    chunks, rest = divmod(noised.shape[2] if noised.ndim == 5 else 0, per_chunk)
    if rest or not 1 <= chunks <= config.chunking.window_chunks:
        raise ValueError(
            f"noised has shape {list(noised.shape)}; it must be [B, C, T, h, w] with T from 1 to "
            f"{config.chunking.window_chunks} times latents_per_chunk={per_chunk}"
        )
    size, frames = len(noised), chunks * per_chunk
    _expect_latents("noised", noised, config, size, frames)
    _expect_latents("anchor", anchor, config, size, 1)
    if (clean is None) != (chunks == 1):
        raise ValueError(
            f"noised holds {chunks} chunk(s) and clean is "
            f"{'None' if clean is None else 'given'}; clean holds all chunks but the last, and is "
            f"None for one chunk"
        )
    if clean is not None:
        _expect_latents("clean", clean, config, size, frames - per_chunk)
    _expect("times", times, (size, chunks))
    if offsets is not None:
        _expect("offsets", offsets, (size, 3))
    _check_text(config, text, size)
    patch, video = config.backbone.patch_size, config.video
    return WindowShape(
        registers=config.backbone.encoder.num_registers,
        text=text.shape[1],
        frames=frames,
        clean_frames=frames - per_chunk,
        frames_per_chunk=per_chunk,
        cells=(video.latent_height // patch) * (video.latent_width // patch),
    )


def _front(tokens: int) -> Slot:
    return Slot(kind="global", frames=1, tokens_per_frame=tokens)


def _expect_latents(
    name: str, tensor: Tensor, config: PraxisConfig, size: int, frames: int
) -> None:
    video = config.video
    wanted = (size, video.latent_channels, frames, video.latent_height, video.latent_width)
    _expect(name, tensor, wanted)


def _expect(name: str, tensor: Tensor, wanted: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != wanted:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, it must have {list(wanted)}")


def _check_text(config: PraxisConfig, text: Tensor, size: int) -> None:
    encoder = config.text_encoder
    fits = text.ndim == 3 and text.shape[0] == size and text.shape[2] == encoder.hidden_dim
    if not fits or text.shape[1] > encoder.max_tokens:
        raise ValueError(
            f"text has shape {list(text.shape)}, it must have [{size}, X, {encoder.hidden_dim}] "
            f"with X up to text_encoder.max_tokens={encoder.max_tokens}"
        )
