"""How latents, text and times enter and leave the towers."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwalk.model_praxis.config import ProjectionConfig
from shardwalk.model_praxis.layers import Modulation, ZeroCenteredRMSNorm


def patchify(latents: Tensor, patch: int) -> Tensor:
    """[B, C, T, h, w] to [B, T, h w / patch^2, C patch^2]: channel, row, column of a patch."""
    cells: Tensor = latents.unflatten(4, (-1, patch)).unflatten(3, (-1, patch))
    return cells.permute(0, 2, 3, 5, 1, 4, 6).flatten(4).flatten(2, 3)


def unpatchify(tokens: Tensor, rows: int, patch: int) -> Tensor:
    """Give each cell of a patch its own token.

    Args:
        tokens: [B, T, rows * columns, patch^2 * n], row and column of the patch first.
        rows: of a frame, in patches.
        patch: its side.

    Returns:
        [B, T, rows * patch * columns * patch, n], row by row of the frame.
    """
    cells: Tensor = tokens.unflatten(3, (patch, patch, -1)).unflatten(2, (rows, -1))
    return cells.transpose(3, 4).flatten(2, 5)


class TextIn(nn.Module):
    """From states of the text encoder to tokens: norm(fc2(silu(fc1(x))))."""

    def __init__(self, projection: ProjectionConfig, dim: int, eps: float) -> None:
        super().__init__()
        assert projection.hidden_dim is not None
        self.fc1 = nn.Linear(projection.features, projection.hidden_dim)
        self.fc2 = nn.Linear(projection.hidden_dim, dim)
        self.norm = ZeroCenteredRMSNorm(dim, eps)

    def forward(self, states: Tensor) -> Tensor:
        """[B, X, features] of any dtype to [B, X, dim]."""
        out: Tensor = self.norm(self.fc2(F.silu(self.fc1(states.to(self.fc1.weight.dtype)))))
        return out


class TimeFeatures(nn.Module):
    """Fixed random Fourier features of a time: cos(2 pi (t f + phase)) / 2.

    The buffers `frequencies` (normal) and `phases` (uniform in a turn), [dim] each, are drawn once
    and never trained.
    """

    frequencies: Tensor
    phases: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.empty(dim))
        self.register_buffer("phases", torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw them anew."""
        nn.init.normal_(self.frequencies)
        nn.init.uniform_(self.phases)

    def forward(self, times: Tensor) -> Tensor:
        """[...] to float32 [..., dim], within 1/2 of 0."""
        turns = times.float()[..., None] * self.frequencies.float() + self.phases.float()
        return 0.5 * torch.cos(2 * math.pi * turns)


class ModulationOut(nn.Linear):
    """From an encoder token to the modulation of each cell of its patch.

    The outputs are ordered by row and column of the patch, then shift and scale. It starts by
    modulating nothing: shift 0, scale 1, whatever the token.
    """

    def __init__(self, dim: int, patch: int, decoder_dim: int) -> None:
        self.patch, self.decoder_dim = patch, decoder_dim
        super().__init__(dim, patch * patch * 2 * decoder_dim)

    def reset_parameters(self) -> None:
        """Start over."""
        with torch.no_grad():
            nn.init.zeros_(self.weight)
            nn.init.zeros_(self.bias)
            self.bias.view(-1, 2, self.decoder_dim)[:, 1].fill_(1.0)

    def modulation(self, tokens: Tensor, rows: int) -> Modulation:
        """The modulation of all cells, row by row.

        Args:
            tokens: [B, T, rows * columns, dim].
            rows: of a frame, in patches.

        Returns:
            float32 or wider, [B, T * cells, decoder_dim] each.
        """
        out = self(tokens)
        wide = out.to(torch.promote_types(out.dtype, torch.float32))
        cells = unpatchify(wide, rows, self.patch).flatten(1, 2)
        return Modulation(*cells.unflatten(-1, (2, -1)).unbind(-2))


class VideoOut(nn.Module):
    """From decoder tokens to latents: linear(norm(x))."""

    def __init__(self, dim: int, channels: int, eps: float) -> None:
        super().__init__()
        self.norm = ZeroCenteredRMSNorm(dim, eps)
        self.linear = nn.Linear(dim, channels)

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] to [..., channels]."""
        out: Tensor = self.linear(self.norm(x))
        return out
