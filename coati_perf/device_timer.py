"""How long the device was at work on a phase, from events on its current stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from coati_perf import catalogue


class TimingEvent(Protocol):
    """What is used of ``torch.Event(device, enable_timing=True)``."""

    def record(self) -> None:
        """Note on the current stream that what was launched before is done."""
        ...

    def synchronize(self) -> None:
        """Wait until it is."""
        ...

    def elapsed_time(self, end_event: Any, /) -> float:
        """Return the milliseconds to a later event."""
        ...


Timing = tuple[str, TimingEvent, TimingEvent]
"""The metric that the time counts to, the phase's first event and its last."""


class DeviceTimer:
    """A probe that records an event where a phase begins and one where it ends.

    Nothing waits: the times are read by ``device_seconds`` on another thread. Only the phases
    that the catalogue knows are timed.
    """

    def __init__(self, new_event: Callable[[], TimingEvent]) -> None:
        self._new_event = new_event
        self._open: list[tuple[str, TimingEvent]] = []
        self._timings: list[Timing] = []

    def enter(self, path: str) -> None:
        event = self._new_event()
        event.record()
        self._open.append((path, event))

    def leave(self, path: str) -> None:
        while self._open:
            opened, start = self._open.pop()
            if opened == path:
                self._note(path, start)
                return

    def clear(self) -> None:
        self._open.clear()
        self._timings.clear()

    def take(self) -> list[Timing]:
        """Return the timings of the episode that has ended, and forget them."""
        timings, self._timings = self._timings, []
        self._open.clear()
        return timings

    def _note(self, path: str, start: TimingEvent) -> None:
        *around, phase = path.split("/")
        metric = catalogue.device_time(phase)
        if metric in catalogue.CATALOGUE and phase not in around:
            end = self._new_event()
            end.record()
            self._timings.append((metric, start, end))


def device_seconds(timings: list[Timing]) -> dict[str, float]:
    """Wait for the device, and return the seconds by metric."""
    seconds: dict[str, float] = {}
    for metric, start, end in timings:
        end.synchronize()
        seconds[metric] = seconds.get(metric, 0.0) + start.elapsed_time(end) / 1000
    return seconds


def timed_on_device(timing: str) -> bool:
    """Say whether ``timing`` asks for the device's times, or raise ValueError."""
    if timing not in ("host", "device"):
        message = f"timing is {timing!r}; expected 'host' or 'device'"
        raise ValueError(message)
    if timing == "device" and torch.accelerator.current_accelerator() is None:
        message = "timing is 'device', but torch sees no accelerator here; expected 'host'"
        raise ValueError(message)
    return timing == "device"


def timing_event() -> torch.Event:
    """Return a new event of the current accelerator."""
    return torch.Event(torch.accelerator.current_accelerator(), enable_timing=True)
