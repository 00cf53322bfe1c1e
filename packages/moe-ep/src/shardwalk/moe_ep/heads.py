"""The head, which may compute in another precision than the rest."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwalk.mesh import MoEParallelizerConfig
from shardwalk.parallelizer_core.fp32_pins import PIN_ATTRIBUTE
from shardwalk.parallelizer_core.layers import find_block_stacks


def pin_head(model: nn.Module, config: MoEParallelizerConfig) -> None:
    """Let the head compute in the precision that `check_head` allowed."""
    if config.lm_head_precision == torch.float32:
        path, _ = find_head(model, torch.float32)
        pins = getattr(model, PIN_ATTRIBUTE, None) or ()
        pins = [pins] if isinstance(pins, str) else list(pins)
        vars(model)[PIN_ATTRIBUTE] = [*pins, path]


def check_head(
    model: nn.Module, config: MoEParallelizerConfig, policy: MixedPrecisionPolicy
) -> None:
    """Refuse a precision of the head that it cannot have.

    Raises:
        ValueError: no head, or a tied one; a head stored in fewer bits; a dtype that is neither
            fp32 nor what the rest computes in.
    """
    precision = config.lm_head_precision
    if precision is None:
        return
    path, head = find_head(model, precision)
    if shares_weights(model, head):
        raise ValueError(
            f"lm_head_precision={precision}, but {path} shares its weight with another module, "
            f"which would compute in that dtype too; untie them, or leave lm_head_precision unset"
        )
    for name, parameter in head.named_parameters():
        compute = policy.param_dtype or parameter.dtype
        if precision not in (torch.float32, compute):
            allowed = " or ".join(str(d) for d in dict.fromkeys((torch.float32, compute)))
            raise ValueError(
                f"lm_head_precision={precision} is not what the rest computes in ({compute}), nor "
                f"torch.float32; use {allowed}"
            )
        stored = parameter.dtype
        if precision == torch.float32 and not parameter.is_meta and stored != torch.float32:
            raise ValueError(
                f"lm_head_precision={precision}, but {path}.{name} is stored in {stored}, so its "
                f"low bits are lost; build or load the head in float32"
            )


def find_head(model: nn.Module, precision: object) -> tuple[str, nn.Module]:
    """The path and the module of the head: what the model calls so, or the one linear layer.

    Raises:
        ValueError: there is none, or several linear layers could be it.
    """
    found = list(_heads(model))
    if len(found) != 1:
        raise ValueError(
            f"lm_head_precision={precision}, but {type(model).__name__} has {len(found)} modules "
            f"that could be its head; let its get_output_embeddings() return the head, or leave "
            f"lm_head_precision unset"
        )
    return found[0]


def _heads(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    named = getattr(model, "get_output_embeddings", lambda: None)()
    rows = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    in_blocks = {
        module
        for stack in find_block_stacks(model)
        for _, block in stack.blocks
        for module in block.modules()
    }
    for path, module in model.named_modules():
        is_linear = isinstance(module, nn.Linear) and module.out_features in rows
        if module is named or (named is None and is_linear and module not in in_blocks):
            yield path, module


def shares_weights(model: nn.Module, part: nn.Module) -> bool:
    """Whether a parameter in `part` stands outside of it in `model` too."""
    own = {id(parameter) for parameter in part.parameters()}
    inside = set(part.modules())
    return any(
        id(parameter) in own
        for module in model.modules()
        if module not in inside
        for parameter in module.parameters(recurse=False)
    )
