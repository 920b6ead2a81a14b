"""coati_perf for OpenRLHF: records from the timings and rollouts of its Ray trainer."""

from coati_perf_openrlhf.controller import measure

__all__ = ["measure"]
