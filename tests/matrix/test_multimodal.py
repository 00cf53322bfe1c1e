"""Models of transformers that see and hear, nobody prepared: the numbers of one process."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardwalk.mesh import DDPConfig, FSDP2Config, ParallelismSizes
from shardwalk.parallelizer_core import (
    export_safetensors,
    load_checkpoint,
    materialize,
    model_state_dict,
    parallelize_model,
    save_checkpoint,
)
from shardwalk.parallelizer_core.testing import ParityCase, assert_parity, run_on_ranks
from shardwalk.parallelizer_core.testing.parity_subject import Subject
from tests.matrix.case_models import BF16, FULL, parallel, seeded
from tests.matrix.tiny_multimodal import KINDS, MediaBatches, MediaLosses, build, freeze
from tests.matrix.tiny_transformers import MODELS, normal_weights

MESHES: dict[str, tuple[int, ParallelismSizes]] = {
    "one rank": (1, ParallelismSizes()),
    "fsdp 2": (2, ParallelismSizes()),
    "hsdp 2x2": (4, ParallelismSizes(dp_replicate_size=2)),
    "ddp 2": (2, ParallelismSizes()),
}
EVERY = ("11111111",)
ALTERNATING = ("11110000", "00001111", "00000000")
"""Which rows have a medium, by step: those of the first rank, the second, and none."""


FIXED = {"llava": ("k_proj.bias",), "qwen-vl": (), "qwen-audio": ("embed_positions",)}
"""What does not train in a trainable tower: a table, and what has no gradient but noise."""


def case(name: str, frozen: tuple[str, ...], media: tuple[str, ...] = EVERY) -> ParityCase:
    """A tower that trains is run on a blank row by ranks whose rows are text only."""
    return ParityCase(
        model=partial(build, name, frozen),
        batches=MediaBatches(name, media),
        token_losses=MediaLosses(name, adds_blank=KINDS[name].tower not in frozen),
        init=normal_weights,
    )


def run(parity_case: ParityCase, mesh: str, sharding: str = "root", **options: Any) -> None:
    world_size, sizes = MESHES[mesh]
    unit = options.pop("unit", {})
    multimodal = {"frozen_sharding": sharding}
    strategy: Any = FSDP2Config(mp_policy=FULL, multimodal=multimodal, **unit)
    if mesh == "ddp 2":
        strategy = DDPConfig(find_unused_parameters=True, **unit)  # CLIP's last norm, in LLaVA
    options = {"optimizers": ("sgd",), **options}
    assert_parity(
        parity_case, world_size=world_size, parallelism_sizes=sizes, strategy=strategy, **options
    )


# Where frozen towers live


@pytest.mark.parametrize("sharding", ["root", "per_layer", "replicate"])
@pytest.mark.parametrize("name", KINDS)
def test_frozen_towers(name: str, sharding: str) -> None:
    run(case(name, (KINDS[name].tower,)), "fsdp 2", sharding)


@pytest.mark.parametrize(
    ("name", "sharding", "mesh", "start"),
    [
        ("llava", "replicate", "hsdp 2x2", "checkpoint"),
        ("qwen-vl", "per_layer", "hsdp 2x2", None),
        ("qwen-audio", "root", "hsdp 2x2", "init"),
        ("qwen-vl", "replicate", "fsdp 2", "init"),
        ("qwen-audio", "replicate", "one rank", None),
    ],
)
def test_frozen_towers_on_other_meshes_and_from_meta(
    name: str, sharding: str, mesh: str, start: Any
) -> None:
    run(case(name, (KINDS[name].tower,)), mesh, sharding, meta_start=start)


# Ranks whose rows are text only


SPREAD = {
    ("llava", "root", False),
    ("llava", "replicate", "full"),
    ("qwen-vl", "root", "full"),
    ("qwen-vl", "replicate", "selective"),
    ("qwen-audio", "root", "selective"),
    ("qwen-audio", "replicate", False),
}
TEXT_ONLY = [
    pytest.param(*each, marks=() if each in SPREAD else pytest.mark.widest)
    for each in itertools.product(KINDS, ["root", "replicate"], [False, "full", "selective"])
]


@pytest.mark.parametrize(("name", "sharding", "mode"), TEXT_ONLY)
def test_ranks_of_text_only_beside_a_frozen_tower(name: str, sharding: str, mode: Any) -> None:
    """B44: nothing to do: they skip the tower, and nobody waits for them."""
    kind = KINDS[name]
    unit = {"activation_checkpointing": mode}
    run(
        case(name, (kind.tower, kind.projector), ALTERNATING),
        "hsdp 2x2" if mode == "full" else "fsdp 2",
        sharding,
        unit=unit,
        steps=3,
    )


def reduces_unused(model: nn.Module, setup: Any) -> nn.Module:
    model = parallelize_model(model, setup.mesh_context)
    assert isinstance(model, FSDPModule)
    model.set_reduce_scatter_unused_params(True)
    return model


@pytest.mark.parametrize("sharding", ["root", "replicate"])
@pytest.mark.parametrize("name", ["llava", "qwen-audio"])
def test_ranks_of_text_only_beside_a_trainable_projector(name: str, sharding: str) -> None:
    """B44: one line, since its parameters are in the root unit; what nobody used has zeros."""
    run(
        case(name, (KINDS[name].tower,), ALTERNATING[:2]),
        "fsdp 2",
        sharding,
        steps=3,
        subject=Subject(parallelize=reduces_unused),
    )


@pytest.mark.parametrize(
    ("name", "mode", "mesh"),
    [
        ("llava", False, "fsdp 2"),
        ("qwen-vl", "full", "hsdp 2x2"),
        ("qwen-audio", "selective", "fsdp 2"),
        ("llava", "selective", "ddp 2"),
    ],
)
def test_ranks_of_text_only_beside_a_trainable_tower(name: str, mode: Any, mesh: str) -> None:
    """B44: they add a row with a blank medium, whose labels are all masked."""
    frozen = FIXED[name]
    run(
        case(name, frozen, ALTERNATING[:2]),
        mesh,
        unit={"activation_checkpointing": mode},
        steps=3,
    )


# Precision


def model_of(name: str) -> nn.Module:
    model: nn.Module = seeded(
        partial(build, name) if name in KINDS else partial(MODELS[name], True)
    )
    return model


def inputs_of(name: str) -> dict[str, Tensor]:
    if name not in KINDS:
        return {"input_ids": torch.arange(16).view(2, 8)}
    rows = MediaBatches(name)(0)[0]
    ids = rows["input_ids"][:2]
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        **KINDS[name].inputs(rows["media"][:2]),
    }


def in_bf16(name: str, sharding: str | None) -> tuple[Tensor, dict[str, Any]]:
    """The logits of a sharded model, and what is plain in it once the forward is over."""
    model = model_of(name)
    if sharding is not None:
        freeze(model, KINDS[name].tower)
    multimodal = {"frozen_sharding": sharding or "root"}
    model = parallel(model, mp_policy=BF16, multimodal=multimodal)
    logits = model(**inputs_of(name)).logits
    logits.float().sum().backward()
    plain = {n: p for n, p in model.named_parameters() if not isinstance(p, DTensor)}
    return logits.detach(), {n: p.detach().clone() for n, p in plain.items()}


@pytest.mark.parametrize(
    ("name", "sharding"),
    [
        *((name, None) for name in (*KINDS, *MODELS)),
        *(("qwen-vl", sharding) for sharding in ("root", "per_layer", "replicate")),
        ("llava", "replicate"),
        ("qwen-audio", "replicate"),
    ],
)
def test_logits_in_bf16_are_those_of_the_whole_model_bit_for_bit(
    name: str, sharding: str | None
) -> None:
    """With inputs that units cast: rotary tables of vision blocks stay in fp32."""
    reference = model_of(name).to(torch.bfloat16)
    for name_of_buffer, buffer in model_of(name).named_buffers():
        reference.get_buffer(name_of_buffer).data = buffer  # no policy casts buffers
    given = {n: v.bfloat16() if v.is_floating_point() else v for n, v in inputs_of(name).items()}
    with torch.no_grad():
        expected = reference(**given).logits
    for logits, plain in run_on_ranks(2, in_bf16, name, sharding):
        assert torch.equal(logits, expected)
        tower = KINDS[name].tower if sharding == "replicate" else "none"
        stored = {n: p for n, p in model_of(name).named_parameters() if n.startswith(tower)}
        assert plain.keys() == stored.keys()
        for key, value in stored.items():
            assert torch.equal(plain[key], value)  # as it was stored, in fp32


# Checkpoints and exports


def saved(folder: Path) -> dict[str, Tensor]:
    kind = KINDS["llava"]
    model = freeze(model_of("llava"), kind.tower)
    model = parallel(model, multimodal={"frozen_sharding": "replicate"})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model(**inputs_of("llava")).logits.pow(2).mean().backward()
    optimizer.step()
    save_checkpoint(folder / "run", model, optimizer, step=1)
    export_safetensors(model, folder / "export")
    return model_state_dict(model, full=True)


def resumed(folder: Path, sharding: str) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = build("llava")
    model = parallel(
        freeze(model, KINDS["llava"].tower), "hsdp", multimodal={"frozen_sharding": sharding}
    )
    materialize(model, init=normal_weights)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    assert load_checkpoint(folder / "run", model, optimizer).step == 1
    return model_state_dict(model, full=True)


def test_checkpoints_and_exports_contain_a_tower_that_is_whole_on_every_rank(
    tmp_path: Path,
) -> None:
    expected, other = run_on_ranks(2, saved, tmp_path)
    assert all(torch.equal(value, other[name]) for name, value in expected.items())
    tower = [name for name in expected if name.startswith(KINDS["llava"].tower)]
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert tower
    assert set(tower) <= exported.keys()
    assert all(torch.equal(value, expected[name]) for name, value in exported.items())
    for sharding in ("root", "replicate"):
        for state in run_on_ranks(4, resumed, tmp_path, sharding):
            assert all(torch.equal(value, expected[name]) for name, value in state.items())


# Recomputed layer groups


@pytest.mark.parametrize(
    ("name", "scope", "mode", "mesh"),
    [
        ("llava", "vision", "full", "fsdp 2"),
        ("qwen-vl", "multimodal", "selective", "hsdp 2x2"),
        ("qwen-audio", ["audio", "language"], "full", "ddp 2"),
        ("qwen-vl", "language", "selective", "fsdp 2"),
    ],
)
def test_recomputed_layer_groups(name: str, scope: Any, mode: str, mesh: str) -> None:
    unit = {"activation_checkpointing": mode, "activation_checkpointing_scope": scope}
    frozen = FIXED[name]
    run(case(name, frozen), mesh, unit=unit)
