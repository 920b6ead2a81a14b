"""Hands the lines of a journal to one sink, and remembers how far it got."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coati_perf.feed import Feed
from coati_perf.journal import JournalReader, decode_line
from coati_perf.record import EpisodeRecord, Failure, Header, JournalLine, Summary
from coati_perf.sinks.base import Sink
from coati_perf.sinks.cursor import Cursor, Position


class AbandonedError(Exception):
    """A call came back after its sink had been given up for another."""


class Delivery:
    """Delivers each line once and in order; where the sink raises, the same call is made again.

    A sink that ``needs_whole_run`` and was cut off in the middle of one gets it from its start
    again. A run that ends without a summary is closed with one of status ``killed``, as soon as
    another run follows it or ``finish`` is called. Not thread-safe.
    """

    def __init__(self, sink: Sink, journal: Path, cursor: Cursor, feed: Feed | None = None) -> None:
        self.abandoned = False
        self.delivered: collections.Counter[str] = collections.Counter()  # episodes, by run
        self.called_at: float | None = None  # while a call to the sink runs, when it began
        self.sink = sink
        self._cursor = cursor
        self._feed = feed
        position = cursor.position
        self._reader = JournalReader(journal, position.offset)
        # The run that the sink is in the middle of: where it begins, and its header once open.
        self._header_offset = position.header
        self._open: Header | None = None
        self._episodes = position.episodes
        self._last_episode = position.last_episode
        self._from_memory: set[int] = set()

    def catch_up(self) -> None:
        """Deliver what there is; raises what the sink or the reading of the journal does."""
        if self._header_offset is not None and self._open is None:  # another process's
            self._resume(self._header_offset)
        for line in self._reader.lines():
            self._save()  # the line before is delivered
            number = None if self._feed is None else self._feed.late_number(self._reader.offset)
            if number is None or number not in self._from_memory:
                self._deliver(line)
        self._save()
        if self._feed is not None:
            for number, line in self._feed.beyond(self._reader):
                if number not in self._from_memory:
                    self._deliver(line)
                    self._from_memory.add(number)

    @property
    def offset(self) -> int:
        """The byte of the journal up to which lines are delivered."""
        return self._reader.offset

    def finish(self) -> None:
        """Close a run that nothing more comes of: it has no summary, as it was cut off."""
        if self._open is not None:
            self._close_cut_off(self._open)
            self._save()

    def _save(self) -> None:
        # Asked for anew each time: a sink may know it only once it is open.
        needs_whole_run = getattr(self.sink, "needs_whole_run", False)
        if needs_whole_run and self._header_offset is not None:
            self._cursor.save(Position(self._header_offset))
        else:
            episodes, last = self._episodes, self._last_episode
            self._cursor.save(Position(self._reader.offset, self._header_offset, episodes, last))

    def _resume(self, header_offset: int) -> None:
        """Open again the run that another process was in the middle of."""
        with self._reader.path.open("rb") as file:
            file.seek(header_offset)
            header = decode_line(file.readline())
        assert isinstance(header, Header)
        self._call(self.sink.open, header)
        self._open = header

    def _deliver(self, line: JournalLine) -> None:
        if isinstance(line, Header):
            if self._open is not None:
                self._close_cut_off(self._open)
            self._call(self.sink.open, line)
            self._open, self._header_offset = line, self._reader.offset
        elif isinstance(line, EpisodeRecord):
            self._call(self.sink.write, line)
            self.delivered[line.run_id] += 1
            self._episodes += 1
            self._last_episode = line.episode
        elif isinstance(line, Summary):
            self._call(self.sink.close, line)
            self._closed()
        else:
            assert isinstance(line, Failure)  # the summary tells the sinks

    def _close_cut_off(self, header: Header) -> None:
        summary = Summary(
            run_id=header.run_id,
            at=time.time(),
            status="killed",
            episodes=self._episodes,
            last_episode=self._last_episode,
        )
        self._call(self.sink.close, summary)
        self._closed()

    def _closed(self) -> None:
        self._open = self._header_offset = self._last_episode = None
        self._episodes = 0

    def _call(self, method: Callable[[Any], None], line: JournalLine) -> None:
        self.called_at = time.monotonic()
        try:
            method(line)
        finally:
            self.called_at = None
        if self.abandoned:
            raise AbandonedError
