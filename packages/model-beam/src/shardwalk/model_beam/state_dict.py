"""Checkpoint files of Beam: a tensor per expert, and else the names of the model."""

from __future__ import annotations

from shardwalk.moe_ep import PerExpertAdapter


class BeamStateDictAdapter(PerExpertAdapter):
    """The layout of published checkpoints and of what transformers writes.

    With E experts of width I on tokens of width H, and ``experts`` short for
    ``model.layers.<l>.mlp.experts``:

    - ``experts.gate_up_proj`` [E, 2 I, H] of the model is ``experts.<e>.gate_proj.weight`` and
      ``experts.<e>.up_proj.weight``, [I, H] each, in the files;
    - ``experts.down_proj`` [E, H, I] is ``experts.<e>.down_proj.weight`` [H, I].

    All other tensors have the same names and shapes in both. transformers' model in memory has the
    names and shapes of this package's, so that either loads the other's ``state_dict()`` as it is.
    """

    def __init__(self) -> None:
        super().__init__(gate="gate_proj", up="up_proj", down="down_proj")
