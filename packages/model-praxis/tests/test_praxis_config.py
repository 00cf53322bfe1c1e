"""The document is read whole or refused with the place that is wrong."""

import json

import pytest
import torch
from praxis_toys import tiny_config, tiny_document

from shardwalk.model_praxis import (
    FlexKernelOptions,
    MoeTrainingSettings,
    PraxisConfig,
    PraxisConfigError,
    TowerConfig,
)


def test_a_document_survives_json_and_back(tmp_path):
    config = tiny_config(action_expert__flex_kernel_options={"block_m": 32})
    text = json.dumps(config.to_dict())
    (tmp_path / "config.json").write_text(text)
    assert PraxisConfig.from_pretrained(tmp_path) == config
    assert PraxisConfig.from_dict(json.loads(text)) == config


def test_what_a_document_may_leave_out_has_the_values_of_the_format():
    document = tiny_document()
    del document["model_type"], document["torch_dtype"]
    config = PraxisConfig.from_dict(document)
    assert (config.model_type, config.format_version, config.torch_dtype) == (
        "praxis",
        2,
        "bfloat16",
    )
    assert (config.embodiment, config.pose_frame) == ("single_arm", "flange")
    assert config.fp32_tensors == ("*.ffn.expert_bias",)
    assert config.dtype is torch.bfloat16


def test_derived_numbers():
    config = tiny_config()
    assert (config.action_expert.num_layers, config.action_space.token_dim) == (4, 20)
    assert (config.backbone.encoder.moe_layers, config.backbone.moe_layers) == (3, 4)
    options = FlexKernelOptions(block_m=32, num_warps=4)
    assert options.kernel_options() == {"BLOCK_M": 32, "num_warps": 4}


def test_every_unknown_key_is_refused_with_its_path():
    for path in ("heads", "backbone__moe__latent", "backbone__input_projections__VideoTensor__bias",
                 "action_expert__rope__theta", "video__fps"):  # fmt: skip
        with pytest.raises(PraxisConfigError, match=path.replace("__", ".") + ": unknown key"):
            tiny_config(**({"action_expert__rope": {}} if "rope" in path else {}), **{path: 1})


def test_every_key_without_a_default_is_needed():
    places = [((), name) for name in tiny_document() if name not in {"model_type", "torch_dtype"}]
    places += [
        ((section,), name)
        for section in ("backbone", "action_space", "normalization", "chunking", "video",
                        "text_encoder", "action_expert")
        for name in tiny_document()[section]
    ]  # fmt: skip
    for sections, name in places:
        document = part = tiny_document()
        for section in sections:
            part = part[section]
        del part[name]
        with pytest.raises(PraxisConfigError) as caught:
            PraxisConfig.from_dict(document)
        assert str(caught.value) == ".".join((*sections, name)) + ": missing"


REFUSED = {
    "another model": ({"model_type": "llama"}, "model_type: 'llama' is not supported"),
    "another format": ({"format_version": 3}, "format_version: 3 is not supported"),
    "the base checkpoint": ({"embodiment": "base"}, "embodiment: got 'base', it must be 'single_arm'"),
    "another pose frame": ({"pose_frame": "tool"}, "pose_frame: got 'tool'"),
    "another dtype": ({"torch_dtype": "int8"}, "torch_dtype: 'int8' is not supported"),
    "other float32 tensors": ({"fp32_tensors": ["*"]}, "fp32_tensors"),
    "no object": ({"backbone__moe": 3}, "backbone.moe: got 3, it must be an object"),
    "a bool for an integer": ({"backbone__patch_size": True}, "patch_size: got True, it must be an integer"),
    "a float for an integer": ({"backbone__moe__top_k": 2.0}, "top_k: got 2.0"),
    "an integer for a bool": ({"backbone__moe__norm_topk": 1}, "norm_topk: got 1, it must be true or false"),
    "a string in a list": ({"action_expert__taps": [1, "3"]}, "taps: got .* each item an integer"),
    "zero layers": ({"backbone__encoder__num_layers": 0}, "encoder.num_layers: 0 must be above 0"),
    "a negative count": ({"backbone__encoder__dense_layers": -1}, "dense_layers: -1 must be 0 or more"),
    "an infinite scale": ({"backbone__moe__route_scale": float("inf")}, "route_scale: inf is not finite"),
    "heads": ({"backbone__attention__num_kv_heads": 3}, "3 does not divide num_heads=4"),
    "an odd head": ({"backbone__attention__head_dim": 15}, "attention.head_dim: 15 is odd"),
    "another head of the expert": ({"action_expert__head_dim": 8}, "action_expert.head_dim: 8 differs"),
    "too many picks": ({"backbone__moe__top_k": 9}, "9 is more than num_experts=8"),
    "uneven groups": ({"backbone__moe__num_groups": 3}, "3 does not divide num_experts=8"),
    "too many groups": ({"backbone__moe__top_groups": 2}, "2 is more than num_groups=1"),
    "picks beyond the groups": (
        {"backbone__moe__num_groups": 4, "backbone__moe__top_k": 3}, "more than the 2 experts",
    ),
    "groups of one expert": (
        {"backbone__moe__num_groups": 8, "backbone__moe__top_groups": 4}, "one expert per group",
    ),
    "more dense layers than layers": ({"backbone__decoder__dense_layers": 3}, "decoder.dense_layers: 3"),
    "a missing projection": ({"backbone__output_projections": {}}, "output_projections: has \\[\\]"),
    "a projection of two layers with one": (
        {"backbone__input_projections__TextEncodingTensor__hidden_dim": None}, "hidden_dim: None",
    ),
    "other channels": (
        {"backbone__output_projections__VideoTensor__features": 5}, "VideoTensor.features: 5 differs",
    ),
    "other channels than the video": ({"video__latent_channels": 5}, "but video.latent_channels=5"),
    "another text width": ({"text_encoder__hidden_dim": 8}, "but text_encoder.hidden_dim=8"),
    "falling taps": ({"action_expert__taps": [3, 1]}, "taps: \\[3, 1\\] must rise"),
    "no tap": ({"action_expert__taps": []}, "taps"),
    "a tap beyond": ({"action_expert__taps": [1, 4]}, "action_expert.taps: 4 is beyond the 4 blocks"),
    "an odd width of the expert": ({"action_expert__dim": 33}, "^action_expert.dim: 33 is odd"),
    "odd time features": ({"action_expert__time_features": 3}, "time_features: 3 is odd"),
    "a patch across the edge": ({"video__latent_height": 2, "backbone__patch_size": 4,
                                 "video__canvas_height": 32}, "4 does not divide 2"),
    "rows that overlap": ({"backbone__rope__row_stride": 3}, "row_stride: 3 is less"),
    "frames that overlap": ({"backbone__rope__frame_stride": 100}, "frame_stride: 100 must be above"),
    "text that overlaps": ({"text_encoder__max_tokens": 1024}, "max_tokens: 1024 must be below"),
    "frames of a chunk": ({"chunking__chunk_frames": 9}, "chunk_frames: 9 must be 4 x"),
    "frames of a window": ({"chunking__window_frames": 24}, "window_frames: 24 must be 1 \\+"),
    "rows of a token": ({"action_space__rows_per_token": 2}, "rows_per_token: a chunk's"),
    "lengths of statistics": ({"normalization__action_q99": [1.0]}, "action_q99: 1 numbers, but 5"),
    "statistics of another row": ({"action_space__row_dim": 4}, "but action_space.row_dim=4"),
    "statistics of another pose": ({"action_space__proprio_dim": 4}, "but action_space.proprio_dim=4"),
    "percentiles": ({"normalization__action_q01": [1.0] * 5}, "action_q99: must be above"),
    "a spread of 0": ({"normalization__proprio_std": [0.0] * 7}, "proprio_std: must be above 0"),
    "a canvas": ({"video__canvas_width": 63}, "canvas_height: a canvas of 64 x 63"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case):
    changes, message = REFUSED[case]
    with pytest.raises(PraxisConfigError, match=message):
        tiny_config(**changes)


def test_sections_check_themselves_too():
    with pytest.raises(PraxisConfigError, match="^dense_layers: 2 is more"):
        TowerConfig(dim=8, num_layers=1, ffn_dim=8, dense_layers=2, num_registers=1)


def test_a_file_without_json_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(PraxisConfigError, match="config.json holds no JSON"):
        PraxisConfig.from_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError):
        PraxisConfig.from_pretrained(tmp_path / "nowhere")


def test_training_settings_reach_every_sparse_layer_and_do_nothing_by_default():
    backbone = tiny_config().backbone
    training = MoeTrainingSettings(balance_loss_weight=0.2, bias_update_speed=0.01)
    moe = backbone.layer_moe(backbone.encoder, training)
    assert (moe.balance_loss_coefficient, moe.bias_update_speed) == (0.2 / 4, 0.01)
    moe = backbone.layer_moe(backbone.encoder, MoeTrainingSettings())
    assert (moe.balance_loss_coefficient, moe.bias_update_speed) == (0, 0)
    with pytest.raises(PraxisConfigError, match="balance_loss_weight: -1 must be 0 or more"):
        MoeTrainingSettings(balance_loss_weight=-1)
