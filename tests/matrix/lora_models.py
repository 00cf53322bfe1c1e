"""Models with adapters by peft, for the tests of LoRA."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from tests.matrix.tiny_transformers import MODELS

TARGETS = ["q_proj", "v_proj", "down_proj"]


def with_adapters(base: nn.Module, adapter_name: str = "default", **options: Any) -> Any:
    """`base` in a PeftModel: LoRA of rank 4 whose second factor is not zero, so that both train."""
    options = {"target_modules": TARGETS, "init_lora_weights": False, **options}
    with ignored_warnings():
        return get_peft_model(base, LoraConfig(r=4, **options), adapter_name)


@contextmanager
def ignored_warnings() -> Iterator[None]:
    """Ignore what peft itself causes: it reads an attribute that transformers renamed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
        yield


def lora(
    name: str = "llama",
    *,
    tied: bool = False,
    base_dtype: torch.dtype = torch.float32,
    layers: int = 4,
    **options: Any,
) -> Any:
    """A tiny model of transformers, frozen, stored in `base_dtype`, with adapters in fp32."""
    return with_adapters(MODELS[name](tied, num_hidden_layers=layers).to(base_dtype), **options)


class Unused(nn.Module):
    """A base with a trainable parameter in a block and one beside the blocks that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = lora()
        block = self.inner.get_base_model().model.layers[1]
        block.register_parameter("unused", nn.Parameter(torch.ones(5)))
        self.unused = nn.Parameter(torch.ones(3, 2))

    def forward(self, ids: Tensor) -> Any:
        return self.inner(ids)


def adapter_names(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]
