"""The two models that finetune.py trains, one pretrained, one random and tiny, made parallel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import smollm2
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from shardwalk.mesh import DDPConfig, MeshContext
from shardwalk.parallelizer_core import materialize, parallelize_model


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to make a model: its config, what materialize takes its weights from, its tokenizer."""

    config: LlamaConfig
    weights: dict[str, Any]
    encode: Callable[[str], list[int]]

    def on_meta(self) -> LlamaForCausalLM:
        """Build the model without memory for its weights."""
        with torch.device("meta"):
            return LlamaForCausalLM(self.config)


def pretrained() -> Recipe:
    """SmolLM2-135M-Instruct."""
    folder = smollm2.converted()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return Recipe(
        config=LlamaConfig.from_pretrained(folder),
        weights={"checkpoint": folder},
        encode=lambda text: tokenizer(text).input_ids,
    )


def tiny() -> Recipe:
    """A random model that reads bytes, with as many heads as the pretrained one."""
    config = LlamaConfig(
        vocab_size=258,  # two more than there are bytes: three ranks can share them
        hidden_size=72,
        intermediate_size=144,
        num_hidden_layers=4,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    return Recipe(
        config=config, weights={"init": small_numbers}, encode=lambda text: [*text.encode()]
    )


def small_numbers(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """Initialize one parameter; the values do not depend on how it will be sharded."""
    if "norm" in name:
        tensor.fill_(1)
    else:
        tensor.normal_(std=0.05, generator=generator)


RECIPES = {"smollm2": pretrained, "tiny": tiny}


def parallel_model(recipe: Recipe, context: MeshContext) -> nn.Module:
    """Build the model so that no rank ever has more of it in memory than it keeps."""
    model = recipe.on_meta()
    if isinstance(context.strategy_config, DDPConfig):  # keeps all of it, and wraps real weights
        materialize(model, **recipe.weights)
        return parallelize_model(model, context)
    model = parallelize_model(model, context)
    materialize(model, **recipe.weights)
    return model


def token_losses(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Give the loss of every token, 0 where it is no target."""
    logits = model(inputs, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
