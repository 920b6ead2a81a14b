"""The thread that feeds a sink, with sinks that fail."""

from __future__ import annotations

import threading
import time

import pytest
from sink_doubles import Recording, episode, header, summary

from coati_perf.journal import FILE_NAME
from coati_perf.record import EpisodeRecord, Header, Summary
from coati_perf.sinks import SinkSource
from coati_perf.sinks.cursor import Cursor
from coati_perf.sinks.worker import SinkWorker


class Stuck(Recording):
    def write(self, record):
        threading.Event().wait()


def fit(evaluator, episodes=3):
    for number in range(episodes):
        with evaluator.episode(number):
            pass
        wait_for_record(evaluator, number)
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
    assert "got 0 of 3 episodes and was not closed (ConnectionError: down); later: " in caplog.text


def test_a_call_that_never_returns_is_given_up_for_another_sink_of_the_name(
    write, tmp_path, monkeypatch
):
    """Only a sink with a name can be made anew; the one that hangs keeps its thread."""
    monkeypatch.setattr("coati_perf.sinks.worker.CALL_LIMIT_S", 0.2)
    made = [Stuck(), Recording()]
    sinks = list(made)
    path = write(header(), episode(0), summary())
    cursor = Cursor(tmp_path, "name", 0)
    worker = SinkWorker(SinkSource("name", lambda: sinks.pop(0)), path, cursor)
    deadline = time.monotonic() + 10
    while not made[1].lines or made[1].lines[-1] != summary():
        worker.wake()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    worker.finish()
    assert worker.join(10)
    assert made[1].lines == [header(), episode(0), summary()]
    assert worker.errors == 1


def test_the_health_of_each_sink_is_in_the_records(make_evaluator, read_run):
    broken, healthy = Recording(range(1, 100)), Recording()
    fit(make_evaluator(sinks=[healthy, broken]), episodes=4)
    last = read_run().episodes[-1].metrics
    assert last["perf/sink/Recording_errors"] == 0
    assert last["perf/sink/Recording_2_errors"] >= 1
    assert last["perf/sink/Recording_2_lag_episodes"] == 3
    assert last["perf/sink/Recording_2_dropped"] == 0
    assert last["perf/health/journal_waiting"] == 0


def test_a_restart_in_the_same_folder_goes_on_where_each_sink_stood(make_evaluator, read_run):
    first = make_evaluator(sinks=[Recording(range(1, 100))])
    fit(first, episodes=2)
    healed = Recording()
    fit(make_evaluator(sinks=[healed]), episodes=3)
    assert healed.episodes == [0, 1, 0, 1, 2]
    assert healed.lines[0].run_id != healed.lines[-1].run_id
