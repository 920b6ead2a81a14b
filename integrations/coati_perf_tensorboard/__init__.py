"""TensorBoard as a sink of coati_perf: ``sinks=["tensorboard"]`` or ``"tensorboard:DIRECTORY"``."""

from coati_perf.sinks.registry import require
from coati_perf_tensorboard.sink import TensorBoardSink

__all__ = ["TensorBoardSink", "tensorboard_sink"]


def tensorboard_sink(directory: str | None) -> TensorBoardSink:
    """Make the sink named ``tensorboard``; without a directory it writes below the run's own."""
    require("tensorboard", extra="tensorboard")
    return TensorBoardSink(directory)
