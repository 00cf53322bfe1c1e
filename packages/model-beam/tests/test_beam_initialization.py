"""Values drawn tensor by tensor follow the law of a model that was just built."""

from __future__ import annotations

import pytest
import torch
from beam_toys import beam_config

from shardwalk.model_beam import BeamForCausalLM, initial_values
from shardwalk.parallelizer_core import materialize


@pytest.mark.parametrize("tied", [False, True])
def test_values_drawn_one_by_one_have_the_law_of_the_constructor(tied: bool) -> None:
    config = beam_config(
        initializer_range=0.05, attention_bias=True, pad_token_id=7, tie_word_embeddings=tied
    )
    model = BeamForCausalLM.on_meta(config, dtype=torch.float32)
    materialize(model, init=initial_values(config))
    built = BeamForCausalLM(config).state_dict()
    for name, value in model.state_dict().items():
        if built[name].unique().numel() <= 1:
            assert value.equal(built[name]), name
        else:
            assert abs(value.std().item() / built[name].std().item() - 1) < 0.15, name
            assert not value.equal(built[name]), name
    assert not model.model.embed_tokens.weight[7].any()
    experts = model.model.layers[1].mlp.experts.gate_up_proj
    assert not experts[0].equal(experts[1])
