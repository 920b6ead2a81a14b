"""Rank 0's background thread when the disk, the store or another rank fails."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import msgspec
import pytest

from coati_perf import recorder as recorder_module
from coati_perf.exchange import NoExchange
from coati_perf.feed import Feed
from coati_perf.journal import JournalWriter, read_journal
from coati_perf.recorder import Ending, Recorder
from coati_perf.row import Departure, Row, encode

DATA = Path(__file__).parent / "data"
HEADER = read_journal(DATA / "journal_schema_1.jsonl").segments[0].header


def row(rank=0, sequence=0):
    return Row(rank, sequence, sequence, 1.0, {"learn": 0.5}, {}, {})


class ScriptedExchange(NoExchange):
    """Four ranks whose rows and departures a test puts in by hand."""

    name = "scripted"
    world_size = 4

    def __init__(self):
        super().__init__()
        self.rows = {}
        self.gone = {}
        self.discarded = []
        self.broken = False

    def collect(self, sequence, ranks, *, partial):
        if self.broken:
            raise ConnectionError("store gone")
        there = {rank: self.rows[sequence, rank] for rank in ranks if (sequence, rank) in self.rows}
        return there if partial or len(there) == len(ranks) else {}

    def departures(self, ranks):
        return {rank: self.gone[rank] for rank in ranks if rank in self.gone}

    def any_failure(self):
        return bool(self.gone)

    def discard(self, sequence, ranks):
        self.discarded.append(sequence)

    def arrive(self, rank, sequence=0):
        self.rows[sequence, rank] = encode(row(rank, sequence))

    def depart(self, rank, error=None, *, sequence=0, final=True):
        self.gone[rank] = encode(Departure(rank, sequence, sequence, error, final))


@pytest.fixture
def exchange():
    return ScriptedExchange()


@pytest.fixture
def start(tmp_path, exchange):
    def start(exchange=exchange):
        writer = JournalWriter(tmp_path / "journal.jsonl")
        writer.append(HEADER)
        return Recorder(
            msgspec.structs.replace(HEADER, world_size=exchange.world_size),
            exchange,
            Feed(writer),
            lambda: None,
            dict,
        )

    return start


def wait_until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def end(recorder, tmp_path, grace_s=0.1):
    recorder.put(Ending(None, grace_s))
    assert recorder.join(10)
    return read_journal(tmp_path / "journal.jsonl").segments[-1]


def test_an_episode_is_recorded_once_every_rank_has_sent_it(start, exchange, tmp_path):
    recorder = start()
    recorder.put(row())
    for rank in (1, 2):
        exchange.arrive(rank)
    time.sleep(0.1)
    assert recorder.latest is None
    exchange.arrive(3)
    wait_until(lambda: recorder.latest is not None)
    assert recorder.latest.ranks_missing == []
    assert exchange.discarded == [0]
    assert end(recorder, tmp_path).summary.status == "finished"


def test_episodes_are_recorded_in_order(start, exchange, tmp_path):
    recorder = start()
    for sequence in (0, 1):
        recorder.put(row(0, sequence))
    for sequence in (1, 0):
        for rank in (1, 2, 3):
            exchange.arrive(rank, sequence)
    wait_until(lambda: recorder.recorded_episodes == 2)
    assert [record.episode for record in end(recorder, tmp_path).episodes] == [0, 1]


def test_a_silent_rank_costs_a_deadline_and_a_flag(start, exchange, tmp_path, monkeypatch):
    monkeypatch.setattr(recorder_module, "GATHER_TIMEOUT_S", 0.2)
    recorder = start()
    recorder.put(row())
    exchange.arrive(1)
    exchange.arrive(3)
    wait_until(lambda: recorder.latest is not None)
    assert recorder.latest.ranks_missing == [2]
    assert recorder.latest.metrics["perf/ranks/reported"] == 3
    end(recorder, tmp_path)


def test_a_rank_whose_fit_has_ended_is_not_waited_for(start, exchange, tmp_path):
    recorder = start()
    exchange.depart(2, "ValueError: boom")
    recorder.put(row())
    exchange.arrive(1)
    exchange.arrive(3)
    wait_until(lambda: recorder.latest is not None)
    assert recorder.latest.ranks_missing == [2]
    run = end(recorder, tmp_path)
    assert [(failure.rank, failure.error) for failure in run.failures] == [(2, "ValueError: boom")]
    assert (run.summary.status, run.summary.error) == ("failed", "rank 2: ValueError: boom")


def test_a_rank_that_goes_on_after_a_failed_episode_misses_that_one_alone(
    start, exchange, tmp_path
):
    """Rows pair up by the episode: the failed one uses up its number on that rank too."""
    recorder = start()
    exchange.depart(2, "ValueError: swallowed", final=False)
    for sequence in (0, 1):
        recorder.put(row(0, sequence))
        exchange.arrive(1, sequence)
        exchange.arrive(3, sequence)
    wait_until(lambda: recorder.recorded_episodes == 1)
    time.sleep(0.1)
    assert recorder.recorded_episodes == 1, "the second episode waits for rank 2"
    exchange.arrive(2, 1)
    wait_until(lambda: recorder.recorded_episodes == 2)
    exchange.depart(2, sequence=2)
    run = end(recorder, tmp_path)
    assert [record.ranks_missing for record in run.episodes] == [[2], []]
    assert run.summary.status == "finished"


def test_ranks_that_say_nothing_when_rank_0_fails_are_named(start, exchange, tmp_path):
    recorder = start()
    exchange.depart(1, "RuntimeError: connection closed by peer")
    exchange.depart(3)
    recorder.put(Ending("RuntimeError: connection closed by peer", 0.3))
    assert recorder.join(10)
    error = read_journal(tmp_path / "journal.jsonl").segments[-1].summary.error
    assert "rank 0: RuntimeError: connection closed by peer; " in error
    assert error.endswith("; no word from rank 2 (killed, or waiting)")


def test_a_failure_is_on_the_disk_before_the_fit_ends(start, exchange, tmp_path):
    """The launcher kills rank 0 as soon as it sees the other rank's process end."""
    recorder = start()
    exchange.depart(1, "OSError: gone")
    wait_until(lambda: read_journal(tmp_path / "journal.jsonl").segments[0].failures)
    end(recorder, tmp_path)


def test_a_broken_store_leaves_rank_0s_own_figures(start, exchange, tmp_path, caplog):
    exchange.broken = True
    recorder = start()
    recorder.put(row())
    wait_until(lambda: recorder.latest is not None)
    assert recorder.latest.ranks_missing == [1, 2, 3]
    end(recorder, tmp_path)
    assert "the figures of other ranks cannot be had" in caplog.text


def test_late_rows_hold_up_the_end_for_the_grace_only(start, exchange, tmp_path):
    recorder = start()
    recorder.put(row())
    started = time.monotonic()
    run = end(recorder, tmp_path, grace_s=0.3)
    assert time.monotonic() - started < 3
    assert [record.ranks_missing for record in run.episodes] == [[1, 2, 3]]


def test_what_a_full_disk_refused_is_written_when_there_is_room(
    start, tmp_path, monkeypatch, caplog
):
    recorder = start(NoExchange())
    real, full = os.write, [True]

    def write(descriptor, data):
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    recorder.put(row(0, 0))
    recorder.put(row(0, 1))
    wait_until(lambda: recorder.recorded_episodes == 2)
    assert read_journal(tmp_path / "journal.jsonl").segments[0].episodes == []
    full[0] = False
    run = end(recorder, tmp_path)
    assert [record.episode for record in run.episodes] == [0, 1]
    assert run.summary.episodes == 2
    assert caplog.text.count("cannot be written") == 1
