"""Offline runs of the real wandb, read back with ``wandb leet inspect``."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("wandb")

HERE = str(Path(__file__).parent)


def _environment():
    """Return the environment without the address of a service that wandb has in this process."""
    return {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}


@pytest.fixture
def wandb_script(tmp_path, load_offline_run):
    """Return a runner of scripts in processes of their own: wandb keeps state per process."""

    def run(script: str):
        head = f"import sys; sys.path.insert(0, {HERE!r})\nfrom conftest import CONFIG, train\n"
        done = subprocess.run(
            [sys.executable, "-c", head + textwrap.dedent(script)],
            cwd=tmp_path,
            env=_environment() | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return load_offline_run(tmp_path)

    return run


OWN = """
    from coati_perf import PerformanceEvaluator
    evaluator = PerformanceEvaluator(
        1, 1, 1, 1, train_config=CONFIG, run_dir="run", sinks=["wandb:project"]
    )
    train(evaluator)
"""

JOINED = """
    import time
    import wandb
    from coati_perf import PerformanceEvaluator

    owner = wandb.init(project="owners", dir=".", config={"lr": 7, "theirs": 1})
    evaluator = PerformanceEvaluator(
        1, 1, 1, 1, train_config=CONFIG, run_dir="run", sinks=["wandb"]
    )

    def episode(number):
        with evaluator.episode(number):
            pass
        while evaluator.latest_record is None or evaluator.latest_record.episode < number:
            time.sleep(0.01)
        time.sleep(0.2)  # until the sink's thread has it too
"""


def test_a_run_of_our_own_holds_config_and_history_of_each_episode(wandb_script, read_run):
    offline = wandb_script(OWN)
    run = read_run()
    rows = [
        {key: value for key, value in row.items() if not key.startswith("_")}
        for row in offline.history()
    ]
    assert rows == [{"perf/episode": r.episode, **r.metrics} for r in run.episodes]
    config = offline.config()
    assert {key: config[key] for key in run.header.train_config} == run.header.train_config
    assert config["coati_perf"]["convention"] == "coati"
    assert config["coati_perf"]["run_id"] == run.header.run_id
    assert offline.exit_code() == 0


def test_the_episode_is_the_step_axis(wandb_script):
    offline = wandb_script(OWN)
    metrics = [record["metric"] for record in offline.records if record["type"] == "metric"]
    assert any(
        metric.get("glob_name") == "perf/*" and metric["step_metric"] == "perf/episode"
        for metric in metrics
    )


def test_a_failed_run_is_failed_in_wandb(wandb_script, read_run):
    offline = wandb_script(
        OWN.replace(
            "train(evaluator)",
            """
    try:
        with evaluator.episode(0):
            raise ValueError
    except ValueError:
        evaluator.on_fit_end()
    """,
        )
    )
    assert read_run().summary.status == "failed"
    assert offline.exit_code() == 1


def test_a_joined_run_keeps_every_row_of_its_owners_and_of_ours(wandb_script, read_run):
    """The owner logs with explicit steps before, between and after ours, with gaps, repeats."""
    offline = wandb_script(
        JOINED
        + """
    owner.log({"loss": 0.0}, step=0)
    episode(0)
    owner.log({"loss": 1.0}, step=1)
    owner.log({"repeat": 1.0}, step=1)
    episode(1); episode(2); episode(3)          # faster than the owner's steps
    owner.log({"loss": 2.0}, step=2)
    episode(4)
    owner.log({"loss": 3.0}, step=3)
    episode(5)
    owner.log({"loss": 10.0}, step=10)
    episode(6)
    owner.log({"loss": 11.0}, step=11)
    evaluator.on_fit_end()
    assert wandb.run is owner
    owner.log({"loss": 20.0}, step=20)
    owner.finish()
    """
    )
    rows = offline.history()
    losses = {row["loss"]: row["_step"] for row in rows if "loss" in row}
    assert losses == {0.0: 0, 1.0: 1, 2.0: 2, 3.0: 3, 10.0: 10, 11.0: 11, 20.0: 20}
    assert [row["_step"] for row in rows if "repeat" in row] == [1]
    ours = [row for row in rows if "perf/episode" in row]
    assert [row["perf/episode"] for row in ours] == list(range(7))
    for row, record in zip(ours, read_run().episodes, strict=True):
        assert {name: row[name] for name in record.metrics} == record.metrics


def test_a_joined_run_whose_owner_logs_without_steps_loses_none(wandb_script):
    offline = wandb_script(
        JOINED
        + """
    for number in range(4):
        episode(number)
        owner.log({"loss": number})
    evaluator.on_fit_end()
    owner.log({"loss": 9})
    owner.finish()
    """
    )
    rows = offline.history()
    assert [row["loss"] for row in rows if "loss" in row] == [0, 1, 2, 3, 9]
    assert [row["perf/episode"] for row in rows if "perf/episode" in row] == [0, 1, 2, 3]


def test_a_joined_runs_config_is_added_to_and_never_overwritten(wandb_script):
    config = wandb_script(JOINED + "    train(evaluator, 1); owner.finish()\n").config()
    assert config["lr"] == 7
    assert config["theirs"] == 1
    assert config["plugin"] == "zero2"


def test_a_run_that_its_owner_finishes_early_stops_no_training(wandb_script, read_run):
    wandb_script(
        JOINED
        + """
    episode(0)
    owner.finish()
    episode(1)
    started = time.monotonic()
    evaluator.on_fit_end()
    assert time.monotonic() - started < 10
    """
    )
    assert [record.episode for record in read_run().episodes] == [0, 1]
    assert read_run().summary.status == "finished"


@pytest.mark.parametrize(
    ("mode", "folders", "said"),
    [
        ("disabled", 0, ""),
        ("dryrun", 1, ""),
        ("online", 0, "got 0 of 5 episodes and was not closed (UsageError: No API key configured"),
    ],
)
def test_every_mode_of_wandb_lets_training_go_on(mode, folders, said, tmp_path):
    """Online, where there is no API key and no terminal to ask for one."""
    head = f"import sys; sys.path.insert(0, {HERE!r})\nfrom conftest import CONFIG, train\n"
    hidden = ("WANDB_API_KEY", "WANDB_SERVICE", "WANDB_MODE")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(OWN)],
        cwd=tmp_path,
        env={**environment, "WANDB_MODE": mode, "WANDB_SILENT": "true", "HOME": str(tmp_path)},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len([*tmp_path.glob("run/wandb/*run-*")]) == folders
    assert said in done.stderr
    assert ("was not closed" in done.stderr) == bool(said)


def test_a_run_by_an_id_of_the_users_gets_our_rows_after_those_it_has(wandb_script):
    offline = wandb_script("""
    from coati_perf import PerformanceEvaluator
    from coati_perf_wandb import WandbSink
    sink = WandbSink("project", id="theirs", group="their-group")
    evaluator = PerformanceEvaluator(1, 1, 1, 1, run_dir="run", sinks=[sink])
    train(evaluator)
    """)
    assert [row["perf/episode"] for row in offline.history()] == list(range(5))
    (run,) = [record["run"] for record in offline.records if "run" in record][:1]
    assert (run["run_id"], run["run_group"]) == ("theirs", "their-group")


def test_a_run_that_copies_tensorboard_gets_nothing_twice(wandb_script, read_run):
    """As in ColossalChat's trainers: sync_tensorboard, and a writer of their own."""
    offline = wandb_script("""
        import time
        import wandb
        from coati_perf import PerformanceEvaluator

        owner = wandb.init(project="owners", dir=".", sync_tensorboard=True)
        from torch.utils.tensorboard import SummaryWriter
        writer = SummaryWriter("theirs")
        evaluator = PerformanceEvaluator(
            1, 1, 1, 1, run_dir="run", sinks=["tensorboard", "wandb"]
        )
        for number in range(3):
            with evaluator.episode(number):
                writer.add_scalar("train/reward", 0.5, number)
        evaluator.close()
        writer.close()
        time.sleep(2)
        owner.finish()
    """)
    rows = offline.history()
    episodes = [row["perf/episode"] for row in rows if "perf/time/episode_s" in row]
    assert episodes == [0, 1, 2]
    assert [row["global_step"] for row in rows if "train/reward" in row] == [0, 1, 2]
    assert len(read_run().episodes) == 3
