"""Tests that every sink passes, for those who write one.

In a test module of your own::

    from coati_perf.testing import SinkConformance

    class TestMySink(SinkConformance):
        sink = "mine:{folder}/data"

        def read(self, folder, run_id):
            return {episode: metrics for …}

Needs pytest, and the sink's entry point to be installed.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from coati_perf import __version__
from coati_perf.journal import FILE_NAME, JournalWriter
from coati_perf.machine import Machine
from coati_perf.plain import plain
from coati_perf.record import EpisodeRecord, Header, JournalLine, Summary
from coati_perf.sinks.base import Sink
from coati_perf.sinks.cursor import Cursor
from coati_perf.sinks.delivery import Delivery
from coati_perf.sinks.registry import parse_sinks

FLOATS = (0.0, -0.0, 1.0, -1.5, 1 / 3, 1e-10, 2.0**53, 2.0**63, 1e308, -1e308, 5e-324)

CONFIG: Mapping[Any, Any] = {
    "lr": 1e-6,
    "nested": {"a": [1, {"b": None}], "": "empty key", "deep.er/key (%)": True},
    "text; with\nlines": "a; b\r\nc\t\x00 ☃ 🦝",
    "long": "x" * 9000,
    "numbers": [2**63, -(2**63), 2**70, float("nan"), float("inf")],
    "none": None,
    "bytes": b"\xff",
    "callable": len,
    1: "a key that is no string",
}

# Ends as a process does that is killed: nothing is closed, nothing at exit is done.
_DELIVER_AND_DIE = """
import os, pathlib, sys
from coati_perf.sinks.cursor import Cursor
from coati_perf.sinks.delivery import Delivery
from coati_perf.sinks.registry import parse_sinks
folder = pathlib.Path(sys.argv[1])
(source,) = parse_sinks([sys.argv[2]])
Delivery(source.make(), folder / "journal.jsonl", Cursor(folder, "sink", 0)).catch_up()
os._exit(0)
"""

# How long a process may take that is not killed, in seconds.
_LIMIT_S = 120


def make_header(run_id: str, run_dir: Path, config: Mapping[Any, Any] = CONFIG) -> Header:
    """Return the first line of a run, for tests."""
    return Header(
        run_id=run_id,
        at=1.7e9,
        segment=0,
        run_dir=str(run_dir),
        train_config=plain(config),
        seed_config_line="",
        convention="exact",
        cost_model={},
        ignore_episodes=0,
        world_size=1,
        exchange="none",
        device="cpu",
        host="host",
        pid=os.getpid(),
        versions={"coati_perf": __version__},
        machine=Machine(ranks=1),
    )


def make_record(run_id: str, episode: int, metrics: Mapping[str, float]) -> EpisodeRecord:
    """Return the line of an episode, for tests."""
    return EpisodeRecord(
        run_id=run_id,
        at=1.7e9 + episode,
        episode=episode,
        convention="exact",
        metrics=dict(metrics),
        phases={},
        ranks=1,
    )


def make_summary(run_id: str, episodes: int, status: str = "finished") -> Summary:
    """Return the last line of a run, for tests."""
    last = episodes - 1 if episodes else None
    return Summary(run_id=run_id, at=1.8e9, status=status, episodes=episodes, last_episode=last)


def some_metrics(episode: int) -> dict[str, float]:
    """Return metrics that differ in every episode, one of a user's own phase among them."""
    return {
        "perf/time/episode_s": 1.5 + episode,
        "perf/time/my-phase.1_s": 0.25 * episode,
        "perf/samples/learned": 8.0 * episode,
    }


class SinkConformance:
    """Subclass it, name the ``sink`` and say how to ``read`` back what it wrote.

    ``{folder}`` in the name, and in the values of ``environment``, is a fresh folder for each
    test. ``keeps`` is ``"all"`` or, of a backend that holds the present alone, ``"last"``. Set
    ``exactly_once`` to False where the backend can't say what it has, so that what was on its way
    when the process was killed may be there twice.
    """

    sink: ClassVar[str]
    environment: ClassVar[Mapping[str, str]] = {}
    keeps: ClassVar[str] = "all"
    exactly_once: ClassVar[bool] = True
    kills: ClassVar[int] = 4

    def read(self, folder: Path, run_id: str) -> Mapping[int, Mapping[str, float]]:
        """Return the metrics of every episode of a run; raise where an episode is there twice."""
        raise NotImplementedError

    def held(self, value: float) -> float:
        """Return what the backend makes of a value, such as float32."""
        return value

    @pytest.fixture(autouse=True)
    def _environment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value.format(folder=tmp_path))

    def test_episodes_are_there_as_they_were(self, tmp_path: Path) -> None:
        """Whatever the run was like."""
        self._deliver(tmp_path, self._run(tmp_path, "run", 3))
        self._check(tmp_path, "run", 3)

    @pytest.mark.parametrize("value", FLOATS)
    def test_every_float_is_held(self, tmp_path: Path, value: float) -> None:
        name = "perf/samples/learned"
        lines: list[JournalLine] = [
            make_header("run", tmp_path),
            make_record("run", 0, {**some_metrics(0), name: value}),
            make_summary("run", 1),
        ]
        self._deliver(tmp_path, lines)
        assert repr(self.read(tmp_path, "run")[0][name]) == repr(self.held(value))

    @pytest.mark.parametrize("status", ["failed", "killed"])
    def test_a_run_that_did_not_finish_can_be_closed(self, tmp_path: Path, status: str) -> None:
        *lines, _ = self._run(tmp_path, "run", 2)
        self._deliver(tmp_path, [*lines, make_summary("run", 2, status)])
        self._check(tmp_path, "run", 2)

    def test_runs_without_an_episode_or_a_config_are_no_trouble(self, tmp_path: Path) -> None:
        self._deliver(tmp_path, [make_header("run", tmp_path, {}), make_summary("run", 0)])

    def test_a_call_may_come_twice(self, tmp_path: Path) -> None:
        """As it does after one that failed when its work was done."""
        sink = self._make(tmp_path)
        header, *records, summary = self._run(tmp_path, "run", 2)
        assert isinstance(header, Header)
        assert isinstance(summary, Summary)
        sink.open(header)
        for record in records:
            assert isinstance(record, EpisodeRecord)
            sink.write(record)
            if self.exactly_once:
                sink.write(record)
        sink.close(summary)
        sink.close(summary)
        self._check(tmp_path, "run", 2)

    def test_what_comes_before_open_is_an_error(self, tmp_path: Path) -> None:
        """An error that is swallowed would lose the episode."""
        with pytest.raises(Exception):  # noqa: B017, PT011 - whichever the sink finds fit
            self._make(tmp_path).write(make_record("run", 0, some_metrics(0)))

    def test_a_sink_may_be_opened_for_another_run(self, tmp_path: Path) -> None:
        first, second = self._run(tmp_path, "first", 2), self._run(tmp_path, "second", 3)
        self._deliver(tmp_path, [*first, *second])
        if self.keeps == "all":
            self._check(tmp_path, "first", 2)
        self._check(tmp_path, "second", 3)

    def test_a_run_that_was_cut_off_is_completed(self, tmp_path: Path) -> None:
        """Another process, with a sink of its own, gets the rest, or all of it again."""
        lines = self._run(tmp_path, "run", 4)
        for part in (lines[:3], lines[3:]):
            self._append(tmp_path, part)
            self._python(tmp_path, ["-c", _DELIVER_AND_DIE, str(tmp_path)])
        self._check(tmp_path, "run", 4)

    def test_a_kill_loses_nothing_and_repeats_nothing(self, tmp_path: Path) -> None:
        """``coati-perf replay`` is killed at random moments, and then let be."""
        episodes = 40
        elsewhere, here = tmp_path / "elsewhere", tmp_path / "here"
        for folder in (elsewhere, here):
            folder.mkdir()
            self._append(folder, self._run(folder, "run", episodes))
        whole_s = self._replay(elsewhere)
        dice = random.Random(0)  # noqa: S311 - no secret is made of it
        for _ in range(self.kills):
            self._replay(here, kill_after_s=dice.uniform(0.2, 1.0) * whole_s)
        self._replay(here)
        self._check(here, "run", episodes)

    def _run(self, folder: Path, run_id: str, episodes: int) -> list[JournalLine]:
        records = [make_record(run_id, number, some_metrics(number)) for number in range(episodes)]
        return [make_header(run_id, folder), *records, make_summary(run_id, episodes)]

    def _make(self, folder: Path) -> Sink:
        (source,) = parse_sinks([self.sink.format(folder=folder)])
        return source.make()

    def _append(self, folder: Path, lines: Sequence[JournalLine]) -> None:
        writer = JournalWriter(folder / FILE_NAME)
        for line in lines:
            writer.append(line)
        writer.close()

    def _deliver(self, folder: Path, lines: Sequence[JournalLine]) -> None:
        self._append(folder, lines)
        Delivery(self._make(folder), folder / FILE_NAME, Cursor(folder, "sink", 0)).catch_up()

    def _replay(self, folder: Path, kill_after_s: float | None = None) -> float:
        """Replay the journal in ``folder`` to the sink; return the seconds that it took."""
        command = ["-m", "coati_perf", "replay", str(folder), "--to"]
        return self._python(folder, command, kill_after_s)

    def _python(
        self, folder: Path, arguments: Sequence[str], kill_after_s: float | None = None
    ) -> float:
        """Run Python with the sink's name as last argument; return the seconds that it took."""
        environment = {name: text.format(folder=folder) for name, text in self.environment.items()}
        started = time.monotonic()
        with subprocess.Popen(  # noqa: S603 - the sink's name is the test's own
            [sys.executable, *arguments, self.sink.format(folder=folder)],
            env={**os.environ, **environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        ) as process:
            try:
                _, error = process.communicate(timeout=kill_after_s or _LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                assert kill_after_s is not None, f"no end within {_LIMIT_S} s"
            else:
                assert process.returncode == 0, error.decode()
        return time.monotonic() - started

    def _check(self, folder: Path, run_id: str, episodes: int) -> None:
        found = self.read(folder, run_id)
        numbers = range(episodes) if self.keeps == "all" else range(episodes - 1, episodes)
        assert list(found) == list(numbers)
        for number in numbers:
            expected = {name: self.held(value) for name, value in some_metrics(number).items()}
            assert {name: found[number].get(name) for name in expected} == expected
