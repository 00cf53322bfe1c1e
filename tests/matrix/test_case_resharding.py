"""Weights that stay gathered where no backward follows, and two forwards before one backward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from shardwalk.parallelizer_core import load_checkpoint, save_checkpoint
from shardwalk.parallelizer_core.state_dicts import load_model_state_dict, model_state_dict
from shardwalk.parallelizer_core.testing import TinyDecoder, run_on_ranks
from tests.matrix.case_models import (
    BF16,
    FULL,
    assert_equal,
    gradients,
    logits_of,
    mean_loss,
    mine,
    parallel,
    seeded,
    tokens,
)
from tests.matrix.tiny_transformers import MODELS


class Towered(TinyDecoder):
    """A frozen vision tower, whose weights the root holds, before the blocks."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.vision_tower = nn.Sequential(nn.Linear(18, 7), nn.GELU(), nn.Linear(7, 18, bias=False))
        self.vision_tower.requires_grad_(False)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = super().forward(input_ids)
        seen = self.vision_tower(self.embed(input_ids))
        return logits + self.head(seen)


def llama() -> nn.Module:
    return MODELS["llama"](True)


MAKERS: list[Callable[[], nn.Module]] = [TinyDecoder, llama, Towered]


def gathered(model: nn.Module) -> list[str]:
    """The parameters that are not this rank's share: gathered, or more than a share of them."""
    found = []
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            found.append(name)
            continue
        shards = parameter.device_mesh.size(-1)
        rows = -(-parameter.shape[0] // shards)  # rows are split, the last rank's may be fewer
        if parameter.to_local().shape[0] > rows:
            found.append(name)
    return found


def evaluate(model: nn.Module, how: str) -> None:
    if how == "inference mode":
        with torch.inference_mode():
            model(tokens())
    elif how == "eval":
        model.eval()
        with torch.no_grad():
            model(tokens())
        model.train()
    elif how == "a failed forward":
        for gradient in (True, False):
            with torch.set_grad_enabled(gradient), pytest.raises(IndexError):
                model(torch.full_like(tokens(), 99))
    elif how == "a step":
        mean_loss(model, mine(tokens())).backward()
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]).step()
        model.zero_grad()


def left_gathered(make: Any, kind: str, reshard: bool | None) -> dict[str, Any]:
    options: dict[str, Any] = {"reshard_after_forward": reshard}
    model = parallel(seeded(make), kind, **options)
    left: dict[str, Any] = {}
    for how in ("eval", "inference mode", "a failed forward", "a step"):
        evaluate(model, how)
        left[how] = gathered(model)
        state = model_state_dict(model, full=True)
        left[f"state after {how}"] = [n for n, t in state.items() if isinstance(t, DTensor)]
    logits_of(model, mine(tokens()))  # a forward whose backward has not come yet
    left["own state dict"] = [n for n in model.state_dict() if not n.startswith(tuple(state))]
    left["state in between"] = [
        n for n, t in model_state_dict(model, full=True).items() if t.isnan().any()
    ]
    return left


@pytest.mark.parametrize("reshard", [None, False, True])
@pytest.mark.parametrize(("kind", "world"), [("fsdp", 1), ("fsdp", 2), ("hsdp", 4)])
@pytest.mark.parametrize("make", MAKERS)
def test_nothing_stays_gathered(make: Any, kind: str, world: int, reshard: bool | None) -> None:
    """B70: after an eval forward, a failed one, and an optimizer step; frozen towers too."""
    for left in run_on_ranks(world, left_gathered, make, kind, reshard):
        assert left == {name: [] for name in left}


def frozen_model(make: Any, kind: str) -> list[str]:
    model = parallel(seeded(make).requires_grad_(False), kind)
    logits_of(model, tokens())
    return gathered(model)


@pytest.mark.parametrize(("kind", "world"), [("fsdp", 2), ("hsdp", 4)])
@pytest.mark.parametrize("make", MAKERS)
def test_a_frozen_model_is_sharded_after_a_forward(make: Any, kind: str, world: int) -> None:
    """B70: no backward will reshard it, although gradients are enabled."""
    assert run_on_ranks(world, frozen_model, make, kind) == [[]] * world


def changed_in_between(make: Any) -> tuple[Tensor, Tensor]:
    """The second of two eval forwards uses the weights as they are then."""
    model = parallel(seeded(make))
    with torch.no_grad():
        logits_of(model, tokens())
        for parameter in model.parameters():
            parameter.mul_(0.5)
        second = logits_of(model, tokens())
    mean_loss(model, mine(tokens())).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
        return second, logits_of(model, tokens())


@pytest.mark.parametrize("make", MAKERS)
def test_weights_changed_after_a_forward_are_those_of_the_next(make: Any) -> None:
    """B70: an average swapped in, or weights received, between two forwards."""
    reference = seeded(make)
    expected = []
    with torch.no_grad():
        for _ in range(2):
            for parameter in reference.parameters():
                parameter.mul_(0.5)
            expected.append(logits_of(reference, tokens()))
    for found in run_on_ranks(2, changed_in_between, make):
        torch.testing.assert_close(list(found), expected, rtol=1e-5, atol=1e-6)


def averaged(model: nn.Module) -> dict[str, Tensor]:
    """Other values for every parameter, in the layout of the model."""
    return {name: parameter.detach() * 0.5 + 0.01 for name, parameter in model.named_parameters()}


def swap_in(model: nn.Module, values: dict[str, Tensor], how: str) -> None:
    if how == "load":
        load_model_state_dict(model, values, strict=False)
        return
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])


def evaluated(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return logits_of(model, tokens())


def swapped_and_saved(make: Any, kind: str, how: str, folder: Path) -> dict[str, Any]:
    """Eval, all weights changed, eval, save; then a step, and the old weights back again."""
    model = parallel(seeded(make), kind)
    own = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    found = {"before": evaluated(model)}
    swap_in(model, averaged(model), how)
    found["swapped"] = evaluated(model)
    found["state"] = model_state_dict(model, full=True)
    save_checkpoint(folder, model)
    mean_loss(model, mine(tokens())).backward()
    found["gradients"] = gradients(model)
    swap_in(model, own, how)
    found["after"] = evaluated(model)
    load_checkpoint(folder, model)
    found["loaded"] = evaluated(model)
    return found


@pytest.mark.parametrize("how", ["copy", "load"])
@pytest.mark.parametrize(("kind", "world"), [("fsdp", 1), ("fsdp", 2), ("hsdp", 4)])
@pytest.mark.parametrize("make", MAKERS)
def test_weights_swapped_between_evaluations_are_used_and_saved(
    make: Any, kind: str, world: int, how: str, tmp_path: Path
) -> None:
    """B70: eval, change all weights, eval, save; and a step on the new ones."""
    reference = seeded(make)
    expected = {"before": evaluated(reference)}
    expected["after"] = expected["before"]
    swap_in(reference, averaged(reference), "copy")
    expected["swapped"] = expected["loaded"] = evaluated(reference)
    mean_loss(reference, tokens()).backward()
    for found in run_on_ranks(world, swapped_and_saved, make, kind, how, tmp_path):
        for name, logits in expected.items():
            torch.testing.assert_close(found[name], logits, rtol=1e-5, atol=1e-6, msg=name)
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(found["state"][name], value, rtol=1e-6, atol=1e-7)
        assert_equal(found["gradients"], gradients(reference))


def log_likelihood(model: nn.Module, ids: Tensor) -> Tensor:
    logits = logits_of(model, ids[:, :-1]).log_softmax(-1)
    return logits.gather(-1, ids[:, 1:, None]).mean()


def preference(model: nn.Module, frozen: nn.Module, form: str, pick: Callable[..., Any]) -> Tensor:
    """A preference loss over two forwards of the model, with a frozen second model beside it."""
    chosen, rejected = pick(tokens(seed=1)), pick(tokens(seed=2, length=6))
    if form == "no grad first":
        with torch.no_grad():
            before = log_likelihood(model, rejected)
        return -F.logsigmoid(log_likelihood(model, chosen) - before)
    first = log_likelihood(model, chosen)
    with torch.set_grad_enabled(form != "no grad second"):
        second = log_likelihood(model, rejected)
    if form == "reference model":
        with torch.no_grad():
            second = second + log_likelihood(frozen, rejected) - log_likelihood(frozen, chosen)
    if form == "three":
        second = second + log_likelihood(model, chosen).square()
    return -F.logsigmoid(first - second)


def as_it_is(*values: Any) -> Any:
    return values[0]


FORMS = ["both", "three", "no grad first", "no grad second", "reference model"]


def preferred(make: Any, kind: str, policy: Any, reshard: bool | None) -> list[Any]:
    options = {"mp_policy": policy, "reshard_after_forward": reshard}
    model = parallel(seeded(make), kind, **options)
    frozen = parallel(seeded(make, seed=4).requires_grad_(False), kind, **options)
    found = []
    for form in FORMS:
        model.zero_grad()
        # Equal rows on every rank: the loss is not a mean over rows, so each rank takes them all.
        preference(model, frozen, form, as_it_is).backward()
        found.append((gradients(model), gathered(model), gathered(frozen)))
    return found


@pytest.mark.parametrize("reshard", [None, False, True])
@pytest.mark.parametrize(("kind", "world"), [("fsdp", 2), ("hsdp", 4)])
@pytest.mark.parametrize("make", [TinyDecoder, llama])
def test_two_forwards_before_one_backward(
    make: Any, kind: str, world: int, reshard: bool | None
) -> None:
    """B65: preference losses, any of their forwards without gradients, a reference model beside."""
    expected = []
    for form in FORMS:
        model, frozen = seeded(make), seeded(make, seed=4)
        preference(model, frozen, form, as_it_is).backward()
        expected.append(gradients(model))
    for found in run_on_ranks(world, preferred, make, kind, FULL, reshard):
        for (grads, left, left_of_frozen), wanted in zip(found, expected, strict=True):
            assert_equal(grads, wanted)
            assert left == left_of_frozen == []


def test_two_forwards_before_one_backward_in_bf16() -> None:
    """B65 under mixed precision."""
    expected = []
    for form in FORMS:
        model, frozen = seeded(llama), seeded(llama, seed=4)
        preference(model, frozen, form, as_it_is).backward()
        expected.append(gradients(model))
    for found in run_on_ranks(2, preferred, llama, "fsdp", BF16, None):
        for (grads, _, _), wanted in zip(found, expected, strict=True):
            assert_equal(grads, wanted, tolerance=0.15)
