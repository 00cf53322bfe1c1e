"""Initial values tensor by tensor, for models of which no process can hold a layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shardwalk.model_beam.config import BeamConfig


def initial_values(config: BeamConfig) -> Callable[[str, Tensor, torch.Generator], None]:
    """A function for `materialize(model, init=...)`, which then draws experts one by one.

    Weights are N(0, ``initializer_range``), norms 1, biases and the row of padding 0, as in a model
    that was just built; ``init="reset_parameters"`` draws the same law, but whole layers.
    """

    def fill(name: str, tensor: Tensor, generator: torch.Generator) -> None:
        if name.endswith("norm.weight"):
            tensor.fill_(1)
        elif name.endswith("bias"):
            tensor.zero_()
        else:
            tensor.normal_(std=config.initializer_range, generator=generator)
        if name.endswith("embed_tokens.weight") and config.pad_token_id is not None:
            tensor[config.pad_token_id] = 0

    return fill
