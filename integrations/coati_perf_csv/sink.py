"""The CSV sink."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

from coati_perf.record import EpisodeRecord, Header, Summary
from coati_perf.sinks import Sink

_KEYS = ["run_id", "episode", "at"]


class CsvSink:
    """Appends a row per episode, a column per metric; several runs may share the file.

    A metric that is new gets a column of its own: the file is then replaced, as a whole.
    """

    def __init__(self, path: str | None = None) -> None:
        self._given = path
        self._path: Path | None = None
        self._columns: list[str] = []
        self._there: set[int] = set()

    def open(self, header: Header) -> None:
        path = Path(self._given or Path(header.run_dir) / "metrics.csv")
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = _whole_rows(path)
        self._columns = rows[0] if rows else []
        self._there = {int(row[1]) for row in rows[1:] if row[0] == header.run_id}
        self._path = path

    def write(self, record: EpisodeRecord) -> None:
        path = self._opened()
        if record.episode in self._there:
            return
        new = [name for name in (*_KEYS, *record.metrics) if name not in self._columns]
        if new:
            rows = _whole_rows(path)[1:]
            columns = self._columns + new
            padded = [row + [""] * (len(columns) - len(row)) for row in rows]
            _replace(path, _lines([columns, *padded]))
            self._columns = columns
        values: dict[str, str | float] = {
            **record.metrics,
            "run_id": record.run_id,
            "episode": record.episode,
            "at": record.at,
        }
        row = [_text(values.get(name)) for name in self._columns]
        with path.open("ab", buffering=0) as file:
            file.write(_lines([row]))
        self._there.add(record.episode)

    def close(self, summary: Summary) -> None:
        self._path = None

    def _opened(self) -> Path:
        if self._path is None:
            message = "the CSV file is not open"
            raise RuntimeError(message)
        return self._path


def _text(value: str | float | None) -> str:
    """Return a value as it is read back exactly, nothing for None."""
    return "" if value is None else value if isinstance(value, str) else repr(value)


def _whole_rows(path: Path) -> list[list[str]]:
    """Return the rows of a file, and cut off a last one that a killed process left unfinished."""
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        _replace(path, whole)
    return list(csv.reader(io.StringIO(whole.decode(), newline="")))


def _lines(rows: list[list[str]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _replace(path: Path, content: bytes) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(content)
    os.replace(new, path)  # noqa: PTH105 - the atomic one, by its known name


if TYPE_CHECKING:
    _: Sink = CsvSink()
