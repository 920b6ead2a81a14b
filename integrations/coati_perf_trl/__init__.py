"""coati_perf for TRL's trainers, and for Transformers' own."""

from coati_perf_trl.callback import CoatiPerfCallback

__all__ = ["CoatiPerfCallback"]
