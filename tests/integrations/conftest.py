"""A real fit of a few episodes with the sinks under test."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coati_perf import PerformanceEvaluator, read_journal

CONFIG = {
    "lr": 1e-5,
    "plugin": "zero2",
    "nested": {"layers": [1, 2], "none": None},
    "flag": True,
    "empty": [],
}


def train(evaluator: PerformanceEvaluator, episodes: int = 5) -> None:
    """Drive the hooks as a trainer does, with learning that speeds up from episode to episode."""
    experience = SimpleNamespace(sequences=torch.zeros(4, 64), action_mask=torch.ones(4, 40))
    evaluator.on_fit_start()
    for episode in range(episodes):
        evaluator.on_episode_start(episode)
        evaluator.on_make_experience_start()
        with evaluator.phase("generate"):
            time.sleep(0.002 * (episode + 1))
        evaluator.on_make_experience_end(experience)
        evaluator.on_learn_batch_start()
        evaluator.on_learn_batch_end(experience)
        evaluator.on_episode_end(episode)
    evaluator.on_fit_end()


@pytest.fixture
def fit(tmp_path: Path):
    """Return a function that trains with the sinks given and returns the journal's segment."""

    def fit(*sinks, **options):
        evaluator = PerformanceEvaluator(
            10**6, 10**6, 10**6, 10**6,
            train_config=CONFIG, run_dir=tmp_path / "run", sinks=sinks, **options,
        )  # fmt: skip
        train(evaluator)
        return read_journal(tmp_path / "run").segments[-1]

    return fit


class OfflineRun:
    """A wandb run as ``wandb leet inspect`` reads it back: one dict per record."""

    def __init__(self, path: Path) -> None:
        wandb = str(Path(sys.executable).parent / "wandb")
        done = subprocess.run(
            [wandb, "leet", "inspect", "--json", str(path)],
            capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        self.records: list[dict[str, Any]] = [
            json.loads(line) for line in done.stdout.split("\n") if line
        ]

    def history(self) -> list[dict[str, Any]]:
        """Return the rows that were logged, in order."""
        return [record["history"]["item"] for record in self.records if "history" in record]

    def config(self) -> dict[str, Any]:
        """Return the config as it stood at the end."""
        config: dict[str, Any] = {}
        for record in self.records:
            holder = (
                record["run"].get("config", {}) if "run" in record else record.get("config", {})
            )
            config.update(holder.get("update", {}))
        return config

    def exit_code(self) -> int:
        """Return what the run was finished with."""
        (code,) = [record["exit"]["exit_code"] for record in self.records if "exit" in record]
        return code


@pytest.fixture
def load_offline_run():
    """Return a reader of the one offline run below a folder."""

    def load(directory: Path) -> OfflineRun:
        (path,) = directory.glob("**/run-*.wandb")
        return OfflineRun(path)

    return load
