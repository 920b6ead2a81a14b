"""The thread that feeds a sink, with sinks that fail."""

from __future__ import annotations

import threading
import time

import pytest

from coati_perf.journal import FILE_NAME
from coati_perf.record import EpisodeRecord, Header, Summary
from coati_perf.sinks import SinkSource
from coati_perf.sinks.cursor import Cursor
from coati_perf.sinks.worker import SinkWorker


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


class Stuck(Recording):
    def write(self, record):
        threading.Event().wait()


def fit(evaluator, episodes=3):
    for episode in range(episodes):
        with evaluator.episode(episode):
            pass
        wait_for_record(evaluator, episode)
    evaluator.close()


def wait_for_record(evaluator, episode):
    deadline = time.monotonic() + 10
    while evaluator.latest_record is None or evaluator.latest_record.episode < episode:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("fails", [(), (1,), (2,), (3, 4), (5,)])
def test_a_sink_that_fails_gets_everything_once_in_order(fails, make_evaluator, read_run, caplog):
    sink = Recording(fails)
    fit(make_evaluator(sinks=[sink]))
    run = read_run()
    assert [type(line) for line in sink.lines] == [Header, *3 * [EpisodeRecord], Summary]
    assert sink.lines == [run.header, *run.episodes, run.summary]
    assert sum("failed (ConnectionError: down)" in message for message in caplog.messages) == bool(
        fails
    )


def test_a_call_that_fails_in_the_last_round_is_made_once_more(make_evaluator, tmp_path):
    """However late the thread wakes: here it first runs when the whole run is written."""
    fit(make_evaluator())
    sink = Recording(fails=(5,))
    source = SinkSource("late", lambda: sink)
    worker = SinkWorker(source, tmp_path / "run" / FILE_NAME, Cursor(tmp_path, "late", 0))
    worker.finish()
    assert worker.join(10)
    assert [type(line) for line in sink.lines] == [Header, *3 * [EpisodeRecord], Summary]


def test_sinks_work_on_threads_of_their_own(make_evaluator):
    sinks = [Recording(), Recording()]
    fit(make_evaluator(sinks=sinks))
    names = [sink.threads for sink in sinks]
    assert names[0] == names[1] == {"coati_perf-sink-Recording"}
    assert threading.main_thread().name not in names[0]


def test_a_sink_that_hangs_holds_up_neither_training_nor_the_other_sink(
    make_evaluator, read_run, caplog
):
    healthy = Recording()
    started = time.monotonic()
    fit(make_evaluator(sinks=[Stuck(), healthy], close_timeout_s=0.5))
    assert time.monotonic() - started < 5
    assert len(healthy.lines) == 5
    assert read_run().summary.status == "finished"
    assert (
        "sink Stuck got 0 of 3 episodes and was not closed (not done within 0.5 s)" in caplog.text
    )


def test_a_sink_that_never_recovers_is_named_with_its_error(make_evaluator, caplog):
    fit(make_evaluator(sinks=[Recording(range(1, 100))]))
    assert "got 0 of 3 episodes and was not closed (ConnectionError: down)" in caplog.text
