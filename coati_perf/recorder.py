"""Rank 0's background thread: rows in, records out to the journal."""

from __future__ import annotations

import collections
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping

import msgspec

from coati_perf import catalogue
from coati_perf.evidence import write_evidence
from coati_perf.exchange.base import Exchange
from coati_perf.feed import Feed
from coati_perf.record import EpisodeRecord, Failure, Header, JournalLine, Summary
from coati_perf.reduce import reduce_rows
from coati_perf.row import Departure, Row, decode_departure, decode_row
from coati_perf.unresolved import UnresolvedRow

_logger = logging.getLogger(__name__)

# Rows of other ranks that have not come so long after rank 0's own are given up.
GATHER_TIMEOUT_S = 120.0
# While rows are awaited the store is asked at growing intervals up to this; while none are, at
# this interval for failures, so that a rank's exception is on the disk before the launcher,
# which sees the process end, kills rank 0.
_MAX_PAUSE_S = 0.05
_MIN_PAUSE_S = 0.001
# Ranks that keep an episode waiting so long are asked for: their fit may have ended.
_ASK_AFTER_S = 0.5


# So many failures after which training went on are named at the end.
_MAX_FAILURES = 50


class Ending(msgspec.Struct, frozen=True):
    """The end of rank 0's fit: why, if it failed, and how long late rows are waited for."""

    error: str | None
    grace_s: float


class _Awaited(msgspec.Struct):
    """An episode that rank 0 has finished, waiting for the rows of the others."""

    rows: dict[int, Row]
    since: float


class Recorder:
    """Gathers each episode's rows, reduces them and appends the record to the journal.

    ``put`` is all that the training thread calls; it never waits. ``notify`` is called after
    each append, ``health`` for further metrics of each record. The journal is written and closed
    by this thread alone.
    """

    def __init__(
        self,
        header: Header,
        exchange: Exchange,
        feed: Feed,
        notify: Callable[[], None],
        health: Callable[[], Mapping[str, float]],
    ) -> None:
        self.latest: EpisodeRecord | None = None
        self.recorded_episodes = 0
        self._header = header
        self._exchange = exchange
        self._feed = feed
        self._notify = notify
        self._health = health
        self._inbox: queue.SimpleQueue[Row | UnresolvedRow | Departure | Ending] = (
            queue.SimpleQueue()
        )
        self._awaited: collections.deque[_Awaited] = collections.deque()
        self._departed: dict[int, Departure] = {}
        self._failures: dict[tuple[int, int | None, str], None] = {}  # rank, episode, error
        self._last_episode: int | None = None
        self._ending: Ending | None = None
        self._end_by = 0.0
        self._asked_at = 0.0
        self._warned: set[str] = set()
        self.put = self._inbox.put
        self._thread = threading.Thread(target=self._run, name="coati_perf-recorder", daemon=True)
        self._thread.start()

    def join(self, timeout: float) -> bool:
        """Wait for the summary to be written; say whether it was by then."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        pause = _MIN_PAUSE_S
        while True:
            message = self._next(pause)
            try:
                # Before rank 0's own failure: the others' came first, and may be its cause.
                self._look_for_failures()
                if message is not None:
                    self._take(message)
                finished = self._record_finished_episodes()
            except Exception as error:  # noqa: BLE001 - this thread must outlive any fault
                self._warn("recording failed", error)
                finished = False
            pause = _MIN_PAUSE_S if finished or message else min(2 * pause, _MAX_PAUSE_S)
            if self._ending is not None and self._may_end(self._ending):
                self._end(self._ending)
                return

    def _next(self, pause: float) -> Row | UnresolvedRow | Departure | Ending | None:
        alone = self._exchange.world_size == 1
        try:
            return self._inbox.get(timeout=None if alone and not self._awaited else pause)
        except queue.Empty:
            return None

    def _take(self, message: Row | UnresolvedRow | Departure | Ending) -> None:
        if isinstance(message, UnresolvedRow):
            message = message.resolve()
        if isinstance(message, Row):
            self._awaited.append(_Awaited({0: message}, time.monotonic()))
        elif isinstance(message, Departure):
            self._report(message)
        else:
            self._ending = message
            self._end_by = time.monotonic() + message.grace_s
            self._report(Departure(0, self.recorded_episodes, None, message.error))

    def _look_for_failures(self) -> None:
        if self._exchange.world_size > 1 and self._exchange.any_failure():
            self._ask_for_departures()

    def _ask_for_departures(self) -> None:
        now = time.monotonic()
        if now - self._asked_at < _ASK_AFTER_S and self._asked_at:
            return
        self._asked_at = now
        others = range(1, self._exchange.world_size)
        for rank, packed in self._exchange.departures(others).items():
            self._departed[rank] = decode_departure(packed)
            self._report(self._departed[rank])

    def _report(self, departure: Departure) -> None:
        rank, episode, error = departure.rank, departure.episode, departure.error
        if error is None or (rank, episode, error) in self._failures:
            return
        if episode is None and any(key[::2] == (rank, error) for key in self._failures):
            return  # what ended an episode has ended the fit too
        self._failures[rank, episode, error] = None
        self._append(
            Failure(
                run_id=self._header.run_id,
                at=time.time(),
                rank=rank,
                episode=episode,
                error=error,
            )
        )

    def _record_finished_episodes(self) -> bool:
        """Record every awaited episode whose rows are all there, in order; say whether any was."""
        recorded = False
        while self._awaited and self._gather(self._awaited[0]):
            self._record(self._awaited.popleft().rows)
            recorded = True
        return recorded

    def _gather(self, awaited: _Awaited) -> bool:
        """Collect what has come; say whether nothing more is to be waited for."""
        missing = set(range(self._exchange.world_size)) - awaited.rows.keys()
        if not missing:
            return True
        sequence = awaited.rows[0].sequence
        now = time.monotonic()
        late = now - awaited.since
        over = late > GATHER_TIMEOUT_S or (self._ending is not None and now > self._end_by)
        if late > _ASK_AFTER_S:
            self._ask_for_departures()
        try:
            # What a rank sent, it sent before it said that no more comes.
            gone = {rank for rank in missing if self._is_gone(rank, sequence)}
            self._collect(awaited, gone, partial=True)
            self._collect(awaited, missing - gone, partial=over)
        except Exception as error:  # noqa: BLE001 - the store, or the row, is broken
            self._warn("the figures of other ranks cannot be had", error)
            return True
        missing -= awaited.rows.keys()
        if missing - gone and not over:
            return False
        self._exchange.discard(sequence, range(1, self._exchange.world_size))
        return True

    def _is_gone(self, rank: int, sequence: int) -> bool:
        departure = self._departed.get(rank)
        return departure is not None and (departure.final or departure.sequence == sequence)

    def _collect(self, awaited: _Awaited, ranks: set[int], *, partial: bool) -> None:
        sequence = awaited.rows[0].sequence
        for rank, packed in self._exchange.collect(sequence, ranks, partial=partial).items():
            awaited.rows[rank] = decode_row(packed)

    def _record(self, rows: dict[int, Row]) -> None:
        header = self._header
        reduced = reduce_rows([rows[rank] for rank in sorted(rows)], header.machine)
        record = EpisodeRecord(
            run_id=header.run_id,
            at=time.time(),
            episode=rows[0].episode,
            convention=header.convention,
            metrics={
                **reduced.metrics,
                catalogue.JOURNAL_WAITING: float(self._feed.waiting),
                catalogue.JOURNAL_LOST: float(self._feed.lost),
                **self._health(),
            },
            phases=reduced.phases,
            ranks=header.world_size,
            ranks_missing=[rank for rank in range(header.world_size) if rank not in rows],
            slowest=reduced.slowest,
            impossible=reduced.impossible,
            faults=reduced.faults,
            warnings=header.warnings,
        )
        self._append(record)
        if record.impossible:
            self._keep_evidence(record)
        self._last_episode = record.episode
        self.recorded_episodes += 1
        self.latest = record

    def _keep_evidence(self, record: EpisodeRecord) -> None:
        try:
            write_evidence(self._header, record)
        except OSError as error:
            self._warn("the inputs of an impossible figure cannot be written", error)

    def _append(self, line: JournalLine) -> None:
        """Write a line, after those that could not be written before it."""
        try:
            self._feed.append(line)
        except OSError as error:
            self._warn(f"the journal {self._feed.journal.path} cannot be written", error)
        self._notify()

    def _may_end(self, ending: Ending) -> bool:
        """Say whether nothing more is to be waited for: rows, or why other ranks failed."""
        if time.monotonic() > self._end_by:
            return True
        if self._awaited:
            return False
        if ending.error is not None and self._silent_ranks():
            self._hear_departures()
            return not self._silent_ranks()
        return True

    def _silent_ranks(self) -> list[int]:
        """Return the ranks that have not said that their fit ended, or how."""
        return [rank for rank in range(1, self._exchange.world_size) if rank not in self._departed]

    def _hear_departures(self) -> None:
        try:
            self._ask_for_departures()
        except Exception as error:  # noqa: BLE001 - the store may be gone by now
            self._warn("the other ranks' ends cannot be had", error)

    def _end(self, ending: Ending) -> None:
        self._asked_at = 0.0
        self._hear_departures()
        # A rank that went on after a failed episode has not failed: its last word counts.
        last = {rank: departure.error for rank, departure in self._departed.items()}
        last[0] = ending.error
        alone = self._exchange.world_size == 1
        errors = dict.fromkeys(
            error if alone else f"rank {rank}: {error}"
            for rank, _, error in self._failures
            if last.get(rank) == error
        )
        if ending.error is not None and (silent := self._silent_ranks()):
            names = ", ".join(map(str, silent))
            errors[f"no word from rank {names} (killed, or waiting)"] = None
        self._append(
            Summary(
                run_id=self._header.run_id,
                at=time.time(),
                status="failed" if errors else "finished",
                episodes=self.recorded_episodes,
                last_episode=self._last_episode,
                error="; ".join(errors) or None,
                failures=[
                    f"rank {rank}, {_where(episode)}: {error}"
                    for rank, episode, error in self._failures
                    if last.get(rank) != error
                ][:_MAX_FAILURES],
            )
        )
        self._feed.journal.close()
        self._exchange.close()

    def _warn(self, what: str, error: Exception) -> None:
        if what not in self._warned:
            self._warned.add(what)
            _logger.warning("%s (%s: %s); training goes on", what, type(error).__name__, error)


def _where(episode: int | None) -> str:
    return "outside an episode" if episode is None else f"episode {episode}"
