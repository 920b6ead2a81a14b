"""The journal, with the lines in memory that it could not take: what sinks are fed from."""

from __future__ import annotations

import collections
import threading

from coati_perf.journal import JournalReader, JournalWriter
from coati_perf.record import JournalLine

# Lines that cannot be written wait for room; when there are more, the oldest are given up.
_MAX_WAITING = 1000


class Feed:
    """Appends lines to the journal, those first that it refused before.

    Lines are numbered from 0 in the order they came. ``lost`` counts those that were given up.
    One thread appends, others read.
    """

    def __init__(self, journal: JournalWriter) -> None:
        self.journal = journal
        self.lost = 0
        self._waiting: collections.deque[tuple[int, JournalLine]] = collections.deque()
        self._number = 0
        # Where the lines lie that were written late, and that a sink may have from memory.
        self._late: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """How many lines the journal has not taken yet."""
        return len(self._waiting)

    def append(self, line: JournalLine) -> None:
        """Write every line that waits and this one; raises OSError where the journal takes none."""
        with self._lock:
            self._waiting.append((self._number, line))
            self._number += 1
            if len(self._waiting) > _MAX_WAITING:
                self._waiting.popleft()
                self.lost += 1
            while self._waiting:
                number, first = self._waiting[0]
                offset = self.journal.size
                self.journal.append(first)
                if number < self._number - 1:
                    self._late[offset] = number
                self._waiting.popleft()

    def late_number(self, offset: int) -> int | None:
        """Return the number of the line at ``offset`` if it was written late, else None."""
        return self._late.get(offset)

    def beyond(self, reader: JournalReader) -> list[tuple[int, JournalLine]]:
        """Return the lines in memory, if ``reader`` has read all of the journal before them."""
        if not self._waiting:
            return []
        with self._lock:
            return list(self._waiting) if reader.offset >= self.journal.size else []
