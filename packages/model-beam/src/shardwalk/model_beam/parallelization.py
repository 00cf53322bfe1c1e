"""How Beam is sharded."""

from __future__ import annotations

from shardwalk.parallelizer_core import ModelParallelizer


class BeamModelParallelizer(ModelParallelizer):
    """The sidecar of Beam."""


PARALLELIZER = BeamModelParallelizer()
