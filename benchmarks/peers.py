"""A phase beside what other libraries offer for the same."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from torch.profiler import record_function

from coati_perf import PerformanceEvaluator
from table import Comparison
from timing import Loop, nanoseconds_per_call

OURS = 'with phase("generate")'


def compare(folder: Path, *, calls: int, rounds: int) -> Iterator[Comparison]:
    """Yield a phase beside Lightning's ``Throughput.update`` and torch's ``record_function``."""
    evaluator = PerformanceEvaluator(1, 1, 1, 1, run_dir=folder / "phase")
    evaluator.on_episode_start(0)
    peers = {
        "Lightning Throughput.update": _throughput(),
        "torch record_function, no profiler": _record_function,
    }
    figures = nanoseconds_per_call({OURS: _phase(evaluator), **peers}, calls, rounds)
    evaluator.on_episode_end(0)
    evaluator.on_fit_end()
    for peer in peers:
        yield Comparison(OURS, figures[OURS], peer, figures[peer])


def _phase(evaluator: PerformanceEvaluator) -> Loop:
    def loop(calls: int) -> None:
        for _ in range(calls):
            with evaluator.phase("generate"):
                pass

    return loop


def _throughput() -> Loop:
    from lightning.fabric.utilities.throughput import Throughput

    throughput = Throughput()
    batches = 0
    clock = time.perf_counter

    def loop(calls: int) -> None:
        nonlocal batches
        for _ in range(calls):
            batches += 1
            # The clock is read by its caller, so that reading it belongs to the cost.
            throughput.update(
                time=clock(), batches=batches, samples=4 * batches, lengths=256 * batches
            )

    return loop


def _record_function(calls: int) -> None:
    for _ in range(calls):
        with record_function("generate"):
            pass
