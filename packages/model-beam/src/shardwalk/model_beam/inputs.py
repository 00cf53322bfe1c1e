"""What a forward is given, checked and spelled out: positions, padding, packed sequences."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shardwalk.model_beam.config import BeamConfig
from shardwalk.model_beam.masks import positions_in, sequences_of, visible_keys
from shardwalk.model_beam.rotary import RotaryTable, query_scale, rotary_table


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Where the tokens of a call are.

    Attributes:
        position_ids: int64 [B, S].
        is_token: bool [B, S], False for padding; None is no padding.
        sequence_ids: integer [B, S], equal within a packed sequence; None is one per row.
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

        Raises:
            ValueError: one has another shape.
        """
        rows, length = embeddings.shape[:2]
        _check("attention_mask", attention_mask, rows, length)
        _check("sequence_ids", sequence_ids, rows, length)
        if position_ids is not None:
            _check("position_ids", position_ids, rows, length, may_broadcast=True)
            position_ids = position_ids.expand(rows, length)
            if sequence_ids is None and attention_mask is None:
                sequence_ids = sequences_of(position_ids)
        elif sequence_ids is not None:
            position_ids = positions_in(sequence_ids)
        else:
            position_ids = torch.arange(length, device=embeddings.device).expand(rows, length)
        return cls(
            position_ids=position_ids,
            is_token=None if attention_mask is None else attention_mask.bool(),
            sequence_ids=sequence_ids,
        )

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
        """What each position is to predict, [B, S]: the label of the next one, or `ignored`."""
        next_labels = torch.full_like(labels, ignored)
        next_labels[:, :-1] = labels[:, 1:]
        if self.sequence_ids is not None:
            is_last = self.sequence_ids[:, :-1] != self.sequence_ids[:, 1:]
            next_labels[:, :-1].masked_fill_(is_last, ignored)
        if self.is_token is not None:
            next_labels[:, :-1].masked_fill_(~self.is_token[:, 1:], ignored)
        return next_labels

    @cached_property
    def _query_scale(self) -> Tensor:
        return query_scale(self.position_ids)

    def _rotary_table(self, config: BeamConfig, parameters: Any) -> RotaryTable:
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


def check_source(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> None:
    """Refuse both or neither of tokens and embeddings.

    Raises:
        ValueError: says so.
    """
    if (input_ids is None) == (inputs_embeds is None):
        given = "neither is" if input_ids is None else "both are"
        raise ValueError(f"give input_ids or inputs_embeds, one of them; {given} given")


def _check(
    name: str, given: Tensor | None, rows: int, length: int, *, may_broadcast: bool = False
) -> None:
    if given is None:
        return
    allowed = [(rows, length), (1, length)] if may_broadcast else [(rows, length)]
    if given.ndim != 2 or tuple(given.shape) not in allowed:
        raise ValueError(
            f"{name} has shape {tuple(given.shape)} and must have {(rows, length)}, a value for "
            f"each token; masks over pairs of tokens are not taken, since each layer type makes "
            f"its own"
        )
