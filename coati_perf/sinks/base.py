"""What a sink must do."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from coati_perf.record import EpisodeRecord, Header, Summary


@runtime_checkable
class Sink(Protocol):
    """Receives the records of a run, on rank 0 only, each call on one thread of the sink's own.

    The order is ``open``, then ``write`` per episode in the order of the journal, then ``close``.
    Constructing a sink does no input or output. Any method may raise or take its time: training
    does not notice. After an exception the same call is made again with the same argument, when
    the next record comes and twice at the end of the run; so a ``write`` that failed half way must
    bear to be repeated. After ``close`` a sink may be opened again for another run.
    ``record.metrics`` is a plain dict of finite floats; do not change it.
    """

    def open(self, header: Header) -> None:
        """Begin a run. ``header.run_dir`` is the directory where the run keeps its files."""
        ...

    def write(self, record: EpisodeRecord) -> None:
        """Take in one episode."""
        ...

    def close(self, summary: Summary) -> None:
        """End the run: everything written must be safe when this returns."""
        ...
