"""Time: the default clock, and ColossalChat's stopwatch on top of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Returns seconds since an arbitrary start; must never go backwards."""

# The same clock as time.monotonic on Linux, at the finest resolution everywhere.
monotonic: Clock = time.perf_counter

_logger = logging.getLogger(__name__)


class Timer:
    """Adds up the seconds between ``start()`` and ``end()`` in ``duration``.

    ``end()`` without ``start()`` adds nothing and logs a warning: a stopwatch must not stop a
    training run. ``reset()`` sets ``duration`` to 0 and leaves a running interval running.
    """

    def __init__(self, clock: Clock = monotonic) -> None:
        self.duration: float = 0.0
        self.start_time: float | None = None
        self._clock = clock

    def start(self) -> None:
        """Begin an interval; a second call begins it anew."""
        self.start_time = self._clock()

    def end(self) -> None:
        """End the interval and add its seconds to ``duration``."""
        if self.start_time is None:
            _logger.warning("Timer.end() was called without start(): nothing was added")
            return
        self.duration += self._clock() - self.start_time
        self.start_time = None

    def reset(self) -> None:
        """Forget the seconds added up so far."""
        self.duration = 0.0
