"""The cost of each pair of hooks, beside the seed's arithmetic."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from coati_perf import PerformanceEvaluator
from seed_arithmetic import SeedArithmetic
from table import Comparison
from timing import Loop, nanoseconds_per_call, percentile

PARAMETERS = (7_000_000_000, 7_000_000_000, 7_000_000_000, 7_000_000_000)
PEER = "seed's arithmetic"
AIM = "≤ 1.0"


class Hooks(Protocol):
    """What is measured on both sides."""

    def on_episode_start(self, episode: int) -> None: ...
    def on_episode_end(self, episode: int) -> None: ...
    def on_make_experience_start(self) -> None: ...
    def on_make_experience_end(self, experience: Any) -> None: ...
    def on_learn_batch_start(self) -> None: ...
    def on_learn_batch_end(self, experience: Any) -> None: ...


def experience(*, masked: bool = False) -> SimpleNamespace:
    """Return what ColossalChat's toy trainer makes: 4 samples, 24 prompt tokens and 40 actions."""
    return SimpleNamespace(
        attention_mask=torch.ones(4, 64, dtype=torch.long) if masked else None,
        sequences=torch.zeros(4, 64, dtype=torch.long),
        action_mask=torch.ones(4, 40, dtype=torch.bool),
    )


def compare(folder: Path, *, calls: int, rounds: int, episodes: int) -> Iterator[Comparison]:
    """Yield the learn, make-experience and ignored pairs in tight loops, then the episode pair."""
    ours = PerformanceEvaluator(*PARAMETERS, run_dir=folder / "measured")
    seed = SeedArithmetic(*PARAMETERS)
    ours.on_episode_start(0)
    seed.on_episode_start(0)
    for name, loop in (("learn pair", _learn), ("make-experience pair", _make_experience)):
        yield _pair(name, loop(ours), loop(seed), calls, rounds)
        # Each call launches a sum, and keeps its result until the episode's end.
        masked = loop(ours, masked=True)
        masked_name = f"{name}, real lengths from masks"
        pair = _pair(masked_name, masked, loop(seed), calls // 50, rounds)
        yield dataclasses.replace(pair, aim="")
    ours.on_episode_end(0)
    ours.on_fit_end()

    ours = PerformanceEvaluator(*PARAMETERS, ignore_episodes=1, run_dir=folder / "ignored")
    seed = SeedArithmetic(*PARAMETERS, ignore_episodes=1)
    ours.on_episode_start(0)
    seed.on_episode_start(0)
    yield _pair("learn pair, ignored episode", _learn(ours), _learn(seed), calls, rounds)
    ours.on_episode_end(0)
    ours.on_fit_end()

    yield _episode_pair("episode pair, single calls", folder / "alone", episodes)
    with _thread_busy_in_python():
        yield _episode_pair("the same beside a busy Python thread", folder / "beside", episodes)


@contextlib.contextmanager
def _thread_busy_in_python() -> Iterator[None]:
    """Run what wants the interpreter's lock all the time, as a data loader's thread may."""
    enough = threading.Event()

    def spin() -> None:
        while not enough.is_set():
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()


def _pair(name: str, ours: Loop, seed: Loop, calls: int, rounds: int) -> Comparison:
    figures = nanoseconds_per_call({"ours": ours, "seed": seed}, calls, rounds)
    return Comparison(name, figures["ours"], PEER, figures["seed"], aim=AIM)


def _learn(hooks: Hooks, *, masked: bool = False) -> Loop:
    start, end = hooks.on_learn_batch_start, hooks.on_learn_batch_end
    batch = experience(masked=masked)

    def loop(calls: int) -> None:
        for _ in range(calls):
            start()
            end(batch)

    return loop


def _make_experience(hooks: Hooks, *, masked: bool = False) -> Loop:
    start, end = hooks.on_make_experience_start, hooks.on_make_experience_end
    batch = experience(masked=masked)

    def loop(calls: int) -> None:
        for _ in range(calls):
            start()
            end(batch)

    return loop


def _episode_pair(what: str, folder: Path, episodes: int) -> Comparison:
    """Measure single calls: an episode takes seconds, and the recorder is idle by its end."""
    ours = PerformanceEvaluator(*PARAMETERS, run_dir=folder)
    ours.on_fit_start()
    sides: dict[str, Hooks] = {"ours": ours, "seed": SeedArithmetic(*PARAMETERS)}
    figures: dict[str, list[float]] = {name: [] for name in sides}
    batch = experience()
    stamps: list[float] = []
    for episode in range(episodes):
        for name, hooks in sides.items():
            time.sleep(0.005)
            began = time.perf_counter_ns()
            hooks.on_episode_start(episode)
            started = time.perf_counter_ns()
            hooks.on_make_experience_start()
            hooks.on_make_experience_end(batch)
            hooks.on_learn_batch_start()
            hooks.on_learn_batch_end(batch)
            ending = time.perf_counter_ns()
            hooks.on_episode_end(episode)
            ended = time.perf_counter_ns()
            figures[name].append(started - began + ended - ending)
            empty = time.perf_counter_ns()
            stamps.append(time.perf_counter_ns() - empty)
    ours.on_fit_end()
    # Two intervals, each with a stamp inside it.
    stamp = 2 * statistics.median(stamps)
    return Comparison(
        what,
        statistics.median(figures["ours"]) - stamp,
        PEER,
        statistics.median(figures["seed"]) - stamp,
        aim=AIM,
        ours_p99=percentile(figures["ours"], 99) - stamp,
        theirs_p99=percentile(figures["seed"], 99) - stamp,
    )
