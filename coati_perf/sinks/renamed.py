"""A sink that gets the metrics under other trainers' names too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from coati_perf.names import NAMES, Alias, named
from coati_perf.record import EpisodeRecord, Header, Summary
from coati_perf.sinks.base import Sink
from coati_perf.sinks.registry import SinkError, parse_sinks


class RenamedSink:
    """Hands records on to another sink, with a trainer's names beside ours, or names of one's own.

    Args:
        inner: the other sink.
        names: a trainer in ``coati_perf.names``, or what each name stands for.

    Raises:
        SinkError: there are no names of that trainer.
    """

    def __init__(self, inner: Sink, names: str | Mapping[str, Alias]) -> None:
        if isinstance(names, str) and names not in NAMES:
            message = f"there are no names of {names!r}; there are those of {', '.join(NAMES)}"
            raise SinkError(message)
        self._inner = inner
        self._names = NAMES[names] if isinstance(names, str) else names

    def open(self, header: Header) -> None:
        self._inner.open(header)

    def write(self, record: EpisodeRecord) -> None:
        metrics = named(record.metrics, self._names)
        self._inner.write(msgspec.structs.replace(record, metrics=metrics))

    def close(self, summary: Summary) -> None:
        self._inner.close(summary)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # ``needs_whole_run`` and ``abandon``, where it has them


def renamed_sink(argument: str | None) -> RenamedSink:
    """Make the sink of ``"as:TRAINER:SINK"``, such as ``"as:verl:wandb:my-project"``."""
    trainer, _, sink = (argument or "").partition(":")
    if not sink:
        message = f"the sink 'as' got {argument!r}; expected a trainer and a sink: 'as:verl:wandb'"
        raise SinkError(message)
    (source,) = parse_sinks([sink])
    return RenamedSink(source.make(), trainer)
