"""What many tests need: a scripted clock, experiences, and runs read back from their journal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import hypothesis
import pytest
import torch

from coati_perf import PerformanceEvaluator, read_journal
from coati_perf.journal import Segment

# A machine under load is slow now and then, and no test is about that.
hypothesis.settings.register_profile(
    "loaded", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("loaded")


class ScriptedClock:
    """A clock that moves only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the traces of a test to itself."""
    monkeypatch.setenv("COATI_PERF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def clock() -> ScriptedClock:
    return ScriptedClock()


@pytest.fixture
def make_evaluator(tmp_path: Path, clock: ScriptedClock):
    """Return a maker of evaluators with 10, 20, 30 and 40 parameters that write to tmp_path."""
    made: list[PerformanceEvaluator] = []

    def make(**options: Any) -> PerformanceEvaluator:
        options = {"run_dir": tmp_path / "run", "clock": clock, **options}
        made.append(PerformanceEvaluator(10, 20, 30, 40, **options))
        return made[-1]

    yield make
    for evaluator in made:
        evaluator.close()


@pytest.fixture
def make_experience():
    """Return a maker of experiences of a batch size, a length and a number of actions."""

    def make(batch: int = 4, length: int = 64, actions: int | None = 40) -> SimpleNamespace:
        mask = None if actions is None else torch.ones(batch, actions, dtype=torch.bool)
        return SimpleNamespace(
            sequences=torch.zeros(batch, length, dtype=torch.long), action_mask=mask
        )

    return make


@pytest.fixture
def offline_wandb(tmp_path: Path):
    """Let wandb write to tmp_path, with nothing of other tests; return what ends and reads its run.

    That gives the rows of the history, read by wandb's own ``leet inspect``.
    """
    wandb = pytest.importorskip("wandb")
    offline = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}

    def rows() -> list[dict[str, Any]]:
        wandb.finish()
        (run,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
        program = str(Path(sys.executable).parent / "wandb")
        done = subprocess.run(
            [program, "leet", "inspect", "--json", str(run)],
            check=True,
            capture_output=True,
            text=True,
        )
        lines = done.stdout.splitlines()
        return [json.loads(line).get("history", {}).get("item", {}) for line in lines]

    wandb.teardown()
    with mock.patch.dict(os.environ, offline):
        os.environ.pop("WANDB_SERVICE", None)
        yield rows
        wandb.teardown()


@pytest.fixture
def read_run(tmp_path: Path):
    """Return a reader of the last fit in tmp_path/run."""

    def read(run_dir: Path | None = None) -> Segment:
        return read_journal(run_dir or tmp_path / "run").segments[-1]

    return read
