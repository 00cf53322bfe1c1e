"""Rows to call a model with, and its loss."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from shardwalk.parallelizer_core.testing.parity_case import IGNORED_LABEL, Rows

ROWS, TEXT = 4, 9
FIRST_TOKEN, LAST_TOKEN = 5, 90  # between them stands no special token of a tiny model

Constant = int | float | tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Argument:
    """One tensor of a batch: rows drawn at random, or all alike.

    Attributes:
        shape: of one row, which may take several in dimension 0.
        constant: the one row, as nested tuples, in place of a shape.
        tokens: whether what is drawn are tokens.
    """

    name: str
    shape: tuple[int, ...] = ()
    constant: Constant | None = None
    tokens: bool = False

    def rows(self, count: int, generator: torch.Generator) -> Tensor:
        """The tensor of `count` rows."""
        if self.constant is not None:
            row = torch.tensor(self.constant)
            return row.expand(count, *row.shape).contiguous()
        shape = (count * self.shape[0], *self.shape[1:])
        if self.tokens:
            return torch.randint(FIRST_TOKEN, LAST_TOKEN, shape, generator=generator)
        return torch.randn(shape, generator=generator)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The micro-batches of a parity case: text, special tokens before it, and what else it takes.

    Attributes:
        name: the argument of the tokens that logits belong to.
        prefix: special tokens at the start of each row, such as those of an image.
        marks: arguments shaped like the tokens, 1 where the prefix stands.
        ones: arguments shaped like the tokens, 1 everywhere.
        arguments: everything else.
    """

    name: str = "input_ids"
    prefix: tuple[int, ...] = ()
    marks: tuple[str, ...] = ()
    ones: tuple[str, ...] = ()
    arguments: tuple[Argument, ...] = ()

    def __call__(self, step: int) -> list[Rows]:
        """One micro-batch, whose rows have unequal numbers of valid tokens."""
        generator = torch.Generator().manual_seed(1000 + step)
        tokens = torch.randint(FIRST_TOKEN, LAST_TOKEN, (ROWS, TEXT + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        for row in range(ROWS):
            labels[row, TEXT * (row + 2) // (ROWS + 2) :] = IGNORED_LABEL
        prefix = torch.tensor(self.prefix, dtype=torch.int64).expand(ROWS, -1)
        rows = {
            self.name: torch.cat([prefix, tokens[:, :-1]], dim=1),
            "labels": torch.cat([torch.full_like(prefix, IGNORED_LABEL), labels], dim=1),
        }
        mark = torch.zeros_like(rows["labels"])
        mark[:, : prefix.shape[1]] = 1
        rows |= dict.fromkeys(self.marks, mark) | dict.fromkeys(self.ones, torch.ones_like(mark))
        return [rows | {one.name: one.rows(ROWS, generator) for one in self.arguments}]


def token_losses(model: nn.Module, rows: Rows) -> Tensor:
    """Cross-entropy of every token where logits belong to tokens, else one value for each row."""
    with quiet():
        output = model(**{name: value for name, value in rows.items() if name != "labels"})
    logits, labels = output.logits, rows["labels"]
    count, length = labels.shape
    if logits.ndim == 3 and logits.shape[0] == count and logits.shape[1] >= length:
        losses = F.cross_entropy(
            logits[:, -length:].flatten(0, 1).float(),
            labels.flatten(),
            reduction="none",
            ignore_index=IGNORED_LABEL,
        )
        return losses.view_as(labels)
    per_row = logits.float().reshape(count, -1).square().mean(1)
    return per_row * (labels != IGNORED_LABEL).sum(1)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of models, which are no business of a sweep."""
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
