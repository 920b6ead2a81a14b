"""The exchange of a single process: there is no one to exchange with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from coati_perf.exchange.base import Exchange


class NoExchange:
    """One process is all the ranks there are, or all that can be reached.

    ``rank`` is above 0 on a rank that has no way to rank 0; what it sends is dropped.
    """

    name = "none"
    world_size = 1

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank

    def send(self, sequence: int, packed_row: bytes) -> None:
        """Drop the row: rank 0 keeps its own."""

    def depart(self, packed_departure: bytes, *, failed: bool) -> None:
        """Drop the departure: rank 0 keeps its own."""

    def collect(self, sequence: int, ranks: Iterable[int], *, partial: bool) -> dict[int, bytes]:
        """Return nothing: there are no other ranks."""
        return {}

    def departures(self, ranks: Iterable[int]) -> dict[int, bytes]:
        """Return nothing: there are no other ranks."""
        return {}

    def any_failure(self) -> bool:
        """Say no: there are no other ranks."""
        return False

    def discard(self, sequence: int, ranks: Iterable[int]) -> None:
        """Do nothing: nothing is kept."""

    def close(self) -> None:
        """Do nothing: nothing is open."""


if TYPE_CHECKING:
    _: Exchange = NoExchange()
