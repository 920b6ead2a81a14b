"""coati_perf for Lightning's trainer: learning alone."""

from coati_perf_lightning.callback import CoatiPerfCallback

__all__ = ["CoatiPerfCallback"]
