"""The store that the exchange runs over: the job's own, or a TCPStore of ours.

Leans on one private name of torch, ``distributed_c10d._get_default_store``, and on these public
ones: ``PrefixStore(prefix, store)`` with ``underlying_store``, ``Store.clone()`` (a client with a
connection of its own), ``TCPStore`` with ``port=0`` and ``port``, and ``set``, ``get``, ``check``
and ``delete_key``, of which ``TCPStore.set`` does not wait for an answer.
``tests/exchange/test_torch_store.py`` fails where a torch release changes any of it.
"""

from __future__ import annotations

import collections
import contextlib
import os
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, cast

from coati_perf.exchange.store import Client

if TYPE_CHECKING:  # torch.distributed exports them at run time only
    from torch._C._distributed_c10d import PrefixStore, TCPStore
    from torch._C._distributed_c10d import Store as TorchStore
else:
    from torch.distributed import PrefixStore, TCPStore
    from torch.distributed import Store as TorchStore

# For one answer of the store, on a thread that may wait. A healthy server takes microseconds.
_ANSWER_TIMEOUT = timedelta(seconds=60)
# Rows that a rank keeps while its connection is being made; later ones are dropped and counted.
_MAX_WAITING = 1000


def job_store() -> TorchStore:
    """Return the store of the default process group; raises where it has none."""
    from torch.distributed.distributed_c10d import _get_default_store  # noqa: PLC0415

    return _get_default_store()


def is_tcp(store: TorchStore) -> bool:
    """Say whether a store, below its prefixes, is a TCPStore, whose ``set`` does not wait."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, TCPStore)


def connect_to_job(store: TorchStore, prefix: str) -> LateClient:
    """Return a client of the job's own store, a TCPStore, with a connection of its own."""
    return LateClient(lambda: _behind(prefix, _clone(store)), keep_alive=store)


def serve(job: TorchStore, prefix: str) -> LateClient:
    """Start a TCPStore on this host, on a free port; publish its address; return a client of it."""
    host = _own_host()
    server = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    PrefixStore(prefix, job).set("address", f"{host}:{server.port}")
    return LateClient(lambda: _behind(prefix, _clone(server)), keep_alive=(job, server))


def connect_to_served(job: TorchStore, prefix: str) -> LateClient:
    """Return a client of the TCPStore that rank 0 serves, once it has published its address."""

    def connect() -> TorchStore:
        host, _, port = PrefixStore(prefix, _clone(job)).get("address").decode().rpartition(":")
        return _behind(prefix, TCPStore(host, int(port), is_master=False))

    return LateClient(connect, keep_alive=job)


class LateClient:
    """A client that takes writes before it is connected, and is connected in the background.

    Connecting is done on a thread of its own: it takes minutes to fail where a server is dead, and
    it may have to wait for rank 0. ``keep_alive`` is held as long as the client: the store whose
    server it talks to.
    """

    def __init__(self, connect: Callable[[], TorchStore], keep_alive: object) -> None:
        self._keep_alive = keep_alive
        self._waiting: collections.deque[tuple[str, bytes]] = collections.deque()
        self._lock = threading.Lock()
        self._client: TorchStore | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(
            target=self._connect, args=(connect,), name="coati_perf-connect", daemon=True
        )
        self._thread.start()

    @property
    def connected(self) -> bool:
        if self._error is not None:
            raise self._error
        return self._client is not None

    def set(self, key: str, value: bytes) -> None:
        with self._lock:
            if self.connected:
                self._connected().set(key, cast("str", value))
            elif len(self._waiting) < _MAX_WAITING:
                self._waiting.append((key, value))
            else:
                message = f"rank 0's store could not be reached; {_MAX_WAITING} rows are waiting"
                raise ConnectionError(message)

    def get(self, key: str) -> bytes:
        return self._connected().get(key)

    def check(self, keys: list[str]) -> bool:
        return self._connected().check(keys)

    def delete_key(self, key: str) -> bool:
        return self._connected().delete_key(key)

    def flush(self, timeout: float) -> None:
        self._thread.join(timeout)

    def _connected(self) -> TorchStore:
        if self._client is None:
            message = "the store is not connected yet"
            raise ConnectionError(message)
        return self._client

    def _connect(self, connect: Callable[[], TorchStore]) -> None:
        try:
            client = connect()
            with self._lock:
                while self._waiting:
                    key, value = self._waiting.popleft()
                    client.set(key, cast("str", value))
                self._client = client
        except Exception as error:  # noqa: BLE001 - surfaces where the client is used
            self._error = error


def _behind(prefix: str, store: TorchStore) -> TorchStore:
    store.set_timeout(_ANSWER_TIMEOUT)
    return PrefixStore(prefix, store)


def _clone(store: TorchStore) -> TorchStore:
    clone: TorchStore = store.clone()  # type: ignore[attr-defined]  # not in torch's stubs
    return clone


def _own_host() -> str:
    """Return a name of this host under which the other ranks can reach it."""
    for host in (os.environ.get("MASTER_ADDR"), socket.gethostname()):
        if host:
            with contextlib.suppress(OSError):
                socket.getaddrinfo(host, None)
                return host
    return "127.0.0.1"


if TYPE_CHECKING:

    def _is_client(client: LateClient) -> Client:
        return client
