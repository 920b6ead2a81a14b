"""A whole PPO run against an independent count of everything that it executes."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from coati_perf import CostModel, PerformanceEvaluator
from coati_perf.demo.models import build_models
from coati_perf.demo.task import Task
from coati_perf.demo.trainer import PPOConfig, PPOTrainer
from independent_count import executed_flop


def test_the_demos_run_executes_exactly_what_is_counted(tmp_path, read_run):
    """Generation, scoring by four models, and learning with backward; eager attention is full."""
    task = Task()
    models = build_models(task)
    for model in vars(models).values():
        model.set_attn_implementation("eager")
    evaluator = PerformanceEvaluator(
        0,
        0,
        0,
        0,
        run_dir=tmp_path / "run",
        peak_tflops=1.0,  # else it would be measured, by matrix products
        models={
            role: CostModel.traced(model, attention="full") for role, model in vars(models).items()
        },
    )
    config = PPOConfig(episodes=2, prompts_per_collect=8, batch_size=4)
    trainer = PPOTrainer(models, task, config, [evaluator], evaluator.phase)
    executed = executed_flop(trainer.fit)
    episodes = read_run().episodes
    assert sum(record.metrics["perf/flops/overall_executed"] for record in episodes) == executed
    for record in episodes:
        for phase in ("generate", "score", "learn"):
            useful = record.metrics[f"perf/flops/{phase}"]
            assert 0 < useful < record.metrics[f"perf/flops/{phase}_executed"], phase
