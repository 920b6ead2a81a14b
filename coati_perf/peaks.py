"""What accelerators can do at most: dense matrix products, and their memory's bandwidth.

Figures as of December 2026, from the makers' data sheets, *dense*: where a sheet gives a figure
with 2:4 sparsity, half of it. Matrix products in float16 and bfloat16 accumulate in float32.
A device that is not in the table, such as Huawei's and Google's, is unknown and will be measured;
it is never taken for one of a similar name.
"""

from __future__ import annotations

import re

import msgspec
import torch


class DevicePeak(msgspec.Struct, frozen=True):
    """One kind of device: dense TFLOP/s (10¹²) by type, memory bandwidth in GB/s (10⁹ bytes).

    ``name`` is what torch calls it, of which all words must occur. ``tflops`` has the keys
    ``half`` (bfloat16 and float16), ``float16`` (where bfloat16 has no units of its own),
    ``tfloat32``, ``float32`` and ``float8``.
    """

    name: str
    tflops: dict[str, float]
    bandwidth_gb_per_s: float
    source: str


def _peak(name: str, bandwidth: float, source: str, **tflops: float) -> DevicePeak:
    return DevicePeak(name, tflops, bandwidth, source)


_HOPPER = "NVIDIA H100 Tensor Core GPU data sheet"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet"
_AMPERE = "NVIDIA A100 Tensor Core GPU data sheet"
_BLACKWELL = "NVIDIA HGX and Blackwell architecture data sheets"

PEAKS = (
    _peak("V100 SXM2", 900, "NVIDIA V100 data sheet", float16=125, float32=15.7),
    _peak("V100 PCIE", 900, "NVIDIA V100 data sheet", float16=112, float32=14),
    _peak("T4", 320, "NVIDIA T4 data sheet", float16=65, float32=8.1),
    _peak("A100 SXM4 40GB", 1555, _AMPERE, half=312, tfloat32=156, float32=19.5),
    _peak("A100 PCIE 40GB", 1555, _AMPERE, half=312, tfloat32=156, float32=19.5),
    _peak("A100 SXM4 80GB", 2039, _AMPERE, half=312, tfloat32=156, float32=19.5),
    _peak("A100 80GB PCIE", 1935, _AMPERE, half=312, tfloat32=156, float32=19.5),
    _peak("A800 SXM4 80GB", 2039, "NVIDIA A800 data sheet", half=312, tfloat32=156, float32=19.5),
    _peak("A800 80GB PCIE", 1935, "NVIDIA A800 data sheet", half=312, tfloat32=156, float32=19.5),
    _peak("A30", 933, "NVIDIA A30 data sheet", half=165, tfloat32=82, float32=10.3),
    _peak("A10", 600, "NVIDIA A10 data sheet", half=125, tfloat32=62.5, float32=31.2),
    _peak("A40", 696, "NVIDIA A40 data sheet", half=149.7, tfloat32=74.8, float32=37.4),
    _peak("L4", 300, "NVIDIA L4 data sheet", half=121, tfloat32=60, float32=30.3, float8=242.5),
    _peak("L40", 864, "NVIDIA L40 data sheet", half=181, tfloat32=90.5, float32=90.5, float8=362),
    _peak("L40S", 864, "NVIDIA L40S data sheet", half=362, tfloat32=183, float32=91.6, float8=733),
    _peak(
        "GEFORCE RTX 3090", 936, "NVIDIA GA102 white paper", half=71, tfloat32=35.6, float32=35.6
    ),
    _peak(
        "GEFORCE RTX 4090", 1008, "NVIDIA Ada white paper", half=165.2, tfloat32=82.6, float32=82.6
    ),
    _peak(
        "GEFORCE RTX 5090",
        1792,
        "NVIDIA RTX Blackwell white paper",
        half=209.5,
        tfloat32=104.8,
        float32=104.8,
    ),
    _peak("RTX A4000", 448, "NVIDIA RTX A4000 data sheet", half=76.7, float32=19.2),
    _peak("RTX A5000", 768, "NVIDIA RTX A5000 data sheet", half=111.1, float32=27.8),
    _peak("RTX A6000", 768, "NVIDIA GA102 white paper", half=154.8, tfloat32=77.4, float32=38.7),
    _peak("H100 80GB HBM3", 3350, _HOPPER, half=989.4, tfloat32=494.7, float32=67, float8=1978.9),
    _peak("H100 PCIE", 2000, _HOPPER, half=756.5, tfloat32=378, float32=51, float8=1513),
    _peak("H100 NVL", 3900, _HOPPER, half=835.5, tfloat32=417.5, float32=60, float8=1670.5),
    _peak("H20", 4000, "NVIDIA H20 data sheet", half=148, tfloat32=74, float32=44, float8=296),
    _peak("H200", 4800, _H200, half=989.4, tfloat32=494.7, float32=67, float8=1978.9),
    _peak("H200 NVL", 4800, _H200, half=835.5, tfloat32=417.5, float32=60, float8=1670.5),
    _peak(
        "GH200 480GB",
        4000,
        "NVIDIA GH200 data sheet",
        half=989.4,
        tfloat32=494.7,
        float32=67,
        float8=1978.9,
    ),
    _peak("B200", 8000, _BLACKWELL, half=2250, tfloat32=1125, float32=75, float8=4500),
    _peak("GB200", 8000, _BLACKWELL, half=2500, tfloat32=1250, float32=80, float8=5000),
    _peak("B300", 8000, _BLACKWELL, half=2250, float8=4500),
    _peak("GB300", 8000, _BLACKWELL, half=2500, float8=5000),
    _peak("INSTINCT MI210", 1638, "AMD Instinct MI210 data sheet", half=181, float32=45.3),
    # torch sees each of the two dies as a device.
    _peak("INSTINCT MI250", 1638, "AMD Instinct MI250 data sheet, ÷ 2", half=181, float32=45.3),
    _peak("INSTINCT MI250X", 1638, "AMD Instinct MI250X data sheet, ÷ 2", half=191.5, float32=47.9),
    _peak(
        "INSTINCT MI300X",
        5300,
        "AMD Instinct MI300X data sheet",
        half=1307.4,
        float32=163.4,
        float8=2614.9,
    ),
    _peak(
        "INSTINCT MI300A",
        5300,
        "AMD Instinct MI300A data sheet",
        half=980.6,
        float32=122.6,
        float8=1961.2,
    ),
    _peak(
        "INSTINCT MI325X",
        6000,
        "AMD Instinct MI325X data sheet",
        half=1307.4,
        float32=163.4,
        float8=2614.9,
    ),
    _peak("INSTINCT MI350X", 8000, "AMD Instinct MI350X data sheet", half=2300, float8=4600),
    _peak("INSTINCT MI355X", 8000, "AMD Instinct MI355X data sheet", half=2500, float8=5000),
    _peak("GAUDI2", 2450, "Intel Gaudi 2 data sheet", half=432, float8=865),
    _peak("GAUDI3", 3700, "Intel Gaudi 3 data sheet", half=1835, float8=1835),
)

# Words of a device's name that say nothing of its speed.
_SILENT = frozenset({"NVIDIA", "TESLA", "AMD", "OAM", "GRAPHICS", "CARD"})
# V100 and A100 come with so much memory in a name's last word, or without it.
_OPTIONAL = re.compile(r"\d+GB?|HBM3E?")


def find_peak(device_name: str) -> DevicePeak | None:
    """Return the entry of a device, as ``torch.cuda.get_device_name`` calls it; None if unknown.

    Whole words must agree: an L40S is no L4, an RTX A4000 no A40, and a slice of an H100 (MIG) is
    not in the table.
    """
    words = _words(device_name)
    found = [peak for peak in PEAKS if _covers(_words(peak.name), words)]
    # The most specific: an "H200 NVL" has the word of the "H200" too.
    return max(found, key=lambda peak: len(_words(peak.name)), default=None)


def dtype_tflops(peak: DevicePeak, dtype: torch.dtype, *, tf32: bool = False) -> float | None:
    """Return the dense TFLOP/s for a type that matrices are multiplied in; None if unknown.

    ``tf32`` says that float32 is multiplied as TensorFloat-32.
    """
    keys = {
        torch.bfloat16: ("half",),
        torch.float16: ("half", "float16"),
        torch.float32: ("tfloat32",) if tf32 else ("float32",),
        torch.float8_e4m3fn: ("float8",),
        torch.float8_e5m2: ("float8",),
    }.get(dtype, ())
    return next((peak.tflops[key] for key in keys if key in peak.tflops), None)


def _words(name: str) -> frozenset[str]:
    return frozenset(re.findall(r"[A-Z0-9]+", name.upper())) - _SILENT


def _covers(entry: frozenset[str], words: frozenset[str]) -> bool:
    """Say whether a name has every word of an entry, and no other that might mean something."""
    return entry <= words and all(_OPTIONAL.fullmatch(word) for word in words - entry)
