"""Sinks by name, through the entry-point group ``coati_perf.sinks``.

An entry point names a factory that takes the part after the first ``:`` of ``"name:argument"``,
or None, and returns a sink. It raises ``MissingDependencyError`` where a package it needs is not
installed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import cast

import msgspec

from coati_perf.sinks.base import Sink

GROUP = "coati_perf.sinks"

SinkFactory = Callable[[str | None], Sink]


class SinkError(ValueError):
    """A sink was asked for that does not exist or cannot be made."""


class MissingDependencyError(SinkError, ImportError):
    """The package that a sink writes with is not installed."""


class SinkSource(msgspec.Struct, frozen=True):
    """A sink as the user asked for it: ``label`` for messages, ``make`` gives the sink of a fit.

    A ``named`` one is made anew by each call, any other is the user's own object.
    """

    label: str
    make: Callable[[], Sink]
    named: bool = True


def require(module: str, extra: str) -> None:
    """Raise MissingDependencyError unless ``module`` can be found; does not import it."""
    if importlib.util.find_spec(module) is None:
        message = (
            f"the {extra!r} sink needs the package {module!r}: pip install 'coati-perf[{extra}]'"
        )
        raise MissingDependencyError(message)


def parse_sinks(sinks: Iterable[str | Sink]) -> tuple[SinkSource, ...]:
    """Turn names, ``"name:argument"`` strings and sink objects into sources.

    Every named sink is made once here, so that what is wrong is said before training. Raises
    SinkError, and TypeError for what is neither a name nor a sink.
    """
    if isinstance(sinks, str):
        message = f"sinks is the string {sinks!r}; expected a list of sinks, such as [{sinks!r}]"
        raise TypeError(message)
    return tuple(_source(sink) for sink in sinks)


def _source(sink: str | Sink) -> SinkSource:
    if isinstance(sink, str):
        name, _, argument = sink.partition(":")
        factory = _factory(name)
        source = SinkSource(sink, lambda: factory(argument or None))
        made = source.make()
        if not isinstance(made, Sink):
            message = f"the entry point of sink {name!r} made a {type(made).__name__}, no Sink"
            raise SinkError(message)
        return source
    # The class of a sink has the methods too, so that it would pass for one.
    if isinstance(sink, Sink) and not isinstance(sink, type):
        return SinkSource(type(sink).__name__, lambda: sink, named=False)
    message = (
        f"{sink!r} is a {type(sink).__name__}; expected a sink's name, 'name:argument', "
        "or an object with open(header), write(record) and close(summary)"
    )
    raise TypeError(message)


def _factory(name: str) -> SinkFactory:
    found: dict[str, EntryPoint] = {}
    for entry_point in entry_points(group=GROUP):
        found.setdefault(entry_point.name, entry_point)
    if name not in found:
        message = (
            f"there is no sink named {name!r}; there are: {', '.join(sorted(found)) or 'none'}. "
            f"Other packages bring theirs through the entry-point group {GROUP!r}"
        )
        raise SinkError(message)
    try:
        return cast("SinkFactory", found[name].load())
    except MissingDependencyError:
        raise
    except Exception as error:
        message = f"sink {name!r} ({found[name].value}) could not be loaded: {error!r}"
        raise SinkError(message) from error
