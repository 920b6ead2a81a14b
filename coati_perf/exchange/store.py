"""The exchange over a ``torch.distributed`` store: one ``set`` per rank and episode.

A store object serialises its calls: a ``set`` made while another thread waits on the same object
waits with it. So the sending side and the collecting side have a client each, and neither is the
client of the training's process group. No collective is ever issued.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from coati_perf.exchange.base import Exchange


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that the exchange leans on."""

    def set(self, key: str, value: bytes, /) -> None:
        """Write without waiting for an answer."""
        ...

    def get(self, key: str, /) -> bytes:
        """Read a key that is known to be there."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Say whether all keys are there."""
        ...

    def delete_key(self, key: str, /) -> bool:
        """Delete a key if it is there."""
        ...


class StoreExchange:
    """Rows under ``row/<sequence>/<rank>``, departures under ``departed/<rank>``.

    ``sender`` is used by the training thread alone, ``reader`` by rank 0's recorder alone.
    ``keep_alive`` is held for as long as the exchange lives: the store whose server both use.
    """

    name = "store"

    def __init__(
        self, rank: int, world_size: int, sender: Store, reader: Store, keep_alive: object
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._sender: Store | None = sender
        self._reader: Store | None = reader
        self._keep_alive = keep_alive

    def send(self, sequence: int, packed_row: bytes) -> None:
        self._set(f"row/{sequence}/{self.rank}", packed_row)

    def depart(self, packed_departure: bytes, *, failed: bool) -> None:
        self._set(f"departed/{self.rank}", packed_departure)
        if failed:
            self._set("failed", b"1")

    def collect(self, sequence: int, ranks: Iterable[int], *, partial: bool) -> dict[int, bytes]:
        keys = {rank: f"row/{sequence}/{rank}" for rank in ranks}
        return self._read(keys, partial=partial)

    def departures(self, ranks: Iterable[int]) -> dict[int, bytes]:
        return self._read({rank: f"departed/{rank}" for rank in ranks}, partial=True)

    def any_failure(self) -> bool:
        return self._connected().check(["failed"])

    def discard(self, sequence: int, ranks: Iterable[int]) -> None:
        reader = self._connected()
        for rank in ranks:
            reader.delete_key(f"row/{sequence}/{rank}")

    def close(self) -> None:
        self._sender = self._reader = self._keep_alive = None

    def _read(self, keys: dict[int, str], *, partial: bool) -> dict[int, bytes]:
        reader = self._connected()
        if not keys:
            return {}
        # One round trip answers for all ranks in the usual case, that all rows are there.
        if reader.check(list(keys.values())):
            return {rank: reader.get(key) for rank, key in keys.items()}
        if not partial:
            return {}
        return {rank: reader.get(key) for rank, key in keys.items() if reader.check([key])}

    def _set(self, key: str, value: bytes) -> None:
        if self._sender is None:
            message = "the store of the exchange is gone: this rank's figures cannot reach rank 0"
            raise ConnectionError(message)
        try:
            self._sender.set(key, value)
        except Exception:
            self._sender = None  # a client that failed once fails for ever, and noisily
            raise

    def _connected(self) -> Store:
        if self._reader is None:
            message = "the exchange is closed"
            raise ConnectionError(message)
        return self._reader


if TYPE_CHECKING:

    def _is_exchange(exchange: StoreExchange) -> Exchange:
        return exchange
