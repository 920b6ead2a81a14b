"""The text report at ``save_path``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from coati_perf.machine import Machine
from coati_perf.record import EpisodeRecord, Header, Summary
from coati_perf.report import render_run, seed_report
from coati_perf.sinks.base import Sink
from coati_perf.sinks.registry import SinkError
from coati_perf.totals import RunTotals


class TextReportSink:
    """Appends one report per run, when the run ends: ColossalChat's lines, then ours."""

    needs_whole_run = True

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._header: Header | None = None
        self._totals = RunTotals(Machine(ranks=1))

    def open(self, header: Header) -> None:
        self._header = header
        self._totals = RunTotals(header.machine)

    def write(self, record: EpisodeRecord) -> None:
        if self._header is None:
            message = "the text report is not open"
            raise RuntimeError(message)
        if record.episode != self._totals.last_episode:  # a call may come twice
            self._totals.add(record)

    def close(self, summary: Summary) -> None:
        if self._header is None:
            return
        report = (
            f"{self._header.seed_config_line}\n"
            f"{seed_report(self._totals)}\n\n"
            f"{render_run(self._header, self._totals, summary)}\n"
        )
        with self.path.open("a", encoding="utf-8") as file:
            file.write(report)
        self._header = None


def text_report(argument: str | None) -> TextReportSink:
    """Make the sink named ``text:PATH``."""
    if argument is None:
        message = "the text sink needs a path: 'text:PATH'"
        raise SinkError(message)
    return TextReportSink(argument)


if TYPE_CHECKING:
    _: Sink = TextReportSink("")
