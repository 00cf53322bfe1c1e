"""Every config: defaults, normal forms, what it refuses and with which words, and round trips."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from shardwalk.mesh import (
    PIPELINE_SCHEDULES,
    DDPConfig,
    FSDP2Config,
    MegatronFSDPConfig,
    MoEParallelizerConfig,
    MultimodalDistributedConfig,
    MultimodalVisionConfig,
    PipelineConfig,
    activation_checkpointing_groups,
    normalize_activation_checkpointing,
    normalize_activation_checkpointing_scope,
)

DEFAULT_POLICY = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16,
    reduce_dtype=torch.float32,
    output_dtype=None,
    cast_forward_inputs=False,
)

EXAMPLES = [
    FSDP2Config(),
    FSDP2Config(
        tp_plan={"layers.0": "colwise"},
        mp_policy={"param_dtype": "bf16"},
        offload_policy={"pin_memory": False},
        activation_checkpointing=True,
        multimodal={"frozen_sharding": "replicate"},
    ),
    DDPConfig(bucket_cap_mb=3, autocast_dtype="bfloat16"),
    MegatronFSDPConfig(megatron_fsdp_unit_modules=["pkg.Block"], activation_checkpointing=True),
    MoEParallelizerConfig(lm_head_precision="float32", mp_policy={"reduce_dtype": "float32"}),
    MultimodalDistributedConfig(vision={}),
    MultimodalVisionConfig(),
    PipelineConfig(
        pp_schedule="GPipe",
        pp_batch_size=4,
        dtype="bf16",
        module_fqns_per_model_part=[["a"], ["b"]],
    ),
]


@pytest.mark.parametrize("config", EXAMPLES, ids=lambda config: type(config).__name__)
def test_to_dict_round_trips_and_the_config_is_frozen(config: Any) -> None:
    assert type(config)(**config.to_dict()) == config
    assert list(config.to_dict()) == [field.name for field in dataclasses.fields(config)]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.new = 1


@pytest.mark.parametrize("value", [None, {"_target_": "MixedPrecisionPolicy"}, DEFAULT_POLICY])
def test_none_and_default_are_the_same_policy(value: Any) -> None:
    assert FSDP2Config().mp_policy == DEFAULT_POLICY
    expected = MixedPrecisionPolicy() if isinstance(value, dict) else DEFAULT_POLICY
    assert FSDP2Config(mp_policy=value).mp_policy == expected


def test_policies_as_dicts_get_real_dtypes() -> None:
    """P35: a dtype given as a string is stored as a dtype, in a policy object too."""
    target = "torch.distributed.fsdp.MixedPrecisionPolicy"
    given = {"_target_": target, "param_dtype": "bfloat16", "reduce_dtype": "torch.float32"}
    policy = FSDP2Config(mp_policy={**given, "cast_forward_inputs": False}).mp_policy
    assert policy == DEFAULT_POLICY
    stringly = MixedPrecisionPolicy(param_dtype="float16")  # type: ignore[arg-type]
    assert MoEParallelizerConfig(mp_policy=stringly).mp_policy.param_dtype is torch.float16
    assert FSDP2Config(offload_policy={"pin_memory": False}).offload_policy == CPUOffloadPolicy(
        pin_memory=False
    )


def test_dtype_names() -> None:
    for name in ("bfloat16", "bf16", "torch.bfloat16", " BF16 "):
        assert DDPConfig(autocast_dtype=name).autocast_dtype is torch.bfloat16
    assert PipelineConfig(dtype="float32").dtype is torch.float32
    assert MoEParallelizerConfig(lm_head_precision="fp32").lm_head_precision is torch.float32


def test_the_scopes_and_modes() -> None:
    modes = [False, True, "full", "selective"]
    assert [normalize_activation_checkpointing(mode) for mode in modes] == [
        *(False, "full", "full", "selective")
    ]
    assert normalize_activation_checkpointing_scope(None) == "all"
    assert activation_checkpointing_groups("multimodal") == {"vision", "audio"}
    assert activation_checkpointing_groups("all") == {"language", "vision", "audio"}
    assert activation_checkpointing_groups(["language", "audio"]) == {"language", "audio"}
    assert normalize_activation_checkpointing_scope(["vision", "vision"]) == "vision"
    several = FSDP2Config(activation_checkpointing_scope=["vision", "language"])
    assert several.activation_checkpointing_scope == ("vision", "language")
    assert FSDP2Config(**several.to_dict()) == several
    assert MegatronFSDPConfig(activation_checkpointing="full").activation_checkpointing is True


def test_async_tensor_parallel_sets_sequence_parallel_and_says_so() -> None:
    with pytest.warns(UserWarning, match="sequence_parallel") as caught:
        config = FSDP2Config(enable_async_tensor_parallel=True)
    assert config.sequence_parallel
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FSDP2Config(**config.to_dict())


def test_schedules() -> None:
    for name in PIPELINE_SCHEDULES:
        assert PipelineConfig(pp_schedule=name).pp_schedule == name
    assert PipelineConfig(pp_schedule="Interleaved1F1B").pp_schedule == "interleaved_1f1b"
    assert PipelineConfig(pp_schedule=None, pp_schedule_csv="a.csv").pp_schedule is None
    assert PipelineConfig(pp_recv_buffer_pool=True).pp_recv_buffer_pool


REFUSED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (FSDP2Config, {"activation_checkpointing": "selectve"}, "did you mean 'selective'"),
    (FSDP2Config, {"activation_checkpointing": None}, "False, True"),
    (FSDP2Config, {"activation_checkpointing": 1}, "activation_checkpointing=1"),
    (FSDP2Config, {"activation_checkpointing_scope": "visio"}, "did you mean 'vision'"),
    (DDPConfig, {"activation_checkpointing_scope": ["all", "audi"]}, "did you mean 'audio'"),
    (DDPConfig, {"activation_checkpointing_scope": []}, "selects nothing"),
    (FSDP2Config, {"fsdp2_forward_prefetch_depth": -1}, "fsdp2_forward_prefetch_depth=-1"),
    (FSDP2Config, {"fsdp2_backward_prefetch_depth": True}, "fsdp2_backward_prefetch_depth=True"),
    (FSDP2Config, {"reshard_after_forward": 2}, "True, False or None"),
    (FSDP2Config, {"sequence_parallel": "yes"}, "FSDP2Config.sequence_parallel='yes'"),
    (FSDP2Config, {"tp_plan": 3}, "tp_plan=3"),
    (FSDP2Config, {"tp_plan": {3: "colwise"}}, "keys must be strings"),
    (FSDP2Config, {"mp_policy": {"param_dtypes": "bf16"}}, "did you mean 'param_dtype'"),
    (FSDP2Config, {"mp_policy": {"param_dtype": "bfloat61"}}, "did you mean 'bfloat16'"),
    (FSDP2Config, {"mp_policy": {"param_dtype": "int8"}}, "floating-point"),
    (FSDP2Config, {"mp_policy": {"_target_": "CPUOffloadPolicy"}}, "MixedPrecisionPolicy"),
    (FSDP2Config, {"mp_policy": {"_target_": "x.MixedPrecisionPolicy"}}, "_target_='x.Mixed"),
    (FSDP2Config, {"offload_policy": {"_target_": "x.CPUOffloadPolicy"}}, "_target_='x.CPU"),
    (FSDP2Config, {"mp_policy": {"cast_forward_inputs": 1}}, "cast_forward_inputs=1"),
    (FSDP2Config, {"mp_policy": "bf16"}, "MixedPrecisionPolicy, a dict"),
    (FSDP2Config, {"offload_policy": True}, "CPUOffloadPolicy, a dict"),
    (FSDP2Config, {"offload_policy": OffloadPolicy()}, "CPUOffloadPolicy, a dict"),
    (FSDP2Config, {"autocast_dtype": torch.int32}, "floating-point"),
    (FSDP2Config, {"multimodal": {"frozen_shardin": "root"}}, "did you mean 'frozen_sharding'"),
    (FSDP2Config, {"multimodal": "root"}, "MultimodalDistributedConfig or a dict"),
    (MultimodalDistributedConfig, {"frozen_sharding": "rot"}, "did you mean 'root'"),
    (MultimodalDistributedConfig, {"vision": {"x": 1}}, "no option 'x'"),
    (DDPConfig, {"bucket_cap_mb": -3}, "bucket_cap_mb=-3"),
    (DDPConfig, {"bucket_cap_mb": float("nan")}, "bucket_cap_mb=nan"),
    (DDPConfig, {"static_graph": None}, "static_graph=None"),
    (DDPConfig, {"activation_checkpointing": "selectve"}, "did you mean 'selective'"),
    (MegatronFSDPConfig, {"zero_dp_strategy": 9}, "from 0 to 3"),
    (MegatronFSDPConfig, {"megatron_fsdp_unit_modules": []}, "non-empty list"),
    (MegatronFSDPConfig, {"megatron_fsdp_unit_modules": ["a b"]}, "import path"),
    (MegatronFSDPConfig, {"activation_checkpointing": "selective"}, "no selective"),
    (MoEParallelizerConfig, {"reshard_after_forward": None}, "True or False"),
    (MoEParallelizerConfig, {"lm_head_precision": "fp23"}, "lm_head_precision='fp23'"),
    (PipelineConfig, {"pp_schedule": "1f1bb"}, "did you mean '1f1b'"),
    (PipelineConfig, {"pp_schedule": None}, "pp_schedule=None"),
    (PipelineConfig, {"pp_schedule_csv": ""}, "pp_schedule_csv=''"),
    (PipelineConfig, {"pp_batch_size": 5, "pp_microbatch_size": 2}, "pp_batch_size=5"),
    (PipelineConfig, {"pp_microbatch_size": 0}, "pp_microbatch_size=0"),
    (PipelineConfig, {"pp_batch_size": 0}, "pp_batch_size=0"),
    (PipelineConfig, {"layers_per_stage": 0}, "layers_per_stage=0"),
    (PipelineConfig, {"pp_seq_len": 0}, "pp_seq_len=0"),
    (PipelineConfig, {"round_virtual_stages_to_pp_multiple": "upp"}, "did you mean 'up'"),
    (PipelineConfig, {"module_fqns_per_model_part": [[]]}, "without modules"),
    (PipelineConfig, {"module_fqns_per_model_part": ["a"]}, "the stage 'a'"),
    (PipelineConfig, {"module_fqns_per_model_part": [["a", "a"]]}, "twice"),
    (PipelineConfig, {"loss_fn": "mse"}, "loss_fn='mse'"),
    (PipelineConfig, {"dtype": 32}, "dtype=32"),
    (PipelineConfig, {"pp_recv_buffer_pool_slack": -1}, "pp_recv_buffer_pool_slack=-1"),
    (PipelineConfig, {"pp_recv_buffer_pool": True, "pp_schedule": "gpipe"}, "not 'gpipe'"),
]


@pytest.mark.parametrize(("config", "options", "words"), REFUSED)
def test_refused_options_name_field_value_and_what_is_allowed(
    config: Callable[..., Any], options: dict[str, Any], words: str
) -> None:
    """P12 and P18: nothing unknown or out of range is taken as it is."""
    with pytest.raises((ValueError, TypeError)) as error:
        config(**options)
    assert words in str(error.value)
