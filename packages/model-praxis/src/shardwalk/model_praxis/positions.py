"""Integer positions of the tokens of both towers.

A frame, or the text, is a block of `frame_stride` positions: token (row, column) of block b is at
b x frame_stride + 1 + row x row_stride + column. Registers are at 0. In the encoder the anchor is
block 0, the text block 1, noised frame f block 2 + f, and the clean copy of a frame is where its
noised twin is. In the decoder frame f is block f.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwalk.model_praxis.config import RopeConfig

_ANCHOR, _TEXT, _FIRST_FRAME = range(3)


def frame_positions(
    frames: int, height: int, width: int, rope: RopeConfig, *, first_block: int,
    device: torch.device | str = "cpu",
) -> Tensor:  # fmt: skip
    """Positions of the cells of frames, in order of frame, row, column.

    Returns:
        int64 [frames * height * width].
    """
    block, row, column = (
        torch.arange(size, dtype=torch.int64, device=device) for size in (frames, height, width)
    )
    start = (first_block + block) * rope.frame_stride + 1
    cells = row[:, None] * rope.row_stride + column
    return (start[:, None, None] + cells).flatten()


def encoder_positions(
    rope: RopeConfig, *, registers: int, text: int, frames: int, clean_frames: int, height: int,
    width: int, offsets: Tensor | None = None, device: torch.device | str = "cpu",
) -> Tensor:  # fmt: skip
    """Positions of [registers | anchor | text | noised frames | clean frames].

    Args:
        rope: the strides.
        registers: how many tokens there are.
        text: how many tokens there are.
        frames: noised frames.
        clean_frames: how many of them have clean copies.
        height: rows of a frame, in tokens.
        width: columns of a frame.
        offsets: int64 [B, 3], added to the anchor, the text, and the noised and clean frames of
            each window; None adds nothing.
        device: where to.

    Returns:
        int64 [B, tokens]; [1, tokens] without offsets.
    """
    clean = clean_frames * height * width
    anchor = frame_positions(1, height, width, rope, first_block=_ANCHOR, device=device)
    words = _TEXT * rope.frame_stride + 1 + torch.arange(text, device=device)
    noised = frame_positions(frames, height, width, rope, first_block=_FIRST_FRAME, device=device)
    at_zero = noised.new_zeros(registers)
    return _moved([at_zero, anchor, words, torch.cat((noised, noised[:clean]))], offsets)


def decoder_positions(
    rope: RopeConfig, *, registers: int, frames: int, height: int, width: int,
    offsets: Tensor | None = None, device: torch.device | str = "cpu",
) -> Tensor:  # fmt: skip
    """Positions of [registers | noised frames]; the offset of the video moves the frames.

    Returns:
        int64 [B, tokens]; [1, tokens] without offsets.
    """
    cells = frame_positions(frames, height, width, rope, first_block=0, device=device)
    video = None if offsets is None else offsets[:, 2:]
    return _moved([cells.new_zeros(registers), cells], video)


def _moved(parts: Sequence[Tensor], offsets: Tensor | None) -> Tensor:
    """The parts behind each other; every one but the first moved by its column of `offsets`."""
    if offsets is None:
        return torch.cat(list(parts))[None]
    first, *rest = (part.expand(len(offsets), -1) for part in parts)
    moved = [part + offsets[:, [column]] for column, part in enumerate(rest)]
    return torch.cat((first, *moved), 1)
