"""What a run was started from: the command, the commit of the code in the working directory."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

# A repository too large to be looked through in this time is left out.
_LIMIT_S = 2.0


class Commit(msgspec.Struct, frozen=True):
    """A git commit; ``dirty`` where tracked files differ from it."""

    id: str
    dirty: bool


def current_commit(folder: Path | None = None) -> Commit | None:
    """Return the commit checked out in ``folder`` (the working directory), None where none is."""
    commit = _git(["rev-parse", "HEAD"], folder)
    changes = _git(["status", "--porcelain", "--untracked-files=no"], folder)
    return None if commit is None or changes is None else Commit(commit, bool(changes))


def command_line() -> list[str]:
    """Return the arguments that this process was started with."""
    return [str(argument) for argument in sys.argv]


def _git(arguments: Sequence[str], folder: Path | None) -> str | None:
    command = ["git", *arguments]
    try:
        done = subprocess.run(  # noqa: S603 - no shell, and the arguments are ours
            command, cwd=folder, capture_output=True, text=True, timeout=_LIMIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def installed_version(package: str) -> str:
    """Return the version of a package for a message, also where it is not installed as one."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of no known version"
