"""What an exchange must do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Exchange(Protocol):
    """Carries packed rows and departures from the other ranks to rank 0, and nothing back.

    ``send`` and ``depart`` are called on the training thread of every rank but 0, and must not
    wait for anyone. ``collect``, ``departures`` and ``discard`` are called on rank 0, by one
    background thread, and may take as long as a round trip to the store. ``close`` comes last,
    on the thread that used the exchange. All but ``close`` may raise; the caller counts it and
    goes on.
    """

    name: str
    rank: int
    world_size: int

    def send(self, sequence: int, packed_row: bytes) -> None:
        """Hand over the row of this rank's measured episode number ``sequence``."""
        ...

    def depart(self, packed_departure: bytes, *, failed: bool) -> None:
        """Say that this rank sends no more rows; a failure is seen by rank 0 without delay."""
        ...

    def collect(self, sequence: int, ranks: Iterable[int], *, partial: bool) -> dict[int, bytes]:
        """Return the rows of ``ranks`` if all are there; with ``partial``, those that are."""
        ...

    def departures(self, ranks: Iterable[int]) -> dict[int, bytes]:
        """Return the departures of ``ranks`` that are there."""
        ...

    def any_failure(self) -> bool:
        """Say cheaply whether some rank has departed with a failure."""
        ...

    def discard(self, sequence: int, ranks: Iterable[int]) -> None:
        """Free what the rows of an episode took up, whether they came or not."""
        ...

    def close(self) -> None:
        """Let go of every connection; never raises."""
        ...
