"""Adapters by peft on a frozen base: the numbers of one process on every mesh."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from shardwalk.mesh import FSDP2Config
from shardwalk.parallelizer_core import materialize
from shardwalk.parallelizer_core.testing import (
    Bf16,
    ParityCase,
    TokenBatches,
    assert_parity,
    run_on_ranks,
)
from tests.matrix.case_models import (
    gradients,
    logits_of,
    mean_loss,
    mine,
    on_meta,
    parallel,
    seeded,
    tokens,
)
from tests.matrix.lora_models import lora
from tests.matrix.test_dense_parity import MESHES, meshes
from tests.matrix.tiny_transformers import MODELS, normal_weights


def case(name: str = "llama", micro_batches: int = 1, **options: Any) -> ParityCase:
    return ParityCase(
        model=partial(lora, name, **options),
        batches=TokenBatches(vocabulary=61, micro_batches=micro_batches),
        init=normal_weights,
    )


def run(parity_case: ParityCase, mesh: str, **options: Any) -> None:
    world_size, strategy, sizes = MESHES[mesh]
    options = {"strategy": strategy, **options}
    assert_parity(parity_case, world_size=world_size, parallelism_sizes=sizes, **options)


CHECKPOINTING = pytest.mark.parametrize("mode", [False, "full", "selective"])


@meshes("one rank", "fsdp 2", "fsdp 4", "hsdp 2x2", "ddp 2")
@CHECKPOINTING
def test_adapters_train_to_the_numbers_of_one_process(mode: Any, mesh: str) -> None:
    """B12 and B02: with blocks that are recomputed above a frozen embedding too."""
    run(case(), mesh, setup={"activation_checkpointing": mode})


@meshes("fsdp 4", "hsdp 2x2")
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_models_with_tied_tables(name: str, mesh: str) -> None:
    run(case(name, tied=True, layers=3), mesh, optimizers=("adamw",))


@meshes("fsdp 4", "hsdp 2x2", "ddp 2")
def test_micro_batches_and_clipping(mesh: str) -> None:
    run(case(micro_batches=3), mesh, clip=0.05, optimizers=("sgd",))


@meshes("fsdp 2", "hsdp 2x2")
@pytest.mark.parametrize("start", ["checkpoint", "init"])
def test_a_start_on_the_meta_device(start: str, mesh: str) -> None:
    """Adapters on meta get their values along with the base."""
    run(case(), mesh, meta_start=start, optimizers=("adamw",))


@meshes("fsdp 2", "hsdp 2x2")
def test_bf16_compute_with_fp32_reduction(mesh: str) -> None:
    run(case(), mesh, bf16=Bf16())


OPTIONS = {
    "resharded everywhere": {"reshard_after_forward": True},
    "kept gathered": {"reshard_after_forward": False},
    "prefetch": {"enable_fsdp2_prefetch": True},
    "offload": {"offload_policy": {"pin_memory": False}},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_no_option_changes_the_numbers(option: str) -> None:
    config = FSDP2Config(mp_policy={"param_dtype": None}, **OPTIONS[option])
    run(case(micro_batches=2), "fsdp 2", strategy=config, optimizers=("sgd",))


FORMS = {
    "tables": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "every linear": {"target_modules": "all-linear", "lora_bias": False},
    "a trained head": {"modules_to_save": ["lm_head", "norm"]},
    "magnitudes": {"use_dora": True},
}


@meshes("fsdp 2", "hsdp 2x2")
@pytest.mark.parametrize("form", FORMS)
def test_other_forms_of_adapters(form: str, mesh: str) -> None:
    """Adapters of tables outside the blocks, copies that train, magnitudes that read the base."""
    run(case(**FORMS[form]), mesh, optimizers=("adamw",))


def without_effect(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """As peft starts adapters."""
    if ".lora_B" in name:
        tensor.zero_()
    else:
        nn.init.kaiming_uniform_(tensor, 5**0.5, generator=generator)


def base_from_files(kind: str, folder: Path, form: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    model = parallel(on_meta(lora, **form), kind)
    materialize(model, checkpoint=folder, init=without_effect)
    with torch.no_grad():
        logits = logits_of(model, tokens())
    mean_loss(model, mine(tokens())).backward()
    return logits, {name: g for name, g in gradients(model).items() if g is not None}


STARTS = {
    "adapters": {},
    "copies that train": {"modules_to_save": ["lm_head", "norm"]},
    "tables": {"target_modules": ["q_proj", "lm_head"]},
}


@pytest.mark.parametrize("form", STARTS)
@pytest.mark.parametrize(("kind", "world"), [("fsdp", 2), ("hsdp", 4)])
def test_a_start_on_meta_from_the_files_of_the_base(
    kind: str, world: int, form: str, tmp_path: Path
) -> None:
    """Each rank reads its part of the base; the adapters, in no file, start without effect."""
    base = seeded(lambda: MODELS["llama"](False, num_hidden_layers=4))
    save_file({n: t.contiguous() for n, t in base.state_dict().items()}, tmp_path / "m.safetensors")
    with torch.no_grad():
        expected = logits_of(base, tokens())
    results = run_on_ranks(world, base_from_files, kind, tmp_path, STARTS[form])
    for logits, grads in results:
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
        assert all(grad.abs().max() > 0 for name, grad in grads.items() if ".lora_B" in name)
        assert all(torch.equal(grad, results[0][1][name]) for name, grad in grads.items())


def odd_starts(folder: Path) -> list[str]:
    """What is said to options that do not fit together, of a model that stays on meta."""
    said = []
    for make, checkpoint, init in [
        (lambda: MODELS["llama"](False), folder, without_effect),
        (lora, folder, "reset_parameters"),
        (lora, folder, None),
    ]:
        model = on_meta(make)
        with pytest.raises(ValueError) as error:
            materialize(model, checkpoint=checkpoint, init=init)
        said.append(str(error.value))
        assert all(p.is_meta for p in model.parameters())
    return said


def test_files_of_a_base_and_a_function_go_with_adapters_only(tmp_path: Path) -> None:
    base = seeded(lambda: MODELS["llama"](False, num_hidden_layers=4))
    save_file({n: t.contiguous() for n, t in base.state_dict().items()}, tmp_path / "m.safetensors")
    none, drawn, missing = odd_starts(tmp_path)
    assert "has no adapters for init to fill" in none
    assert "both factors of each adapter" in drawn
    assert "init= beside checkpoint= fills adapters" in missing
