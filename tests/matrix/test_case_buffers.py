"""Buffers outside the state dict: never built, cast with the weights, or different per rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from shardwalk.parallelizer_core import materialize
from shardwalk.parallelizer_core.testing import run_on_ranks
from tests.matrix.case_models import (
    BF16,
    FULL,
    logits_of,
    on_meta,
    parallel,
    seeded,
    tokens,
)
from tests.matrix.tiny_transformers import SIZES, gemma3

LONG = {"rope_theta": 10000.0, "original_max_position_embeddings": 32}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, **LONG},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **LONG},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        **LONG,
    },
}


def model_of(kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # how transformers itself builds a model in bf16
    try:
        if kind == "gemma3":
            return gemma3(tied=True)
        config = LlamaConfig(**SIZES, tie_word_embeddings=True, rope_parameters=ROPES[kind])
        return LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers, and tensors in plain attributes of their modules."""
    found = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for name, module in model.named_modules():
        found |= {
            f"{name}.{k}": v.clone() for k, v in vars(module).items() if isinstance(v, Tensor)
        }
    return found


def fill_new_memory(on: bool) -> None:
    """Whether new memory holds NaN, so that a read of what was never written shows."""
    torch.use_deterministic_algorithms(on)
    torch.utils.deterministic.fill_uninitialized_memory = on


def rotate(model: Any, kind: str, positions: int = 8192) -> list[Tensor]:
    rotary, ids = model.model.rotary_emb, torch.arange(positions)[None]
    x = torch.empty(1, 1, 1)
    layer = {"layer_type": "full_attention"} if kind == "gemma3" else {}
    return [part[0, -1].detach().clone() for part in rotary(x, ids, **layer)]


def started(kind: str, path: str, dtype: torch.dtype, file: Path) -> Any:
    fill_new_memory(True)
    try:
        assert torch.empty(3).isnan().all()
        if path == "direct":
            model = seeded(model_of, kind=kind, dtype=dtype)
        else:
            model = on_meta(model_of, kind=kind, dtype=dtype)
        model = parallel(model, mp_policy=FULL if dtype == torch.float32 else BF16)
        materialize(model, checkpoint=file)
        found = buffers(model)
        with torch.no_grad():
            logits = logits_of(model, tokens())
        return found, logits, rotate(model, kind)
    finally:
        fill_new_memory(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [*ROPES, "gemma3"])
def test_frequencies_are_the_constructed_ones_in_fp32(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """B04, B35: from meta and directly, on every rank bit for bit, right at position 8191."""
    reference = seeded(model_of, kind=kind)
    state = {n: t.to(dtype) for n, t in reference.state_dict().items() if n != "lm_head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    expected, far = buffers(reference), rotate(seeded(model_of, kind=kind), kind)
    assert any("inv_freq" in name for name in expected)
    reference.load_state_dict(state, strict=False)
    for parameter in reference.parameters():
        parameter.data = parameter.data.to(dtype)
    with torch.no_grad():
        logits = logits_of(reference, tokens())
    for path in ("meta", "direct"):
        for found, measured, rotated in run_on_ranks(2, started, kind, path, dtype, tmp_path):
            assert found.keys() == expected.keys()
            for name, buffer in expected.items():
                if path == "meta" or "inv_freq" in name:  # a scale of the model follows its dtype
                    assert found[name].dtype == torch.float32, name
                assert torch.equal(found[name], buffer.to(found[name].dtype)), name
            torch.testing.assert_close(measured, logits, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(rotated, far, rtol=0, atol=1e-6)


class Kinds(nn.Module):
    """Buffers of every kind: integers, booleans, complex, derived, persistent, absent."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        angles = torch.outer(torch.arange(size).float(), torch.arange(1, 4).float())
        self.register_buffer("positions", torch.arange(size), persistent=False)
        self.register_buffer("mask", torch.ones(size, size).tril().bool(), persistent=False)
        self.register_buffer(
            "turns", torch.polar(torch.ones_like(angles), angles), persistent=False
        )
        self.register_buffer("table", angles.cos(), persistent=False)
        self.register_buffer("same", self.table, persistent=False)
        self.register_buffer("absent", None, persistent=False)
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("scale", torch.tensor(size**0.5), persistent=False)
        self.norm = nn.BatchNorm1d(3)


class KindsModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Wrapped() for _ in range(2))
        self.kinds = Kinds(4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.kinds.scale


class Wrapped(nn.Module):
    """A block with buffers of its own beside weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, bias=False)
        self.kinds = Kinds(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.kinds.table[:1]


def kinds_from_meta(kind: str) -> dict[str, Tensor]:
    fill_new_memory(True)
    try:
        model = on_meta(KindsModel)
        if kind == "ddp":
            materialize(model, init="reset_parameters")
        model = parallel(model, kind)
        if kind != "ddp":
            materialize(model, init="reset_parameters")
        model(torch.ones(2, 3))
        inner = model.module if kind == "ddp" else model
        assert inner.kinds.same is inner.kinds.table
        assert inner.kinds.absent is None
        return buffers(inner)
    finally:
        fill_new_memory(False)


@pytest.mark.parametrize(("kind", "world"), [("fsdp", 1), ("fsdp", 2), ("hsdp", 4), ("ddp", 2)])
def test_buffers_of_every_kind_are_rebuilt(kind: str, world: int) -> None:
    """B04: also in blocks whose class changed, on one rank and under DDP."""
    expected = buffers(seeded(KindsModel))
    for found in run_on_ranks(world, kinds_from_meta, kind):
        assert found.keys() == expected.keys()
        for name, buffer in expected.items():
            assert found[name].dtype == buffer.dtype, name
            assert torch.equal(found[name], buffer), name


class Unknown(nn.Module):
    """Keeps nothing of what its buffer came from."""

    def __init__(self, base: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("table", base ** torch.arange(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class UnknownModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Unknown(3.0), Unknown(2.0)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x))


def ones(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    tensor.fill_(1.0)


def nobody_rebuilds() -> tuple[str, bool]:
    model = parallel(on_meta(UnknownModel))
    with pytest.raises(ValueError) as error:
        materialize(model, init=ones)
    return str(error.value), all(p.is_meta for p in model.parameters())


def test_a_buffer_that_nobody_can_rebuild_is_named() -> None:
    """B04: on every rank alike, before anything is written."""
    first, second = run_on_ranks(2, nobody_rebuilds)
    assert first == second
    assert first[1]
    assert "layers.0.table" in first[0]
    assert "layers.1.table" in first[0]
