"""What a forward is given, checked and spelled out: positions, padding, packed sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwalk.model_beam.config import BeamConfig
from shardwalk.model_beam.masks import numbered, positions_in, sequences_of, visible_keys
from shardwalk.model_beam.rotary import RotaryTable, query_scale, rotary_table

_INTEGERS = (
    torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Where the tokens of a call are.

    Attributes:
        position_ids: int64 [B, S].
        is_token: bool [B, S], False for padding; None is no padding.
        sequence_ids: int64 [B, S], equal within a packed sequence; None is one per row.
    """

    position_ids: Tensor
    is_token: Tensor | None = None
    sequence_ids: Tensor | None = None

    @classmethod
    def of(
        cls,
        embeddings: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        sequence_ids: Tensor | None = None,
    ) -> Rows:
        """The rows of embeddings [B, S, H]; the other arguments are those of `BeamForCausalLM`.

        What excludes nothing is left out, so that the attention of full layers needs no mask.

        Raises:
            TypeError: one has another dtype.
            ValueError: one has another shape.
        """
        shape = (embeddings.shape[0], embeddings.shape[1])
        _check("attention_mask", attention_mask, shape, (torch.bool, *_INTEGERS))
        _check("sequence_ids", sequence_ids, shape, _INTEGERS)
        _check("position_ids", position_ids, shape, _INTEGERS, may_broadcast=True)
        is_token = None if attention_mask is None else attention_mask.bool()
        if is_token is not None and bool(is_token.all()):
            is_token = None
        if position_ids is not None:
            position_ids = position_ids.long().expand(shape)
        if sequence_ids is not None:
            sequence_ids = numbered(sequence_ids, is_token)
        elif position_ids is not None:
            sequence_ids = sequences_of(position_ids, is_token)
        if sequence_ids is not None and not bool(sequence_ids.any()):
            sequence_ids = None
        if position_ids is None:
            everything = torch.ones(shape, dtype=torch.bool, device=embeddings.device)
            position_ids = positions_in(sequence_ids, everything if is_token is None else is_token)
        elif is_token is not None:
            position_ids = position_ids.masked_fill(~is_token, 0)  # padding may be anywhere
        return cls(position_ids=position_ids, is_token=is_token, sequence_ids=sequence_ids)

    def for_layer(self, config: BeamConfig, layer_type: str) -> dict[str, Any]:
        """What a block of this type is called with beside its hidden states."""
        rope = config.rope_parameters[layer_type]
        window = config.sliding_window if layer_type == "sliding_attention" else None
        return {
            "rotary": None if rope is None else self._rotary_table(config, rope),
            "query_scale": self._query_scale if rope is None else None,
            "mask": self._mask(window),
            "token_mask": self.is_token,
        }

    def targets(self, labels: Tensor, ignored: int) -> Tensor:
        """What each position is to predict, int64 [B, S]: the next label, or `ignored`.

        Nothing predicts padding or the first token of a sequence, and padding predicts nothing.

        Raises:
            TypeError: labels that are no integers.
            ValueError: labels of another shape.
        """
        rows, length = self.position_ids.shape
        _check("labels", labels, (rows, length), _INTEGERS)
        targets = torch.full_like(labels, ignored, dtype=torch.int64)
        targets[:, :-1] = labels[:, 1:]
        if self.sequence_ids is not None:
            is_last = self.sequence_ids[:, :-1] != self.sequence_ids[:, 1:]
            targets[:, :-1].masked_fill_(is_last, ignored)
        if self.is_token is not None:
            are_tokens = self.is_token[:, :-1] & self.is_token[:, 1:]
            targets[:, :-1].masked_fill_(~are_tokens, ignored)
        return targets

    @cached_property
    def _query_scale(self) -> Tensor:
        return query_scale(self.position_ids)

    def _rotary_table(self, config: BeamConfig, parameters: Mapping[str, Any]) -> RotaryTable:
        return rotary_table(
            self.position_ids,
            parameters,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
        )

    def _mask(self, window: int | None) -> Tensor | None:
        return visible_keys(
            self.position_ids.shape[1],
            window=window,
            is_token=self.is_token,
            sequence_ids=self.sequence_ids,
            device=self.position_ids.device,
        )


def check_source(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    """What is given: refuse both or neither of tokens and embeddings, and other shapes and dtypes.

    Raises:
        TypeError: no tensor, tokens that are not int32 or int64, embeddings that are not floating
            point.
        ValueError: the rest.
    """
    _check_tensor("input_ids", input_ids)
    _check_tensor("inputs_embeds", inputs_embeds)
    if (input_ids is None) == (inputs_embeds is None):
        given = "neither is" if input_ids is None else "both are"
        raise ValueError(f"give input_ids or inputs_embeds, one of them; {given} given")
    if input_ids is not None:
        if input_ids.dtype not in {torch.int32, torch.int64}:
            raise TypeError(f"input_ids has dtype {input_ids.dtype}; use int64 or int32")
        if input_ids.ndim != 2:
            shape = list(input_ids.shape)
            raise ValueError(f"input_ids has shape {shape} and must have [rows, tokens]")
    if inputs_embeds is not None:
        if not inputs_embeds.is_floating_point():
            raise TypeError(f"inputs_embeds has dtype {inputs_embeds.dtype}; use floating point")
        if inputs_embeds.ndim != 3:
            shape = list(inputs_embeds.shape)
            raise ValueError(f"inputs_embeds has shape {shape} and must have [rows, tokens, width]")
        return inputs_embeds
    assert input_ids is not None
    return input_ids


def check_weights(weight: Tensor, given: Tensor) -> None:
    """Refuse to work with weights that have no memory.

    Raises:
        ValueError: `weight` is on the meta device, and `given` is not.
    """
    if weight.is_meta and not given.is_meta:
        raise ValueError(
            "the weights of the model are on the meta device; call materialize(model, "
            "checkpoint=folder), or with init=, before the model is called"
        )


def check_embeddings(embeddings: Tensor, width: int, table: nn.Embedding | None) -> None:
    """Refuse embeddings [B, S, H] that the layers cannot take.

    Args:
        width: H of the model.
        table: whose rows they stand for; None where the layers cast what they get. Where it is
            sharded, the policy of its unit says what is cast, and autocast casts as well.

    Raises:
        TypeError: for another dtype.
        ValueError: for another width.
    """
    if embeddings.shape[-1] != width:
        shape = list(embeddings.shape)
        raise ValueError(f"inputs_embeds has shape {shape}, and its width must be {width}")
    if table is None or isinstance(table.weight, DTensor) or embeddings.is_meta:
        return
    if torch.is_autocast_enabled(embeddings.device.type):
        return
    dtype = table.weight.dtype
    if embeddings.dtype != dtype:
        raise TypeError(
            f"inputs_embeds has dtype {embeddings.dtype} and the weights have {dtype}, with no "
            f"precision policy between them; use inputs_embeds.to({dtype})"
        )


def _check_tensor(name: str, given: object) -> None:
    if given is not None and not isinstance(given, Tensor):
        raise TypeError(
            f"{name} must be a tensor, not a {type(given).__name__}; use torch.tensor(...)"
        )


def check_kept(logits_to_keep: int | Tensor, labels: Tensor | None) -> None:
    """Refuse what names no positions, and labels beside it.

    Raises:
        TypeError: for neither an integer nor a tensor of integers.
        ValueError: for a negative number, for indices that are no list, and with labels.
    """
    if isinstance(logits_to_keep, Tensor):
        if logits_to_keep.dtype not in {torch.int32, torch.int64}:
            raise TypeError(f"logits_to_keep has dtype {logits_to_keep.dtype}; use int64 or int32")
        if logits_to_keep.ndim != 1:
            raise ValueError(
                f"logits_to_keep has shape {list(logits_to_keep.shape)}; its indices must be one "
                f"list, for all rows"
            )
    elif isinstance(logits_to_keep, bool) or not isinstance(logits_to_keep, int):
        raise TypeError(f"logits_to_keep={logits_to_keep!r} must be an integer or a tensor of them")
    elif logits_to_keep < 0:
        raise ValueError(
            f"logits_to_keep={logits_to_keep} is not allowed; use 0 for all positions, a number of "
            f"last ones, or a tensor of indices"
        )
    if labels is not None and (isinstance(logits_to_keep, Tensor) or logits_to_keep):
        raise ValueError("labels need the logits of all positions; leave logits_to_keep at 0")


def _check(
    name: str,
    given: Tensor | None,
    shape: tuple[int, int],
    dtypes: tuple[torch.dtype, ...],
    *,
    may_broadcast: bool = False,
) -> None:
    _check_tensor(name, given)
    if given is None:
        return
    allowed = [shape, (1, shape[1])] if may_broadcast else [shape]
    if tuple(given.shape) not in allowed:
        pairs = (
            "; masks over pairs of tokens are not taken, since each type of layer makes its own"
            if given.ndim > 2
            else ""
        )
        raise ValueError(
            f"{name} has shape {list(given.shape)} and must have {list(shape)}, a value for each "
            f"token{pairs}"
        )
    if given.dtype not in dtypes:
        kinds = "bool or integers (0 is padding)" if torch.bool in dtypes else "integers"
        raise TypeError(f"{name} has dtype {given.dtype}; use {kinds}")
