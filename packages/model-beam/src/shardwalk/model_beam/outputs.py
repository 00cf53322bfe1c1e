"""What a forward of Beam gives."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shardwalk.model_beam.inputs import Rows
from shardwalk.parallelizer_core._torch_compat import as_own_tensor


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

    def of_one_row(self) -> BeamOutput:
        """The same without the dimension of rows, of which there is one.

        No tensor is a view, which FSDP2 warns of: logits are the last that holds their memory, and
        hidden states, which the backward reads, are copied.
        """
        states = self.hidden_states
        return BeamOutput(
            logits=as_own_tensor(self.logits.squeeze(0)),
            loss=self.loss,
            hidden_states=None if states is None else tuple(x.squeeze(0).clone() for x in states),
        )


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
