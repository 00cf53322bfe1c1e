"""Checkpoints that do not load: on another mesh, under other names, or only seemingly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from shardwalk.parallelizer_core import clip_grad_norm_, materialize
from shardwalk.parallelizer_core.checkpoint import load_checkpoint, save_checkpoint
from shardwalk.parallelizer_core.dcp_source import stored_tensors
from shardwalk.parallelizer_core.optimizer_state import optimizer_state_dict
from shardwalk.parallelizer_core.parallel_state import unwrap_model
from shardwalk.parallelizer_core.state_dicts import load_model_state_dict, model_state_dict
from shardwalk.parallelizer_core.state_mismatch import StateMismatchError
from shardwalk.parallelizer_core.testing import TinyDecoder, run_on_ranks
from tests.matrix.case_models import (
    FULL,
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
from tests.matrix.tiny_transformers import MODELS


class Odd(nn.Module):
    """Sizes 6, 5 and 9, a tied table, a frozen norm, a scalar and a parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 6)
        self.layers = nn.ModuleList(OddBlock(size) for size in (5, 9, 5))
        self.norm = nn.LayerNorm(6).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(6, 61, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x) * self.scale)


class OddBlock(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.up = nn.Linear(6, size)
        self.down = nn.Linear(size, 6, bias=False)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x))) * self.gain


def llama() -> nn.Module:
    return MODELS["llama"](True)


SHARDINGS = [("none", 0), ("fsdp", 1), ("fsdp", 2), ("fsdp", 4), ("hsdp", 4), ("ddp", 2)]


class Run:
    """A model with its optimizer and scheduler, on the mesh or in one process."""

    def __init__(self, make: Any, kind: str, seed: int = 3) -> None:
        self.model: nn.Module = seeded(make, seed=seed)
        if kind != "none":
            self.model = parallel(self.model, kind)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0, "lr": 3e-2},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)

    def train(self, steps: int, first: int = 0) -> list[float]:
        losses = []
        for step in range(first, first + steps):
            self.optimizer.zero_grad()
            loss = mean_loss(self.model, mine(tokens(rows=8, seed=step)))
            loss.backward()
            clip_grad_norm_(self.model, 0.5)
            self.optimizer.step()
            self.scheduler.step()
            total = loss.detach().double()
            if dist.is_initialized():
                dist.all_reduce(total)
                total /= dist.get_world_size()
            losses.append(total.item())
        return losses

    def state(self) -> dict[str, Any]:
        return {
            "model": model_state_dict(self.model, full=True),
            "optimizer": optimizer_state_dict(self.model, self.optimizer, full=True),
            "scheduler": self.scheduler.state_dict(),
        }


def saved(make: Any, kind: str, folder: Path) -> tuple[dict[str, Any], list[float]]:
    run = Run(make, kind)
    run.train(3)
    parts = run.model, run.optimizer
    save_checkpoint(folder, *parts, scheduler=run.scheduler, step=3, extra={"epoch": 2})
    return run.state(), run.train(2, first=3)


def resumed(make: Any, kind: str, folder: Path) -> tuple[dict[str, Any], list[float], Any]:
    run = Run(make, kind, seed=9)
    run.train(1)
    loaded = load_checkpoint(folder, run.model, run.optimizer, scheduler=run.scheduler)
    return run.state(), run.train(2, first=3), (loaded.step, loaded.extra)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["scheduler"] == expected["scheduler"]
    assert list(found["model"]) == list(expected["model"])
    for name, value in expected["model"].items():
        assert torch.equal(found["model"][name], value), name
    moments, wanted = found["optimizer"]["state"], expected["optimizer"]["state"]
    assert moments.keys() == wanted.keys()
    assert found["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    for name, entry in wanted.items():
        assert moments[name].keys() == entry.keys()
        assert all(torch.equal(moments[name][key], value) for key, value in entry.items()), name


def on(world: int, function: Any, *args: Any) -> list[Any]:
    return run_on_ranks(world, function, *args) if world else [function(*args)]


@pytest.mark.parametrize(
    ("kind", "world", "make"),
    [
        ("none", 0, Odd),
        ("fsdp", 2, Odd),
        ("fsdp", 4, Odd),
        ("hsdp", 4, Odd),
        ("ddp", 2, Odd),
        ("fsdp", 2, llama),
    ],
)
def test_a_run_goes_on_with_any_number_of_ranks(
    kind: str, world: int, make: Any, tmp_path: Path
) -> None:
    """B56: bits of weights and moments, then the losses of the run that was not interrupted."""
    expected, losses = on(world, saved, make, kind, tmp_path)[0]
    for other, ranks in SHARDINGS:
        for state, found, rest in on(ranks, resumed, make, other, tmp_path):
            assert rest == (3, {"epoch": 2})
            assert_same(state, expected)
            assert found == pytest.approx(losses, rel=1e-6)


def wrapped() -> nn.Module:
    """Checkpointing on a part of a block and around whole blocks, as users do it by hand."""
    model = TinyDecoder()
    model.layers[0].up = checkpoint_wrapper(model.layers[0].up)
    for index in (1, 2):
        model.layers[index] = checkpoint_wrapper(model.layers[index])
    model.embed = checkpoint_wrapper(model.embed)
    return model


def names_everywhere(kind: str, folder: Path) -> dict[str, Any]:
    model = parallel(seeded(wrapped), kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mean_loss(model, mine(tokens())).backward()
    grads = {n.replace("_checkpoint_wrapped_module.", ""): g for n, g in gradients(model).items()}
    optimizer.step()
    adapters = {n for n in model_state_dict(model) if n.startswith("layers.0.up")}
    save_checkpoint(folder, model, optimizer)
    full = model_state_dict(model, full=True)
    load_model_state_dict(model, seeded().state_dict())
    after = model_state_dict(model, full=True)
    return {
        "sharded": list(model_state_dict(model)),
        "full": full,
        "adapters": adapters,
        "optimizer": list(optimizer_state_dict(model, optimizer)["state"]),
        "grads": grads,
        "loaded": all(torch.equal(after[n], t) for n, t in seeded().state_dict().items()),
    }


@pytest.mark.parametrize(("kind", "world"), [("fsdp", 1), ("fsdp", 2), ("hsdp", 4), ("ddp", 2)])
def test_wrappers_leave_no_trace_in_any_name(kind: str, world: int, tmp_path: Path) -> None:
    """B54: of the state dict, the files, the optimizer's state; both directions load strictly."""
    plain = seeded()
    names = list(plain.state_dict())
    mean_loss(plain, tokens()).backward()
    for found in run_on_ranks(world, names_everywhere, kind, tmp_path):
        assert found["sharded"] == list(found["full"]) == found["optimizer"] == names
        assert found["adapters"] == {"layers.0.up.weight"}
        assert found["loaded"]
        assert_equal(found["grads"], gradients(plain))
        seeded(seed=9).load_state_dict(found["full"], strict=True)
    stored = stored_tensors(tmp_path)
    assert {n.removeprefix("model.") for n in stored if n.startswith("model.")} == set(names)
    model = seeded(seed=9)
    load_checkpoint(tmp_path, model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, found["full"][name]), name


def first_loss(make: Any, kind: str, start: str, dtype: torch.dtype, file: Path) -> Any:
    model: nn.Module = on_meta(make) if start == "meta" else seeded(make, seed=9)
    model = model.to(dtype)
    before = {} if start == "meta" else {n: p.clone() for n, p in model.named_parameters()}
    if kind == "ddp":
        materialize(model, checkpoint=file)
    model = parallel(model, kind, **({} if kind == "ddp" else {"mp_policy": FULL}))
    if kind != "ddp":
        materialize(model, checkpoint=file)
    after = {n: whole(p) for n, p in unwrap_model(model).named_parameters()}
    same = [n for n, value in before.items() if torch.equal(value, after[n])]
    total = mean_loss(model, mine(tokens())).detach()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size(), same, after


@pytest.mark.parametrize("start", ["meta", "real weights"])
@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float32),
    ],
)
@pytest.mark.parametrize(("kind", "world"), [("fsdp", 2), ("hsdp", 4), ("ddp", 2)])
def test_the_weights_of_the_file_are_really_loaded(
    kind: str, world: int, stored: torch.dtype, dtype: torch.dtype, start: str, tmp_path: Path
) -> None:
    """B37: whatever dtype the file and the model have; no parameter keeps what it had."""
    source: Any = seeded(llama)
    for index, parameter in enumerate(source.parameters()):
        parameter.data += 0.05 * (index + 1) / len(list(source.parameters()))
    source = source.to(stored)
    save_file(
        {n: t.clone() for n, t in source.state_dict().items()}, tmp_path / "model.safetensors"
    )
    source = source.to(dtype)
    expected = mean_loss(source, tokens()).item()
    for loss, same, after in run_on_ranks(world, first_loss, llama, kind, start, dtype, tmp_path):
        assert loss == pytest.approx(expected, rel=1e-4 if dtype == torch.float32 else 1e-2)
        assert same == []
        for name, parameter in source.named_parameters():
            assert torch.equal(after[name], parameter), name


def renamed(start: str, file: Path) -> tuple[str, bool]:
    model: nn.Module = on_meta(llama) if start == "meta" else seeded(llama, seed=9)
    model = parallel(model)
    before = [None if p.is_meta else whole(p) for p in model.parameters()]
    with pytest.raises(StateMismatchError) as error:
        materialize(model, checkpoint=file)
    after = [None if p.is_meta else whole(p) for p in model.parameters()]
    untouched = all(
        a is b if b is None else torch.equal(a, b) for a, b in zip(after, before, strict=True)
    )
    return str(error.value), untouched


@pytest.mark.parametrize("start", ["meta", "real weights"])
def test_a_renamed_key_is_an_error_that_lists_both(start: str, tmp_path: Path) -> None:
    """B37: on every rank, before a value is written."""
    state = {n: t.clone() for n, t in seeded(llama).state_dict().items()}
    state["model.layers.0.mlp.up.weight"] = state.pop("model.layers.0.mlp.up_proj.weight")
    save_file(state, tmp_path / "model.safetensors")
    first, second = run_on_ranks(2, renamed, start, tmp_path)
    assert first == second
    assert first[1]
    assert "missing (1): model.layers.0.mlp.up_proj.weight" in first[0]
    assert "unexpected (1): model.layers.0.mlp.up.weight" in first[0]
