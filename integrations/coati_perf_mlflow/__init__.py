"""Metrics in MLflow: ``sinks=["mlflow"]`` or ``sinks=["mlflow:EXPERIMENT"]``."""

from __future__ import annotations

from coati_perf.sinks.registry import require
from coati_perf_mlflow.sink import MlflowSink

__all__ = ["MlflowSink", "mlflow_sink"]


def mlflow_sink(argument: str | None) -> MlflowSink:
    """Make the sink; ``argument`` is the experiment, by default ``coati_perf``."""
    require("mlflow", extra="mlflow")
    return MlflowSink(argument or "coati_perf")
