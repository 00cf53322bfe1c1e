"""How much an all-to-all dispatch sends and receives, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Splits:
    """Pieces (rows or slots) that go to and come from each rank.

    A rank's own pieces go nowhere: they stand behind all others, in and out.

    Attributes:
        sent: to each rank, 0 to this one.
        received: from each rank, 0 from this one.
        own: of this rank for itself.
    """

    sent: list[int]
    received: list[int]
    own: int

    @property
    def leaving(self) -> int:
        """Pieces that leave this rank."""
        return sum(self.sent)

    @property
    def arriving(self) -> int:
        """Pieces that other ranks send here."""
        return sum(self.received)

    def back(self) -> Splits:
        """The same pieces on their way back."""
        return Splits(sent=self.received, received=self.sent, own=self.own)


@dataclass(frozen=True, kw_only=True)
class ExchangeSizes:
    """The sizes of one dispatch, as one rank sees them; entries of ranks in the order of the group.

    A row is a token that goes to a rank, a slot its copy for one expert there. The entry of the
    rank itself counts what stays.

    Attributes:
        sent_rows, received_rows: rows to and from each rank.
        sent_slots, received_slots: slots to and from each rank.
        counts: slots of each expert of this rank.
    """

    sent_rows: Sequence[int]
    received_rows: Sequence[int]
    sent_slots: Sequence[int]
    received_slots: Sequence[int]
    counts: Sequence[int]

    def __post_init__(self) -> None:
        if sum(self.received_slots) != sum(self.counts):
            raise ValueError(
                f"received_slots={list(self.received_slots)} and counts={list(self.counts)} must "
                f"have the same sum"
            )

    @classmethod
    def even(
        cls, *, tokens: int, top_k: int, num_experts: int, ranks: int, rank: int
    ) -> ExchangeSizes:
        """The sizes where every rank has so many tokens and spreads them evenly.

        Each token goes to as many ranks as it can, which is the most traffic there may be.
        """
        rows = _even(tokens * min(top_k, ranks), ranks)
        slots = _even(tokens * top_k, ranks)
        return cls(
            sent_rows=rows,
            received_rows=[rows[rank]] * ranks,
            sent_slots=slots,
            received_slots=[slots[rank]] * ranks,
            counts=_even(slots[rank] * ranks, num_experts // ranks),
        )

    def rows(self, rank: int) -> Splits:
        """The splits of the rows, as `rank` sees them."""
        return _splits(self.sent_rows, self.received_rows, rank)

    def slots(self, rank: int) -> Splits:
        """The splits of the slots, as `rank` sees them."""
        return _splits(self.sent_slots, self.received_slots, rank)


def _splits(sent: Sequence[int], received: Sequence[int], rank: int) -> Splits:
    others = [[*sizes[:rank], 0, *sizes[rank + 1 :]] for sizes in (sent, received)]
    return Splits(sent=others[0], received=others[1], own=sent[rank])


def _even(total: int, parts: int) -> list[int]:
    return [total // parts + (part < total % parts) for part in range(parts)]
