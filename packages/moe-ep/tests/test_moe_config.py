"""Settings that cannot work, or would be accepted and do nothing, are errors by name."""

import dataclasses

import pytest
from moe_router_toys import moe_config

REFUSED = [
    ({"top_k": 9}, "top_k=9 is more than num_experts=8"),
    ({"top_k": 0}, "top_k=0 is not allowed"),
    ({"num_groups": 3}, "num_groups=3 does not divide num_experts=8; use one of \\[1, 2, 4, 8\\]"),
    ({"num_groups": 2, "top_k_groups": 3}, "top_k_groups=3 is more than num_groups=2"),
    ({"num_groups": 4, "top_k": 3}, "top_k=3 is more than the 2 experts that top_k_groups=1"),
    (
        {"num_groups": 8, "top_k_groups": 4, "correction_bias": True},
        "num_groups=8 leaves one expert per group",
    ),
    ({"score_function": "relu"}, "score_function='relu' is not allowed; use one of"),
    ({"activation": "gelu"}, "activation='gelu'"),
    ({"dispatcher": "alltoall"}, "dispatcher='alltoall'"),
    ({"balance_loss_scope": "batch"}, "balance_loss_scope='batch'"),
    ({"num_experts": 0}, "num_experts=0"),
    ({"hidden_size": -1}, "hidden_size=-1"),
    ({"latent_size": 0}, "latent_size=0"),
    ({"scaling_factor": 0.0}, "scaling_factor=0.0"),
    ({"scaling_factor": float("inf")}, "scaling_factor=inf"),
    ({"balance_loss_coefficient": -0.1}, "balance_loss_coefficient=-0.1"),
    ({"balance_loss_coefficient": float("nan")}, "balance_loss_coefficient=nan"),
    ({"bias_update_speed": 0.1}, "bias_update_speed=0.1 has no effect without correction_bias"),
    ({"score_function": "sigmoid", "softmax_before_top_k": False}, "softmax_before_top_k=False"),
    ({"normalize_weights": False, "normalize_epsilon": 1e-6}, "normalize_epsilon=1e-06"),
    ({"activation_limit": 7.0}, "activation_limit=7.0 has no effect"),
    ({"activation_alpha": 1.7}, "activation_alpha=1.7 has no effect"),
    ({"activation": "swiglu_clamped"}, "needs an activation_limit"),
    ({"shared_gate": True}, "shared_gate=True has no effect without num_shared_experts"),
    ({"shared_intermediate_size": 4}, "shared_intermediate_size=4 has no effect"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_p31_degenerate_settings_are_refused_at_construction(changes, message):
    with pytest.raises(ValueError, match=message):
        moe_config(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 2.0},
        {"num_experts": True},
        {"hidden_size": "8"},
        {"latent_size": 1.5},
        {"router_bias": 1},
        {"scaling_factor": "1"},
    ],
)
def test_values_of_another_type_are_type_errors(changes):
    with pytest.raises(TypeError, match=next(iter(changes))):
        moe_config(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 8},
        {"num_groups": 8, "top_k_groups": 8, "correction_bias": True},
        {"num_groups": 8, "top_k_groups": 2},
        {"num_groups": 4, "top_k_groups": 2, "top_k": 4, "correction_bias": True},
        {"activation": "swiglu_oai"},
        {"num_shared_experts": 1, "shared_intermediate_size": 7, "shared_gate": True},
        {"scaling_factor": 2},
    ],
)
def test_the_limits_of_what_works_are_allowed(changes):
    config = moe_config(**changes)
    assert dataclasses.replace(config) == config


def test_a_config_is_frozen_and_by_keyword():
    with pytest.raises(dataclasses.FrozenInstanceError):
        moe_config().top_k = 3
    with pytest.raises(TypeError):
        type(moe_config())(8, 4, 8, 2)
