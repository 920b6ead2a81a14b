"""Finds out, at fit start on rank 0, on what machine a run is and what its devices can do."""

from __future__ import annotations

import functools

import msgspec
import torch

from coati_perf.machine import Machine
from coati_perf.measured_peak import measure_bandwidth, measure_tflops
from coati_perf.peaks import dtype_tflops, find_peak


class Declared(msgspec.Struct, frozen=True, kw_only=True):
    """What the user says of the devices; see ``PerformanceEvaluator``."""

    dtype: torch.dtype = torch.bfloat16
    peak_tflops: float | None = None
    bandwidth_gb_per_s: float | None = None
    trainer_devices: int | None = None
    rollout_devices: int | None = None
    data_parallel_size: int | None = None


def survey(declared: Declared, ranks: int) -> Machine:
    """Return the machine: peaks as given, else from the table, else measured.

    Nothing is measured where the TFLOP/s are given, nor on an accelerator that training has not
    started up yet: what is not known then stays unknown.
    """
    if declared.peak_tflops is None:
        tflops, bandwidth, source = _known_peaks(declared.dtype) or _measured_peaks(declared.dtype)
    else:
        known = find_peak(device_name())
        tflops, source = declared.peak_tflops, "given"
        bandwidth = None if known is None else known.bandwidth_gb_per_s / 1000
    if declared.bandwidth_gb_per_s is not None:
        bandwidth = declared.bandwidth_gb_per_s / 1000
    return Machine(
        ranks=ranks,
        trainer_devices=declared.trainer_devices,
        rollout_devices=declared.rollout_devices,
        data_parallel_size=declared.data_parallel_size,
        peak_tflops=tflops,
        bandwidth=bandwidth,
        peak_source=source,
    )


def device_name() -> str:
    """Name the accelerator, without starting one up that training has not."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return "cpu"
    name = getattr(torch.get_device_module(accelerator), "get_device_name", None)
    return str(name()) if name is not None and _is_up(accelerator) else accelerator.type


def _is_up(accelerator: torch.device) -> bool:
    is_initialized = getattr(torch.get_device_module(accelerator), "is_initialized", None)
    return is_initialized is None or bool(is_initialized())


Peaks = tuple[float | None, float | None, str | None]
"""TFLOP/s, TB/s, and where they come from."""


def _known_peaks(dtype: torch.dtype) -> Peaks | None:
    known = find_peak(device_name())
    if known is None:
        return None
    tf32 = torch.get_float32_matmul_precision() != "highest"
    tflops = dtype_tflops(known, dtype, tf32=tf32)
    return None if tflops is None else (tflops, known.bandwidth_gb_per_s / 1000, known.source)


def _measured_peaks(dtype: torch.dtype) -> Peaks:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return _measured("cpu", dtype)
    return _measured(accelerator.type, dtype) if _is_up(accelerator) else (None, None, None)


@functools.cache
def _measured(device_type: str, dtype: torch.dtype) -> Peaks:
    """Measure once per process."""
    device = torch.device(device_type)
    name = str(dtype).removeprefix("torch.")
    return measure_tflops(device, dtype), measure_bandwidth(device), f"measured, {name}"
