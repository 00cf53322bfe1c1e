"""The Beam decoder, sharded with the numbers of one process."""

from shardwalk.model_beam.config import BeamConfig
from shardwalk.model_beam.initialization import initial_values
from shardwalk.model_beam.model import BeamForCausalLM, BeamModel
from shardwalk.model_beam.outputs import BeamOutput
from shardwalk.model_beam.state_dict import BeamStateDictAdapter

__all__ = [
    "BeamConfig",
    "BeamForCausalLM",
    "BeamModel",
    "BeamOutput",
    "BeamStateDictAdapter",
    "initial_values",
]
