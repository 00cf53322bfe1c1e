"""Parameters that compute in bf16 although they must not, and blocks that mix dtypes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from shardwalk.mesh import DistributedSetup, FSDP2Config
from shardwalk.parallelizer_core import clip_grad_norm_, describe_units, materialize
from shardwalk.parallelizer_core.testing import run_on_ranks
from shardwalk.parallelizer_core.testing.collectives import CountCollectives
from tests.matrix.case_models import (
    BF16,
    FULL,
    VOCABULARY,
    assert_equal,
    gradients,
    mean_loss,
    mine,
    on_meta,
    parallel,
    seeded,
    tokens,
    whole,
)

WIDTH, EXPERTS = 8, 4


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(EXPERTS, WIDTH))
        self.bias = nn.Parameter(torch.zeros(EXPERTS))
        with torch.no_grad():
            row = torch.linspace(0.5, 1.0, WIDTH)
            self.weight.copy_(row * torch.tensor([[1.0], [1.0 + 1e-3], [0.5], [0.25]]))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


class Routed(nn.Module):
    """A block whose first two experts score 1e-3 apart: bf16 weights would tie them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = Router()
        self.A_log = nn.Parameter(torch.linspace(0.1, 1.0, WIDTH))
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(EXPERTS))
        self.seen: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(self.norm(x).abs())
        picked = scores.argmax(-1)
        self.seen |= {"scores": scores.dtype, "A_log": self.A_log.dtype, "picked": picked}
        self.seen |= {"experts": self.experts[0].weight.dtype}
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-2)
        weighed = outputs * (nn.functional.one_hot(picked, EXPERTS) * scores.softmax(-1))[..., None]
        return x + (weighed.sum(-2) * self.A_log.exp()).to(x.dtype)


class RoutedModel(nn.Module):
    _keep_in_fp32_modules_strict = ("gate", "A_log")

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Routed() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


PINNED = ("gate.weight", "gate.bias", "A_log")


def pinned(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name.endswith(PINNED)}


def routed(kind: str, narrow: bool, path: Path) -> dict[str, Any]:
    model = on_meta(RoutedModel)
    if narrow:
        model.to(torch.bfloat16)
    model = parallel(model, kind, mp_policy=BF16)
    before = {name: p.dtype for name, p in model.named_parameters()}
    materialize(model, checkpoint=path)
    loaded = {name: whole(p) for name, p in model.named_parameters()}
    inside: list[tuple[torch.dtype, torch.dtype, bool]] = []
    gate = model.layers[0].gate
    gate.register_forward_pre_hook(
        lambda module, args: inside.append((module.weight.dtype, args[0].dtype, True))
    )
    mean_loss(model, tokens()).backward()
    grads = gradients(model)
    clip_grad_norm_(model, 0.1)
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    after = {name: p.dtype for name, p in model.named_parameters()}
    seen = [layer.seen for layer in model.layers]
    return {
        "before": before, "loaded": loaded, "inside": inside, "grads": grads, "after": after,
        "seen": seen,
    }  # fmt: skip


@pytest.mark.parametrize("narrow", [False, True], ids=["fp32 model", "bf16 model"])
@pytest.mark.parametrize(("kind", "world"), [("fsdp", 1), ("fsdp", 2), ("hsdp", 4)])
def test_what_a_model_pins_to_fp32_is_fp32(
    kind: str, world: int, narrow: bool, tmp_path: Path
) -> None:
    """B09: stored, loaded, computed and reduced in fp32, so that the same experts are picked."""
    reference = seeded(RoutedModel)
    state = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    reference(tokens()[:, :-1])
    picks = [layer.seen["picked"] for layer in reference.layers]
    assert all(bool((pick == 1).all()) for pick in picks)
    for found in run_on_ranks(world, routed, kind, narrow, tmp_path):
        for stage in ("before", "after"):
            assert set(pinned(found[stage]).values()) == {torch.float32}
        for name, value in pinned(found["loaded"]).items():
            assert torch.equal(value, state[name]), name
        assert found["inside"] == [(torch.float32, torch.float32, True)]
        for name, grad in pinned(found["grads"]).items():
            assert grad.dtype == torch.float32, name
            assert "gate" in name or bool(grad.any())
        for seen, pick in zip(found["seen"], picks, strict=True):
            assert (seen["scores"], seen["A_log"]) == (torch.float32, torch.float32)
            assert seen["experts"] == torch.bfloat16
            assert torch.equal(seen["picked"], pick)


def narrow_real_weights() -> str:
    with pytest.raises(ValueError, match="gate.weight is pinned to float32") as error:
        parallel(seeded(RoutedModel).to(torch.bfloat16), mp_policy=BF16)
    return str(error.value)


def test_bits_that_are_lost_already_are_not_widened_silently() -> None:
    """B09: upcasting real bf16 weights would bring other experts, not the old ones."""
    assert len(set(run_on_ranks(2, narrow_real_weights))) == 1


class Corrected(nn.Module):
    """A pinned buffer, as the correction bias of a router is one."""

    _keep_in_fp32_modules_strict = ("correction",)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("correction", torch.full((4,), 1 + 2**-12))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.correction


def corrected(kind: str, path: Path) -> Tensor:
    model = parallel(on_meta(Corrected).to(torch.bfloat16), kind, mp_policy=BF16)
    materialize(model, checkpoint=path)
    with pytest.raises(ValueError, match="correction is pinned to float32"):
        parallel(Corrected().to(torch.bfloat16), kind, mp_policy=BF16)
    return model.correction.clone()


@pytest.mark.parametrize(("kind", "world"), [("fsdp", 1), ("fsdp", 2), ("hsdp", 4)])
def test_a_pinned_buffer_keeps_its_bits(kind: str, world: int, tmp_path: Path) -> None:
    """B09: loaded into a bf16 model from meta; real values that are narrow already are refused."""
    source = Corrected()
    save_file(source.state_dict(), tmp_path / "model.safetensors")
    for found in run_on_ranks(world, corrected, kind, tmp_path):
        assert found.dtype == torch.float32
        assert torch.equal(found, source.correction)


class Mixed(nn.Module):
    """An fp32 norm, bf16 linears, an fp32 scalar, and a frozen matrix of another dtype."""

    def __init__(self, frozen: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        base = torch.randn(WIDTH, WIDTH) * (1 if frozen.is_floating_point else 9)
        self.base = nn.Parameter(base.to(frozen), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.down = nn.Linear(WIDTH, 3, bias=False, dtype=torch.bfloat16)
        self.up = nn.Linear(3, WIDTH, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x.to(self.norm.weight.dtype)).to(self.down.weight.dtype)
        adapted = self.up(self.down(hidden)) * self.scale.to(hidden.dtype)
        return x + (hidden @ self.base.to(hidden.dtype).T * 0.1 + adapted).to(x.dtype)


class MixedModel(nn.Module):
    """Dtypes differ in the blocks and in what the root holds; the table is frozen."""

    def __init__(self, frozen: torch.dtype) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(Mixed(frozen) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=torch.bfloat16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        normed = self.norm(x.to(self.norm.weight.dtype))
        return self.head(normed.to(self.head.weight.dtype))


def mixed(kind: str, frozen: torch.dtype, policy: dict[str, Any]) -> Any:
    model = parallel(seeded(MixedModel, frozen=frozen), kind, mp_policy=policy)
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    with torch.no_grad(), CountCollectives() as counted:
        model(tokens())
    mean_loss(model, mine(tokens())).backward()
    grads = gradients(model)
    clip_grad_norm_(model, 1.0)
    torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2).step()
    units = [unit.name for unit in describe_units(model)]
    return dtypes, counted.calls["_allgather_base_"], len(units), grads


@pytest.mark.parametrize("policy", [FULL, BF16], ids=["no policy", "bf16 policy"])
@pytest.mark.parametrize("frozen", [torch.bfloat16, torch.float32, torch.float16, torch.int8])
@pytest.mark.parametrize(("kind", "world"), [("fsdp", 2), ("hsdp", 4)])
def test_a_block_of_many_dtypes_trains(
    kind: str, world: int, frozen: torch.dtype, policy: dict[str, Any]
) -> None:
    """B63: declared dtypes stay, gradients are right, and each unit costs one gather."""
    reference = seeded(MixedModel, frozen=frozen)
    mean_loss(reference, tokens()).backward()
    expected = gradients(reference)
    for dtypes, gathers, units, grads in run_on_ranks(world, mixed, kind, frozen, policy):
        assert dtypes == {name: p.dtype for name, p in reference.named_parameters()}
        assert gathers == units
        found = {n: None if g is None else g.float() for n, g in grads.items()}
        wanted = {n: None if g is None else g.float() for n, g in expected.items()}
        assert_equal(found, wanted, tolerance=0.15)
        assert all(g is None or g.dtype == dtypes[n] for n, g in grads.items())


def one_rank() -> dict[str, Any]:
    """The same strategy on a mesh of one rank."""
    config = FSDP2Config(offload_policy={"pin_memory": False})
    context = DistributedSetup.build(config).mesh_context
    from shardwalk.parallelizer_core import parallelize_model

    model = parallelize_model(seeded(RoutedModel), context)
    seen: dict[str, Any] = {}
    model.layers[0].experts[0].register_forward_pre_hook(
        lambda module, args: seen.update(weight=module.weight.dtype)
    )
    seen["out"] = model(tokens()).dtype
    model(tokens()).float().square().mean().backward()
    seen["grads"] = {p.grad.dtype for p in model.parameters() if p.grad is not None}
    seen["stored"] = {p.dtype for p in model.parameters()}
    seen["units"] = [unit.name for unit in describe_units(model)]
    seen["devices"] = {p.device.type for p in model.parameters()}
    return seen


def test_a_policy_means_the_same_on_one_rank() -> None:
    """P13: bf16 compute with fp32 storage and gradients, units and offload at world size 1."""
    (seen,) = run_on_ranks(1, one_rank)
    (two, _) = run_on_ranks(2, one_rank)
    assert seen == two
    assert seen["weight"] == seen["out"] == torch.bfloat16
    assert seen["grads"] == seen["stored"] == {torch.float32}
