"""Any tracker of Hugging Face accelerate: ``sinks=["accelerate:trackio"]`` and others."""

from __future__ import annotations

from coati_perf.sinks.registry import SinkError, require
from coati_perf_accelerate.sink import AccelerateSink

__all__ = ["AccelerateSink", "accelerate_sink"]


def accelerate_sink(argument: str | None) -> AccelerateSink:
    """Make the sink; ``argument`` is the tracker, or ``tracker:project``."""
    require("accelerate", extra="accelerate")
    if argument is None:
        message = "the accelerate sink needs a tracker, such as 'accelerate:trackio'"
        raise SinkError(message)
    tracker, _, project = argument.partition(":")
    return AccelerateSink(tracker, project or "coati_perf")
