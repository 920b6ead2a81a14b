"""What a sink must do."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from coati_perf.record import EpisodeRecord, Header, Summary


@runtime_checkable
class Sink(Protocol):
    """Receives the records of a run, on rank 0 only, each call on one thread of the sink's own.

    The order is ``open``, then ``write`` per episode in the order of the journal, then ``close``.
    Constructing a sink does no input or output. Any method may raise or take its time: training
    does not notice. After an exception the same call is made again with the same argument, after
    growing pauses and a few times at the end of the run; so a ``write`` that failed half way must
    bear to be repeated. A call that takes two minutes is given up, for another sink of the same
    name. After ``close`` a sink may be opened again for another run.
    ``record.metrics`` is a plain dict of finite floats; do not change it.

    Where the process was killed, the next one goes on in the middle of a run: ``open`` with the
    header of that run, then the episodes that are left. A sink that keeps rows in memory, or sums
    them up, has an attribute ``needs_whole_run``, true once it is open: it gets that run from its
    start again, and sees to it that nothing is there twice.

    Where the run's end comes before a call has returned, ``abandon()`` is called on another
    thread, if there is such a method: it must see to it at once that the sink does not hold up
    the interpreter's exit.
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
