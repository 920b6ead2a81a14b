"""What sinks cost the training thread and the memory, however many and however slow they are.

First: the episode's end with 8 sinks beside 1, in turns. Second: 100,000 episodes at full speed
with one sink 100 times slower than the others, and how far the process's memory rises. Run
``python benchmarks/sink_load.py``; about four minutes, with ``--quick`` some seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from coati_perf import PerformanceEvaluator
from coati_perf.record import EpisodeRecord
from hook_pairs import PARAMETERS
from table import Comparison, render
from timing import percentile

# Stands for generation and learning, in which the background threads get their time.
_EPISODE_S = 0.01


class Slow:
    """A sink that takes its time over each episode, and counts what it got."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds
        self.episodes = 0

    def open(self, header: Any) -> None: ...

    def write(self, record: EpisodeRecord) -> None:
        if self._seconds:
            time.sleep(self._seconds)
        self.episodes += 1

    def close(self, summary: Any) -> None: ...


def one_and_eight(folder: Path, episodes: int) -> Comparison:
    """Time the episode's end with 8 CSV sinks, and with 1, in turns."""
    microseconds: dict[int, list[float]] = {1: [], 8: []}
    evaluators = {
        number: PerformanceEvaluator(
            *PARAMETERS,
            run_dir=folder / f"run-{number}",
            sinks=[f"csv:{folder / f'{number}-{sink}.csv'}" for sink in range(number)],
        )
        for number in microseconds
    }
    for episode in range(episodes):
        for number, evaluator in evaluators.items():
            evaluator.on_episode_start(episode)
            with evaluator.phase("learn"):
                time.sleep(_EPISODE_S)
            began = time.perf_counter()
            evaluator.on_episode_end(episode)
            microseconds[number].append(1e6 * (time.perf_counter() - began))
            time.sleep(_EPISODE_S)
    for evaluator in evaluators.values():
        evaluator.close()
    return Comparison(
        "episode's end with 8 sinks",
        statistics.median(microseconds[8]),
        "with 1 sink",
        statistics.median(microseconds[1]),
        unit="µs",
        aim="1.0",
        ours_p99=percentile(microseconds[8], 99),
        theirs_p99=percentile(microseconds[1], 99),
    )


def backlog(folder: Path, episodes: int) -> dict[str, float]:
    """Run episodes as fast as they are recorded, with a sink that takes 100 times as long."""
    quick, slow = Slow(), Slow()
    evaluator = PerformanceEvaluator(
        *PARAMETERS, run_dir=folder / "run", sinks=[quick, slow], close_timeout_s=1.0
    )
    warm_up = episodes // 20
    peak = base = 0.0
    began = time.perf_counter()
    for episode in range(episodes):
        with evaluator.episode(episode), evaluator.phase("learn"):
            pass
        while evaluator._fit._run.recorder.recorded_episodes < episode - 100:
            time.sleep(0.001)
        if episode == warm_up:
            slow._seconds = 100 * (time.perf_counter() - began) / warm_up
            base = _resident_mb()
        elif episode > warm_up and episode % 100 == 0:
            peak = max(peak, _resident_mb())
    behind = slow.episodes
    evaluator.close()
    return {
        "episodes": episodes,
        "slow_sink_s": slow._seconds,
        "quick_sink_got": quick.episodes,
        "slow_sink_got": behind,
        "memory_before_mb": base,
        "rise_mb": peak - base,
    }


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run; its figures are rough")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write them as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        comparison = one_and_eight(Path(name) / "number", 20 if arguments.quick else 500)
        print(render([comparison]), flush=True)
        memory = backlog(Path(name) / "backlog", 2_000 if arguments.quick else 100_000)
        print("\n" + ", ".join(f"{what} {value:,.6g}" for what, value in memory.items()))
    if arguments.output is not None:
        figures = {"sinks": comparison.as_dict(), "backlog": memory}
        arguments.output.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
