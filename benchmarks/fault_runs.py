"""One run of the demo's trainer with faults injected from outside, and what it left.

The trainer runs in a forked process, which ends as an interpreter of its own does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from coati_perf import PerformanceEvaluator, read_journal
from coati_perf.callback import Callback
from coati_perf.demo.models import build_models, count_parameters
from coati_perf.demo.task import Task
from coati_perf.demo.trainer import PPOConfig, PPOTrainer
from coati_perf.pending import recover
from coati_perf.sinks import Sink

CLOSE_TIMEOUT_S = 2.0
_LIMIT_S = 120.0


class Faulty:
    """A sink that keeps what it got in a file, and fails as told: raises or hangs in a call."""

    def __init__(self, folder: Path, how: str = "", where: str = "") -> None:
        self._path = folder / "faulty.jsonl"
        self._how, self._where = how, where
        self._dice = random.Random(0)

    def open(self, header: Any) -> None:
        self._fail("open")

    def write(self, record: Any) -> None:
        self._fail("write")
        with self._path.open("a") as file:
            file.write(f"{record.episode}\n")

    def close(self, summary: Any) -> None:
        self._fail("close")

    def _fail(self, call: str) -> None:
        if self._where not in (call, "any"):
            return
        if self._how == "hang":
            threading.Event().wait()
        if self._how == "raise" or self._dice.random() < 0.5:
            message = f"{call} is down"
            raise ConnectionError(message)


class TimedHooks(Callback):
    """Passes the hooks on to an evaluator, and notes on the disk what training saw of it."""

    def __init__(self, evaluator: PerformanceEvaluator, folder: Path) -> None:
        self._evaluator = evaluator
        self._notes = os.open(folder / "notes.jsonl", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        self._delays_s: list[float] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_") or name in ("on_fit_start", "on_fit_end"):
            return object.__getattribute__(self, name)
        hook = getattr(self._evaluator, name)

        def timed(*arguments: Any) -> None:
            started = time.perf_counter()
            hook(*arguments)
            self._delays_s.append(time.perf_counter() - started)
            if name == "on_episode_end":
                self.note("finished", arguments[0])

        return timed

    def on_fit_start(self) -> None:
        self._evaluator.on_fit_start()
        self.note("started", 0)

    def on_fit_end(self) -> None:
        self.note("delays", sorted(self._delays_s))
        self.note("ending", 0)
        self._evaluator.on_fit_end()

    def note(self, what: str, value: Any) -> None:
        os.write(self._notes, json.dumps([what, value, time.monotonic()]).encode() + b"\n")


@dataclasses.dataclass
class Left:
    """What a run left.

    ``finished`` maps an episode to when the last hook of it returned to training; ``delays_s``
    are the seconds that each hook of an episode took.
    """

    folder: Path
    ended_at: float
    finished: dict[int, float]
    delays_s: list[float]
    ending_at: float | None

    @property
    def journal(self) -> Path:
        return self.folder / "run"

    def recorded(self) -> list[int]:
        recover(self.journal)
        try:
            segments = read_journal(self.journal).segments
        except (OSError, ValueError):
            return []
        return [record.episode for segment in segments for record in segment.episodes]

    @property
    def exit_s(self) -> float | None:
        """Seconds from the fit's end to the end of the process."""
        return None if self.ending_at is None else self.ended_at - self.ending_at


@dataclasses.dataclass
class Scenario:
    """Sinks beside the healthy one, what happens before each episode, and how the process ends."""

    sinks: Callable[[Path], Sequence[str | Sink]] = lambda _: ()
    before_episode: Callable[[Path, int], None] = lambda *_: None
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    kill: tuple[int, float] | None = None  # a signal, and seconds after the fit's start
    episodes: int = 12
    unprivileged: bool = False
    measured: bool = True  # by an evaluator; else how long the same process takes to exit


class _EndNoted(Callback):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_fit_end(self) -> None:
        line = json.dumps(["ending", 0, time.monotonic()])
        (self._folder / "notes.jsonl").write_text(line + "\n")


class _Disturbance(Callback):
    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self._scenario, self._folder = scenario, folder

    def on_episode_start(self, episode: int) -> None:
        self._scenario.before_episode(self._folder, episode)


def healthy(folder: Path) -> str:
    return f"csv:{folder / 'healthy.csv'}"


def run(scenario: Scenario, folder: Path) -> Left:
    """Train in a process of its own, and return what is left when that has ended."""
    folder.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _train(scenario, folder)  # never returns
    if scenario.kill is not None:
        number, after_s = scenario.kill
        while not _notes(folder):
            time.sleep(0.001)
        time.sleep(after_s)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)
    deadline = time.monotonic() + _LIMIT_S
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, 9)
        time.sleep(0.001)
    notes = _notes(folder)
    by_name = {what: value for what, value, _ in notes}
    return Left(
        folder=folder,
        ended_at=time.monotonic(),
        finished={value: at for what, value, at in notes if what == "finished"},
        delays_s=by_name.get("delays", []),
        ending_at=next((at for what, _, at in notes if what == "ending"), None),
    )


def _notes(folder: Path) -> list[tuple[str, Any, float]]:
    path = folder / "notes.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _train(scenario: Scenario, folder: Path) -> None:
    """Train as the demo does, and leave the interpreter by its own exit."""
    os.environ.update(scenario.environment)
    log = os.open(folder / "log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if scenario.unprivileged:
        folder.chmod(0o777)
        os.setuid(65534)
    torch.set_num_threads(1)
    config = PPOConfig(
        episodes=scenario.episodes,
        collect_steps=1,
        prompts_per_collect=4,
        update_steps=1,
        batch_size=4,
    )
    if not scenario.measured:
        PPOTrainer(MODELS, Task(), config, [_EndNoted(folder)]).fit()
        sys.exit(0)
    evaluator = PerformanceEvaluator(
        **count_parameters(MODELS),
        run_dir=folder / "run",
        save_path=folder / "report.txt",
        sinks=[*scenario.sinks(folder), healthy(folder)],
        close_timeout_s=CLOSE_TIMEOUT_S,
        peak_tflops=1e6,
    )
    callbacks = [_Disturbance(scenario, folder), TimedHooks(evaluator, folder)]
    PPOTrainer(MODELS, Task(), config, callbacks, phase=evaluator.phase).fit()
    sys.exit(0)


torch.set_num_threads(1)  # forked processes must not inherit a pool of threads
MODELS = build_models(Task())
