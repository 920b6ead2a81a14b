"""The OpenTelemetry sink."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from coati_perf import catalogue
from coati_perf.record import EpisodeRecord, Header, Summary
from coati_perf.sinks import Sink


class OpenTelemetrySink:
    """Sets a gauge per metric after each episode, with the run as attribute.

    The gauges are those of ``meter_provider``, by default the process's own: which exporter they
    go through is set up there, by code or ``OTEL_…`` variables. ``perf/mfu/learn`` keeps its name.
    """

    def __init__(self, meter_provider: Any = None) -> None:
        self._given = meter_provider
        self._meter: Any = None
        self._gauges: dict[str, Any] = {}
        self._attributes: dict[str, str | int] = {}

    def open(self, header: Header) -> None:
        from opentelemetry import metrics

        provider = metrics.get_meter_provider() if self._given is None else self._given
        self._meter = provider.get_meter("coati_perf", header.versions.get("coati_perf"))
        self._gauges = {}
        self._attributes = {
            "run_id": header.run_id,
            "device": header.device,
            "world_size": header.world_size,
            "convention": header.convention,
        }

    def write(self, record: EpisodeRecord) -> None:
        if self._meter is None:
            message = "the OpenTelemetry meter is not open"
            raise RuntimeError(message)
        for name, value in {"perf/episode": record.episode, **record.metrics}.items():
            if name not in self._gauges:
                known = catalogue.CATALOGUE.get(name)
                unit, meaning = ("", name) if known is None else (known.unit, known.meaning)
                self._gauges[name] = self._meter.create_gauge(name, unit=unit, description=meaning)
            self._gauges[name].set(value, self._attributes)

    def close(self, summary: Summary) -> None:
        from opentelemetry import metrics

        provider = metrics.get_meter_provider() if self._given is None else self._given
        flush = getattr(provider, "force_flush", None)  # the API's own provider has none
        if self._meter is not None and flush is not None:
            flush()
        self._meter = None


if TYPE_CHECKING:
    _: Sink = OpenTelemetrySink()
