"""The demo, as a user starts it, and its outputs read back by others' code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ENVIRONMENT = {
    key: value
    for key, value in os.environ.items()
    if not key.startswith(("WANDB_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_"))
}


def run_demo(folder: Path, launcher: list[str], *options: str) -> str:
    done = subprocess.run(
        [*launcher, "-m", "coati_perf", "demo", "--run-dir", str(folder / "run"), *options],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def mean_rewards(printed: str) -> tuple[float, float]:
    found = re.search(r"Mean reward: (\S+) in the first episode, (\S+) in the last", printed)
    return float(found[1]), float(found[2])


def test_the_demo_learns_and_its_four_outputs_agree(tmp_path, read_run, load_offline_run):
    printed = run_demo(tmp_path, [sys.executable])
    first, last = mean_rewards(printed)
    assert last > first + 0.3, "the reward rises visibly"

    run = read_run()
    assert len(run.episodes) == 14
    assert all(record.faults == {} for record in run.episodes)
    wandb_folder = next((tmp_path / "run" / "wandb").glob("offline-run-*"))
    for path in ("run/report.txt", "run/journal.jsonl", "run/tensorboard", wandb_folder):
        assert (tmp_path / path).exists()
        assert str(tmp_path / path) in printed
    assert "Where the time went" in printed

    events = EventAccumulator(
        str(tmp_path / "run" / "tensorboard" / run.header.run_id), size_guidance={"scalars": 0}
    ).Reload()
    rows = load_offline_run(tmp_path).history()
    for record, row in zip(run.episodes, rows, strict=True):
        assert {name: row[name] for name in record.metrics} == record.metrics
        for name, value in record.metrics.items():
            (event,) = [e for e in events.Scalars(name) if e.step == record.episode]
            assert event.value == pytest.approx(value, rel=2**-24)
    for name in ("perf/time/generate_s", "perf/time/score_s", "perf/time/learn_s"):
        assert all(record.metrics[name] > 0 for record in run.episodes)
    config = load_offline_run(tmp_path).config()
    assert {key: config[key] for key in run.header.train_config} == run.header.train_config


def test_the_demo_runs_on_two_ranks(tmp_path, read_run):
    """128 prompts per collect pair and rank: the figures are those of both."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    printed = run_demo(tmp_path, torchrun, "--episodes", "3")
    assert printed.count("Mean reward:") == 1
    run = read_run()
    assert run.header.world_size == 2
    assert [record.metrics["perf/ranks/reported"] for record in run.episodes] == [2, 2, 2]
    assert [record.metrics["perf/samples/generated"] for record in run.episodes] == [256] * 3
