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
import logging
import os
import socket
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, cast

from coati_perf.exchange.store import Store

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

_logger = logging.getLogger(__name__)


def job_store() -> TorchStore | None:
    """Return the store of the default process group, None where there is none."""
    try:
        from torch.distributed.distributed_c10d import _get_default_store  # noqa: PLC0415

        return _get_default_store()
    except Exception as error:  # noqa: BLE001 - whatever torch makes of a private call
        _logger.debug("the job has no store: %s", error)
        return None


def is_tcp(store: TorchStore) -> bool:
    """Say whether a store, below its prefixes, is a TCPStore, whose ``set`` does not wait."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, TCPStore)


def own_client(store: TorchStore, prefix: str) -> Store:
    """Return a client with a connection of its own, whose keys are behind ``prefix``."""
    client = _clone(store)
    client.set_timeout(_ANSWER_TIMEOUT)
    return cast("Store", PrefixStore(prefix, client))


def serve(job: TorchStore, prefix: str) -> TorchStore:
    """Start a TCPStore on this host, on a free port, and publish its address (rank 0)."""
    host = _own_host()
    server = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    PrefixStore(prefix, job).set("address", f"{host}:{server.port}")
    return server


class LateClient:
    """A client of rank 0's own TCPStore that takes writes before it is connected.

    The connection is made on a thread of its own, since it has to wait for rank 0.
    """

    def __init__(self, job: TorchStore, prefix: str) -> None:
        self._waiting: collections.deque[tuple[str, bytes]] = collections.deque()
        self._lock = threading.Lock()
        self._client: TorchStore | None = None
        self._error: Exception | None = None
        thread = threading.Thread(
            target=self._connect, args=(job, prefix), name="coati_perf-connect", daemon=True
        )
        thread.start()

    def set(self, key: str, value: bytes, /) -> None:
        """Write, now or once connected."""
        with self._lock:
            if self._client is not None:
                self._client.set(key, cast("str", value))
            elif self._error is not None:
                raise self._error
            elif len(self._waiting) < _MAX_WAITING:
                self._waiting.append((key, value))
            else:
                message = f"rank 0's store could not be reached; {_MAX_WAITING} rows are waiting"
                raise ConnectionError(message)

    def get(self, key: str, /) -> bytes:
        """Never called: only rank 0 reads."""
        raise NotImplementedError(key)

    def check(self, keys: list[str], /) -> bool:
        """Never called: only rank 0 reads."""
        raise NotImplementedError(keys)

    def delete_key(self, key: str, /) -> bool:
        """Never called: only rank 0 reads."""
        raise NotImplementedError(key)

    def _connect(self, job: TorchStore, prefix: str) -> None:
        try:
            address = PrefixStore(prefix, _clone(job)).get("address").decode()
            host, _, port = address.rpartition(":")
            client = PrefixStore(
                prefix, TCPStore(host, int(port), is_master=False, timeout=_ANSWER_TIMEOUT)
            )
        except Exception as error:  # noqa: BLE001 - surfaces at the next set()
            with self._lock:
                self._error = error
            return
        with self._lock:
            with contextlib.suppress(IndexError):
                while True:
                    key, value = self._waiting.popleft()
                    client.set(key, cast("str", value))
            self._client = client


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
