"""The commit and the command that a run was started from."""

from __future__ import annotations

import subprocess
import sys

from coati_perf import provenance
from coati_perf.provenance import Commit, current_commit
from coati_perf.redaction import MASK


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_the_commit_is_that_checked_out_and_dirty_once_a_tracked_file_differs(tmp_path):
    assert current_commit(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert current_commit(tmp_path) is None, "there is no commit yet"
    (tmp_path / "file").write_text("a")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    head = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "untracked").touch()
    assert current_commit(tmp_path) == Commit(head, dirty=False)
    (tmp_path / "file").write_text("b")
    assert current_commit(tmp_path) == Commit(head, dirty=True)


def test_without_git_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert current_commit(tmp_path) is None


def test_a_repository_that_is_too_slow_is_left_out(tmp_path, monkeypatch):
    (tmp_path / "git").write_text("#!/bin/sh\nexec sleep 5\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(provenance, "_LIMIT_S", 0.05)
    assert current_commit(tmp_path) is None


def test_the_header_has_both(make_evaluator, read_run, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--hf_token", "x9"])
    evaluator = make_evaluator()
    with evaluator.episode(0):
        pass
    evaluator.close()
    header = read_run().header
    assert header.command == ["train.py", "--hf_token", MASK]
    assert header.commit == current_commit()
