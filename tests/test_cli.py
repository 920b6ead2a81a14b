"""The command line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from coati_perf.cli import main


def test_report_prints_a_finished_run(make_evaluator, tmp_path, capsys):
    evaluator = make_evaluator()
    with evaluator.episode(7):
        pass
    evaluator.close()
    assert main(["report", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Performance summary:\n")
    assert "finished\n1 episodes (7 to 7)" in printed


def test_report_says_what_is_wrong_in_one_line(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("coati-perf: no journal at ")


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["demo", "--episodes", "0"]])
def test_a_wrong_command_is_refused(arguments):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2


def test_the_package_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "coati_perf", "--version"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("coati-perf ")
