"""Weights & Biases as a sink of coati_perf: ``sinks=["wandb"]`` or ``"wandb:PROJECT"``."""

from coati_perf.sinks.registry import require
from coati_perf_wandb.sink import WandbSink

__all__ = ["WandbSink", "wandb_sink"]


def wandb_sink(project: str | None) -> WandbSink:
    """Make the sink named ``wandb``; without a project wandb's own default holds."""
    require("wandb", extra="wandb")
    return WandbSink(project)
