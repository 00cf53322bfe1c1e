"""Whether windows and draws are what a policy takes, before anything is computed from them.

Shapes that merely broadcast would give a loss of other data without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

import torch
from torch import Tensor

from shardwalk.model_praxis.config import PraxisConfig
from shardwalk.model_praxis.draws import Draws, PraxisWindow

_OFFSETS = 3  # anchor, text, video
_DRAWN = {"drop_text": torch.bool, "drop_proprio": torch.bool, "offsets": torch.int64}


def check_window(config: PraxisConfig, window: PraxisWindow) -> int:
    """Check every tensor of windows; gives their number of chunks, 1 or more.

    Raises:
        TypeError: what is no PraxisWindow, no tensor or not floating; names the field.
        ValueError: another shape; names the field, its shape and the one it must have.
    """
    if not isinstance(window, PraxisWindow):
        raise TypeError(f"window must be a PraxisWindow, not {type(window).__name__}")
    for field in fields(window):
        value = getattr(window, field.name)
        _expect_tensor(f"window.{field.name}", value)
        if not value.is_floating_point():
            raise TypeError(f"window.{field.name} is {value.dtype}, it must be floating")
    chunks = _chunks_of(config, window.latents)
    wanted = _window_shapes(config, window.size, chunks)
    _expect_shapes("window", {name: getattr(window, name) for name in wanted}, wanted)
    _check_captions(config, window)
    return chunks


def check_draws(config: PraxisConfig, draws: Draws, *, windows: int, chunks: int) -> None:
    """Check every tensor of the draws for so many windows of so many chunks.

    Values of offsets are looked at on the CPU only; elsewhere that would wait for the device.

    Raises:
        TypeError: what is no Draws, no tensor or of another dtype; names the field.
        ValueError: another shape, or an offset of a frame block or more; names the field.
    """
    if not isinstance(draws, Draws):
        raise TypeError(f"draws must be a Draws, not {type(draws).__name__}")
    for field in fields(draws):
        value, dtype = getattr(draws, field.name), _DRAWN.get(field.name, torch.float32)
        _expect_tensor(f"draws.{field.name}", value)
        if value.dtype != dtype:
            raise TypeError(f"draws.{field.name} is {value.dtype}, it must be {dtype}")
    wanted = _draw_shapes(config, windows, chunks)
    _expect_shapes("draws", {name: getattr(draws, name) for name in wanted}, wanted)
    stride, offsets = config.backbone.rope.frame_stride, draws.offsets
    if offsets.device.type == "cpu" and not ((offsets >= 0) & (offsets < stride)).all():
        raise ValueError(
            f"draws.offsets go from {offsets.min()} to {offsets.max()}; they must be 0 or more, "
            f"and below backbone.rope.frame_stride={stride}"
        )


def _window_shapes(config: PraxisConfig, size: int, chunks: int) -> dict[str, tuple[int, ...]]:
    video, space = config.video, config.action_space
    frames = chunks * config.chunking.latents_per_chunk
    cells = (video.latent_height, video.latent_width)
    return {
        "latents": (size, video.latent_channels, frames, *cells),
        "anchor": (size, video.latent_channels, 1, *cells),
        "proprio": (size, chunks, space.proprio_dim),
        "actions": (size, frames, space.token_dim),
    }


def _draw_shapes(config: PraxisConfig, size: int, chunks: int) -> dict[str, tuple[int, ...]]:
    of_window = _window_shapes(config, size, chunks)
    return {
        "window_time": (size,),
        "window_noise": of_window["latents"],
        "chunk_times": (size, chunks),
        "action_times": (size, chunks),
        "action_noise": of_window["actions"],
        "drop_text": (size,),
        "drop_proprio": (size,),
        "offsets": (size, _OFFSETS),
    }


def _chunks_of(config: PraxisConfig, latents: Tensor) -> int:
    per_chunk, most = config.chunking.latents_per_chunk, config.chunking.window_chunks
    chunks, rest = divmod(latents.shape[2] if latents.ndim == 5 else 0, per_chunk)
    if rest or not 1 <= chunks <= most or not len(latents):
        video = config.video
        raise ValueError(
            f"window.latents has shape {list(latents.shape)}, it must have [B, "
            f"{video.latent_channels}, T, {video.latent_height}, {video.latent_width}] with one "
            f"window or more and T from 1 to {most} times latents_per_chunk={per_chunk}"
        )
    return chunks


def _check_captions(config: PraxisConfig, window: PraxisWindow) -> None:
    encoder, size = config.text_encoder, window.size
    for name in ("text", "blank_text"):
        text = getattr(window, name)
        fits = text.ndim == 3 and (text.shape[0], text.shape[2]) == (size, encoder.hidden_dim)
        if not fits or text.shape[1] > encoder.max_tokens:
            raise ValueError(
                f"window.{name} has shape {list(text.shape)}, it must have [{size}, X, "
                f"{encoder.hidden_dim}] with X up to text_encoder.max_tokens={encoder.max_tokens}"
            )
    if window.text.shape != window.blank_text.shape:
        raise ValueError(
            f"window.text has shape {list(window.text.shape)} and window.blank_text has "
            f"{list(window.blank_text.shape)}; pad both captions alike"
        )


def _expect_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(value).__name__}")


def _expect_shapes(
    owner: str, given: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]]
) -> None:
    for name, shape in wanted.items():
        if tuple(given[name].shape) != shape:
            raise ValueError(
                f"{owner}.{name} has shape {list(given[name].shape)}, it must have {list(shape)}"
            )
