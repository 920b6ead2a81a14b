"""The exchange over a ``torch.distributed`` store: one ``set`` per rank and episode.

A store object serialises its calls: a ``set`` made while another thread waits on the same object
waits with it. So the exchange has a client of its own, apart from that of the training's process
group. No collective is ever issued.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from coati_perf.exchange.base import Exchange


class Client(Protocol):
    """A connection to the store that may still be in the making; no call waits for it."""

    @property
    def connected(self) -> bool:
        """Whether reading is possible. Raises what the connection failed with."""
        ...

    def set(self, key: str, value: bytes) -> None:
        """Write without waiting for an answer, now or once connected."""
        ...

    def get(self, key: str) -> bytes:
        """Read a key that is known to be there."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Say whether all keys are there."""
        ...

    def delete_key(self, key: str) -> bool:
        """Delete a key if it is there."""
        ...

    def flush(self, timeout: float) -> None:
        """Wait until what was written before the connection was made is sent."""
        ...


# How long the end of a fit may wait for a connection that is still being made, in seconds.
_FLUSH_TIMEOUT_S = 2.0


class StoreExchange:
    """Rows under ``row/<sequence>/<rank>``, departures under ``departed/<rank>``.

    The client is used by the sender's thread, and by the training thread when that has nothing
    more to send; on rank 0 by the recorder alone.
    """

    name = "store"

    def __init__(self, rank: int, world_size: int, client: Client) -> None:
        self.rank = rank
        self.world_size = world_size
        self._client: Client | None = client

    def send(self, sequence: int, packed_row: bytes) -> None:
        self._set(f"row/{sequence}/{self.rank}", packed_row)

    def depart(self, packed_departure: bytes, *, failed: bool) -> None:
        self._set(f"departed/{self.rank}", packed_departure)
        if failed:
            self._set("failed", b"1")

    def collect(self, sequence: int, ranks: Iterable[int], *, partial: bool) -> dict[int, bytes]:
        return self._read({rank: f"row/{sequence}/{rank}" for rank in ranks}, partial=partial)

    def departures(self, ranks: Iterable[int]) -> dict[int, bytes]:
        return self._read({rank: f"departed/{rank}" for rank in ranks}, partial=True)

    def any_failure(self) -> bool:
        client = self._open()
        return client.connected and client.check(["failed"])

    def discard(self, sequence: int, ranks: Iterable[int]) -> None:
        client = self._open()
        if client.connected:
            for rank in ranks:
                client.delete_key(f"row/{sequence}/{rank}")

    def close(self) -> None:
        if self._client is not None:
            self._client.flush(_FLUSH_TIMEOUT_S)
        self._client = None

    def _read(self, keys: dict[int, str], *, partial: bool) -> dict[int, bytes]:
        client = self._open()
        if not keys or not client.connected:
            return {}
        # One round trip answers for all ranks in the usual case, that all rows are there.
        if client.check(list(keys.values())):
            return {rank: client.get(key) for rank, key in keys.items()}
        if not partial:
            return {}
        return {rank: client.get(key) for rank, key in keys.items() if client.check([key])}

    def _set(self, key: str, value: bytes) -> None:
        client = self._open()
        try:
            client.set(key, value)
        except Exception:
            self._client = None  # a client that failed once fails for ever, and noisily
            raise

    def _open(self) -> Client:
        if self._client is None:
            message = "the store of the exchange is gone, or the exchange is closed"
            raise ConnectionError(message)
        return self._client


if TYPE_CHECKING:

    def _is_exchange(exchange: StoreExchange) -> Exchange:
        return exchange
