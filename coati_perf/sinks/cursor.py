"""Where a sink stands in a journal: a small file, replaced as a whole, that outlives us."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from pathlib import Path

import msgspec

FOLDER = "cursors"

_logger = logging.getLogger(__name__)


class Position(msgspec.Struct, frozen=True):
    """Byte offsets in the journal. All lines before ``offset`` are delivered.

    ``header`` is where the run begins that the sink is in the middle of, None between runs, with
    the number of its episodes delivered and the last of them.
    """

    offset: int = 0
    header: int | None = None
    episodes: int = 0
    last_episode: int | None = None


def cursor_path(run_dir: Path, label: str) -> Path:
    """Return where the position of a sink in the journal of ``run_dir`` is kept."""
    digest = hashlib.sha256(label.encode()).hexdigest()[:8]
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "_", label)[:60]
    return run_dir / FOLDER / f"{stem}-{digest}.json"


class Cursor:
    """The position of the sink ``label`` in the journal of ``run_dir``, kept beside it.

    A sink that was never fed from it begins at the offset ``default``. Where the file cannot be
    written the position is kept in memory alone.
    """

    def __init__(self, run_dir: Path, label: str, default: int) -> None:
        self.path = cursor_path(run_dir, label)
        self.position = Position(-1)
        self._warned = False
        try:
            self.position = msgspec.json.decode(self.path.read_bytes(), type=Position)
        except (OSError, msgspec.DecodeError):
            self.save(Position(default))

    def save(self, position: Position) -> None:
        """Have a new position survive this process; logs once where that is impossible."""
        if position == self.position:
            return
        self.position = position
        written = self.path.with_suffix(".new")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            written.write_bytes(msgspec.json.encode(position))
            os.replace(written, self.path)  # noqa: PTH105 - as fast as it gets, once a line
        except OSError as error:
            if not self._warned:
                self._warned = True
                _logger.warning(
                    "where a sink stands cannot be kept (%s): a restart may deliver again", error
                )
