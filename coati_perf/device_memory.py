"""How much of the device's memory a phase took at most."""

from __future__ import annotations

from typing import Protocol

import torch

from coati_perf import catalogue


class MemoryStatistics(Protocol):
    """The device's memory, in bytes; nothing here waits for the device."""

    def reset(self) -> None:
        """Begin new peaks."""
        ...

    def peaks(self) -> tuple[int, int, int]:
        """Return peaks of the allocated and of the reserved memory, and what all use now."""
        ...


class AcceleratorMemory:
    """That of the current accelerator, from torch's allocator and from the driver."""

    def reset(self) -> None:
        torch.accelerator.reset_peak_memory_stats()

    def peaks(self) -> tuple[int, int, int]:
        free, total = torch.accelerator.get_memory_info()
        return (
            torch.accelerator.max_memory_allocated(),
            torch.accelerator.max_memory_reserved(),
            total - free,
        )


class DeviceMemory:
    """A probe of the peaks within each phase that the catalogue knows, the phases inside included.

    It resets the allocator's peaks where a phase begins or ends, so a peak that someone else reads
    is that since then.
    """

    def __init__(self, statistics: MemoryStatistics) -> None:
        self._statistics = statistics
        self._open: list[tuple[str, list[int]]] = []
        self._peaks: dict[str, float] = {}

    def enter(self, path: str) -> None:
        self._note()
        self._open.append((path, [0, 0, 0]))

    def leave(self, path: str) -> None:
        self._note()
        while self._open:
            opened, peaks = self._open.pop()
            self._keep(opened, peaks)
            if opened == path:
                return

    def clear(self) -> None:
        self._open.clear()
        self._peaks.clear()

    def take(self) -> dict[str, float]:
        """Return the peaks by metric, in bytes, and forget them."""
        peaks, self._peaks = self._peaks, {}
        self._open.clear()
        return peaks

    def _note(self) -> None:
        """Raise the peaks of all open phases to what was seen since the last border."""
        seen = self._statistics.peaks()
        for _, peaks in self._open:
            peaks[:] = map(max, peaks, seen)
        self._statistics.reset()

    def _keep(self, path: str, peaks: list[int]) -> None:
        phase = path.rpartition("/")[2]
        for metric, peak in zip(catalogue.memory_peaks(phase), peaks, strict=True):
            if metric in catalogue.CATALOGUE:
                self._peaks[metric] = max(self._peaks.get(metric, 0.0), float(peak))
