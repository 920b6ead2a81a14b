"""Measure candidates in turns, so that a busy machine slows all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

Loop = Callable[[int], None]
"""Runs what is measured as often as it is told."""


def nanoseconds_per_call(
    candidates: Mapping[str, Loop], calls: int, rounds: int
) -> dict[str, float]:
    """Return each candidate's median over the rounds; every round runs all, in rotating order."""
    for loop in candidates.values():
        loop(max(calls // 10, 100))  # the interpreter specialises code that it has seen run
    names = list(candidates)
    figures: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            began = time.perf_counter_ns()
            candidates[name](calls)
            figures[name].append((time.perf_counter_ns() - began) / calls)
    return {name: statistics.median(values) for name, values in figures.items()}


def percentile(values: list[float], percent: float) -> float:
    """Return the value that ``percent`` of all are not above (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
