"""Delivers a journal to sinks after the run, or beside it."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import filelock
import msgspec
from tqdm import tqdm

from coati_perf.journal import FILE_NAME, is_live, read_journal
from coati_perf.pending import recover
from coati_perf.sinks.cursor import FOLDER, Cursor, cursor_path
from coati_perf.sinks.registry import SinkSource, parse_sinks
from coati_perf.sinks.worker import SinkWorker

_POLL_S = 0.2


class ReplayError(RuntimeError):
    """A journal cannot be delivered to a sink now."""


class Replayed(msgspec.Struct, frozen=True):
    """What a sink got of a replay: ``error`` is None where it has everything now."""

    sink: str
    episodes: int
    error: str | None


def replay(
    path: Path, sinks: Sequence[str], *, follow: bool = False, again: bool = False
) -> list[Replayed]:
    """Deliver to each sink, named as for ``PerformanceEvaluator``, what it has not got yet.

    Each sink has its cursor beside the journal, the one that the run itself moves: a second replay
    delivers nothing. ``again`` begins at the start. ``follow`` goes on while the run is written.

    Raises:
        FileNotFoundError, JournalError: ``path`` is no journal, nor a folder with one.
        SinkError: a sink does not exist or cannot be made.
        ReplayError: the run is still being written, and feeds the sink itself; or another replay
            is under way.
    """
    read_journal(path)
    journal = path / FILE_NAME if path.is_dir() else path
    recover(journal.parent)
    sources = parse_sinks(dict.fromkeys(sinks))
    with _alone(journal.parent):
        cursors = [_cursor(source, journal, again=again) for source in sources]
        workers = [
            SinkWorker(source, journal, cursor)
            for source, cursor in zip(sources, cursors, strict=True)
        ]
        with contextlib.ExitStack() as stack:
            bars = [stack.enter_context(_bar(worker, journal)) for worker in workers]
            live = is_live(journal)
            while follow and live:
                _show(bars, workers, journal)
                live = is_live(journal)
            for worker in workers:
                worker.wake()
                worker.finish(cut_off=not live)
            while any([not worker.ended for worker in workers]):  # noqa: C419 - none is waited for
                _show(bars, workers, journal)
            _show(bars, workers, journal)
    return [Replayed(worker.label, worker.delivered(), worker.last_error) for worker in workers]


@contextlib.contextmanager
def _alone(run_dir: Path) -> Iterator[None]:
    folder = run_dir / FOLDER
    folder.mkdir(exist_ok=True)
    try:
        with filelock.FileLock(folder / "replay.lock", blocking=False):
            yield
    except filelock.Timeout:
        message = f"another replay of {run_dir} is under way; wait for its end"
        raise ReplayError(message) from None


def _cursor(source: SinkSource, journal: Path, *, again: bool) -> Cursor:
    path = cursor_path(journal.parent, source.label)
    if path.exists() and is_live(journal):
        message = f"the run is still being written, and feeds {source.label} itself"
        raise ReplayError(message)
    if again:
        path.unlink(missing_ok=True)
    return Cursor(journal.parent, source.label, 0)


def _bar(worker: SinkWorker, journal: Path) -> tqdm[Any]:
    bar: tqdm[Any] = tqdm(
        desc=worker.label,
        total=journal.stat().st_size,
        initial=worker.offset,
        unit="B",
        unit_scale=True,
        file=sys.stderr,
        disable=None,  # where it is no terminal, a bar is but clutter
    )
    return bar


def _show(bars: Sequence[tqdm[Any]], workers: Sequence[SinkWorker], journal: Path) -> None:
    for bar, worker in zip(bars, workers, strict=True):
        worker.wake()
        bar.total = journal.stat().st_size
        bar.update(worker.offset - bar.n)
    time.sleep(_POLL_S)
