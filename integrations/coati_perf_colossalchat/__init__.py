"""coati_perf for ColossalChat: the evaluators under upstream's names."""

from coati_perf_colossalchat.evaluator import PerformanceEvaluator
from coati_perf_colossalchat.ray_evaluators import (
    ExperienceMakerPerformanceEvaluator,
    TrainerPerformanceEvaluator,
)

__all__ = [
    "ExperienceMakerPerformanceEvaluator",
    "PerformanceEvaluator",
    "TrainerPerformanceEvaluator",
]
