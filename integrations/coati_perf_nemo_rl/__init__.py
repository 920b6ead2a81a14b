"""coati_perf for NeMo-RL: records from what its trainers log of each step."""

from coati_perf_nemo_rl.backend import attach

__all__ = ["attach"]
