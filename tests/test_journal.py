"""The journal file: appending, torn lines, segments, liveness, schemas."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from coati_perf.journal import JournalError, JournalReader, JournalWriter, read_journal
from coati_perf.machine import Machine
from coati_perf.record import EpisodeRecord, Header, Summary
from coati_perf.report import render_journal

DATA = Path(__file__).parent / "data"

HEADER = Header(
    run_id="r", at=0.0, segment=0, run_dir="/r", train_config={}, seed_config_line="",
    convention="coati", cost_model={}, ignore_episodes=0, world_size=1, exchange="none",
    machine=Machine(ranks=1), device="cpu", host="h", pid=1, versions={},
)  # fmt: skip
SUMMARY = Summary(run_id="r", at=9.0, status="finished", episodes=1)


def episode(number):
    return EpisodeRecord(
        run_id="r", at=1.0, episode=number, convention="coati", phases={}, ranks=1,
        metrics={"perf/time/episode_s": 1.0},
    )  # fmt: skip


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal.jsonl"


def write(path, *lines):
    writer = JournalWriter(path)
    for line in lines:
        writer.append(line)
    writer.close()


def test_what_is_appended_is_read(path):
    write(path, HEADER, episode(0), episode(1), SUMMARY)
    journal = read_journal(path)
    assert journal.segments[0].header == HEADER
    assert journal.segments[0].episodes == [episode(0), episode(1)]
    assert journal.segments[0].summary == SUMMARY
    assert (journal.torn_lines, journal.live) == (0, False)


def test_a_run_directory_stands_for_its_journal(path):
    write(path, HEADER)
    assert read_journal(path.parent) == read_journal(path)


def test_a_torn_last_line_is_skipped_and_the_next_segment_starts_afresh(path):
    write(path, HEADER, episode(0))
    with path.open("ab") as file:
        file.write(b'{"kind":"episode","run_id":"r","epis')
    assert read_journal(path).torn_lines == 1
    write(path, HEADER, episode(1), SUMMARY)
    journal = read_journal(path)
    assert [[e.episode for e in segment.episodes] for segment in journal.segments] == [[0], [1]]
    assert journal.torn_lines == 1


def test_a_journal_that_is_being_written_is_live_and_readable(path):
    writer = JournalWriter(path)
    writer.append(HEADER)
    writer.append(episode(0))
    journal = read_journal(path)
    assert journal.live
    assert "still running, after episode 0" in render_journal(journal)
    writer.close()
    assert "CUT OFF after episode 0" in render_journal(read_journal(path))


def test_two_runs_cannot_write_one_journal(path):
    writer = JournalWriter(path)
    with pytest.raises(FileExistsError, match="is being written by another run"):
        JournalWriter(path)
    writer.close()


def test_a_forked_child_neither_keeps_a_journal_locked_nor_unlocks_it(path):
    """DataLoader workers outlive a fit, and for a moment a killed parent."""
    writer = JournalWriter(path)
    writer.append(HEADER)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    assert read_journal(path).live
    writer.close()
    JournalWriter(path).close()
    os.close(write_end)
    os.waitpid(child, 0)
    os.close(read_end)


def test_a_line_that_the_disk_has_no_room_for_is_taken_back(path, monkeypatch):
    writer = JournalWriter(path)
    writer.append(HEADER)
    real = os.write
    monkeypatch.setattr("os.write", lambda fd, data: real(fd, data[:10]))
    with pytest.raises(OSError, match="only 10 of"):
        writer.append(episode(0))
    monkeypatch.undo()
    writer.append(episode(1))
    writer.close()
    journal = read_journal(path)
    assert [e.episode for e in journal.segments[0].episodes] == [1]
    assert journal.torn_lines == 0


def test_a_reader_waits_for_the_rest_of_a_line(path):
    line = msgspec.json.encode(HEADER)
    path.write_bytes(line[:20])
    reader = JournalReader(path)
    assert list(reader.lines()) == []
    path.write_bytes(line + b"\n")
    assert list(reader.lines()) == [HEADER]
    assert list(reader.lines()) == []


def test_a_line_that_the_taker_failed_on_comes_again(path):
    write(path, HEADER, episode(0))
    reader = JournalReader(path)
    assert next(reader.lines()) == HEADER
    assert list(reader.lines()) == [HEADER, episode(0)]


def test_fields_of_a_later_version_are_passed_over_but_a_newer_schema_is_refused(path):
    line = msgspec.json.encode(HEADER)
    path.write_bytes(line.replace(b'{"kind"', b'{"later":1,"kind"', 1) + b"\n")
    assert read_journal(path).segments[0].header == HEADER
    path.write_bytes(line.replace(b'"schema":1', b'"schema":7') + b"\n")
    with pytest.raises(JournalError, match="schema 7, this coati_perf reads up to 1: upgrade"):
        read_journal(path)
    path.write_bytes(b'{"kind":"novelty","schema":7}\n')
    with pytest.raises(JournalError, match="schema 7"):
        read_journal(path)


@pytest.mark.parametrize("content", [b"", b"hello\n", b'{"a": 1}\n', b"\x00\xff\n"])
def test_a_file_that_is_no_journal_is_refused(path, content):
    path.write_bytes(content)
    with pytest.raises(JournalError, match="it is no coati_perf journal"):
        read_journal(path)


def test_a_missing_journal_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no journal at .*journal\.jsonl: give a run"):
        read_journal(tmp_path)


@pytest.mark.parametrize("version", [1])
def test_journals_of_every_published_schema_stay_readable(version):
    """data/journal_schema_<n>.jsonl were written by the first version with that schema."""
    journal = read_journal(DATA / f"journal_schema_{version}.jsonl")
    finished, failed = journal.segments
    assert [record.episode for record in finished.episodes] == [0, 1]
    assert finished.summary.status == "finished"
    assert failed.summary.status == "failed"
    assert failed.failures[0].error == "ValueError: boom"
    assert "perf/throughput/learn_samples_per_s" in render_journal(journal)
