"""The figures of a whole run, added up from its records as they come."""

from __future__ import annotations

from coati_perf import catalogue
from coati_perf.machine import Machine
from coati_perf.metric import Measured
from coati_perf.record import EpisodeRecord, Impossible
from coati_perf.reduce import with_ratios


class RunTotals:
    """Sums over the episodes of one run, in constant memory.

    Ratios of the run are sum ÷ sum over all its episodes, never means of the episodes' ratios.
    """

    def __init__(self, machine: Machine) -> None:
        self.episodes = 0
        self.first_episode: int | None = None
        self.last_episode: int | None = None
        self.phases: dict[str, float] = {}
        self.faults: dict[str, int] = {}
        self.incomplete_episodes = 0
        self.slowest_seconds: dict[tuple[int, str], float] = {}
        self.machine = machine
        self._measured: dict[str, float] = {}

    def add(self, record: EpisodeRecord) -> None:
        """Count one episode in."""
        self.episodes += 1
        if self.first_episode is None:
            self.first_episode = record.episode
        self.last_episode = record.episode
        self.incomplete_episodes += bool(record.ranks_missing)
        for name, value in record.metrics.items():
            if _adds_up(name):
                catalogue.merge(self._measured, {name: value})
        for path, seconds in record.phases.items():
            self.phases[path] = self.phases.get(path, 0.0) + seconds
        for fault, count in record.faults.items():
            self.faults[fault] = self.faults.get(fault, 0) + count
        if record.slowest is not None:
            key = record.slowest.rank, record.slowest.phase
            excess = record.slowest.seconds - record.slowest.mean_s
            self.slowest_seconds[key] = self.slowest_seconds.get(key, 0.0) + excess

    def figures(self) -> tuple[dict[str, float], dict[str, Impossible]]:
        """Return the run's metrics, and the figures that no device could reach."""
        return with_ratios(self._measured, self.machine)


def _adds_up(name: str) -> bool:
    return catalogue.is_phase_time(name) or isinstance(catalogue.CATALOGUE.get(name), Measured)
