"""One fit on one rank: where its rows go."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from coati_perf.cost import Workload
from coati_perf.device_timer import Timing
from coati_perf.errors import describe_error
from coati_perf.exchange import NoExchange, choose_exchange
from coati_perf.record import EpisodeRecord
from coati_perf.row import Departure
from coati_perf.run import Run
from coati_perf.sender import Sender
from coati_perf.sinks import SinkSource
from coati_perf.survey import Declared
from coati_perf.tally import Tally
from coati_perf.unresolved import UnresolvedRow

# How long a failed rank waits until its rows are sent: its exception must be seen at once.
_FAILED_GRACE_S = 1.0


class FitSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What every fit of an evaluator is made with, checked; see ``PerformanceEvaluator``."""

    run_dir: Path | None
    save_path: Path | None
    sinks: tuple[SinkSource, ...]
    train_config: Mapping[Any, Any]
    redact: tuple[str, ...] | None
    workload: Workload
    ignore_episodes: int
    declared: Declared
    close_timeout_s: float
    alone: bool = False  # one process reports for all


class Fit:
    """Hands rows to the recorder on rank 0, and to the exchange on the other ranks.

    Opening one raises OutputError where rank 0 cannot write. Every call is on the training
    thread and does not wait, but for ``close``, which waits ``close_timeout_s`` at most, and a
    failure on another rank than 0, which waits a second at most for the rows before it.
    """

    def __init__(self, settings: FitSettings) -> None:
        self._exchange = NoExchange() if settings.alone else choose_exchange()
        self._sender = Sender(self._exchange)
        self._workload = settings.workload
        self._close_timeout_s = settings.close_timeout_s
        self._sequence = 0
        self._failure: Departure | None = None
        self._run: Run | None = None
        if self._exchange.rank == 0:
            self._run = Run(settings, self._exchange)

    @property
    def run_dir(self) -> Path | None:
        """The folder of the fit's files, on rank 0; None elsewhere."""
        return None if self._run is None else self._run.run_dir

    @property
    def latest_record(self) -> EpisodeRecord | None:
        """The last record written, on rank 0; None elsewhere."""
        return None if self._run is None else self._run.recorder.latest

    def hand_over(self, tally: Tally, now: float, timings: list[Timing]) -> None:
        """Pass on a finished episode, with the device's times that are yet to be read."""
        row = tally.row(self._exchange.rank, self._sequence, now)
        batches = tally.batches.take()
        message = UnresolvedRow(row, batches, self._workload, timings)
        self._sequence += 1
        if self._run is not None:
            self._run.pending.keep(row, batches)
            self._run.recorder.put(message)
        else:
            self._sender.send(message)

    def report_failure(self, episode: int, error: BaseException) -> None:
        """Pass on that an exception ended an episode; its row will not come."""
        self._failure = Departure(
            self._exchange.rank, self._sequence, episode, describe_error(error)
        )
        self._sequence += 1  # on the other ranks the episode has used up its number too
        if self._run is not None:
            self._run.recorder.put(self._failure)
        else:
            self._sender.depart(self._failure, failed=True, timeout=_FAILED_GRACE_S)

    def close(self, error: BaseException | None) -> None:
        """End the fit, with the exception that ended it, if any."""
        text = None if error is None else describe_error(error)
        if self._run is not None:
            self._run.close(text)
            return
        # The fit may end with the exception that ended its last episode.
        failed = (
            self._failure if self._failure is not None and self._failure.error == text else None
        )
        episode = None if failed is None else failed.episode
        departure = Departure(self._exchange.rank, self._sequence, episode, text, final=True)
        timeout = self._close_timeout_s if text is None else _FAILED_GRACE_S
        self._sender.depart(departure, failed=text is not None, timeout=timeout)
        self._exchange.close()
