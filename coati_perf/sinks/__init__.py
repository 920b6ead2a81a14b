"""Where records go: the interface, the registry of names, and the thread that feeds each sink."""

from coati_perf.sinks.base import Sink
from coati_perf.sinks.registry import SinkError, SinkSource, parse_sinks

__all__ = ["Sink", "SinkError", "SinkSource", "parse_sinks"]
