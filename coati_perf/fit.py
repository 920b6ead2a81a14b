"""One fit on one rank: where its rows go."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from coati_perf.cost import CostModel
from coati_perf.errors import describe_error
from coati_perf.exchange import choose_exchange
from coati_perf.record import EpisodeRecord
from coati_perf.row import Departure, encode
from coati_perf.run import Run
from coati_perf.sinks import SinkSource
from coati_perf.tally import Tally


class FitSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What every fit of an evaluator is made with, checked; see ``PerformanceEvaluator``."""

    run_dir: Path | None
    save_path: Path | None
    sinks: tuple[SinkSource, ...]
    train_config: Mapping[Any, Any]
    cost_model: CostModel
    ignore_episodes: int
    peak_tflops: float | None
    close_timeout_s: float


class Fit:
    """Hands rows to the recorder on rank 0, and to the exchange on the other ranks.

    Opening one raises OutputError where rank 0 cannot write. Every call is on the training
    thread and does not wait, but for ``close`` on rank 0, which waits ``close_timeout_s`` at most.
    """

    def __init__(self, settings: FitSettings) -> None:
        self._exchange = choose_exchange()
        self._rows_sent = 0
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

    def hand_over(self, tally: Tally, now: float) -> None:
        """Pass on a finished episode."""
        row = tally.row(self._exchange.rank, self._rows_sent, now)
        self._rows_sent += 1
        if self._run is not None:
            self._run.recorder.put(row)
        else:
            self._exchange.send(row.sequence, encode(row))

    def report_failure(self, episode: int | None, error: BaseException) -> None:
        """Pass on that an exception ended an episode, or the fit outside one."""
        self._depart(episode, describe_error(error))

    def close(self, error: BaseException | None) -> None:
        """End the fit, with the exception that ended it, if any."""
        text = None if error is None else describe_error(error)
        if self._run is not None:
            self._run.close(text)
        else:
            self._depart(None, text)
            self._exchange.close()

    def _depart(self, episode: int | None, error: str | None) -> None:
        departure = Departure(self._exchange.rank, self._rows_sent, episode, error)
        if self._failure is not None and self._failure.error == error:
            departure = self._failure  # the fit ends with the exception that ended the episode
        elif error is not None:
            self._failure = departure
        if self._run is not None:
            self._run.recorder.put(departure)
        else:
            self._exchange.depart(encode(departure), failed=error is not None)
