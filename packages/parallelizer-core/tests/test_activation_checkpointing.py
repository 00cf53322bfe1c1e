"""Which parts of a model are recomputed, what they are called with, and what stays in memory."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from walk_toys import Decoder, context, full_gradients, ids

from shardwalk.mesh import MeshContext
from shardwalk.parallelizer_core import (
    ModelParallelizer,
    apply_activation_checkpointing,
    is_recomputing,
    parallelize_model,
    record_or_replay,
    replay_contexts,
)
from shardwalk.parallelizer_core.testing import TinyDecoder, run_on_ranks

modes = pytest.mark.parametrize("mode", ["full", "selective"])


def seeded(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(7)
    return make()


def train(model: nn.Module, *args: Any) -> dict[str, Tensor | None]:
    """The gradients of one step; tiny losses of any float output."""
    model(*args).float().pow(2).mean().backward()
    return full_gradients(model)


def assert_same(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        other = found[name]
        assert value is other is None or torch.equal(value, other), name  # type: ignore[arg-type]


def checkpointed(make: Callable[[], nn.Module], mode: str, **options: Any) -> Any:
    model = seeded(make)
    apply_activation_checkpointing(model, mode, **options)
    return model


# Which modules run again


def runs(model: nn.Module) -> Counter[str]:
    """How often each module is called from now on, by name; the block by its own forward."""
    found: Counter[str] = Counter()
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: found.update([name]))
    return found


@modes
def test_hooks_of_a_block_run_once_and_its_parts_twice(mode: str) -> None:
    model = checkpointed(Decoder, mode)
    found = runs(model)
    train(model, ids())
    assert [found[f"layers.{index}"] for index in range(3)] == [1, 1, 1]
    assert [found[f"layers.{index}.norm"] for index in range(3)] == [2, 2, 2]
    assert [found[name] for name in ("", "embed", "norm", "head")] == [1, 1, 1, 1]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out(F.scaled_dot_product_attention(q, k, v))


class FusedMlp(nn.Module):
    """No submodules: only its name says that it is more than a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(6, 9)), nn.Parameter(torch.randn(9, 6))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.up).relu() @ self.down


class PartedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.attn = Attention()
        self.mlp = FusedMlp()
        self.adapters = nn.ModuleList([nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 6))])
        self.scale = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return self.scale(x + self.mlp(x) + self.adapters[0](x))


def parted() -> nn.Module:
    return Decoder(block=PartedBlock)


class PartsSidecar(ModelParallelizer):
    def _use_full_layer_activation_checkpointing(self, model: nn.Module) -> bool:
        return False


class PartedDecoder(Decoder):
    parallelizer = PartsSidecar()

    def __init__(self) -> None:
        super().__init__(block=PartedBlock)


def runs_of_parts(model: nn.Module) -> None:
    found = runs(model)
    train(model, ids())
    for index in range(3):
        once = ("", ".norm", ".attn", ".mlp", ".adapters.0", ".scale")
        assert [found[f"layers.{index}{part}"] for part in once] == [1] * 6
        assert [found[f"layers.{index}{part}"] for part in (".attn.qkv", ".adapters.0.0")] == [2, 2]


def test_a_sidecar_has_the_parts_of_its_blocks_recomputed_one_by_one() -> None:
    """Composite children and those named as one, in lists too; the rest of the block runs once."""
    expected = train(seeded(PartedDecoder), ids())
    assert_same(train(checkpointed(parted, "full", whole_layers=False), ids()), expected)
    runs_of_parts(checkpointed(parted, "full", whole_layers=False))
    runs_of_parts(
        parallelize_model(seeded(PartedDecoder), MeshContext(activation_checkpointing="full"))
    )
    assert ModelParallelizer()._use_full_layer_activation_checkpointing(Decoder()) is True


def parts_on_ranks() -> None:
    model = parallelize_model(seeded(PartedDecoder), context(activation_checkpointing="full"))
    found = runs(model)
    grads = train(model, ids())
    assert found["layers.1"] == found["layers.1.attn"] == 1
    assert found["layers.1.attn.qkv"] == 2
    assert_close(grads, train(seeded(PartedDecoder), ids()))


def assert_close(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7)


def test_parts_are_recomputed_under_fsdp_too() -> None:
    run_on_ranks(2, parts_on_ranks)


def reapplied(strategy: str) -> list[bool]:
    """Whether blocks are checkpointed each time that trainability is reapplied."""
    seen: list[bool] = []
    mesh_context = context(activation_checkpointing="full")
    if strategy == "none":
        mesh_context = MeshContext(activation_checkpointing="full")
    mesh_context.reapply_trainability = lambda model: seen.append(
        "forward" in vars(model.layers[0])
    )
    parallelize_model(Decoder(), mesh_context)
    return seen


def test_trainability_is_reapplied_before_and_after_checkpointing() -> None:
    assert run_on_ranks(2, reapplied, "fsdp2") == [[False, True]] * 2
    assert reapplied("none") == [False]


def test_a_block_without_parts_is_recomputed_whole() -> None:
    model = nn.ModuleList([nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.GELU())])
    apply_activation_checkpointing(model, "full", whole_layers=False)
    assert all("forward" in vars(block) for block in model)
    assert "forward" not in vars(model[1][0])


def test_a_part_that_two_blocks_share_is_recomputed_once_per_call() -> None:
    model = seeded(parted)
    model.layers[2].attn = model.layers[0].attn
    apply_activation_checkpointing(model, "full", whole_layers=False)
    found = runs(model)
    train(model, ids())
    assert found["layers.0.attn"] == 2  # called by two blocks; its hooks run once in each
    assert found["layers.0.attn.qkv"] == 2 * 2


def test_what_cannot_be_checkpointed_is_refused() -> None:
    with pytest.raises(ValueError, match="'full' recomputes blocks, and Linear has no list"):
        apply_activation_checkpointing(nn.Linear(2, 2), "full")
    with pytest.raises(ValueError, match="activation_checkpointing_scope='vision'"):
        apply_activation_checkpointing(Decoder(), "full", scope="vision")
    with pytest.raises(ValueError, match="did you mean 'selective'"):
        apply_activation_checkpointing(Decoder(), "selectve")
    model = Decoder()
    apply_activation_checkpointing(model, False)
    apply_activation_checkpointing(model, True, scope=None)
    with pytest.raises(ValueError, match=r"layers\.0 is checkpointed already"):
        apply_activation_checkpointing(model, "full")


# What the calls are made with


@modes
def test_a_copy_and_a_pickle_are_checkpointed_as_well(mode: str) -> None:
    model = checkpointed(TinyDecoder, mode)
    tokens = torch.arange(10).view(2, 5)
    expected = train(seeded(TinyDecoder), tokens)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        found = runs(other)
        assert_same(train(other, tokens), expected)
        assert found["layers.0.qkv"] == 2
        assert vars(other.layers[0])["forward"]._forward.__self__ is other.layers[0]
    assert all(parameter.grad is None for parameter in model.parameters())


@modes
def test_autocast_holds_in_the_recompute(mode: str) -> None:
    tokens = torch.arange(10).view(2, 5)
    grads = []
    for model in (seeded(TinyDecoder), checkpointed(TinyDecoder, mode)):
        with torch.autocast("cpu", torch.bfloat16):
            output = model(tokens)
        assert output.dtype is torch.bfloat16
        output.float().pow(2).mean().backward()
        grads.append(full_gradients(model))
    assert_same(grads[1], grads[0])


class Dropping(nn.Module):
    """Dropout before, in and after attention: the recompute must draw the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(F.dropout(x, 0.3)).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.4)
        return x + F.dropout(self.out(mixed), 0.3)


@modes
def test_dropout_is_that_of_the_forward(mode: str) -> None:
    grads, after = [], []
    for model in (
        seeded(lambda: Decoder(block=Dropping)),
        checkpointed(lambda: Decoder(block=Dropping), mode),
    ):
        torch.manual_seed(11)
        grads.append(train(model, ids()))
        after.append(torch.rand(1))
    assert_same(grads[1], grads[0])
    assert torch.equal(*after)  # the recompute leaves the random state where the forward did


def test_keywords_reach_the_block_whatever_their_names() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(6, 6)

        def forward(self, x: Tensor, *, debug: float, context_fn: float) -> Tensor:
            return self.up(x * debug).sin() * context_fn

    block = Block()
    model = nn.ModuleList([block])
    apply_activation_checkpointing(model, "full")
    x = torch.randn(2, 6, requires_grad=True)
    block(x, debug=2.0, context_fn=3.0).sum().backward()
    expected = torch.autograd.grad((block.up(x * 2).sin() * 3).sum(), x)[0]
    torch.testing.assert_close(x.grad, expected)


class Cache:
    """What transformers calls a cache, as far as it matters."""

    def __init__(self, held: int = 0) -> None:
        self.held = held

    def update(self) -> None:
        self.held += 1

    def get_seq_length(self) -> int:
        return self.held


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(
        self, x: Tensor, past: Cache | None = None, *, other: Cache | None = None
    ) -> Tensor:
        for cache in (past, other):
            if cache is not None:
                cache.update()
        return x + self.up(x).sin()


class CachedDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Cached(), Cached()])

    def forward(self, x: Tensor, past: Cache, other: Cache) -> Tensor:
        for layer in self.layers:
            x = layer(x, past, other=other)
        return x


@modes
def test_a_cache_is_kept_out_of_a_training_forward(mode: str) -> None:
    """Its recompute would append to it again; a forward without gradients fills it."""
    model, x = checkpointed(CachedDecoder, mode), torch.randn(3, 6)
    caches = Cache(), Cache()
    with pytest.warns(UserWarning, match="CachedDecoder passes a cache.*use_cache=False"):
        train(model, x, *caches)
    train(model, x, *caches)  # once per model: a second warning would be an error here
    assert [cache.held for cache in caches] == [0, 0]
    with torch.no_grad():
        model(x, *caches)
    assert [cache.held for cache in caches] == [2, 2]
    with pytest.raises(ValueError, match="a cache of 2 positions"):
        model(x, *caches)


class TwoStacks(CachedDecoder):
    def __init__(self) -> None:
        super().__init__()
        self.readers = nn.ModuleList([Cached()])

    def forward(self, x: Tensor, past: Cache, other: Cache) -> Tensor:
        return self.readers[0](super().forward(x, past, past), other)


def test_a_cache_from_one_stack_to_another_is_refused() -> None:
    model, x, cache = checkpointed(TwoStacks, "full"), torch.randn(3, 6), Cache()
    with pytest.warns(UserWarning, match="passes a cache"):
        train(model, x, Cache(), Cache())  # each stack its own
    with pytest.raises(ValueError, match="one cache to the blocks of layers and of readers"):
        train(model, x, cache, cache)


# What it costs where there is nothing to recompute


class Watching(nn.Module):
    """Counts the contexts it is asked for and the forwards it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.asked, self.ran = nn.Linear(6, 6), 0, 0

    def checkpoint_context(self) -> Any:
        self.asked += 1
        return replay_contexts()

    def forward(self, x: Tensor) -> Tensor:
        self.ran += 1
        return x + self.up(x).sin()


@modes
def test_a_forward_without_gradients_does_not_pay(mode: str) -> None:
    model = checkpointed(lambda: Decoder(block=Watching), mode)
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            model(ids())
    assert [(block.asked, block.ran) for block in model.layers] == [(0, 2)] * 3
    train(model, ids())
    assert [(block.asked, block.ran) for block in model.layers] == [(1, 4)] * 3


@modes
def test_a_block_that_needs_no_gradient_is_not_recomputed(mode: str) -> None:
    """Frozen, before anything trainable: nothing of it is kept either."""
    model = checkpointed(lambda: Decoder(block=Watching), mode)
    model.embed.requires_grad_(False)
    model.layers[:2].requires_grad_(False)
    kept: list[weakref.ref[Tensor]] = []
    model.layers[0].up.register_forward_hook(lambda *call: kept.append(weakref.ref(call[2])))
    output = model(ids())
    gc.collect()
    assert kept[0]() is None
    output.sum().backward()
    assert [block.ran for block in model.layers] == [1, 1, 2]


# The seam for contexts of a block


class Branching(nn.Module):
    """Takes one of two paths, and another one each time it is asked anew."""

    decisions = 0

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)
        self.counted = 0

    def forward(self, x: Tensor) -> Tensor:
        if not is_recomputing():
            self.counted += 1
        rows = record_or_replay("rows", self.decide)
        y = x.flatten(0, -2)
        parts = [self.left(y[rows]).sin(), self.right(y.flip(0)).cos()]
        return x + torch.cat([*parts[:1], y[len(rows) :]]).view_as(x) + parts[1].view_as(x)

    def decide(self) -> Tensor:
        Branching.decisions += 1
        return torch.arange(1 + Branching.decisions % 4)


class BranchingBlock(nn.Module):
    """The module inside that decides asks for the log, not the block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(6), Branching(), Branching()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(self.norm(x)))


class Logged(Branching):
    checkpoint_context = staticmethod(replay_contexts)


class LoggedBlock(BranchingBlock):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Logged(), Logged()


def branching_step(make: Callable[[], nn.Module], mode: str | bool) -> Any:
    Branching.decisions = 0
    model = seeded(lambda: Decoder(block=make))
    apply_activation_checkpointing(model, mode)
    return model, train(model, ids())


@modes
@pytest.mark.parametrize("make", [Logged, LoggedBlock])
def test_a_block_brings_its_own_contexts(make: Callable[[], nn.Module], mode: str) -> None:
    """Two modules that ask for one kind of log share it; no decision is taken twice."""
    _, expected = branching_step(make, False)
    decisions = Branching.decisions
    model, found = branching_step(make, mode)
    assert Branching.decisions == decisions
    assert_same(found, expected)
    assert {m.counted for m in model.modules() if isinstance(m, Branching)} == {1}


@modes
def test_contexts_may_be_given_to_a_block_later(mode: str) -> None:
    """As an instance attribute; and without a log at all, the missing record is named."""
    _, expected = branching_step(Branching, False)
    with pytest.raises(RuntimeError, match="'rows', which nothing recorded"):
        branching_step(Branching, mode)
    Branching.decisions = 0
    model = checkpointed(lambda: Decoder(block=Branching), mode)
    for block in model.layers:
        block.checkpoint_context = replay_contexts
    assert_same(train(model, ids()), expected)


def threaded_branches(mode: str) -> None:
    import threading

    grads = []
    for asked in (False, mode):
        Branching.decisions = 0
        model = seeded(lambda: Decoder(block=Logged))
        model = parallelize_model(model, context(activation_checkpointing=asked))
        loss = model(ids()).pow(2).mean()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        grads.append(full_gradients(model))
    assert_same(grads[1], grads[0])


@modes
def test_a_log_is_replayed_under_fsdp_by_a_backward_in_another_thread(mode: str) -> None:
    run_on_ranks(2, threaded_branches, mode)


def kept_graph() -> None:
    Branching.decisions = 0
    model = seeded(lambda: Decoder(block=Logged))
    model = parallelize_model(model, context(activation_checkpointing="full"))
    loss = model(ids()).pow(2).mean()
    loss.backward(retain_graph=True)
    first = {name: grad.clone() for name, grad in full_gradients(model).items()}  # type: ignore[union-attr]
    model.zero_grad()
    loss.backward()
    assert Branching.decisions == 3
    assert_same(full_gradients(model), first)


def test_a_second_backward_over_a_kept_graph() -> None:
    """Under full; what selective kept is gone after the first one, and torch says so."""
    run_on_ranks(2, kept_graph)
    loss = checkpointed(Decoder, "selective")(ids()).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward an extra time") as error:
        loss.backward()
    assert "use 'full' for retain_graph=True" in "".join(error.value.__notes__)


# Memory


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages made since it was entered that are alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak = 0, 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage()._cdata for t in args if isinstance(t, Tensor)}
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, list | tuple) else [output]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in before:
                self._add(tensor.untyped_storage())
        return output

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


class Gated(nn.Module):
    """Three products: gate and up of width F, down of width H."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(16, 64, bias=False), nn.Linear(16, 64, bias=False)
        self.down = nn.Linear(64, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def memory(mode: str | bool, layers: int, tokens: int) -> tuple[int, int]:
    """Bytes alive after the forward, and at the peak of the step; gradients of weights apart."""
    model = nn.Sequential(*(Gated() for _ in range(layers)))
    apply_activation_checkpointing(model, mode)
    x = torch.randn(tokens, 16, requires_grad=True)
    model(x).sum().backward()  # gradients are there from here on
    with LiveBytes() as measured:
        y = model(x)
        gc.collect()
        after_forward = measured.live
        y.sum().backward()
    return after_forward, measured.peak


def test_memory_is_what_the_count_by_hand_says() -> None:
    """After the forward of L blocks of T tokens, in floats, with H = 16 and F = 64.

    Every block's output is kept by all: L T H. No checkpointing keeps gate, silu(gate), up and
    their product: 4 L T F. Selective keeps the first and third matrix product: L T (F + H).
    """
    layers, tokens, hidden, inner = 6, 50, 16, 64
    outputs = layers * tokens * hidden
    expected = {
        False: outputs + 4 * layers * tokens * inner,
        "selective": outputs + layers * tokens * (inner + hidden),
        "full": outputs,
    }
    found = {mode: memory(mode, layers, tokens) for mode in expected}
    for mode, floats in expected.items():
        assert found[mode][0] == 4 * floats, mode
    peaks = [found[mode][1] for mode in (False, "selective", "full")]
    assert peaks[0] > 1.8 * peaks[1] > 1.8 * 1.5 * peaks[2]


@modes
def test_memory_of_a_block_does_not_add_up_over_blocks(mode: str) -> None:
    """Two more blocks cost two more outputs, and what selective keeps of each; no more."""
    few, many = (memory(mode, layers, 50)[1] for layers in (6, 8))
    per_block = 50 * (16 if mode == "full" else 16 + 64 + 16)
    assert many - few == 4 * 2 * per_block
