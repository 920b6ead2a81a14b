"""The peak of a device that no data sheet is known of, measured: its best matrix product."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

_SIZES = (256, 512, 1024, 2048, 4096, 8192)
_COPY_BYTES = 1 << 28  # larger than any processor's caches


def measure_tflops(device: torch.device, dtype: torch.dtype, seconds: float = 0.5) -> float:
    """Return the best rate of square matrix products, in TFLOP/s, within about ``seconds``."""
    best = 0.0
    deadline = time.perf_counter() + seconds
    for size in _SIZES:
        matrix = torch.ones(size, size, device=device, dtype=dtype)
        took = _best_time(device, functools.partial(torch.mm, matrix, matrix), deadline)
        best = max(best, 2 * size**3 / took / 1e12)
        # The next size takes eight times as long.
        if time.perf_counter() + 3 * 8 * took > deadline:
            break
    return best


def measure_bandwidth(device: torch.device, seconds: float = 0.25) -> float:
    """Return the best rate of a copy, bytes read and written, in TB/s (10¹²)."""
    source = torch.ones(_COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    deadline = time.perf_counter() + seconds
    took = _best_time(device, lambda: target.copy_(source), deadline)
    return 2 * _COPY_BYTES / took / 1e12


def _best_time(device: torch.device, work: Callable[[], object], deadline: float) -> float:
    """Return the shortest of several runs after the first, two at least, in seconds."""
    work()
    times: list[float] = []
    while len(times) < 2 or (len(times) < 10 and time.perf_counter() < deadline):  # noqa: PLR2004
        _wait(device)
        started = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - started)
    return min(times)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
