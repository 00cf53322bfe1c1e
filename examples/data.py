"""English text that is on every machine, Python's own documentation, cut into batches."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import chain, cycle, islice
from pydoc_data.topics import topics

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

IGNORED = -100  # the label of a token that is no target: cross_entropy leaves it out

Batch = tuple[Tensor, Tensor]


def samples(encode: Callable[[str], list[int]], length: int) -> list[list[int]]:
    """Give the tokens of each paragraph, in an order that is random but always the same.

    Paragraphs have different lengths, of at most length + 1 tokens: a token has the next as label.
    """
    paragraphs = [" ".join(part.split()) for text in topics.values() for part in text.split("\n\n")]
    prose = [text for text in paragraphs if len(text.split()) >= 30]
    random.Random(0).shuffle(prose)
    return [encode(text)[: length + 1] for text in prose]


def micro_batches(
    tokens: list[list[int]], *, step: int, size: int, count: int, rank: int = 0, ranks: int = 1
) -> list[Batch]:
    """Give this rank's part of the batch of a step, in micro-batches of inputs and labels.

    The whole batch depends on the step alone, so that any number of ranks trains on the same.
    """
    whole = [tokens[index % len(tokens)] for index in range(step * size, (step + 1) * size)]
    own = whole[rank::ranks]
    return [_padded(own[part::count]) for part in range(count)]


def full_rows(tokens: list[list[int]], *, rows: int, length: int, rank: int, ranks: int) -> Batch:
    """Give this rank's part of rows that are full to the last token: paragraphs, one after another.

    Every row has `length` inputs and as many labels.
    """
    text = islice(cycle(chain.from_iterable(tokens)), rows * (length + 1))
    whole = torch.tensor(list(text)).view(rows, length + 1)[rank::ranks]
    return whole[:, :-1], whole[:, 1:]


def _padded(part: list[list[int]]) -> Batch:
    inputs = [torch.tensor(tokens[:-1]) for tokens in part]
    labels = [torch.tensor(tokens[1:]) for tokens in part]
    return (
        pad_sequence(inputs, batch_first=True),
        pad_sequence(labels, batch_first=True, padding_value=IGNORED),
    )
