"""The command ``coati-perf demo``: a small real PPO run, measured, and what was found."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from coati_perf import PerformanceEvaluator, catalogue
from coati_perf.demo import ranks
from coati_perf.demo.models import build_models, count_parameters
from coati_perf.demo.progress import ProgressBar
from coati_perf.demo.task import Task
from coati_perf.demo.trainer import PPOConfig, PPOTrainer
from coati_perf.journal import read_journal
from coati_perf.report import render_journal

# Short names for the progress bar.
_LIVE_FIGURES = {
    "made/s": "perf/throughput/make_experience_samples_per_s",
    "learned/s": "perf/throughput/learn_samples_per_s",
    "MFU": "perf/mfu/overall",
    "episode s": catalogue.EPISODE_S,
}


def run_demo(episodes: int, seed: int, run_dir: Path | None, convention: str = "exact") -> None:
    """Train, and print on rank 0 the rewards, where the time went, and where everything lies.

    ``convention`` is how FLOPs are counted: ``exact``, or ``coati`` by the parameters.
    """
    # There is no server to log to, and wandb's own lines would break the progress bar.
    os.environ.setdefault("WANDB_MODE", "offline")
    os.environ.setdefault("WANDB_SILENT", "true")
    with ranks.process_group():
        task, config = Task(), PPOConfig(episodes=episodes, seed=seed)
        models = build_models(task, seed)
        save_path = (run_dir or Path("coati_perf_runs")) / "report.txt"
        evaluator = PerformanceEvaluator(
            **count_parameters(models),
            train_config=dataclasses.asdict(config),
            save_path=save_path,
            sinks=["tensorboard", "wandb:coati_perf_demo"],
            run_dir=run_dir,
            models=vars(models) if convention == "exact" else None,
            dtype=torch.float32,
        )

        def figures() -> Mapping[str, float]:
            record = evaluator.latest_record
            metrics = {} if record is None else record.metrics
            return {
                short: metrics[name] for short, name in _LIVE_FIGURES.items() if name in metrics
            }

        bar = ProgressBar(config.episodes, figures)
        rewards = PPOTrainer(models, task, config, [evaluator, bar], phase=evaluator.phase).fit()
        if evaluator.run_dir is not None:
            _print_findings(rewards, evaluator.run_dir, save_path.absolute())


def _print_findings(rewards: list[float], run_dir: Path, save_path: Path) -> None:
    tensorboard = run_dir / "tensorboard"
    # The programs beside this Python, which may be in an environment that is not active.
    programs = Path(sys.executable).parent
    wandb = sorted(run_dir.glob("wandb/offline-run-*"))
    lines = [
        "",
        render_journal(read_journal(run_dir)),
        f"Mean reward: {rewards[0]:.3f} in the first episode, {rewards[-1]:.3f} in the last.",
        "",
        f"report       {save_path}",
        f"journal      {run_dir / 'journal.jsonl'}",
        f"             {programs}/coati-perf report {run_dir}",
        f"TensorBoard  {tensorboard}",
        f"             {programs}/tensorboard --logdir {tensorboard}",
        *(f"wandb        {path}\n             {programs}/wandb sync {path}" for path in wandb[-1:]),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
