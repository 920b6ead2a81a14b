"""The table of peaks: each mistake that libraries of the field are known to make, and names."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coati_perf.machine import Machine
from coati_perf.measured_peak import measure_bandwidth, measure_tflops
from coati_perf.peaks import PEAKS, dtype_tflops, find_peak
from coati_perf.survey import Declared, survey


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        # The makers' data sheets, dense; where these give figures with sparsity, half of them.
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),  # no SXM
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),  # a library takes the SXM's
        ("NVIDIA L40S", 362),  # taken for an L4: 121
        ("NVIDIA L4", 121),
        ("NVIDIA A40", 149.7),
        ("NVIDIA RTX A4000", 76.7),  # taken for an A40
        ("NVIDIA GeForce RTX 4090", 165.2),  # its float32 rate taken: 82.6
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA GB300", 2500),
        ("AMD Instinct MI300X", 1307.4),
        ("AMD Instinct MI250X", 191.5),  # one die, of two
    ],
)
def test_a_devices_dense_bfloat16_peak(name, tflops):
    assert dtype_tflops(find_peak(name), torch.bfloat16) == tflops


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",  # a slice
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A10G",
        "NVIDIA H100",
        "NVIDIA H300",
        "L40SX",
        "cpu",
        "",
    ],
)
def test_an_unknown_device_is_taken_for_no_other(name):
    assert find_peak(name) is None


@given(st.sampled_from(PEAKS), st.text("ABCLS0123456789", min_size=1, max_size=3))
def test_no_device_is_known_by_a_part_of_a_word(peak, more):
    *words, last = peak.name.split()
    found = find_peak(" ".join([*words, last + more]))
    assert found is None or found.name == " ".join([*words, last + more])


def test_every_entry_is_found_by_its_own_name_and_has_a_source():
    for peak in PEAKS:
        assert find_peak(f"NVIDIA {peak.name}") is peak
        assert peak.source
        assert min(peak.tflops.values()) > 0
        assert 100 < peak.bandwidth_gb_per_s < 10_000


def test_types_have_peaks_of_their_own():
    h100 = find_peak("NVIDIA H100 80GB HBM3")
    assert dtype_tflops(h100, torch.float32) == 67
    assert dtype_tflops(h100, torch.float32, tf32=True) == 494.7
    assert dtype_tflops(h100, torch.float8_e4m3fn) == 1978.9
    assert dtype_tflops(h100, torch.int8) is None
    v100 = find_peak("Tesla V100-SXM2-32GB")
    assert dtype_tflops(v100, torch.float16) == 125
    assert dtype_tflops(v100, torch.bfloat16) is None


def test_a_cpu_is_measured_and_says_so():
    machine = survey(Declared(dtype=torch.float32), ranks=2)
    assert machine.peak_source == "measured, float32"
    assert machine.ranks == 2
    assert 0 < machine.peak_tflops < 1000
    assert 0 < machine.bandwidth < 10


def test_a_measured_peak_is_no_less_than_a_product_made_here():
    """Within a half, as another process may have the processor meanwhile."""
    import time

    matrix = torch.ones(512, 512)
    _ = matrix @ matrix
    started = time.perf_counter()
    for _ in range(20):
        _ = matrix @ matrix
    own = 20 * 2 * 512**3 / (time.perf_counter() - started) / 1e12
    assert measure_tflops(torch.device("cpu"), torch.float32, seconds=0.3) > own / 2
    assert measure_bandwidth(torch.device("cpu"), seconds=0.1) > 1e-4


def test_given_peaks_are_taken_as_they_are():
    declared = Declared(peak_tflops=100.0, bandwidth_gb_per_s=2000.0, data_parallel_size=2)
    assert survey(declared, ranks=8) == Machine(
        ranks=8, data_parallel_size=2, peak_tflops=100.0, bandwidth=2.0, peak_source="given"
    )
