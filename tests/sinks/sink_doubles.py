"""Sinks that keep what they get, or fail as told, and lines to feed them."""

from __future__ import annotations

import threading

from coati_perf.machine import Machine
from coati_perf.record import EpisodeRecord, Header, Summary


class Recording:
    """Keeps what it gets; raises at the calls whose numbers are in ``fails``."""

    def __init__(self, fails=()):
        self.lines = []
        self.calls = 0
        self.threads = set()
        self._fails = fails

    def _take(self, line):
        self.calls += 1
        self.threads.add(threading.current_thread().name)
        if self.calls in self._fails:
            raise ConnectionError("down")
        self.lines.append(line)

    open = write = close = _take

    @property
    def episodes(self):
        return [line.episode for line in self.lines if isinstance(line, EpisodeRecord)]


class WholeRun(Recording):
    needs_whole_run = True


def header(run_id="run"):
    return Header(
        run_id=run_id, at=0.0, segment=0, run_dir="/r", train_config={}, seed_config_line="",
        convention="coati", cost_model={}, ignore_episodes=0, world_size=1, exchange="none",
        machine=Machine(ranks=1), device="cpu", host="h", pid=1, versions={},
    )  # fmt: skip


def episode(number, run_id="run"):
    return EpisodeRecord(
        run_id=run_id, at=1.0 + number, episode=number, convention="coati", phases={}, ranks=1,
        metrics={"perf/time/episode_s": 1.0},
    )  # fmt: skip


def summary(run_id="run"):
    return Summary(run_id=run_id, at=9.0, status="finished", episodes=1)
