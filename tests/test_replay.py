"""``coati-perf replay``: any run, any time, to any sink, once."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from coati_perf import read_journal
from coati_perf.cli import main
from coati_perf.journal import JournalReader, JournalWriter
from coati_perf.record import Summary


@pytest.fixture
def run_dir(make_evaluator, tmp_path):
    """Return the folder of a finished run of three episodes, that went to no sink."""
    evaluator = make_evaluator(train_config={"lr": 0.1})
    for number in range(3):
        with evaluator.episode(number), evaluator.phase("learn"):
            pass
    evaluator.close()
    return tmp_path / "run"


def test_a_run_is_delivered_once_unless_asked_for_again(run_dir, tmp_path, capsys):
    report = tmp_path / "report.txt"
    command = ["replay", str(run_dir), "--to", f"text:{report}"]
    assert main(command) == 0
    assert capsys.readouterr().out == f"text:{report}: 3 episodes delivered, has everything\n"
    assert main(command) == 0
    assert capsys.readouterr().out == f"text:{report}: 0 episodes delivered, has everything\n"
    text = report.read_text(encoding="utf-8")
    assert text.count("Performance summary:") == 1
    assert "finished\n3 episodes (0 to 2)" in text
    assert main([*command, "--again"]) == 0
    assert report.read_text(encoding="utf-8").count("Performance summary:") == 2


def test_the_journal_file_stands_for_its_folder_and_sinks_may_be_several(run_dir, tmp_path):
    sinks = [f"text:{tmp_path / name}" for name in "ab"]
    to = [part for sink in sinks for part in ("--to", sink)]
    assert main(["replay", str(run_dir / "journal.jsonl"), *to]) == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_sink_that_fails_is_named_and_gets_all_once_it_has_healed(run_dir, tmp_path, capsys):
    report = tmp_path / "report.txt"
    report.mkdir()
    command = ["replay", str(run_dir), "--to", f"text:{report}"]
    assert main(command) == 1
    assert "FAILED: IsADirectoryError" in capsys.readouterr().out
    report.rmdir()
    assert main(command) == 0
    assert report.read_text(encoding="utf-8").count("Performance summary:") == 1


def test_a_run_that_was_cut_off_is_said_to_be(run_dir, tmp_path):
    path = run_dir / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])
    assert main(["replay", str(run_dir), "--to", f"text:{tmp_path / 'report'}"]) == 0
    text = (tmp_path / "report").read_text(encoding="utf-8")
    assert "CUT OFF after episode 2" in text


def test_follow_goes_on_until_the_run_has_ended(run_dir, tmp_path):
    *lines, summary = JournalReader(run_dir / "journal.jsonl").lines()
    assert isinstance(summary, Summary)
    live = tmp_path / "live"
    live.mkdir()
    writer = JournalWriter(live / "journal.jsonl")
    for line in lines[:2]:
        writer.append(line)
    report = tmp_path / "report"
    done = []
    follower = threading.Thread(
        target=lambda: done.append(
            main(["replay", str(live), "--to", f"text:{report}", "--follow"])
        )
    )
    follower.start()
    for line in (*lines[2:], summary):
        time.sleep(0.3)
        assert not done
        writer.append(line)
    writer.close()
    follower.join(20)
    assert done == [0]
    assert "finished\n3 episodes (0 to 2)" in report.read_text(encoding="utf-8")


def test_a_live_runs_own_sinks_are_left_to_it(make_evaluator, tmp_path, capsys):
    evaluator = make_evaluator(save_path=tmp_path / "report.txt")
    with evaluator.episode(0):
        pass
    assert main(["replay", str(tmp_path / "run"), "--to", f"text:{tmp_path / 'report.txt'}"]) == 2
    assert "is still being written, and feeds text:" in capsys.readouterr().err
    evaluator.close()
    assert (tmp_path / "report.txt").read_text(encoding="utf-8").count("Performance summary") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "--to", "text:x"], "no journal at "),
        (["{run}", "--to", "nonsense"], "there is no sink named 'nonsense'; there are: "),
        (["{run}", "--to", "text"], "the text sink needs a path: 'text:PATH'"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments, message, run_dir, capsys):
    arguments = [argument.format(run=run_dir) for argument in arguments]
    assert main(["replay", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"coati-perf: {message}")
    assert error.count("\n") == 1


def test_a_killed_replay_is_taken_up_where_it_stood(run_dir, tmp_path):
    report = tmp_path / "report.txt"
    command = [sys.executable, "-m", "coati_perf", "replay", str(run_dir), "--to", f"text:{report}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as replay:
        while not list(run_dir.glob("cursors/*.json")) and replay.poll() is None:
            time.sleep(0.001)
        replay.kill()
    assert main(command[3:]) == 0
    assert report.read_text(encoding="utf-8").count("Performance summary:") == 1
    assert len(read_journal(run_dir).segments) == 1
