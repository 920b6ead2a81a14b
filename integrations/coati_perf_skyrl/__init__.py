"""coati_perf for SkyRL: records from the timings and batches of its trainer."""

from coati_perf_skyrl.callback import CoatiPerfCallback

__all__ = ["CoatiPerfCallback"]
