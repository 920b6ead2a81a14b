"""coati_perf for ROLL: records from what its pipelines log, and their batches."""

from coati_perf_roll.tracker import attach

__all__ = ["attach"]
