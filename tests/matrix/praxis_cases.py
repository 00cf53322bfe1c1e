"""A small Praxis policy and windows to train it on, for the parity tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from praxis_toys import randomize, tiny_config
from praxis_windows import small_window
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardwalk.model_praxis import (
    Draws,
    LoraSettings,
    MoeTrainingSettings,
    ObjectiveSettings,
    PraxisPolicy,
    PraxisWindow,
    apply_lora,
    draw,
    praxis_loss,
)
from shardwalk.model_praxis.lora import lora_layers
from shardwalk.model_praxis.parallelize import _block_lists
from shardwalk.moe_ep import attach_router_bias_update
from shardwalk.moe_ep.router import find_gates
from shardwalk.parallelizer_core.testing import ParityCase

WINDOWS = 4  # of a micro-batch, over all ranks
TRAINING = MoeTrainingSettings(balance_loss_weight=0.05, bias_update_speed=0.01)
STILL = MoeTrainingSettings(balance_loss_weight=0.05)
SETTINGS = ObjectiveSettings(text_dropout=0.3, proprio_dropout=0.3, action_guard=math.inf)

_built: list[PraxisPolicy] = []


def build(*, lora: bool = False, fixed_routes: bool = False) -> PraxisPolicy:
    """A policy without a zero in its weights; on the meta device without values.

    With fixed routes every token goes to experts 1 and 2, so that no rounding changes a choice, and
    one rank adds what both make of it, as one process does.
    """
    policy = PraxisPolicy(tiny_config(), training=STILL if fixed_routes else TRAINING)
    if lora:
        apply_lora(policy, LoraSettings(rank=3, alpha=6.0))
    if not next(policy.parameters()).is_meta:
        randomize(policy)
        for _, layer in lora_layers(policy):
            layer.lora_b.data.mul_(0.05)  # adapters are small beside what they adapt
        for gate in find_gates(policy) if fixed_routes else ():
            gate.e_score_correction_bias.copy_(torch.tensor([0, 9.0, 9, 0, 0, 0, 0, 0]))
    _built[:] = [policy]
    return policy


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD whose steps move the biases of the policy that was built last."""
    optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
    attach_router_bias_update(_built[0], optimizer)
    return optimizer


def take_inputs_as_units_do(policy: nn.Module) -> None:
    """Let what comes into a block be one tensor to autograd, as what comes into a unit is.

    The gradients of its uses in the block are then added before those of other uses, such as taps.
    """
    for stack in _block_lists(policy):
        for block in stack:
            block.register_forward_pre_hook(_copied_inputs, with_kwargs=True)


def _copied_inputs(block: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return tree_map_only(Tensor, _SameTensor.apply, (args, kwargs))


class _SameTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def batches(micro_batches: int, step: int) -> Sequence[dict[str, Tensor]]:
    """The micro-batches of a step: windows, and what is drawn for them."""
    return [_windows(100 * step + index) for index in range(micro_batches)]


def _windows(seed: int) -> dict[str, Tensor]:
    config = tiny_config()
    window = small_window(config, windows=WINDOWS, seed=seed)
    drawn = draw(config, SETTINGS, torch.Generator().manual_seed(seed), windows=WINDOWS)
    return {**vars(window), **vars(drawn)}


def window_losses(model: nn.Module, rows: dict[str, Tensor]) -> Tensor:
    """The loss of each window."""
    window, drawn = (
        cls(**{field.name: rows[field.name] for field in fields(cls)})
        for cls in (PraxisWindow, Draws)
    )
    return praxis_loss(model, window, drawn, SETTINGS).total


def count_windows(rows: dict[str, Tensor]) -> int:
    return len(rows["window_time"])


def praxis_case(micro_batches: int = 2, **options: Any) -> ParityCase:
    return ParityCase(
        model=partial(build, **options),
        batches=partial(batches, micro_batches),
        token_losses=window_losses,
        valid_tokens=count_windows,
        init="reset_parameters",
    )
