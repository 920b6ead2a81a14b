"""Journals to feed sinks from."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from coati_perf.journal import FILE_NAME, JournalWriter

sys.path.insert(0, str(Path(__file__).parent))  # for sink_doubles


@pytest.fixture
def write(tmp_path):
    """Return an appender of lines to the journal in tmp_path, as a process of its own would."""

    def write(*lines):
        writer = JournalWriter(tmp_path / FILE_NAME)
        for line in lines:
            writer.append(line)
        writer.close()
        return tmp_path / FILE_NAME

    return write
