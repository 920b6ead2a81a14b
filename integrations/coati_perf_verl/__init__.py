"""coati_perf for verl: records from the timings and batches of its Ray controller."""

from coati_perf_verl.controller import attach

__all__ = ["attach"]
