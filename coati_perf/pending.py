"""Rank 0's last rows as the training thread left them, for the case that it is killed just then.

Between the end of an episode and its record in the journal lie some milliseconds, on a background
thread. A process that is killed in them leaves the row here: what the clock and the hooks saw of
that episode. Its record is made when the journal is next opened.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import struct
import time
from pathlib import Path

import msgspec

from coati_perf.batches import Batches
from coati_perf.journal import FILE_NAME, JournalWriter, is_live, read_journal
from coati_perf.record import EpisodeRecord, Header
from coati_perf.reduce import reduce_rows
from coati_perf.row import Row

_logger = logging.getLogger(__name__)

PENDING_NAME = "pending.bin"

# Rows take turns in the slots of a file of constant size; one that is larger than a slot is not
# kept. More rows than slots are on their way only where another rank keeps rank 0 waiting.
_SLOTS = 16
_SLOT_BYTES = 4096
_LENGTH = struct.Struct(">I")

# os.pwrite lets go of the interpreter's lock, and waits up to 5 ms to have it back where another
# thread is busy in Python; called like this, it keeps it for the microseconds that it takes.
_pwrite = ctypes.PyDLL(None).pwrite
_pwrite.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_long)
_pwrite.restype = ctypes.c_ssize_t

RECOVERED = "recovered after a kill: FLOP, real lengths and other ranks' figures are unknown"


class PendingRow(msgspec.Struct, frozen=True, array_like=True):
    """A row, and the shapes of its batches with their numbers."""

    run_id: str
    row: Row
    experiences: list[tuple[tuple[int, int, int], int]]
    learned: list[tuple[tuple[int, int], int]]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PendingRow)


class PendingRows:
    """Keeps the last rows of a run in its folder. ``keep`` never raises and takes microseconds."""

    def __init__(self, run_dir: Path, run_id: str) -> None:
        self._run_id = run_id
        self._path = run_dir / PENDING_NAME
        self._descriptor = -1
        with contextlib.suppress(OSError):
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o644)
            # The pages are there before the first row is: a write then takes half as long.
            os.pwrite(self._descriptor, bytes(_SLOTS * _SLOT_BYTES), 0)

    def keep(self, row: Row, batches: Batches) -> None:
        """Keep a row until the same slot is needed again, in one write to the page cache."""
        if self._descriptor < 0:
            return
        experiences = batches.experiences + [(shape, 1) for shape, *_ in batches.made]
        learned = batches.learned + [(shape, 1) for shape, _ in batches.learned_from]
        packed = _encoder.encode(PendingRow(self._run_id, row, experiences, learned))
        content = _LENGTH.pack(len(packed)) + packed
        if len(content) <= _SLOT_BYTES:
            offset = row.sequence % _SLOTS * _SLOT_BYTES
            _pwrite(self._descriptor, content, len(content), offset)  # -1 on failure, no exception

    def forget(self) -> None:
        """Remove the file: everything is in the journal."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            with contextlib.suppress(OSError):
                self._path.unlink()


def recover(run_dir: Path) -> int:
    """Record the episodes that a killed process left without a record; return how many.

    Does nothing while the run is being written, or where the folder cannot be.
    """
    path, journal_path = run_dir / PENDING_NAME, run_dir / FILE_NAME
    if not path.exists() or not journal_path.exists() or is_live(journal_path):
        return 0
    segment = read_journal(journal_path).segments[-1]
    known = {record.episode for record in segment.episodes}
    left = [
        pending
        for pending in _read(path)
        if pending.run_id == segment.header.run_id and pending.row.episode not in known
    ]
    try:
        writer = JournalWriter(journal_path)
        for pending in left if segment.summary is None else ():
            writer.append(_record(pending, segment.header))
        writer.close()
        path.unlink()
    except OSError as error:
        _logger.warning("episodes that a kill left without a record stay so (%s)", error)
        return 0
    return len(left)


def _read(path: Path) -> list[PendingRow]:
    """Return the rows of a file in their order; a slot that is empty or holds none is passed."""
    content = path.read_bytes()
    rows = []
    for start in range(0, len(content), _SLOT_BYTES):
        slot = content[start : start + _SLOT_BYTES]
        with contextlib.suppress(struct.error, msgspec.DecodeError):
            (length,) = _LENGTH.unpack_from(slot)
            rows.append(_decoder.decode(slot[_LENGTH.size : _LENGTH.size + length]))
    return sorted(rows, key=lambda pending: pending.row.sequence)


def _record(pending: PendingRow, header: Header) -> EpisodeRecord:
    """Return what can be said of an episode by rank 0's clock and the shapes of its batches."""
    amounts = dict(pending.row.amounts)
    batches = Batches(
        experiences=pending.experiences,
        learned=pending.learned,
        made=[],
        learned_from=[],
    )
    batches.add_counts(amounts)
    row = msgspec.structs.replace(pending.row, amounts=amounts)
    reduced = reduce_rows([row], header.machine)
    return EpisodeRecord(
        run_id=header.run_id,
        at=time.time(),
        episode=row.episode,
        convention=header.convention,
        metrics=reduced.metrics,
        phases=reduced.phases,
        ranks=header.world_size,
        ranks_missing=list(range(1, header.world_size)),
        faults={**reduced.faults, RECOVERED: 1},
        warnings=header.warnings,
    )
