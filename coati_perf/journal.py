"""The journal: append-only JSON Lines, the one source of everything downstream.

A *segment* is one fit: a header, a line per finished episode (and per failure), a summary. A
run that is resumed in the same directory appends a segment; nothing is ever truncated. Each
append is one ``write`` of one whole line, so that a killed process leaves at most one torn line
at the end of its segment; readers skip it and say so.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import msgspec

from coati_perf.record import SCHEMA, EpisodeRecord, Failure, Header, JournalLine, Summary

FILE_NAME = "journal.jsonl"

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(JournalLine)


class JournalError(ValueError):
    """A file is no journal, or was written by a newer coati_perf."""


# A forked child (a DataLoader worker) inherits the file and its lock; if the parent is killed, the
# run must not look alive for as long as its orphans live.
_open_writers: weakref.WeakSet[JournalWriter] = weakref.WeakSet()


class JournalWriter:
    """Appends lines. Holds a lock on the file while it is open, so that readers know it lives."""

    def __init__(self, path: Path) -> None:
        """Open ``path`` to append; raises OSError where that cannot be done."""
        self.path = path
        self._descriptor = _open(path)
        if not _lock(self._descriptor):
            os.close(self._descriptor)
            message = f"{path} is being written by another run; give this one another run_dir"
            raise FileExistsError(message)
        _open_writers.add(self)
        self.size = os.fstat(self._descriptor).st_size
        if self.size and os.pread(self._descriptor, 1, self.size - 1) != b"\n":
            self._write(b"\n")  # the last run was killed in mid-write: close its torn line

    def append(self, line: JournalLine) -> None:
        """Write one line and have it on the disk; raises OSError where it cannot be written.

        A journal that was deleted is there again, whole.
        """
        if os.fstat(self._descriptor).st_nlink == 0:
            self._restore()
        self._write(_encoder.encode(line) + b"\n")
        with contextlib.suppress(OSError):  # some file systems cannot; the line is written
            os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):  # for children too, which hold the same lock
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self.forget()

    def forget(self) -> None:
        """Close the file without giving up the lock that others hold with us: for a child."""
        os.close(self._descriptor)
        self._descriptor = -1
        _open_writers.discard(self)

    def _restore(self) -> None:
        """Write the deleted file, which the descriptor still holds, to its path again."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _open(self.path)
        content = os.pread(self._descriptor, self.size, 0)
        if os.write(descriptor, content) < len(content):
            os.close(descriptor)
            self.path.unlink()
            message = f"the deleted journal {self.path} cannot be written again"
            raise OSError(message)
        _lock(descriptor)
        os.close(self._descriptor)
        self._descriptor = descriptor

    def _write(self, data: bytes) -> None:
        written = os.write(self._descriptor, data)
        if written < len(data):  # The disk is full: take the torn piece back.
            os.ftruncate(self._descriptor, self.size)
            message = f"only {written} of {len(data)} bytes could be written to {self.path}"
            raise OSError(message)
        self.size += written


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _lock(descriptor: int) -> bool:
    """Lock a journal against other writers; say whether no other has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # A file system without locks: readers cannot tell a live run from a dead one.
    return True


def _forget_in_child() -> None:
    for writer in list(_open_writers):
        writer.forget()


os.register_at_fork(after_in_child=_forget_in_child)


def decode_line(line: bytes) -> JournalLine | None:
    """Return the line's record, or None where it is torn. Raises JournalError on a newer schema."""
    record: JournalLine | None
    try:
        record = _decoder.decode(line)
    except msgspec.DecodeError:
        record = None
    schema = _schema(line) if record is None else record.schema
    if schema > SCHEMA:
        message = (
            f"the journal has schema {schema}, this coati_perf reads up to {SCHEMA}: "
            "upgrade with pip install --upgrade coati-perf"
        )
        raise JournalError(message)
    return record


class JournalReader:
    """A cursor over a journal that may still be being written.

    ``offset`` is the byte up to which lines have been returned, ``torn`` how many were skipped.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.offset = offset
        self.torn = 0

    def lines(self) -> Iterator[JournalLine]:
        """Yield the whole lines after the cursor and move it past each one that was taken in.

        The cursor moves when the next line is asked for: what the caller fails on comes again. A
        file that is gone has no lines; its writer makes it again.
        """
        try:
            opened = self.path.open("rb")
        except FileNotFoundError:
            return
        with opened as file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # torn, or being written just now
                record = decode_line(line) if line.strip() else None
                if record is not None:
                    yield record
                elif line.strip():
                    self.torn += 1
                self.offset += len(line)


class Segment(msgspec.Struct):
    """One fit as a journal tells it."""

    header: Header
    episodes: list[EpisodeRecord] = []
    failures: list[Failure] = []
    summary: Summary | None = None


class Journal(msgspec.Struct):
    """A whole journal. ``live`` says whether its last segment is still being written."""

    segments: list[Segment]
    torn_lines: int
    live: bool


def read_journal(path: str | os.PathLike[str]) -> Journal:
    """Read a journal, given its file or the run directory that holds it.

    Raises FileNotFoundError where there is none and JournalError where the file is no journal.
    """
    file = Path(path)
    if file.is_dir():
        file /= FILE_NAME
    if not file.is_file():
        runs = Path(path).glob(f"*/{FILE_NAME}")
        newest = max(runs, key=lambda journal: journal.stat().st_mtime, default=None)
        hint = "" if newest is None else f"; the newest run there is {newest.parent}"
        message = f"no journal at {file}: give a run directory or its {FILE_NAME}{hint}"
        raise FileNotFoundError(message)
    live = is_live(file)
    reader = JournalReader(file)
    segments: list[Segment] = []
    for line in reader.lines():
        if isinstance(line, Header):
            segments.append(Segment(line))
        elif not segments:
            message = f"{file} does not begin with a header line: it is no coati_perf journal"
            raise JournalError(message)
        elif isinstance(line, EpisodeRecord):
            segments[-1].episodes.append(line)
        elif isinstance(line, Failure):
            segments[-1].failures.append(line)
        else:
            segments[-1].summary = line
    if not segments:
        message = f"{file} holds no header line: it is no coati_perf journal"
        raise JournalError(message)
    torn = reader.torn + (reader.offset < file.stat().st_size and not live)
    return Journal(segments, torn, live)


def _schema(line: bytes) -> int:
    """Return the schema of a line that this version cannot decode, 0 where it says none."""
    try:
        fields = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return 0
    schema = fields.get("schema") if isinstance(fields, dict) else None
    return schema if isinstance(schema, int) else 0


def is_live(path: Path) -> bool:
    """Say whether a process has the journal open to write."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
    return False
