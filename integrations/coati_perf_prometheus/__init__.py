"""Metrics for Prometheus' node exporter: ``sinks=["prometheus:/…/coati_perf.prom"]``."""

from __future__ import annotations

from coati_perf.sinks.registry import require
from coati_perf_prometheus.sink import PrometheusSink

__all__ = ["PrometheusSink", "prometheus_sink"]


def prometheus_sink(argument: str | None) -> PrometheusSink:
    """Make the sink; ``argument`` is the file, by default in the run's folder."""
    require("prometheus_client", extra="prometheus")
    return PrometheusSink(argument)
