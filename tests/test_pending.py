"""Episodes that a kill left between the training thread and the journal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from coati_perf import catalogue, read_journal
from coati_perf.cli import main
from coati_perf.pending import PENDING_NAME, RECOVERED, recover

# The recorder is held up, so that no record is made; then the process is killed.
SCRIPT = textwrap.dedent("""
    import os, signal, sys, time
    from types import SimpleNamespace
    import torch
    from coati_perf import PerformanceEvaluator, recorder

    evaluator = PerformanceEvaluator(10, 20, 30, 40, run_dir=sys.argv[1])
    made = SimpleNamespace(
        sequences=torch.zeros(2, 6), attention_mask=torch.ones(2, 6), action_mask=torch.ones(2, 4)
    )
    held_up = int(sys.argv[2])
    for episode in range(4):
        if episode == held_up:
            time.sleep(0.2)
            recorder.Recorder._record = lambda *arguments: time.sleep(60)
        with evaluator.episode(episode):
            evaluator.on_make_experience_start()
            evaluator.on_make_experience_end(made)
            with evaluator.phase("mine"):
                time.sleep(0.01)
            for _ in range(3):
                evaluator.on_learn_batch_start()
                evaluator.on_learn_batch_end(SimpleNamespace(sequences=torch.zeros(2, 6)))
    os.kill(os.getpid(), signal.SIGKILL)
""")


@pytest.fixture
def killed(tmp_path):
    """Return a maker of runs of four episodes that were killed with so many recorded."""

    def run(recorded):
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / "run"), str(recorded)]
        assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
        assert len(read_journal(tmp_path / "run").segments[-1].episodes) == recorded
        return tmp_path / "run"

    return run


@pytest.mark.parametrize("recorded", [0, 2])
def test_every_finished_episode_of_a_killed_run_gets_its_record(killed, recorded):
    run_dir = killed(recorded)
    assert recover(run_dir) == 4 - recorded
    episodes = read_journal(run_dir).segments[-1].episodes
    assert [record.episode for record in episodes] == [0, 1, 2, 3]
    for record in episodes[recorded:]:
        assert record.metrics[catalogue.GENERATED] == 2
        assert record.metrics[catalogue.LEARNED] == 6
        assert record.metrics[catalogue.EPISODE_S] > 0.01
        assert record.phases["mine"] > 0.01
        assert record.faults == {RECOVERED: 1}
        assert not any("flops" in name for name in record.metrics)
    assert recover(run_dir) == 0
    assert len(read_journal(run_dir).segments[-1].episodes) == 4


def test_a_report_a_replay_and_a_restart_recover_first(killed, tmp_path, capsys, make_evaluator):
    run_dir = killed(3)
    assert main(["report", str(run_dir)]) == 0
    assert "CUT OFF after episode 3" in capsys.readouterr().out
    (tmp_path / "run").rename(tmp_path / "first")

    killed(3)
    assert main(["replay", str(run_dir), "--to", f"csv:{tmp_path / 'all.csv'}"]) == 0
    assert len((tmp_path / "all.csv").read_text().splitlines()) == 5
    (tmp_path / "run").rename(tmp_path / "second")

    killed(3)
    evaluator = make_evaluator()
    with evaluator.episode(0):
        pass
    evaluator.close()
    segments = read_journal(run_dir).segments
    assert [len(segment.episodes) for segment in segments] == [4, 1]


def test_a_live_run_and_one_that_ended_have_nothing_to_recover(make_evaluator, tmp_path):
    evaluator = make_evaluator()
    with evaluator.episode(0):
        pass
    assert (tmp_path / "run" / PENDING_NAME).exists()
    assert recover(tmp_path / "run") == 0
    evaluator.close()
    assert not (tmp_path / "run" / PENDING_NAME).exists()


@pytest.mark.parametrize("content", [b"", b"\x00" * 100, os.urandom(4096), b"\x00\x00\x00\x09abc"])
def test_what_is_no_row_is_passed_over(killed, content):
    run_dir = killed(2)
    rows = (run_dir / PENDING_NAME).read_bytes()
    (run_dir / PENDING_NAME).write_bytes(content.ljust(4096, b"\x00") + rows[4096:])
    assert recover(run_dir) == 2


def test_a_row_that_is_too_large_is_left_to_the_journal(make_evaluator, read_run):
    evaluator = make_evaluator(clock=time.perf_counter)
    with evaluator.episode(0):
        for number in range(100):
            with evaluator.phase(f"a-phase-with-a-long-name-and-the-number-{number}"):
                pass
    evaluator.close()
    assert len(read_run().episodes[0].phases) >= 90
