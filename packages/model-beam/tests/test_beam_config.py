"""Configurations travel between Hugging Face's files and ours, and wrong ones are refused."""

import copy
import dataclasses
import json

import pytest
import torch

from shardwalk.model_beam.config import BeamConfig, moe_config
from shardwalk.model_beam.config_checks import ACTIVATIONS
from shardwalk.moe_ep import MoEConfig

transformers = pytest.importorskip("transformers")

PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 2048,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 2048,
}  # fmt: skip


def ropes(sliding, full=None):
    return {"rope_parameters": {"sliding_attention": sliding, "full_attention": full}}


TRAVELLERS = {
    "defaults": {},
    "seven layers": {"num_hidden_layers": 7, "sliding_window": 64, "vocab_size": 300},
    "one layer": {"num_hidden_layers": 1, "pad_token_id": 0, "eos_token_id": [2, 3]},
    "dense only": {
        "mlp_layer_types": ["dense"] * 3, "num_hidden_layers": 3, "n_group": None,
        "topk_group": None, "num_experts": 1,
    },
    "top-1, no norm, no cap": {
        "num_experts_per_tok": 1, "norm_topk_prob": False, "final_logit_softcapping": None,
        "routed_scaling_factor": 1, "n_group": 1, "topk_group": 1,
    },
    "tied, biased, another activation": {
        "tie_word_embeddings": True, "attention_bias": True, "hidden_act": "gelu_pytorch_tanh",
        "attention_dropout": 0.25, "output_router_logits": True, "use_cache": False,
    },
    "swapped": ropes(None, PLAIN),
    "no rotation, no window": {
        **ropes(None), "layer_types": ["full_attention"] * 52, "sliding_window": None,
    },
    "linear and dynamic": ropes(
        {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0},
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2},
    ),
    "yarn and llama3": ropes({**YARN, "mscale": 0.7, "mscale_all_dim": 1.1}, LLAMA3),
    "rotation without its type, and the older name": ropes(
        {"rope_theta": 1e4}, {"type": "linear", "rope_theta": 1e4, "factor": 2.0}
    ),
    "bookkeeping": {
        "architectures": ["BeamForCausalLM"], "dtype": "bfloat16", "bos_token_id": 1,
        "id2label": {0: "no", 1: "yes", 2: "may be"}, "output_hidden_states": True,
        "problem_type": "regression",
    },
}  # fmt: skip


def fields_of(config):
    """Every attribute of a configuration of transformers, its bookkeeping included."""
    values = copy.deepcopy(vars(config))
    return {key: value for key, value in values.items() if key not in {"_name_or_path"}}


@pytest.mark.parametrize("changes", TRAVELLERS.values(), ids=TRAVELLERS)
def test_files_travel_from_transformers_to_us_and_back_without_a_change(changes, tmp_path):
    theirs = transformers.BeamConfig(**copy.deepcopy(changes))
    theirs.save_pretrained(tmp_path / "theirs")
    ours = BeamConfig.from_pretrained(tmp_path / "theirs")
    for name in BeamConfig.field_names():
        assert ours.to_dict()[name] == getattr(theirs, name), name
    ours.save_pretrained(tmp_path / "ours")
    loaded = transformers.BeamConfig.from_pretrained(tmp_path / "ours")
    reloaded = transformers.BeamConfig.from_pretrained(tmp_path / "theirs")
    assert fields_of(loaded) == fields_of(reloaded)
    assert BeamConfig.from_pretrained(tmp_path / "ours") == ours
    theirs_text = (tmp_path / "theirs" / "config.json").read_text()
    assert json.loads((tmp_path / "ours" / "config.json").read_text()) == json.loads(theirs_text)


@pytest.mark.parametrize("changes", TRAVELLERS.values(), ids=TRAVELLERS)
def test_a_configuration_made_by_us_loads_in_transformers_as_the_same(changes, tmp_path):
    bookkeeping = {"architectures", "dtype", "id2label", "output_hidden_states", "problem_type"}
    extra = {key: value for key, value in changes.items() if key in bookkeeping}
    ours = BeamConfig(**{k: v for k, v in changes.items() if k not in extra}, extra=extra)
    ours.save_pretrained(tmp_path)
    loaded = transformers.BeamConfig.from_pretrained(tmp_path)
    assert {name: getattr(loaded, name) for name in BeamConfig.field_names()} == {
        name: value for name, value in ours.to_dict().items() if name in BeamConfig.field_names()
    }
    assert (
        BeamConfig.from_dict(loaded.to_dict()).to_dict().items()
        >= {key: value for key, value in ours.to_dict().items() if key not in extra}.items()
    )


def test_names_and_defaults_are_those_of_transformers():
    theirs, ours = transformers.BeamConfig(), BeamConfig()
    base = set(vars(transformers.PretrainedConfig()))
    assert {key for key in vars(theirs) if key not in base} == set(BeamConfig.field_names())
    full = [i for i, kind in enumerate(ours.layer_types) if kind == "full_attention"]
    assert full == [5, 11, 17, 23, 29, 35, 41, 47, 51]
    assert ours.mlp_layer_types == ("dense",) * 3 + ("sparse",) * 49
    for count in (1, 2, 3, 5, 6, 7, 12):
        theirs, ours = (c(num_hidden_layers=count) for c in (transformers.BeamConfig, BeamConfig))
        assert list(ours.layer_types) == theirs.layer_types
        assert list(ours.mlp_layer_types) == theirs.mlp_layer_types


def test_every_key_that_transformers_may_write_is_kept():
    generation = transformers.GenerationConfig._get_default_generation_params()
    theirs = {**generation, **transformers.BeamConfig(dtype=torch.bfloat16).to_dict()}
    legacy = {"torch_dtype": "bfloat16", "rope_scaling": None, "quantization_config": None}
    ours = BeamConfig.from_dict({**theirs, **legacy})
    assert ours.to_dict() == {**theirs, **legacy}
    assert ours.extra["dtype"] == "bfloat16"


def test_what_is_handed_in_stays_apart_from_the_configuration():
    given = ropes(dict(PLAIN))["rope_parameters"]
    config = BeamConfig(rope_parameters=given, layer_types=["sliding_attention"] * 52)
    given["sliding_attention"]["rope_theta"] = 5.0
    config.to_dict()["rope_parameters"]["sliding_attention"]["rope_theta"] = 6.0
    assert config.rope_of(0) == PLAIN
    assert config.layer_types == ("sliding_attention",) * 52
    assert hash(config) == hash(copy.deepcopy(config))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 8


def test_layers_by_number():
    config = BeamConfig()
    assert [config.window_of(i) for i in (4, 5)] == [512, None]
    assert [config.rope_of(i) for i in (4, 5)] == [PLAIN, None]
    assert [config.is_sparse(i) for i in (2, 3)] == [False, True]


REFUSED = [
    ({"vocab_size": 0}, "vocab_size=0 is not allowed; use 1 or more"),
    ({"num_hidden_layers": 0}, "num_hidden_layers=0 is not allowed"),
    ({"moe_intermediate_size": 0}, "moe_intermediate_size=0"),
    ({"num_key_value_heads": 5}, "num_key_value_heads=5 does not divide num_attention_heads=48"),
    ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for num_hidden_layers=52"),
    ({"layer_types": ["full"] * 52}, r"layer_types\[0\]='full' is not allowed; use one of"),
    ({"layer_types": ["linear_attention"] * 52}, r"layer_types\[0\]='linear_attention'"),
    ({"mlp_layer_types": []}, "mlp_layer_types has 0 entries"),
    ({"mlp_layer_types": ["moe"] * 52}, r"mlp_layer_types\[0\]='moe'.*'dense', 'sparse'"),
    ({"sliding_window": None}, "sliding_window=None leaves the sliding layers"),
    ({"sliding_window": 0}, "sliding_window=0 leaves the sliding layers"),
    ({"attention_dropout": 1.0}, "attention_dropout=1.0"),
    ({"attention_dropout": -0.1}, "attention_dropout=-0.1"),
    ({"attention_dropout": float("nan")}, "attention_dropout=nan"),
    ({"final_logit_softcapping": 0.0}, "final_logit_softcapping=0.0.*or None for no cap"),
    ({"rms_norm_eps": -1e-6}, "rms_norm_eps=-1e-06"),
    ({"initializer_range": float("inf")}, "initializer_range=inf"),
    ({"hidden_act": "relu2"}, "hidden_act='relu2' is not supported; use one of .*silu"),
    ({"pad_token_id": 151936}, "pad_token_id=151936 is no token of vocab_size=151936"),
    ({"eos_token_id": [2, -1]}, r"eos_token_id=\(2, -1\) is no token"),
    ({"routed_scaling_factor": 0.0}, "routed_scaling_factor=0.0"),
    ({"n_group": 6}, r"n_group=6 does not divide num_experts=256; use one of \[1, 2, 4, 8"),
    ({"n_group": None}, "n_group=None .*use 1"),
    ({"topk_group": None}, "topk_group=None"),
    ({"n_group": 256}, "n_group=256 leaves one expert per group"),
    ({"num_experts": 8, "topk_group": 8, "n_group": 8}, "n_group=8 leaves one expert per group"),
    ({"topk_group": 9}, "topk_group=9 is more than n_group=8; use 1 to 8"),
    ({"num_experts_per_tok": 33, "topk_group": 1}, "num_experts_per_tok=33 is more than the 32"),
    ({"num_experts_per_tok": 0}, "num_experts_per_tok=0"),
    ({"head_dim": 127}, "head_dim=127 is odd"),
    ({"head_dim": 3}, "head_dim=3 is odd"),
    ({"rope_parameters": PLAIN}, "'rope_type' where a layer type is expected"),
    ({"rope_parameters": {}}, "rope_parameters has no 'sliding_attention'"),
    ({"rope_parameters": {"sliding_attention": PLAIN}}, "has no 'full_attention', which"),
    (
        ropes({"rope_type": "default"}),
        r"rope_parameters\['sliding_attention'\] has no 'rope_theta'",
    ),
    (ropes(None, {**PLAIN, "rope_type": "longrope"}), "'longrope' is not known; use one of"),
    (ropes({**PLAIN, "factor": 2.0}), "'factor'.*=2.0 would do nothing: rope_type='default'"),
    (ropes({**PLAIN, "rope_theta": 1.0}), "'rope_theta'.*=1.0 is not allowed"),
    (ropes({**PLAIN, "type": "linear"}), "'type'.*='linear' contradicts rope_type='default'"),
    (ropes({**PLAIN, "partial_rotary_factor": 0.5}), "'partial_rotary_factor'.*=0.5"),
    (ropes({**PLAIN, "rope_type": "linear"}), "has no 'factor', which rope_type='linear' needs"),
    (ropes({**PLAIN, "rope_type": "dynamic", "factor": 0.5}), "'factor'.*=0.5.*must be 1 or more"),
    ({**ropes({**PLAIN, "rope_type": "dynamic", "factor": 2}), "head_dim": 2}, "head_dim=2 leaves"),
    (ropes({**PLAIN, "rope_type": "yarn", "factor": 2.0}), "no 'original_max_position_embeddings'"),
    (ropes({**YARN, "beta_fast": 1, "beta_slow": 4}), "'beta_fast'.*=1 .*is below beta_slow=4"),
    (ropes({**YARN, "truncate": False}), "'truncate'.*=False is not supported"),
    (ropes({**YARN, "mscale": 1.0}), "'mscale'.*=1.0 would do nothing alone"),
    (
        ropes({**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.2}),
        "'mscale'.*=1.0 would do nothing beside attention_factor",
    ),
    (ropes({**LLAMA3, "high_freq_factor": 1.0}), "'high_freq_factor'.*=1.0 must be above"),
    (
        ropes({k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}),
        "has no 'low_freq_factor'",
    ),
    ({"extra": {"hidden_sizes": 4}}, "hidden_sizes=4 is no key .*did you mean hidden_size"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_work_is_refused_with_its_name_and_a_way_out(changes, message):
    with pytest.raises(ValueError, match=message):
        BeamConfig(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "64"},
        {"hidden_size": None},
        {"num_hidden_layers": True},
        {"num_hidden_layers": 2.0},
        {"n_group": 2.0},
        {"sliding_window": "8"},
        {"rms_norm_eps": "1e-6"},
        {"routed_scaling_factor": True},
        {"attention_bias": 1},
        {"hidden_act": None},
        {"layer_types": "full_attention"},
        {"mlp_layer_types": [1] * 52},
        {"eos_token_id": [True]},
        {"rope_parameters": [PLAIN]},
        {"extra": ["dtype"]},
    ],
    ids=repr,
)
def test_values_of_another_type_are_type_errors(changes):
    with pytest.raises(TypeError, match=next(iter(changes))):
        BeamConfig(**changes)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("default", r"\['sliding_attention'\]='default' must be None or a mapping"),
        ({**PLAIN, "rope_theta": None}, "'rope_theta'.*=None must be a number"),
        ({**YARN, "original_max_position_embeddings": 2048.0}, "=2048.0 must be an integer"),
        ({**LLAMA3, "factor": True}, "'factor'.*=True must be a number"),
    ],
)
def test_values_of_another_type_inside_a_rotation_are_type_errors(entry, message):
    with pytest.raises(TypeError, match=message):
        BeamConfig(**ropes(entry))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "llama"}, "model_type='llama' is another network"),
        ({"model_type": None}, "model_type=None"),
        ({"hidden_szie": 64}, "hidden_szie=64 is no key .*did you mean hidden_size"),
        ({"n_shared_experts": 1}, "n_shared_experts=1 is no key"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config=.*not supported"),
        ({"rope_theta": 1e6}, "rope_theta=1000000.0 is not supported; write rope_parameters="),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling=.*write rope_parameters="),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config="),
        ({"is_encoder_decoder": True}, "is_encoder_decoder=True"),
    ],
    ids=repr,
)
def test_keys_that_may_change_the_network_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        BeamConfig.from_dict({"num_hidden_layers": 2, **values})


def test_without_a_sparse_layer_nothing_asks_about_experts():
    changes = {"n_group": None, "topk_group": 0, "num_experts": 7, "num_experts_per_tok": 99}
    config = BeamConfig(num_hidden_layers=2, mlp_layer_types=["dense"] * 2, **changes)
    assert not config.has_sparse_layers
    with pytest.raises(ValueError, match="mlp_layer_types holds no sparse layer"):
        moe_config(config)


def test_without_a_rotation_heads_may_be_odd_and_without_a_window_it_may_be_none():
    kinds = ["full_attention"] * 52
    BeamConfig(**ropes(None), head_dim=127)
    BeamConfig(**ropes(PLAIN), layer_types=kinds, sliding_window=None)


def test_the_file_must_hold_an_object(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"give a local folder that holds config\.json"):
        BeamConfig.from_pretrained("someone/beam-501b")
    (tmp_path / "config.json").write_text("{oops")
    with pytest.raises(ValueError, match=r"config\.json is no JSON file: Expecting"):
        BeamConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds list; it must be a JSON object"):
        BeamConfig.from_pretrained(tmp_path)


def test_experts_scale_after_their_sum_and_get_the_speed_from_training():
    config = BeamConfig(norm_topk_prob=False, hidden_act="quick_gelu", num_experts=64, n_group=4)
    expected = MoEConfig(
        hidden_size=5120, intermediate_size=2560, num_experts=64, top_k=8, num_groups=4,
        top_k_groups=4, score_function="sigmoid", normalize_weights=False, correction_bias=True,
        activation="quick_geglu", fp32_product=True, scaling_factor=1.0, bias_update_speed=1e-3,
        dispatcher="local",
    )  # fmt: skip
    assert moe_config(config, bias_update_speed=1e-3, dispatcher="local") == expected
    assert moe_config(BeamConfig()).normalize_epsilon == 1e-20


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_bit_equal_to_those_of_transformers(name):
    act = transformers.activations.ACT2FN[name]
    gate, up = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(0)).mul(4).unbind()
    product = BeamConfig(hidden_act=name).gated_activation.product
    assert torch.equal(product(gate, up), act(gate) * up)
    low, lower = gate.bfloat16(), up.bfloat16()
    assert torch.equal(product(low, lower), (act(low.float()) * lower.float()).bfloat16())
