"""Metrics as OpenTelemetry gauges: ``sinks=["opentelemetry"]``."""

from __future__ import annotations

from coati_perf.sinks.registry import SinkError, require
from coati_perf_opentelemetry.sink import OpenTelemetrySink

__all__ = ["OpenTelemetrySink", "opentelemetry_sink"]


def opentelemetry_sink(argument: str | None) -> OpenTelemetrySink:
    """Make the sink, which takes no argument: the process's meter provider says where to."""
    require("opentelemetry", extra="opentelemetry")
    if argument is not None:
        message = f"the opentelemetry sink takes no argument, and got {argument!r}: set up the SDK"
        raise SinkError(message)
    return OpenTelemetrySink()
