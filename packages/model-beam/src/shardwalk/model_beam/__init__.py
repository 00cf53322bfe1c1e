"""The Beam decoder, sharded with the numbers of one process."""

from shardwalk.model_beam.config import BeamConfig
from shardwalk.model_beam.model import BeamForCausalLM, BeamModel, BeamOutput

__all__ = ["BeamConfig", "BeamForCausalLM", "BeamModel", "BeamOutput"]
