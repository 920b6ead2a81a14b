"""One fit as rank 0 keeps it: its directory, journal, recorder and sinks."""

from __future__ import annotations

import atexit
import collections
import itertools
import logging
import os
import platform
import re
import secrets
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from coati_perf import catalogue
from coati_perf._version import __version__
from coati_perf.errors import describe_error
from coati_perf.exchange.base import Exchange
from coati_perf.feed import Feed
from coati_perf.journal import FILE_NAME, JournalWriter, read_journal
from coati_perf.pending import PendingRows, recover
from coati_perf.plain import MAX_VALUES, plain
from coati_perf.provenance import command_line, current_commit
from coati_perf.record import Header
from coati_perf.recorder import Ending, Recorder
from coati_perf.redaction import mask_command, mask_secrets
from coati_perf.sinks import SinkSource
from coati_perf.sinks.cursor import Cursor
from coati_perf.sinks.text import TextReportSink
from coati_perf.sinks.worker import SinkWorker
from coati_perf.survey import device_name, survey

if TYPE_CHECKING:
    from coati_perf.fit import FitSettings

_logger = logging.getLogger(__name__)

# All that some reader or other takes for the end of a line.
_LINE_BREAKS = re.compile("[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
# How long a failed fit waits for the rows of other ranks: its exception must be seen at once.
_FAILED_GRACE_S = 1.0
# How long fit start waits for sinks to open.
_HEAD_START_S = 2.0


class OutputError(OSError):
    """A directory or file that results are to go to cannot be written."""


class Run:
    """Opens everything at fit start, closes it at fit end; raises OutputError at fit start only."""

    def __init__(self, settings: FitSettings, exchange: Exchange) -> None:
        sinks = settings.sinks
        if settings.save_path is not None:
            check_save_path(settings.save_path)
            text_sink = TextReportSink(settings.save_path)
            sinks += (SinkSource(f"text:{settings.save_path}", lambda: text_sink),)
        run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        self.run_dir = (settings.run_dir or Path("coati_perf_runs") / run_id).absolute()
        self._close_timeout_s = settings.close_timeout_s
        self._run_id = run_id
        self._pid = os.getpid()
        self._closed = False
        recover(self.run_dir)
        journal = _open_journal(self.run_dir)
        offset = journal.size
        config = plain(settings.train_config)
        redact = settings.redact
        masked_config, masked = (config, []) if redact is None else mask_secrets(config, redact)
        header = Header(
            run_id=run_id,
            at=time.time(),
            segment=len(read_journal(journal.path).segments) if offset else 0,
            run_dir=str(self.run_dir),
            train_config=masked_config,
            seed_config_line=_seed_config_line(settings.train_config, config, masked_config),
            masked=masked,
            convention=settings.workload.convention,
            cost_model=settings.workload.describe(),
            ignore_episodes=settings.ignore_episodes,
            world_size=exchange.world_size,
            exchange=exchange.name,
            device=device_name(),
            host=socket.gethostname(),
            pid=self._pid,
            versions={
                "coati_perf": __version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
            machine=survey(settings.declared, exchange.world_size),
            warnings=list(settings.workload.warnings),
            command=command_line() if redact is None else mask_command(command_line(), redact),
            commit=current_commit(),
        )
        _write_first_line(journal, header)
        self.pending = PendingRows(self.run_dir, run_id)
        self._feed = feed = Feed(journal)
        cursors = _numbered(source.label for source in sinks)
        names = _numbered(source.label.partition(":")[0] for source in sinks)
        self._workers = {
            name: SinkWorker(source, journal.path, Cursor(self.run_dir, cursor, offset), feed)
            for name, source, cursor in zip(names, sinks, cursors, strict=True)
        }
        self.recorder = Recorder(header, exchange, feed, self._wake_sinks, self._health)
        self._wake_sinks()
        # What sinks import and start up holds the interpreter's lock, up to 25 ms at once: better
        # now than in the first episode.
        head_start = time.monotonic() + _HEAD_START_S
        for worker in self._workers.values():
            worker.wait_until_tried(max(head_start - time.monotonic(), 0.0))
        atexit.register(self.close_at_exit)

    def close(self, error: str | None) -> None:
        """Write what is left, within ``close_timeout_s``; a second call does nothing."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        atexit.unregister(self.close_at_exit)
        deadline = time.monotonic() + self._close_timeout_s
        grace_s = self._close_timeout_s / 2 if error is None else _FAILED_GRACE_S
        self.recorder.put(Ending(error, grace_s))
        recorded = self.recorder.join(self._close_timeout_s)
        for worker in self._workers.values():
            worker.finish()
        for worker in self._workers.values():
            if not worker.join(max(deadline - time.monotonic(), 0.0)):
                _logger.warning(
                    "sink %s got %d of %d episodes and was not closed (%s); later: %s",
                    worker.label,
                    worker.delivered(self._run_id),
                    self.recorder.recorded_episodes,
                    worker.last_error or f"not done within {self._close_timeout_s:g} s",
                    worker.how_to_replay,
                )
                worker.abandon()
        if not recorded or self._feed.waiting or self._feed.lost:
            _logger.warning("the journal %s is not complete", self._feed.journal.path)
        else:
            self.pending.forget()

    def close_at_exit(self) -> None:
        """Close a fit whose trainer never said that it ended, when the interpreter exits."""
        uncaught = getattr(sys, "last_value", None)
        self.close(None if uncaught is None else describe_error(uncaught))

    def _wake_sinks(self) -> None:
        for worker in self._workers.values():
            worker.wake()

    def _health(self) -> dict[str, float]:
        """Return the health of every sink, as metrics of the next record."""
        recorded = self.recorder.recorded_episodes
        return {
            catalogue.sink_metric(name, what): float(value)
            for name, worker in self._workers.items()
            for what, value in worker.health(self._run_id, recorded).items()
        }


def _numbered(names: Iterable[str]) -> list[str]:
    """Return the names, with a number behind one that was there before."""
    numbers: collections.Counter[str] = collections.Counter()
    numbered = []
    for name in names:
        numbers[name] += 1
        numbered.append(name if numbers[name] == 1 else f"{name} {numbers[name]}")
    return numbered


def check_save_path(path: Path) -> None:
    """Make the folders above ``path`` and see that it can be appended to, or raise OutputError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        with path.open("a"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        message = f"save_path {str(path)!r} cannot be written: {error}. Give another"
        raise OutputError(message) from error


def _open_journal(run_dir: Path) -> JournalWriter:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        return JournalWriter(run_dir / FILE_NAME)
    except OSError as error:
        message = f"run_dir {str(run_dir)!r} cannot be written: {error}. Give another"
        raise OutputError(message) from error


def _write_first_line(journal: JournalWriter, header: Header) -> None:
    try:
        journal.append(header)
    except OSError as error:
        journal.close()
        message = f"the journal {journal.path} cannot be written: {error}"
        raise OutputError(message) from error


def _seed_config_line(
    given: Mapping[Any, Any], config: dict[str, Any], masked: dict[str, Any]
) -> str:
    """Return ColossalChat's line of values, kept to one line whatever the values hold.

    A value in which something is masked is shown as it was masked.
    """
    texts = []
    for key in itertools.islice(given, MAX_VALUES):
        name = str(plain(str(key)))
        try:
            text = str(given[key] if masked[name] == config[name] else masked[name])
        except Exception:  # noqa: BLE001 - someone else's __str__
            text = str(masked.get(name))
        texts.append(str(plain(text)))
    return _LINE_BREAKS.sub(
        lambda found: found[0].encode("unicode_escape").decode(), "; ".join(texts)
    )
