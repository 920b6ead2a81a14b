"""The thread that feeds one sink from the journal."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from coati_perf.journal import JournalReader
from coati_perf.record import EpisodeRecord, Failure, Header, JournalLine, Summary
from coati_perf.sinks.base import Sink

_logger = logging.getLogger(__name__)

# A call that fails at the run's end, such as the very last one, is made once more after this.
_LAST_PAUSE_S = 0.1


class SinkWorker:
    """Reads the journal behind a cursor and hands each line to the sink, on a thread of its own.

    Where the sink raises, the cursor stays, and the same line is tried again at the next wake-up
    and twice at the end: nothing is skipped and nothing is kept in memory, however far the sink
    falls behind.
    """

    def __init__(self, label: str, sink: Sink, journal: Path, offset: int) -> None:
        self.label = label
        self.delivered = 0
        self.errors = 0
        self.last_error: str | None = None
        self._sink = sink
        self._reader = JournalReader(journal, offset)
        self._wake = threading.Event()
        self._finished = threading.Event()
        self._last_call = threading.Event()
        # Never joined at the interpreter's exit: a sink may be stuck in someone's C code.
        self._thread = threading.Thread(
            target=self._run, name=f"coati_perf-sink-{label}", daemon=True
        )
        self._thread.start()

    def wake(self) -> None:
        """Say that the journal has grown."""
        self._wake.set()

    def finish(self) -> None:
        """Say that the journal will not grow any more: the last tries, then the thread ends."""
        self._last_call.set()
        self._wake.set()

    def join(self, timeout: float) -> bool:
        """Wait for the end of the thread; say whether everything was delivered by then."""
        self._thread.join(timeout)
        return self._finished.is_set()

    def _run(self) -> None:
        while not self._finished.is_set():
            self._wake.wait()
            self._wake.clear()
            last = self._last_call.is_set()
            if not self._catch_up() and last:
                time.sleep(_LAST_PAUSE_S)
                self._catch_up()
            if last:
                return

    def _catch_up(self) -> bool:
        """Deliver what the journal has; say whether the sink took all of it."""
        try:
            for line in self._reader.lines():
                self._deliver(line)
        except Exception as error:  # noqa: BLE001 - a sink may raise anything
            self._note(error)
            return False
        return True

    def _deliver(self, line: JournalLine) -> None:
        if isinstance(line, EpisodeRecord):
            self._sink.write(line)
            self.delivered += 1
        elif isinstance(line, Header):
            self._sink.open(line)
        elif isinstance(line, Summary):
            self._sink.close(line)
            self._finished.set()
        else:
            assert isinstance(line, Failure)  # the summary tells the sinks

    def _note(self, error: Exception) -> None:
        self.errors += 1
        self.last_error = f"{type(error).__name__}: {error}"
        if self.errors == 1:
            _logger.warning(
                "sink %s failed (%s); training goes on, the journal keeps what it misses, and it "
                "is tried again with the next record",
                self.label,
                self.last_error,
            )
