"""The TensorBoard sink."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coati_perf import catalogue
from coati_perf.machine import Machine
from coati_perf.plain import flatten
from coati_perf.record import EpisodeRecord, Header, Summary
from coati_perf.report import render_run
from coati_perf.sinks import Sink
from coati_perf.totals import RunTotals

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter


class TensorBoardSink:
    """Writes one scalar per metric and episode, at step = episode.

    ``train_config`` goes to the HPARAMS tab, flattened, beside the last value of every metric of
    the catalogue; the layout of the CUSTOM SCALARS tab has one chart per group of metrics; the
    report goes to the TEXT tab when the run ends. Every episode is flushed, so that a killed
    process loses none that it wrote; what is in the folder already is not written again.

    Args:
        directory: where each run gets a folder of its own, by default in ``run_dir``.
        own_folder: False writes into the directory itself, to the run that is there.
    """

    needs_whole_run = True

    def __init__(self, directory: str | None = None, *, own_folder: bool = True) -> None:
        self._directory = directory
        self._own_folder = own_folder
        self._there: dict[int, set[str]] = {}  # the tags that an episode has already
        self._writer: EventFileWriter | None = None
        self._header: Header | None = None
        self._totals = RunTotals(Machine(ranks=1))

    def open(self, header: Header) -> None:
        from tensorboard.summary.writer import event_file_writer
        from torch.utils.tensorboard.summary import custom_scalars, hparams

        directory = Path(self._directory or Path(header.run_dir) / "tensorboard")
        if self._own_folder:
            directory /= header.run_id
        self._header = header
        self._totals = RunTotals(header.machine)
        self._there = _scalars(directory)
        # wandb's sync_tensorboard replaces the class by one that copies all to its run, where our
        # wandb sink writes already, and keeps the original under this name.
        own = event_file_writer.EventFileWriter
        self._writer = getattr(event_file_writer, "orig_EventFileWriter", own)(str(directory))
        self._add(custom_scalars(_layout()), 0, header.at)
        # SummaryWriter.add_hparams would start a second run at step 0 for the metrics' values.
        # Written by hand into this run, the tab shows the last value of each scalar instead.
        experiment, session_start, self._session_end = hparams(
            {**flatten(header.train_config), "coati_perf/convention": header.convention},
            dict.fromkeys(catalogue.CATALOGUE, 0.0),
        )
        for values in (experiment, session_start):
            self._add(values, 0, header.at)
        self._opened().flush()

    def write(self, record: EpisodeRecord) -> None:
        summary_pb2 = _messages("summary_pb2")
        there = self._there.setdefault(record.episode, set())
        # One event for all of them: an event for each takes 4 ms of the interpreter's lock.
        scalars = [
            summary_pb2.Summary.Value(tag=name, simple_value=value)
            for name, value in record.metrics.items()
            if name not in there
        ]
        self._add(summary_pb2.Summary(value=scalars), record.episode, record.at)
        self._opened().flush()
        there.update(record.metrics)
        last = self._totals.last_episode
        if record.episode != last:  # a call may come twice
            self._totals.add(record)
            self._there.pop(-1 if last is None else last, None)

    def close(self, summary: Summary) -> None:
        from torch.utils.tensorboard.summary import text

        if self._writer is None:
            return
        assert self._header is not None
        report = render_run(self._header, self._totals, summary)
        # TEXT is rendered as Markdown, where four spaces keep a table of figures as it is.
        indented = "\n".join(f"    {line}" for line in report.splitlines())
        self._add(text("coati_perf/report", indented), summary.last_episode or 0, summary.at)
        self._add(self._session_end, 0, summary.at)
        self._writer.close()
        self._writer = None

    def _add(self, values: Any, step: int, at: float) -> None:
        event = _messages("event_pb2").Event(wall_time=at, step=step, summary=values)
        self._opened().add_event(event)

    def _opened(self) -> EventFileWriter:
        if self._writer is None:
            message = "the TensorBoard writer is not open"
            raise RuntimeError(message)
        return self._writer


def _messages(name: str) -> Any:
    """Return a module of protobuf messages, whose classes no type checker knows."""
    return importlib.import_module(f"tensorboard.compat.proto.{name}")


def _scalars(directory: Path) -> dict[int, set[str]]:
    """Return the tags of the scalars in the folder, by step."""
    from tensorboard.backend.event_processing.directory_loader import DirectoryLoader
    from tensorboard.backend.event_processing.event_file_loader import TimestampedEventFileLoader

    tags: dict[int, set[str]] = {}
    if directory.is_dir():
        for event in DirectoryLoader(str(directory), TimestampedEventFileLoader).Load():
            for value in event.summary.value:
                tags.setdefault(event.step, set()).add(value.tag)
    return tags


def _layout() -> dict[str, Any]:
    """Return one chart per group of the catalogue (``perf/<group>/…``), all its metrics in it."""
    charts: dict[str, Any] = {}
    for name in catalogue.CATALOGUE:
        group = name.split("/")[1]
        charts.setdefault(group, ["Multiline", []])[1].append(name)
    return {"coati_perf": charts}


if TYPE_CHECKING:
    _: Sink = TensorBoardSink()
