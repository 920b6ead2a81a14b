"""coati_perf for prime-rl: records from its trainer's times and its orchestrator's episodes."""

from coati_perf_prime_rl.monitors import attach, share_lengths

__all__ = ["attach", "share_lengths"]
