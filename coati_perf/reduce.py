"""From the rows of all ranks to one record."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from coati_perf import catalogue
from coati_perf.cost import ANY_DEVICE_PEAK_TFLOPS
from coati_perf.machine import Machine
from coati_perf.metric import Devices, Measured, Peak, Ratio, Reduction
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


def reduce_rows(rows: Sequence[Row], machine: Machine) -> Reduced:
    """Reduce the rows of one episode, at least one of them, as the catalogue declares."""
    phases = _mean_phases(rows)
    measured = _reduce_amounts(rows, machine.once)
    measured[catalogue.EPISODE_S] = math.fsum(row.episode_s for row in rows) / len(rows)
    measured.update(phase_metrics(phases))
    measured.update(_close_account(rows))
    reported = msgspec.structs.replace(machine, ranks=len(rows))
    metrics, impossible = with_ratios(measured, reported)
    slowest = _slowest(rows)
    metrics[catalogue.RANKS_REPORTED] = float(len(rows))
    metrics[catalogue.RANKS_MISSING] = float(machine.ranks - len(rows))
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
    measured: Mapping[str, float], machine: Machine
) -> tuple[dict[str, float], dict[str, Impossible]]:
    """Return ``measured`` with every combined metric, ratio and loss that is defined.

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
        peak = 1.0 if ratio.peak is None else machine.peak(ratio.peak)
        if numerator is None or not denominator or peak is None:
            continue
        devices = 1 if ratio.devices is None else machine.devices(ratio.devices)
        value = ratio.scale * numerator / (denominator * devices * peak)
        flaw = _why_impossible(ratio, value, machine)
        if flaw is None:
            metrics[ratio.name] = value
        else:
            impossible[ratio.name] = flaw
    metrics.update(_lost(metrics, machine))
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


def _lost(metrics: Mapping[str, float], machine: Machine) -> dict[str, float]:
    """Seconds of each phase above its useful work's at the peak of the devices that share it."""
    lost = {}
    for phase, (seconds, needs, devices) in _LEAST_TIMES.items():
        leasts = [
            1e-12 * metrics[amount] / (machine.devices(devices) * peak)
            for amount, kind in needs
            if amount in metrics and (peak := machine.peak(kind)) is not None
        ]
        if leasts and seconds in metrics:
            lost[catalogue.lost_seconds(phase)] = metrics[seconds] - max(leasts)
    return lost


# What a phase's time can't be below: its FLOP, and for generation its bytes too.
_LEAST_TIMES = {
    "generate": (
        catalogue.GENERATE_S,
        ((catalogue.GENERATE_FLOP, Peak.TFLOPS), (catalogue.GENERATE_BYTES, Peak.BANDWIDTH)),
        Devices.ROLLOUT,
    ),
    "score": (catalogue.SCORE_S, ((catalogue.SCORE_FLOP, Peak.TFLOPS),), Devices.TRAINER),
    "learn": (catalogue.LEARN_S, ((catalogue.LEARN_FLOP, Peak.TFLOPS),), Devices.TRAINER),
}


def _why_impossible(ratio: Ratio, value: float, machine: Machine) -> Impossible | None:
    if ratio.peak is not None:
        reason = f"above what a device can do ({machine.peak_source})"
        return Impossible(value, 1.0, reason) if value > 1 else None
    if ratio.unit != "TFLOP/s":
        return None
    peak = machine.peak_tflops
    if peak is not None and value > peak:
        return Impossible(value, peak, f"above the peak of this device ({machine.peak_source})")
    if value > ANY_DEVICE_PEAK_TFLOPS:
        return Impossible(value, ANY_DEVICE_PEAK_TFLOPS, "above the peak of any device there is")
    return None


def _mean_phases(rows: Sequence[Row]) -> dict[str, float]:
    """Mean seconds by path, in the order in which the ranks first met them."""
    paths = dict.fromkeys(path for row in rows for path in row.seconds)
    return {
        path: math.fsum(row.seconds.get(path, 0.0) for row in rows) / len(rows) for path in paths
    }


def _reduce_amounts(rows: Sequence[Row], once: float) -> dict[str, float]:
    reduced = {}
    for name in dict.fromkeys(name for row in rows for name in row.amounts):
        metric = catalogue.CATALOGUE[name]
        assert isinstance(metric, Measured)
        values = [row.amounts[name] for row in rows if name in row.amounts]
        if metric.reduction is Reduction.MAX:
            reduced[name] = max(values)
        else:
            total = math.fsum(values) * (once if metric.per_replica else 1)
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
