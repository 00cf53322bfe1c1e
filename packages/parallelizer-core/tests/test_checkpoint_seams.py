"""What blocks say about their checkpointed call: refused where it cannot be used, and carried out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from walk_toys import Decoder, context, ids

from shardwalk.parallelizer_core import (
    apply_activation_checkpointing,
    is_recomputing,
    parallelize_model,
    record_or_replay,
    replay_contexts,
)
from shardwalk.parallelizer_core.testing import run_on_ranks

modes = pytest.mark.parametrize("mode", ["full", "selective"])


class Recording(nn.Module):
    """Records `keys` in its forward, around what it computes, and asks for `again` after."""

    checkpoint_context = staticmethod(replay_contexts)
    keys, again = ("before", "after"), ("before", "after")

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        keys = self.again if is_recomputing() else self.keys
        for key in keys[:1]:
            record_or_replay(key, lambda: 1)
        y = x + self.up(x).sin()
        for key in keys[1:]:
            record_or_replay(key, lambda: 1)
        return y


def recording(again: tuple[str, ...]) -> Callable[[], nn.Module]:
    return type("Recording", (Recording,), {"again": again})


def unread(again: tuple[str, ...], named: str, mode: str) -> None:
    model = Decoder(block=recording(again))
    model = parallelize_model(model, context(activation_checkpointing=mode))
    loss = model(ids()).sum()
    with pytest.raises(RuntimeError, match=named):
        loss.backward()


@modes
def test_a_record_that_the_recompute_does_not_ask_for_is_an_error(mode: str) -> None:
    """Also one made after the last tensor that torch saves, where it would end a recompute."""
    for again, named in (
        ((), r"without asking for \['before', 'after'\]"),
        (("before",), r"without asking for \['after'\]"),
    ):
        run_on_ranks(1, unread, again, named, mode)


@modes
def test_only_blocks_with_a_log_recompute_their_tail(mode: str) -> None:
    """Elsewhere torch ends the recompute with the last tensor that the backward needs."""
    ran: list[bool] = []

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x).sin()
            ran.append(is_recomputing())
            return y

    class Logged(Plain):
        checkpoint_context = staticmethod(replay_contexts)

    for block, expected in ((Plain, [False]), (Logged, [False, True])):
        ran.clear()
        model = nn.ModuleList([block()])
        apply_activation_checkpointing(model, mode)
        model[0](torch.ones(2, 6)).sum().backward()
        assert ran == expected


def with_seam(name: str, seam: object) -> nn.Module:
    """The seam stands on a module inside of a block."""
    model = Decoder()
    model.layers[1].up = type("Upward", (nn.Linear,), {name: seam})(6, 10)
    return model


@modes
@pytest.mark.parametrize(
    ("name", "seam", "said"),
    [
        ("checkpoint_context", 3, "is 3; it must be a function without arguments"),
        ("checkpoint_context", None, "is None; it must be"),
        ("ops_to_save", 3, "is 3; it must be"),
        ("ops_to_save", {}, r"is \{\}; it must be"),
        ("ops_to_save", staticmethod(lambda: None), "returned None; it must be .* a mapping"),
        ("ops_to_save", staticmethod(lambda: ["mm"]), r"returned \['mm'\]; it must be"),
        ("ops_to_save", staticmethod(lambda: {"mm": True}), "maps 'mm' to True"),
    ],
)
def test_a_seam_of_another_type_is_refused_before_anything_is_changed(
    name: str, seam: object, said: str, mode: str
) -> None:
    model = with_seam(name, seam)
    with pytest.raises(TypeError, match=f"{name} of Upward {said}"):
        apply_activation_checkpointing(model, mode)
    assert not any("forward" in vars(module) for module in model.modules())
    apply_activation_checkpointing(model, False)


def refused_in_the_call(returned: Any, mode: str) -> None:
    model = with_seam("checkpoint_context", staticmethod(lambda: returned))
    model = parallelize_model(model, context(activation_checkpointing=mode))
    with torch.no_grad():
        model(ids())
    with pytest.raises(TypeError, match="checkpoint_context of Upward returned .* two context man"):
        model(ids())


@modes
def test_contexts_that_are_no_pair_are_refused_in_the_first_call(mode: str) -> None:
    """It is made anew for every call, so that there is none to look at before."""
    for returned in (None, 3, (), (1, 2), "ab"):
        run_on_ranks(1, refused_in_the_call, returned, mode)


def refused_by_its_own_name() -> None:
    model = Decoder(block=Recording)
    model = parallelize_model(model, context(activation_checkpointing="full"))
    model.layers[0].checkpoint_context = 3
    with pytest.raises(TypeError, match="checkpoint_context of Recording is 3"):
        model(ids())


def test_a_class_is_named_as_its_author_wrote_it() -> None:
    run_on_ranks(1, refused_by_its_own_name)
