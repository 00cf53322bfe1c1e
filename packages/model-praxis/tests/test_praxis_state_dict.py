"""Files of Praxis: names and layouts both ways, from and to any mesh, each rank reading its own."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from praxis_toys import tiny_config, tiny_document
from praxis_windows import small_inputs, small_policy, small_window
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwalk.mesh import DistributedSetup, MeshContext, ParallelismSizes
from shardwalk.model_praxis import (
    LoraSettings,
    PraxisConfig,
    PraxisPolicy,
    PraxisStateDictAdapter,
    apply_lora,
    merge_lora,
    save_pretrained,
)
from shardwalk.model_praxis.state_dict import file_tensor, policy_names
from shardwalk.parallelizer_core import (
    StateMismatchError,
    materialize,
    parallelize_model,
)
from shardwalk.parallelizer_core.checkpoint_reading import SafetensorsReader
from shardwalk.parallelizer_core.testing import cached, run_on_ranks

VARIANTS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "dense": {"backbone__encoder__dense_layers": 4, "backbone__decoder__dense_layers": 2},
    "sparse": {"backbone__encoder__dense_layers": 0, "backbone__decoder__dense_layers": 0},
    "twelve blocks": {"backbone__encoder__num_layers": 12},
}
BLOCK = "backbone.encoder.blocks.1"
KNOWN = {
    "backbone.encoder.text_in.fc1.weight": "backbone.encoder.input_projections.TextEncodingTensor.proj.0.weight",
    "backbone.encoder.text_in.fc2.bias": "backbone.encoder.input_projections.TextEncodingTensor.proj.2.bias",
    "backbone.encoder.text_in.norm.weight": "backbone.encoder.input_projections.TextEncodingTensor.proj.3.weight",
    "backbone.encoder.video_in.bias": "backbone.encoder.input_projections.VideoTensor.proj.bias",
    "backbone.encoder.video_out.weight": "backbone.encoder.output_projections.VideoTensor.proj.weight",
    "backbone.encoder.time_proj.phases": "backbone.encoder.t_proj.VideoTensor.phases",
    "backbone.encoder.registers": "backbone.encoder.registers",
    "backbone.decoder.video_in.weight": "backbone.decoder.input_projections.VideoTensor.proj.weight",
    "backbone.decoder.video_out.norm.weight": "backbone.decoder.output_projections.VideoTensor.proj.0.weight",
    "backbone.decoder.video_out.linear.bias": "backbone.decoder.output_projections.VideoTensor.proj.1.bias",
    "backbone.decoder.blocks.0.ffn.gate_proj.weight": "backbone.decoder.blocks.0.ffn.0.linear.a_weight",
    "backbone.decoder.blocks.0.ffn.up_proj.weight": "backbone.decoder.blocks.0.ffn.0.linear.b_weight",
    "backbone.decoder.blocks.0.ffn.down_proj.weight": "backbone.decoder.blocks.0.ffn.1.weight",
    f"{BLOCK}.attn.q_proj.weight": f"{BLOCK}.mha.in_proj.q_weight",
    f"{BLOCK}.attn.v_proj.weight": f"{BLOCK}.mha.in_proj.v_weight",
    f"{BLOCK}.attn.gate_proj.weight": f"{BLOCK}.mha.gate_proj.weight",
    f"{BLOCK}.attn.q_norm.weight": f"{BLOCK}.mha.q_norm.weight",
    f"{BLOCK}.norm1.weight": f"{BLOCK}.norm1.weight",
    f"{BLOCK}.ffn.gate.weight": f"{BLOCK}.ffn.router.weight",
    f"{BLOCK}.ffn.gate.e_score_correction_bias": f"{BLOCK}.ffn.expert_bias",
    f"{BLOCK}.ffn.experts.gate_up_proj": f"{BLOCK}.ffn.routed.gate_up_weight",
    f"{BLOCK}.ffn.experts.down_proj": f"{BLOCK}.ffn.routed.down_weight",
    f"{BLOCK}.ffn.shared_experts.gate_proj.weight": f"{BLOCK}.ffn.shared.gate_up",
    f"{BLOCK}.ffn.shared_experts.up_proj.weight": f"{BLOCK}.ffn.shared.gate_up",
    f"{BLOCK}.ffn.shared_experts.down_proj.weight": f"{BLOCK}.ffn.shared.down",
    "action_expert.action_encoder.w1.weight": "action_expert.action_encoder.w1.weight",
    "action_expert.layers.0.attn.q_proj.weight": "action_expert.layers.0.attn.q_proj.weight",
}


def policy_of(config: PraxisConfig) -> PraxisPolicy:
    """A policy with these weights on meta."""
    with torch.device("meta"):
        return PraxisPolicy(config)


def files_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder."""
    return {k: t for file in folder.glob("*.safetensors") for k, t in load_file(file).items()}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal names, dtypes and bits."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name


def by_hand(policy: PraxisPolicy) -> dict[str, Tensor]:
    """The files of a tiny policy, by the table above and one line for each change of layout."""
    state, files = policy.state_dict(), {}
    for name, tensor in state.items():
        if "experts." in name:  # routed or shared: [.., out, in] here, [.., in, out] in files
            tensor = tensor.mT
        if name.endswith("shared_experts.gate_proj.weight"):
            tensor = torch.cat([tensor, state[name.replace("gate_proj", "up_proj")].mT], 1)
        if not name.endswith("shared_experts.up_proj.weight"):
            files[file_tensor(name).key] = tensor
    return files


# Names


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_name_has_a_place_of_its_own_and_comes_back(variant: str) -> None:
    names = list(policy_of(tiny_config(**VARIANTS[variant])).state_dict())
    places = {name: file_tensor(name) for name in names}
    assert len(set(places.values())) == len(names)
    for name, place in places.items():
        assert policy_names(place.key)[place.part] == name
    back = [name for key in {p.key for p in places.values()} for name in policy_names(key).values()]
    assert Counter(back) == Counter(names)
    halves = {place.part for place in places.values()}
    assert halves == ({None} if variant == "dense" else {None, "gate", "up"})


def test_names_are_the_known_ones() -> None:
    names = policy_of(tiny_config()).state_dict()
    assert KNOWN.keys() <= names.keys()
    assert {name: file_tensor(name).key for name in KNOWN} == KNOWN
    mine = {"time_proj", "text_in", "video_in", "video_out", "attn", "experts", "shared_experts"}
    keys = {file_tensor(name).key for name in names if not name.startswith("action_expert")}
    assert not {key for key in keys if mine & set(key.split("."))}


# Layouts, in one process


def test_files_are_those_made_by_hand_and_load(tmp_path: Path) -> None:
    policy = small_policy()
    save_pretrained(policy, tmp_path, max_file_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    files = files_of(tmp_path)
    assert_same(files, by_hand(policy))
    shapes = {key: list(tensor.shape) for key, tensor in files.items()}
    assert shapes[f"{BLOCK}.ffn.routed.gate_up_weight"] == [8, 64, 64]
    assert shapes[f"{BLOCK}.ffn.routed.down_weight"] == [8, 32, 64]
    assert shapes[f"{BLOCK}.ffn.shared.gate_up"] == [64, 96]
    assert shapes[f"{BLOCK}.ffn.shared.down"] == [48, 64]
    loaded = policy_of(PraxisConfig.from_pretrained(tmp_path))
    materialize(loaded, checkpoint=tmp_path)
    assert_same(loaded.state_dict(), policy.state_dict())
    gate_up = files[f"{BLOCK}.ffn.routed.gate_up_weight"]
    x, layer = torch.randn(3, 64), loaded.get_submodule(f"{BLOCK}.ffn")
    gate, up = (x @ gate_up[0]).chunk(2, -1)
    expected = (torch.nn.functional.silu(gate) * up) @ files[f"{BLOCK}.ffn.routed.down_weight"][0]
    torch.testing.assert_close(layer.experts(x, [3, *[0] * 7]), expected, rtol=1e-4, atol=1e-5)


def test_dtypes_config_and_sums_are_those_of_the_document(tmp_path: Path) -> None:
    """Every tensor is bfloat16 but the selection biases; config.json is copied byte for byte."""
    source, folder = tmp_path / "source", tmp_path / "folder"
    source.mkdir()
    text = json.dumps(tiny_document(torch_dtype="bfloat16"), indent=7)
    (source / "config.json").write_text(text)
    policy = small_policy(PraxisConfig.from_pretrained(source))
    save_pretrained(policy, folder, config_from=source)
    assert (folder / "config.json").read_text() == text
    files = files_of(folder)
    wide = {key for key, tensor in files.items() if tensor.dtype == torch.float32}
    assert wide == {key for key in files if key.endswith(".ffn.expert_bias")}
    assert len(wide) == 4
    expected = {k: t if k in wide else t.bfloat16() for k, t in by_hand(policy).items()}
    assert_same(files, expected)
    loaded = policy_of(policy.config).to(torch.bfloat16)
    materialize(loaded, checkpoint=folder)
    assert loaded.get_buffer(f"{BLOCK}.ffn.gate.e_score_correction_bias").dtype == torch.float32
    save_pretrained(loaded, folder)  # over the earlier one
    assert_same(files_of(folder), files)
    assert PraxisConfig.from_pretrained(folder) == policy.config
    lines = dict(
        line.split("  ")[::-1] for line in (folder / "SHA256SUMS").read_text().splitlines()
    )
    assert lines == {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in ("config.json", "model.safetensors")
    }


def test_a_wrapper_is_written_as_its_policy(tmp_path: Path) -> None:
    policy = small_policy()
    save_pretrained(nn.ModuleDict({"held": policy}), tmp_path / "wrapped")
    save_pretrained(policy, tmp_path / "plain")
    for name in ("SHA256SUMS", "config.json", "model.safetensors"):
        assert (tmp_path / "wrapped" / name).read_bytes() == (
            tmp_path / "plain" / name
        ).read_bytes()
    with pytest.raises(TypeError, match="Linear holds 0 Praxis policies; save_pretrained takes"):
        save_pretrained(nn.Linear(2, 2), tmp_path / "none")


def test_another_config_is_not_copied(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_document(action_expert__mlp_dim=96)))
    with pytest.raises(ValueError, match="differs from the policy's"):
        save_pretrained(small_policy(), tmp_path / "folder", config_from=tmp_path)
    assert not (tmp_path / "folder").exists()


def test_keys_that_do_not_fit_are_named(tmp_path: Path) -> None:
    files = {key: tensor.contiguous() for key, tensor in by_hand(small_policy()).items()}
    del files[f"{BLOCK}.ffn.expert_bias"], files[f"{BLOCK}.ffn.shared.gate_up"]
    files[f"{BLOCK}.ffn.shared.down"] = torch.zeros(64, 48)
    files["backbone.encoder.blocks.0.ffn.shared.gate_up"] = torch.zeros(1)
    save_file(files, tmp_path / "model.safetensors")
    with pytest.raises(StateMismatchError) as error:
        materialize(policy_of(tiny_config()), checkpoint=tmp_path)
    missing, rest = str(error.value).split("unexpected", 1)
    assert f"{BLOCK}.ffn.expert_bias" in missing
    assert f"{BLOCK}.ffn.shared.gate_up" in missing
    assert "backbone.encoder.blocks.0.ffn.shared.gate_up" in rest
    assert f"{BLOCK}.ffn.shared.down" in rest


def test_half_of_a_fused_tensor_is_not_written() -> None:
    with pytest.raises(ValueError, match="came without its gate"):
        PraxisStateDictAdapter().to_file(
            f"{BLOCK}.ffn.shared_experts.up_proj.weight", torch.ones(2, 3)
        )


def test_merged_adapters_are_in_the_files(tmp_path: Path) -> None:
    """Of the layout without adapters, and a policy that loads them acts as the adapted one did."""
    policy = apply_lora(small_policy(), LoraSettings(rank=2))
    for name, parameter in policy.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    inputs = small_inputs(policy.config)
    live = policy(**inputs).action_velocity
    with pytest.raises(ValueError, match="merge_lora"):
        save_pretrained(policy, tmp_path)
    save_pretrained(merge_lora(policy), tmp_path)
    assert files_of(tmp_path).keys() == by_hand(small_policy()).keys()
    loaded = policy_of(policy.config)
    materialize(loaded, checkpoint=tmp_path)
    torch.testing.assert_close(loaded(**inputs).action_velocity, live, rtol=1e-4, atol=1e-5)


# Any mesh


def context(**sizes: int) -> MeshContext:
    """Of these sizes over all ranks, made once per process."""

    def make() -> MeshContext:
        return DistributedSetup.build(
            "fsdp2",
            parallelism_sizes=ParallelismSizes(**sizes),
            moe_parallel_config={} if "ep_size" in sizes else None,
        ).mesh_context

    return cached(("praxis_state_dict", *sizes.items()), make)


class Recording(SafetensorsReader):
    """Knows which experts it read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.experts: set[int] = set()

    def read(self, key: str, index: tuple[slice, ...]) -> Tensor:
        if ".routed." in key:
            self.experts |= set(range(index[0].start, index[0].stop))
        return super().read(key, index)


def through_a_mesh(source: Path, folder: Path, sizes: dict[str, int]) -> None:
    """Read the files onto a mesh, each rank its own, and write them again."""
    policy = policy_of(PraxisConfig.from_pretrained(source)).to(torch.bfloat16)
    parallelize_model(policy, context(**sizes))
    reader = Recording(source)
    materialize(policy, checkpoint=reader)
    held = {name: _local(tensor) for name, tensor in policy.state_dict().items()}
    wide = {name for name, tensor in held.items() if tensor.dtype == torch.float32}
    assert wide == {name for name in held if ".ffn.gate." in name}
    size = sum(tensor.numel() * tensor.element_size() for tensor in held.values())
    routers = sum(held[name].numel() for name in wide if name.endswith("weight"))
    assert reader.bytes_read == size - 2 * routers  # bfloat16 in files, float32 here
    if "ep_size" in sizes:
        count = 8 // sizes["ep_size"]
        first = dist.get_rank() % sizes["ep_size"] * count
        assert reader.experts == set(range(first, first + count))
    save_pretrained(policy, folder, config_from=source)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in bfloat16, in several files."""
    folder = tmp_path_factory.mktemp("source")
    policy = small_policy(tiny_config(torch_dtype="bfloat16"))
    save_pretrained(policy, folder, max_file_size="100KB")
    return folder


@pytest.mark.parametrize(
    ("world", "sizes"),
    [
        (1, {"ep_size": 1}),
        (2, {}),
        (2, {"ep_size": 2}),
        (4, {"ep_size": 2}),
        (4, {"ep_size": 4}),
    ],
    ids=str,
)
def test_files_come_back_bit_for_bit_from_a_mesh(
    world: int, sizes: dict[str, int], source: Path, tmp_path: Path
) -> None:
    run_on_ranks(world, through_a_mesh, source, tmp_path, sizes)
    assert_same(files_of(tmp_path), files_of(source))
    assert (tmp_path / "config.json").read_bytes() == (source / "config.json").read_bytes()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# The example in the README


def run_readme(code: str, folder: Path) -> None:
    config = PraxisConfig.from_pretrained(folder)
    window = small_window(config, seed=dist.get_rank())
    found: dict[str, Any] = {"torch": torch, "folder": folder, "window": window}
    exec(compile(code, "README.md", "exec"), found)
    trained = [p.grad for p in found["policy"].parameters() if p.requires_grad]
    assert all(gradient is not None and gradient.dtype == torch.float32 for gradient in trained)


def test_the_example_in_the_readme_runs(source: Path) -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    run_on_ranks(2, run_readme, code, source)
