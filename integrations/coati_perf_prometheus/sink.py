"""The sink for the textfile collector of Prometheus' node exporter."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from coati_perf import catalogue
from coati_perf.record import EpisodeRecord, Header, Summary
from coati_perf.sinks import Sink

_STATES = ("running", "finished", "failed", "killed")


class PrometheusSink:
    """Replaces a text file with the last episode's metrics, as gauges, after each episode.

    ``perf/time/learn_s`` is ``coati_perf_time_learn_s{run="…"}``; ``coati_perf_run_state`` is 1
    for the state that the run is in. The file is replaced as a whole, so that the collector never
    reads half of it.
    """

    def __init__(self, path: str | None = None) -> None:
        self._given = path
        self._path: Path | None = None
        self._header: Header | None = None
        self._last: EpisodeRecord | None = None

    def open(self, header: Header) -> None:
        path = Path(self._given or Path(header.run_dir) / "coati_perf.prom")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._header, self._last = path, header, None
        self._replace("running")

    def write(self, record: EpisodeRecord) -> None:
        self._last = record
        self._replace("running")

    def close(self, summary: Summary) -> None:
        if self._path is not None:
            self._replace(summary.status)
        self._path = None

    def _replace(self, state: str) -> None:
        from prometheus_client import CollectorRegistry, Gauge, Info, write_to_textfile

        if self._path is None or self._header is None:
            message = "the Prometheus file is not open"
            raise RuntimeError(message)
        run = self._header.run_id
        registry = CollectorRegistry()
        about = Info("coati_perf_run", "what is measured", ["run"], registry=registry)
        about.labels(run).info(
            {
                "device": self._header.device,
                "world_size": str(self._header.world_size),
                "convention": self._header.convention,
            }
        )
        labels = ["run", "state"]
        states = Gauge("coati_perf_run_state", "1 for its state", labels, registry=registry)
        for known in _STATES:
            states.labels(run, known).set(known == state)
        figures = {} if self._last is None else self._last.metrics
        episode = {} if self._last is None else {"perf/episode": float(self._last.episode)}
        for name, value in {**episode, **figures}.items():
            known_metric = catalogue.CATALOGUE.get(name)
            meaning = name if known_metric is None else known_metric.meaning
            Gauge(prometheus_name(name), meaning, ["run"], registry=registry).labels(run).set(value)
        write_to_textfile(str(self._path), registry)


def prometheus_name(metric: str) -> str:
    """Return the name of a metric in Prometheus: ``perf/mfu/learn`` is ``coati_perf_mfu_learn``."""
    return re.sub(r"[^a-zA-Z0-9_]", "_", f"coati_{metric}")


if TYPE_CHECKING:
    _: Sink = PrometheusSink()
