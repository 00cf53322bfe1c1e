"""What a forward of Beam gives."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shardwalk.model_beam.inputs import Rows


@dataclass(frozen=True, kw_only=True)
class BeamOutput:
    """What a forward gives.

    Attributes:
        logits: [B, S, V] (or of the positions that were asked for); fp32 with a soft cap.
        loss: fp32 scalar, with labels.
        hidden_states: with `output_hidden_states`, the input of each block and the normed output
            of the last, each [B, S, H].
    """

    logits: Tensor
    loss: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class BeamModelOutput:
    """What the model without its head gives.

    Attributes:
        last: hidden states after the last norm, [B, S, H].
        rows: where the tokens are.
        hidden_states: as in `BeamOutput`.
    """

    last: Tensor
    rows: Rows
    hidden_states: tuple[Tensor, ...] | None = None
