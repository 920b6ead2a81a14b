"""From the rows of all ranks to one record."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from coati_perf import catalogue
from coati_perf.cost import ANY_DEVICE_PEAK_TFLOPS
from coati_perf.metric import Measured, Reduction
from coati_perf.record import Impossible, Slowest
from coati_perf.row import Row

# A later phase is named the cause only if its excess is this much above that of an earlier one:
# where one rank is late, the others wait for it in the next phase by the very same seconds.
_TIE = 1.05

# Phases that fill an episode to the brim may exceed it by the rounding of their sum.
_ROUNDING_S = 1e-9


class Reduced(msgspec.Struct, frozen=True):
    """The figures of one episode over all ranks; see ``EpisodeRecord`` for the fields."""

    metrics: dict[str, float]
    phases: dict[str, float]
    slowest: Slowest | None
    impossible: dict[str, Impossible]
    faults: dict[str, int]


def reduce_rows(rows: Sequence[Row], world_size: int, peak_tflops: float | None) -> Reduced:
    """Reduce the rows of one episode, at least one of them, as the catalogue declares."""
    phases = _mean_phases(rows)
    measured = _reduce_amounts(rows)
    measured[catalogue.EPISODE_S] = math.fsum(row.episode_s for row in rows) / len(rows)
    measured.update(phase_metrics(phases))
    measured.update(_close_account(rows))
    metrics, impossible = with_ratios(measured, len(rows), peak_tflops)
    slowest = _slowest(rows)
    metrics[catalogue.RANKS_REPORTED] = float(len(rows))
    metrics[catalogue.RANKS_MISSING] = float(world_size - len(rows))
    metrics[catalogue.IMPOSSIBLE_FIGURES] = float(len(impossible))
    if slowest is not None:
        metrics[catalogue.SLOWEST_RANK] = float(slowest.rank)
        metrics[catalogue.SLOWDOWN] = slowest.seconds / slowest.mean_s
    faults: dict[str, int] = {}
    for row in rows:
        for fault, count in row.faults.items():
            faults[fault] = faults.get(fault, 0) + count
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    return Reduced(finite, phases, slowest, impossible, faults)


def with_ratios(
    measured: Mapping[str, float], devices: int, peak_tflops: float | None
) -> tuple[dict[str, float], dict[str, Impossible]]:
    """Return ``measured`` with every combined metric and ratio that is defined.

    A rate above what a device can do comes back in the second dict and not in the first.
    """
    metrics = dict(measured)
    impossible: dict[str, Impossible] = {}
    for combined in catalogue.COMBINED:
        if any(part in measured for part in combined.parts):
            parts = [measured.get(part, 0.0) for part in combined.parts]
            metrics[combined.name] = min(parts) if combined.least else sum(parts)
    for ratio in catalogue.RATIOS:
        numerator = metrics.get(ratio.numerator)
        denominator = metrics.get(ratio.denominator)
        if numerator is None or not denominator:
            continue
        value = ratio.scale * numerator / (denominator * (devices if ratio.per_device else 1))
        flaw = _why_impossible(value, peak_tflops) if ratio.unit == "TFLOP/s" else None
        if flaw is None:
            metrics[ratio.name] = value
        else:
            impossible[ratio.name] = flaw
    return metrics, impossible


def phase_metrics(phases: Mapping[str, float]) -> dict[str, float]:
    """Return the time metric of every phase name, summed over the places it occurs at.

    A phase inside one of its own name is part of that one and counts once.
    """
    seconds: dict[str, float] = {}
    for path, value in phases.items():
        *around, phase = path.split("/")
        if phase not in around:
            name = catalogue.phase_time(phase).name
            seconds[name] = seconds.get(name, 0.0) + value
    return seconds


def _why_impossible(tflops: float, peak_tflops: float | None) -> Impossible | None:
    if peak_tflops is not None and tflops > peak_tflops:
        return Impossible(tflops, peak_tflops, "above the peak_tflops given for this device")
    if tflops > ANY_DEVICE_PEAK_TFLOPS:
        return Impossible(tflops, ANY_DEVICE_PEAK_TFLOPS, "above the peak of any device there is")
    return None


def _mean_phases(rows: Sequence[Row]) -> dict[str, float]:
    """Mean seconds by path, in the order in which the ranks first met them."""
    paths = dict.fromkeys(path for row in rows for path in row.seconds)
    return {
        path: math.fsum(row.seconds.get(path, 0.0) for row in rows) / len(rows) for path in paths
    }


def _reduce_amounts(rows: Sequence[Row]) -> dict[str, float]:
    reduced = {}
    for name in dict.fromkeys(name for row in rows for name in row.amounts):
        metric = catalogue.CATALOGUE[name]
        assert isinstance(metric, Measured)
        values = [row.amounts[name] for row in rows if name in row.amounts]
        if metric.reduction is Reduction.MAX:
            reduced[name] = max(values)
        else:
            total = math.fsum(values)
            reduced[name] = total if metric.reduction is Reduction.SUM else total / len(rows)
    return reduced


def _top_level(row: Row) -> Iterable[float]:
    return (seconds for path, seconds in row.seconds.items() if "/" not in path)


def _close_account(rows: Sequence[Row]) -> dict[str, float]:
    """Seconds in no phase, and seconds in several at once: phases + other − overlap = episode."""
    remainders = [row.episode_s - math.fsum(_top_level(row)) for row in rows]
    other = math.fsum(max(remainder, 0.0) for remainder in remainders) / len(rows)
    overlap = math.fsum(max(-remainder, 0.0) for remainder in remainders) / len(rows)
    account = {catalogue.OTHER_S: other}
    if overlap > _ROUNDING_S:
        account[catalogue.OVERLAP_S] = overlap
    return account


def _slowest(rows: Sequence[Row]) -> Slowest | None:
    """Find the rank furthest above the mean of a top-level phase (see ``_TIE``)."""
    if len(rows) == 1:
        return None
    worst: Slowest | None = None
    for path, mean in _mean_phases(rows).items():
        if "/" in path or mean <= 0:
            continue
        row = max(rows, key=lambda row: row.seconds.get(path, 0.0))
        seconds = row.seconds.get(path, 0.0)
        if worst is None or seconds - mean > _TIE * (worst.seconds - worst.mean_s):
            worst = Slowest(rank=row.rank, phase=path, seconds=seconds, mean_s=mean)
    return worst
