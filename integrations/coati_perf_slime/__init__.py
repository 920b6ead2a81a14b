"""coati_perf for slime: records from the times of its rollouts and of its training."""

from coati_perf_slime.hooks import megatron_started, rollout_logged

__all__ = ["megatron_started", "rollout_logged"]
