"""What a sink gets, once and in order, over kills, restarts and a journal that takes no line."""

from __future__ import annotations

import shutil

import pytest
from sink_doubles import Recording, WholeRun, episode, header, summary

from coati_perf.feed import Feed
from coati_perf.journal import FILE_NAME, JournalReader, JournalWriter
from coati_perf.record import Header, Summary
from coati_perf.sinks.cursor import Cursor
from coati_perf.sinks.delivery import Delivery


def deliver(sink, folder, *, feed=None, default=0):
    """Deliver what there is, in a process that ends then: all it leaves is the cursor's file."""
    delivery = Delivery(sink, folder / FILE_NAME, Cursor(folder, "sink", default), feed)
    delivery.catch_up()
    return delivery


def test_a_second_process_goes_on_where_the_first_stood(write, tmp_path):
    first, second = Recording(), Recording()
    write(header(), episode(0), episode(1))
    deliver(first, tmp_path)
    write(episode(2), summary())
    deliver(second, tmp_path)
    assert first.lines == [header(), episode(0), episode(1)]
    assert second.lines == [header(), episode(2), summary()]


def test_a_sink_that_needs_whole_runs_gets_the_one_that_was_cut_off_again(write, tmp_path):
    first, second, third = WholeRun(), WholeRun(), WholeRun()
    write(header("a"), episode(0, "a"), summary("a"), header("b"), episode(5, "b"))
    deliver(first, tmp_path)
    assert first.episodes == [0, 5]
    write(episode(6, "b"), summary("b"))
    deliver(second, tmp_path)
    assert [line.run_id for line in second.lines] == ["b", "b", "b", "b"]
    assert second.episodes == [5, 6]
    deliver(third, tmp_path)
    assert third.lines == []


@pytest.mark.parametrize("kind", [Recording, WholeRun])
def test_a_run_that_was_cut_off_is_closed_when_the_next_one_begins(kind, write, tmp_path):
    sink = kind()
    write(header("a"), episode(0, "a"), episode(1, "a"))
    deliver(sink, tmp_path)
    write(header("b"), episode(0, "b"))
    restarted = kind()
    deliver(restarted, tmp_path)
    closing = next(line for line in restarted.lines if isinstance(line, Summary))
    assert (closing.run_id, closing.status) == ("a", "killed")
    assert (closing.episodes, closing.last_episode) == (2, 1)
    after = restarted.lines[restarted.lines.index(closing) + 1 :]
    assert after == [header("b"), episode(0, "b")]


def test_a_replay_of_a_dead_run_closes_it_once(write, tmp_path):
    write(header(), episode(0))
    first, second = Recording(), Recording()
    deliver(first, tmp_path).finish()
    assert first.lines[-1].status == "killed"
    deliver(second, tmp_path).finish()
    assert second.lines == []


def test_a_sink_new_to_a_journal_begins_where_it_is_told(write, tmp_path):
    size = write(header("a"), episode(0, "a"), summary("a")).stat().st_size
    write(header("b"))
    sink = Recording()
    deliver(sink, tmp_path, default=size)
    assert sink.lines == [header("b")]


@pytest.mark.parametrize("failing", [1, 2, 3, 4])
def test_what_a_sink_failed_on_comes_again_and_nothing_before_it(failing, write, tmp_path):
    write(header(), episode(0), episode(1), summary())
    sink = Recording(fails=(failing,))
    delivery = Delivery(sink, tmp_path / FILE_NAME, Cursor(tmp_path, "sink", 0))
    with pytest.raises(ConnectionError):
        delivery.catch_up()
    delivery.catch_up()
    assert sink.lines == [header(), episode(0), episode(1), summary()]


class Refusing(JournalWriter):
    """A journal on a disk that is full for a while."""

    full = False

    def append(self, line):
        if self.full:
            raise OSError(28, "No space left on device")
        super().append(line)


def append(feed, *lines):
    for line in lines:
        try:
            feed.append(line)
        except OSError:
            assert feed.journal.full


def test_lines_that_the_journal_refuses_reach_sinks_from_memory_once(tmp_path):
    writer = Refusing(tmp_path / FILE_NAME)
    feed = Feed(writer)
    quick, slow = Recording(), Recording()
    append(feed, header(), episode(0))
    delivery = deliver(quick, tmp_path, feed=feed)
    writer.full = True
    append(feed, episode(1), episode(2))
    delivery.catch_up()
    assert quick.episodes == [0, 1, 2]
    assert feed.waiting == 2
    writer.full = False
    append(feed, episode(3), summary())
    assert feed.waiting == 0
    delivery.catch_up()
    late = Delivery(slow, tmp_path / FILE_NAME, Cursor(tmp_path, "slow", 0), feed)
    late.catch_up()
    for sink in (quick, slow):
        assert sink.episodes == [0, 1, 2, 3]
        assert sink.lines[-1] == summary()
    assert [type(line) for line in JournalReader(writer.path).lines()][-1] is Summary


def test_memory_is_bounded_and_what_it_gave_up_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("coati_perf.feed._MAX_WAITING", 3)
    writer = Refusing(tmp_path / FILE_NAME)
    feed = Feed(writer)
    writer.full = True
    append(feed, *map(episode, range(5)))
    assert (feed.waiting, feed.lost) == (3, 2)


def test_a_journal_that_is_deleted_is_there_again_with_its_next_line(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    writer = JournalWriter(folder / FILE_NAME)
    sink = Recording()
    writer.append(header())
    writer.append(episode(0))
    delivery = deliver(sink, folder)
    shutil.rmtree(folder)
    delivery.catch_up()
    writer.append(episode(1))
    delivery.catch_up()
    assert sink.episodes == [0, 1]
    assert [*JournalReader(writer.path).lines()] == [header(), episode(0), episode(1)]
    with pytest.raises(FileExistsError, match="being written by another run"):
        JournalWriter(folder / FILE_NAME)
    assert Cursor(folder, "sink", 0).position.offset == writer.size


def test_a_cursor_that_cannot_be_kept_stops_nothing(write, tmp_path, caplog):
    write(header(), episode(0))
    (tmp_path / "cursors").touch()
    sink = Recording()
    deliver(sink, tmp_path)
    assert isinstance(sink.lines[0], Header)
    assert sink.episodes == [0]
    assert caplog.text.count("where a sink stands cannot be kept") == 1
