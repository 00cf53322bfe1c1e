"""Which layer groups are recomputed, and what a recompute finds as its forward found it."""

from __future__ import annotations

import random
from collections import Counter, UserDict
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from walk_toys import Decoder, context, full_gradients, ids

from shardwalk.mesh import DDPConfig, FSDP2Config, MeshContext
from shardwalk.parallelizer_core import (
    ModelParallelizer,
    apply_activation_checkpointing,
    parallelize_model,
    record_or_replay,
    replay_contexts,
)
from shardwalk.parallelizer_core.testing import run_on_ranks

modes = pytest.mark.parametrize("mode", ["full", "selective"])


def seeded(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(7)
    return make()


# Scopes


class Part(nn.Module):
    """A block with one composite part, `mlp`."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Part(), Part()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Listening(Decoder):
    def __init__(self) -> None:
        super().__init__(block=Part)
        self.vision_tower, self.audio_tower = Tower(), Tower()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.vision_tower(x) + self.audio_tower(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class InParts(Listening):
    class Sidecar(ModelParallelizer):
        def _use_full_layer_activation_checkpointing(self, model: nn.Module) -> bool:
            return False

    parallelizer = Sidecar()


def recomputed(model: nn.Module) -> set[str]:
    """The groups whose blocks run again in the backward of a step, by their first layer."""
    found: Counter[str] = Counter()
    inner = getattr(model, "module", model)
    groups = {"language": inner, "vision": inner.vision_tower, "audio": inner.audio_tower}
    for group, holder in groups.items():
        first = holder.layers[0].mlp[0]
        first.register_forward_pre_hook(lambda *_, group=group: found.update([group]))
    model(ids()).float().pow(2).mean().backward()
    assert set(found.values()) <= {1, 2}
    return {group for group, calls in found.items() if calls == 2}


SCOPES = {
    "all": {"language", "vision", "audio"},
    "language": {"language"},
    "vision": {"vision"},
    "audio": {"audio"},
    "multimodal": {"vision", "audio"},
    ("language", "audio"): {"language", "audio"},
}


def scopes(strategy: str) -> None:
    mesh = context().device_mesh
    for make in (Listening, InParts):
        expected: dict[str, Any] = {}
        for mode in (False, "full", "selective"):
            for scope, groups in SCOPES.items() if mode else [("all", set())]:
                options: Any = {
                    "activation_checkpointing": mode,
                    "activation_checkpointing_scope": scope,
                }
                config = FSDP2Config(mp_policy={}, **options)
                if strategy == "ddp":
                    config = DDPConfig(**options)
                model = parallelize_model(
                    seeded(make), MeshContext.from_meshes(mesh, strategy_config=config)
                )
                assert recomputed(model) == groups, (make, mode, scope)
                grads = full_gradients(getattr(model, "module", model))
                expected = expected or grads
                assert all(torch.equal(grads[name], value) for name, value in expected.items())


@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
def test_a_scope_selects_the_blocks_of_its_groups_and_changes_no_bit(strategy: str) -> None:
    run_on_ranks(2, scopes, strategy)


def wrong_scopes() -> None:
    for strategy in (FSDP2Config, DDPConfig):
        for scope in ("vision", ["language", "audio"], "multimodal"):
            config = strategy(activation_checkpointing="full", activation_checkpointing_scope=scope)
            mesh_context = MeshContext.from_meshes(context().device_mesh, strategy_config=config)
            with pytest.raises(ValueError, match=r"has none by .*\(it has language: layers\)"):
                parallelize_model(Decoder(), mesh_context)
    with pytest.raises(ValueError, match="selects vision blocks"):
        ModelParallelizer()._apply(
            Decoder(),
            context().device_mesh,
            activation_checkpointing="full",
            activation_checkpointing_scope="vision",
        )


def test_a_scope_that_matches_no_stack_says_what_there_is() -> None:
    run_on_ranks(2, wrong_scopes)


def scopes_of_nothing() -> None:
    for strategy in (FSDP2Config, DDPConfig):
        config = strategy(activation_checkpointing_scope=["language"])
        mesh_context = MeshContext.from_meshes(context().device_mesh, strategy_config=config)
        with pytest.raises(ValueError, match="activation_checkpointing=False; set it, or leave"):
            parallelize_model(Decoder(), mesh_context)


def test_a_scope_without_checkpointing_is_an_error() -> None:
    run_on_ranks(2, scopes_of_nothing)


# Attention


class Attending(nn.Module):
    enabled: ClassVar[list[tuple[bool, bool]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 3)).transpose(1, 3).unbind(2)
        backends = torch.backends.cuda
        self.enabled.append((backends.flash_sdp_enabled(), backends.math_sdp_enabled()))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


@modes
@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_attention_is_recomputed_by_the_kernel_of_its_forward(
    mode: str, backend: SDPBackend
) -> None:
    """The context of the user is left before the backward; selective would name another path."""
    grads = []
    for checkpointed in (False, mode):
        model = seeded(lambda: Decoder(block=Attending))
        apply_activation_checkpointing(model, checkpointed)
        Attending.enabled.clear()
        with sdpa_kernel(backend):
            loss = model(ids()).pow(2).mean()
        loss.backward()
        only = (backend is SDPBackend.FLASH_ATTENTION, backend is SDPBackend.MATH)
        assert Attending.enabled == [only] * (6 if checkpointed else 3)
        assert torch.backends.cuda.flash_sdp_enabled()
        assert torch.backends.cuda.math_sdp_enabled()
        grads.append(full_gradients(model))
    assert all(torch.equal(value, grads[1][name]) for name, value in grads[0].items())


# Keys and values that layers share


class Sharing(nn.Module):
    """Puts its keys into a mapping that a later layer, which has none, reads."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.q = nn.Linear(6, 6)
        self.k = nn.Linear(6, 6) if own else None

    def forward(self, x: Tensor, shared: UserDict[str, Tensor], seen: list[int]) -> Tensor:
        if self.k is not None:
            shared["keys"] = self.k(x).tanh()
        seen.append(len(seen))
        return x + self.q(x).sin() * shared["keys"] * seen[-1]


class SharingDecoder(nn.Module):
    """Two layers with keys of their own, each followed by one that reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Sharing(own) for own in (True, False, True, False)])

    def forward(self, x: Tensor) -> Tensor:
        shared: UserDict[str, Tensor] = UserDict()
        seen: list[int] = []
        for layer in self.layers:
            x = layer(x, shared, seen)
        self.after = shared, seen, shared["keys"]
        return x


@modes
def test_layers_that_share_keys_are_recomputed_with_those_of_their_forward(mode: str) -> None:
    """The mapping holds the keys of the last layer by then, and stays as the forward left it."""
    grads = []
    for checkpointed in (False, mode):
        model = seeded(SharingDecoder)
        apply_activation_checkpointing(model, checkpointed)
        x = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(1))
        model(x).pow(2).mean().backward()
        shared, seen, keys = model.after
        assert shared["keys"] is keys
        assert seen == [0, 1, 2, 3]
        grads.append(full_gradients(model))
    assert all(torch.equal(value, grads[1][name]) for name, value in grads[0].items())


# Caches


class Needing(nn.Module):
    """Cannot train without a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        return x + self.up(x) * len(cache.layers)


class Cache:
    layers = (1, 2)

    def update(self) -> None: ...

    def get_seq_length(self) -> int:
        return 0


class State:
    """What recurrent layers keep, without a length."""


@pytest.mark.filterwarnings("ignore:.*passes a cache")
def test_a_cache_that_a_model_cannot_do_without_is_named() -> None:
    model = nn.ModuleList([Needing()])
    apply_activation_checkpointing(model, "full")
    with pytest.raises(AttributeError) as error:
        model[0](torch.randn(2, 6), cache=Cache())
    assert "needs activation_checkpointing=False" in "".join(error.value.__notes__)
    with pytest.raises(ValueError, match=r"passes cache=State .* set use_cache=False"):
        model[0](torch.randn(2, 6), cache=State())


# Decisions


class Dropped(nn.Module):
    """Stochastic depth, by a generator that no checkpointing restores."""

    checkpoint_context = staticmethod(replay_contexts)
    dice = random.Random(0)

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6))

    def forward(self, x: Tensor) -> Tensor:
        if record_or_replay("runs", lambda: self.dice.random() < 0.5):
            x = x + self.mlp(x) * 2
        return x.sin()


def stochastic_depth(strategy: Any) -> list[Any]:
    mesh = context().device_mesh
    found = []
    for mode in (False, "full", "selective"):
        options: Any = {"mp_policy": {}}
        if strategy is DDPConfig:
            options = {"find_unused_parameters": True}
        config = strategy(activation_checkpointing=mode, **options)
        Dropped.dice.seed(1)
        model = parallelize_model(
            seeded(lambda: Decoder(block=Dropped)),
            MeshContext.from_meshes(mesh, strategy_config=config),
        )
        for step in range(3):
            model(ids(2, 4 + step)).pow(2).mean().backward()
        found.append(full_gradients(getattr(model, "module", model)))
    return found


@pytest.mark.parametrize("strategy", [FSDP2Config, DDPConfig])
def test_blocks_dropped_at_random_in_the_forward_are_dropped_in_the_recompute(
    strategy: Any,
) -> None:
    """A dense use of the log: three steps whose layers run or not by a draw of their own."""
    Dropped.dice.seed(1)
    single = seeded(lambda: Decoder(block=Dropped))
    for step in range(3):
        single(ids(2, 4 + step)).pow(2).mean().backward()
    expected = full_gradients(single)
    for off, *others in run_on_ranks(2, stochastic_depth, strategy):
        for name, value in expected.items():
            torch.testing.assert_close(off[name], value, rtol=1e-5, atol=1e-7)
            assert all(torch.equal(other[name], off[name]) for other in others)
