"""Activation checkpointing: heard wherever it is asked for, and gradients that stay as they were."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.nn import functional as F

from shardwalk.mesh import DDPConfig, DistributedSetup, FSDP2Config, MeshContext
from shardwalk.parallelizer_core import parallelize_model
from shardwalk.parallelizer_core.parallel_state import unwrap_model
from shardwalk.parallelizer_core.state_dicts import model_state_dict
from shardwalk.parallelizer_core.testing import TinyDecoder, run_on_ranks
from tests.matrix.case_models import (
    BF16,
    FULL,
    assert_equal,
    context,
    gradients,
    logits_of,
    mean_loss,
    mine,
    parallel,
    seeded,
    tokens,
)
from tests.matrix.tiny_transformers import MODELS, normal_weights

MODES = ("full", "selective")
modes = pytest.mark.parametrize("mode", MODES)


class CountCalls:
    """How often each block ran, by a hook on its last part: it runs in recomputes too.

    A recompute stops as soon as all that the backward needs is there, so the first part counts.
    """

    def __init__(self, model: nn.Module) -> None:
        blocks = unwrap_model(model).layers
        self.calls = [0] * len(blocks)
        for index, block in enumerate(blocks):
            first = next(block.children())
            first.register_forward_pre_hook(lambda *_, index=index: self._count(index))

    def _count(self, index: int) -> None:
        self.calls[index] += 1


def runs_per_block(mesh_context: MeshContext) -> list[int]:
    model = parallelize_model(seeded(), mesh_context)
    counter = CountCalls(model)
    mean_loss(model, tokens()).backward()
    return counter.calls


def heard() -> None:
    mesh = context().device_mesh
    for strategy in (FSDP2Config, DDPConfig):
        options = {"mp_policy": FULL} if strategy is FSDP2Config else {}
        for mode in (True, "full", "selective"):
            asked = [
                MeshContext.from_meshes(
                    mesh, strategy_config=strategy(activation_checkpointing=mode, **options)
                ),
                MeshContext.from_meshes(
                    mesh, strategy_config=strategy(**options), activation_checkpointing=mode
                ),
                MeshContext.from_meshes(mesh, strategy_config=strategy(**options)),
            ]
            asked[2].activation_checkpointing = mode
            for mesh_context in asked:
                assert mesh_context.activation_checkpointing == ("full" if mode is True else mode)
                assert runs_per_block(mesh_context) == [2, 2, 2]
        plain = MeshContext.from_meshes(mesh, strategy_config=strategy(**options))
        assert runs_per_block(plain) == [1, 1, 1]
        with pytest.raises(ValueError, match="did you mean 'selective'"):
            strategy(activation_checkpointing="selectve")
    for name in ("fsdp2", "ddp"):
        setup = DistributedSetup.build(name, activation_checkpointing="selective")
        assert setup.mesh_context.activation_checkpointing == "selective"
        assert setup.strategy_config.activation_checkpointing is False
    with pytest.raises(ValueError, match="did you mean 'selective'"):
        DistributedSetup.build("fsdp2", activation_checkpointing="selectve")


@pytest.mark.parametrize("world", [1, 2])
def test_checkpointing_is_heard_wherever_it_is_asked_for(world: int) -> None:
    """P11, P12, P13: by every strategy, at every size; a misspelt mode is an error, never full."""
    run_on_ranks(world, heard)


def test_checkpointing_without_a_mesh_is_heard_too() -> None:
    """P11: a bare context shards nothing and checkpoints, once."""
    for mode in MODES:
        assert runs_per_block(MeshContext(activation_checkpointing=mode)) == [2, 2, 2]
    with pytest.raises(ValueError, match="did you mean 'selective'"):
        MeshContext(activation_checkpointing="selectve")  # type: ignore[arg-type]


class Adapted(nn.Module):
    """A frozen linear layer and a trainable adapter of rank 4 beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, 4, bias=False)
        self.lora_B = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.base(x) + self.lora_B(self.lora_A(x))
        return output


class AdaptedDecoder(TinyDecoder):
    """Nothing trains but the adapters, and no input of a block needs a gradient before them."""

    def __init__(self) -> None:
        super().__init__(layers=4)
        self.requires_grad_(False)
        for layer in self.layers:
            for name in ("qkv", "out", "up", "down"):
                setattr(layer, name, Adapted(getattr(layer, name)))


def step(kind: str, make: Callable[..., nn.Module], **options: Any) -> dict[str, Tensor | None]:
    """The gradients of one step; on one process without a mesh for the kind "bare"."""
    if kind == "bare":
        model = parallelize_model(seeded(make), MeshContext(**options))
    else:
        model = parallel(seeded(make), kind, **options)
    mean_loss(model, mine(tokens())).backward()
    return gradients(model)


def assert_adapters_train(found: dict[str, Tensor | None]) -> None:
    adapters = {name: value for name, value in found.items() if "lora_" in name}
    assert len(adapters) == 4 * 4 * 2
    for name, value in adapters.items():
        assert value is not None, name
        assert value.abs().max() > 0, name
    assert all(value is None for name, value in found.items() if name not in adapters)


@modes
@pytest.mark.parametrize(("kind", "world"), [("bare", 0), ("fsdp", 1), ("fsdp", 2), ("ddp", 2)])
def test_adapters_above_a_frozen_embedding_train(kind: str, world: int, mode: str) -> None:
    """B02: every adapter in a checkpointed block has the gradient it has without checkpointing."""
    expected = step("bare", AdaptedDecoder)
    assert_adapters_train(expected)
    for found in ranks_step(world, kind, AdaptedDecoder, activation_checkpointing=mode):
        assert_adapters_train(found)
        assert_equal(found, expected, tolerance=1e-6)


def ranks_step(world: int, kind: str, make: Callable[..., nn.Module], **options: Any) -> Any:
    if not world:
        return [step(kind, make, **options)]
    return run_on_ranks(world, step, kind, make, **options)


def tiny(name: str) -> Any:
    if name == "plain":
        return seeded()
    model = MODELS[name](True)
    generator = torch.Generator().manual_seed(5)
    for parameter_name, parameter in model.named_parameters():
        normal_weights(parameter_name, parameter.data, generator)
    return model


def all_modes(kind: str, name: str, policy: Any) -> list[dict[str, Tensor | None]]:
    options = {} if kind == "ddp" else {"mp_policy": policy}
    grads = []
    for mode in (False, *MODES):
        model = parallel(tiny(name), kind, activation_checkpointing=mode, **options)
        mean_loss(model, mine(tokens())).backward()
        grads.append(gradients(model))
    return grads


@pytest.mark.parametrize(
    ("kind", "world", "name", "policy"),
    [
        ("fsdp", 4, "llama", FULL),
        ("fsdp", 2, "gemma3", BF16),
        ("hsdp", 4, "plain", BF16),
        ("ddp", 2, "qwen3", None),
        ("fsdp", 1, "plain", FULL),
    ],
)
def test_checkpointing_changes_no_bit_of_a_gradient(
    kind: str, world: int, name: str, policy: Any
) -> None:
    """B59 under DDP: full and selective have the gradients of no checkpointing, bit for bit."""
    for off, *others in run_on_ranks(world, all_modes, kind, name, policy):
        assert any(value is not None and value.any() for value in off.values())
        for found in others:
            for key, value in off.items():
                assert value is found[key] is None or torch.equal(value, found[key]), key


def preference_step(kind: str, mode: Any, reference_first: bool) -> dict[str, Tensor | None]:
    """Two forwards with gradients before one backward, and one without before either."""
    model = parallel(seeded(), kind, activation_checkpointing=mode)
    chosen, rejected = mine(tokens(seed=1)), mine(tokens(seed=2))
    if reference_first:
        with torch.no_grad():
            logits_of(model, chosen)
    loss = F.softplus(mean_loss(model, chosen) - 0.5 * mean_loss(model, rejected))
    loss.backward()
    return gradients(model)


def one_process_preference() -> dict[str, Tensor | None]:
    """The mean over two ranks' shares, each with its own loss."""
    model = seeded()
    for part in range(2):
        chosen, rejected = (tokens(seed=seed).tensor_split(2)[part] for seed in (1, 2))
        loss = F.softplus(mean_loss(model, chosen) - 0.5 * mean_loss(model, rejected))
        (loss / 2).backward()
    return gradients(model)


@modes
@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_two_forwards_before_one_backward(kind: str, mode: str) -> None:
    """B65: each forward has a log and saved outputs of its own."""
    expected = one_process_preference()
    for first in (False, True):
        for found in run_on_ranks(2, preference_step, kind, mode, first):
            assert_equal(found, expected)


def in_a_thread(kind: str, mode: str, policy: Any) -> list[dict[str, Tensor | None]]:
    grads = []
    for threaded in (False, True):
        model = parallel(
            seeded(),
            kind,
            activation_checkpointing=mode,
            **({} if kind == "ddp" else {"mp_policy": policy}),
        )
        loss = mean_loss(model, mine(tokens()))
        if threaded:
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        else:
            loss.backward()
        grads.append(gradients(model))
    return grads


@modes
@pytest.mark.parametrize(("kind", "policy"), [("fsdp", FULL), ("fsdp", BF16), ("ddp", None)])
def test_a_backward_in_another_thread(kind: str, policy: Any, mode: str) -> None:
    for here, there in run_on_ranks(2, in_a_thread, kind, mode, policy):
        assert here.keys() == there.keys()
        assert all(torch.equal(value, there[name]) for name, value in here.items())  # type: ignore[arg-type]


def names_and_loading(kind: str, mode: str) -> tuple[list[str], list[str], bool]:
    model = parallel(seeded(), kind, activation_checkpointing=mode)
    mean_loss(model, mine(tokens())).backward()
    full = model_state_dict(model, full=True)
    modules = [name for name, _ in unwrap_model(model).named_modules()]
    other = seeded(seed=9)
    other.load_state_dict(full, strict=True)
    same = all(torch.equal(value, full[name]) for name, value in other.state_dict().items())
    return list(model.state_dict()), modules, same


@modes
@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_no_name_shows_that_a_model_is_checkpointed(kind: str, mode: str) -> None:
    """B54: keys of the state dict, paths of modules; the plain model loads what this one has."""
    plain = seeded()
    for keys, modules, same in run_on_ranks(2, names_and_loading, kind, mode):
        assert keys == list(plain.state_dict())
        assert modules == [name for name, _ in plain.named_modules()]
        assert same


def by_hand() -> nn.Module:
    model = TinyDecoder()
    model.layers[1] = checkpoint_wrapper(model.layers[1])
    return model


def test_a_model_that_is_checkpointed_already_is_refused() -> None:
    """By shardwalk, by torch's wrapper, by its own means: all of it would run three times."""
    once = parallelize_model(seeded(), MeshContext(activation_checkpointing="full"))
    for again in (False, "full", "selective"):
        with pytest.raises(ValueError, match=r"layers\.0 is checkpointed already"):
            parallelize_model(once, MeshContext(activation_checkpointing=again))
    with pytest.raises(ValueError, match=r"layers\.1 is checkpointed already"):
        parallelize_model(by_hand(), MeshContext(activation_checkpointing="full"))
    llama = tiny("llama")
    llama.activation_checkpointing_enable()
    with pytest.raises(
        ValueError, match=r"gradient_checkpointing_disable\(\), or use activation_check"
    ):
        parallelize_model(llama, MeshContext(activation_checkpointing="selective"))
    llama.activation_checkpointing_disable()
    parallelize_model(llama, MeshContext(activation_checkpointing="selective"))
