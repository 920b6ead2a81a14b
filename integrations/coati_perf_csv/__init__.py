"""Metrics in a CSV file: ``sinks=["csv"]`` or ``sinks=["csv:PATH"]``."""

from __future__ import annotations

from coati_perf_csv.sink import CsvSink

__all__ = ["CsvSink", "csv_sink"]


def csv_sink(argument: str | None) -> CsvSink:
    """Make the sink; ``argument`` is the file, by default ``metrics.csv`` in the run's folder."""
    return CsvSink(argument)
