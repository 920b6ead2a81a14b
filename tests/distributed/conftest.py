"""Launching real processes, and seeing that none is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import NamedTuple

import pytest

from coati_perf.cli import main

WORKERS = Path(__file__).parent / "workers.py"
# Far above what any scenario takes, below every timeout of torch's own that could end a hang.
LIMIT_S = 60


class Ended(NamedTuple):
    """How a launched job ended."""

    status: int
    stderr: str


@pytest.fixture
def torchrun(launch):
    """Return a runner of a scenario under the real launcher, on so many ranks."""

    def run(ranks: int, scenario: str, *options: str) -> Ended:
        return launch(
            *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
            *options,
            *(str(WORKERS), scenario),
        )

    return run


@pytest.fixture
def fork(launch):
    """Return a runner of a scenario without a launcher: no rank is killed when another fails."""

    def run(ranks: int, scenario: str) -> Ended:
        return launch(str(WORKERS), "--fork", str(ranks), scenario)

    return run


@pytest.fixture
def launch(tmp_path):
    """Return a runner of Python with ``tmp_path`` as last argument; it leaves no process."""
    token = f"COATI_PERF_TEST={uuid.uuid4()}"

    def run(*arguments: str) -> Ended:
        name, _, value = token.partition("=")
        ports = [_free_port() for _ in range(2)]
        environment = {
            **os.environ,
            name: value,
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(ports[0]),
            "MASTER_PORT_0": str(ports[0]),
            "MASTER_PORT_1": str(ports[1]),
            # The exceptions are asked for, not torch's C++ frames around them.
            "TORCH_SHOW_CPP_STACKTRACES": "0",
        }
        with (tmp_path / "stderr").open("w+") as stderr:
            process = subprocess.Popen(
                [sys.executable, *arguments, str(tmp_path)],
                env=environment,
                cwd=tmp_path,
                stdout=stderr,
                stderr=stderr,
            )
            try:
                process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                _end_processes(token)
                pytest.fail(f"no end within {LIMIT_S} s:\n{(tmp_path / 'stderr').read_text()}")
        left = _end_processes(token)
        assert not left, f"processes left behind: {left}"
        return Ended(process.returncode, (tmp_path / "stderr").read_text(errors="replace"))

    return run


@pytest.fixture
def said(tmp_path):
    """Return what a rank said of something, in order."""

    def read(what: str, rank: int) -> list:
        path = tmp_path / f"{what}-{rank}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    return read


@pytest.fixture
def report(tmp_path, capsys):
    """Return what ``coati-perf report`` prints of the run in ``tmp_path``."""

    def run() -> str:
        assert main(["report", str(tmp_path / "run")]) == 0
        return capsys.readouterr().out

    return run


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def _end_processes(token: str) -> list[int]:
    """Return the processes with ``token`` in their environment that a moment has not ended."""
    deadline = time.monotonic() + 1
    while (left := _processes(token)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left


def _processes(token: str) -> list[int]:
    def has_it(environment: Path) -> bool:
        try:
            return token.encode() in environment.read_bytes().split(b"\0")
        except OSError:
            return False  # ended just now, or not ours

    environments = Path("/proc").glob("[0-9]*/environ")
    return [int(path.parent.name) for path in environments if has_it(path)]
