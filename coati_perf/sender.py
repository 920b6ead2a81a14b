"""What sends the rows of a rank that is not rank 0."""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading

from coati_perf.exchange.base import Exchange
from coati_perf.row import Departure, encode
from coati_perf.unresolved import UnresolvedRow

_logger = logging.getLogger(__name__)

# How long the interpreter's exit waits for rows, of a trainer that never ended its fit.
_EXIT_GRACE_S = 5.0


class Sender:
    """Sends rows in order, each once it is resolved, on a thread that begins with the first one.

    Calls are on the training thread and do not wait, but for ``depart``, which waits for the rows
    before it, ``timeout`` seconds at most. So does the interpreter's exit, where no one departs.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._inbox: queue.SimpleQueue[UnresolvedRow | threading.Event] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def send(self, row: UnresolvedRow) -> None:
        """Send a row after all rows before it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="coati_perf-sender", daemon=True)
            self._thread.start()
            atexit.register(self._drain, _EXIT_GRACE_S)
        self._inbox.put(row)

    def depart(self, departure: Departure, *, failed: bool, timeout: float) -> None:
        """Say that a row, or any more, will not come."""
        if self._thread is not None:
            self._drain(timeout)
        self._exchange.depart(encode(departure), failed=failed)
        if departure.final:
            atexit.unregister(self._drain)

    def _drain(self, timeout: float) -> None:
        if os.getpid() != self._pid:  # a child has no such thread to wait for
            return
        sent = threading.Event()
        self._inbox.put(sent)
        sent.wait(timeout)

    def _run(self) -> None:
        while True:
            message = self._inbox.get()
            if isinstance(message, threading.Event):
                message.set()
                continue
            try:
                row = message.resolve()
                self._exchange.send(row.sequence, encode(row))
            except Exception as error:  # noqa: BLE001 - this thread must outlive any fault
                _logger.warning("a row was not sent (%s); training goes on", error)
