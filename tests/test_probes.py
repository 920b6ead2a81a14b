"""Device times and memory, with doubles of the device: there is no accelerator here.

benchmarks/gpu_checks.py does the same on a real one.
"""

from __future__ import annotations

import pytest
import torch

from coati_perf import PerformanceEvaluator, hooks
from coati_perf.device_memory import DeviceMemory
from coati_perf.device_timer import DeviceTimer, device_seconds


class Device:
    """A device whose work ends later than it is launched, and its memory."""

    def __init__(self):
        self.now_ms = 0.0
        self.waited = 0
        self.peak = [0, 0]
        self.used = 0
        self.broken = False

    def event(self):
        return Event(self)

    def reset(self):
        self.peak = [0, 0]

    def peaks(self):
        if self.broken:
            raise RuntimeError("no statistics")
        return (*self.peak, self.used)

    def take_memory(self, allocated, used):
        self.peak = [max(self.peak[0], allocated), max(self.peak[1], 2 * allocated)]
        self.used = used


class Event:
    def __init__(self, device):
        self._device = device
        self.at = None

    def record(self):
        self.at = self._device.now_ms

    def synchronize(self):
        assert self.at is not None
        self._device.waited += 1

    def elapsed_time(self, end):
        return end.at - self.at


@pytest.fixture
def device(monkeypatch):
    made = Device()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(hooks, "timing_event", made.event)
    monkeypatch.setattr(hooks, "AcceleratorMemory", lambda: made)
    return made


@pytest.fixture
def evaluator(device, tmp_path, clock):
    made = PerformanceEvaluator(
        1, 1, 1, 1, timing="device", clock=clock, run_dir=tmp_path / "run", peak_tflops=1.0
    )
    yield made
    made.close()


def test_device_times_are_those_between_events_and_no_hook_waits(
    evaluator, device, clock, make_experience, read_run
):
    for episode in range(2):
        evaluator.on_episode_start(episode)
        evaluator.on_make_experience_start()
        with evaluator.phase("generate"):
            clock.advance(1.0)
            device.now_ms += 3000.0
        with evaluator.phase("mine"), evaluator.phase("generate"):
            device.now_ms += 500.0
        evaluator.on_make_experience_end(make_experience())
        for _ in range(4):
            evaluator.on_learn_batch_start()
            device.now_ms += 250.0
            evaluator.on_learn_batch_end(make_experience())
        assert device.waited == 0 or episode == 1
        evaluator.on_episode_end(episode)
    evaluator.close()
    for record in read_run().episodes:
        assert record.metrics["perf/time/generate_s"] == 1.0
        assert record.metrics["perf/device/generate_s"] == 3.5
        assert record.metrics["perf/device/make_experience_s"] == 3.5
        assert record.metrics["perf/device/learn_s"] == 1.0
        assert record.faults == {}
    assert device.waited == 2 * (2 + 1 + 4)


def test_memory_peaks_are_those_of_each_phase_with_the_phases_inside(
    evaluator, device, make_experience, read_run
):
    evaluator.on_episode_start(0)
    device.take_memory(900, 1000)  # before any phase
    evaluator.on_make_experience_start()
    device.take_memory(10, 40)
    with evaluator.phase("generate"):
        device.take_memory(30, 70)
    device.take_memory(20, 50)
    evaluator.on_make_experience_end(make_experience())
    evaluator.on_learn_batch_start()
    device.take_memory(25, 60)
    evaluator.on_learn_batch_end(make_experience())
    evaluator.on_episode_end(0)
    evaluator.close()
    metrics = read_run().episodes[0].metrics
    assert metrics["perf/memory/generate_allocated_bytes"] == 30
    assert metrics["perf/memory/generate_reserved_bytes"] == 60
    assert metrics["perf/memory/generate_device_used_bytes"] == 70
    assert metrics["perf/memory/make_experience_allocated_bytes"] == 30
    assert metrics["perf/memory/learn_allocated_bytes"] == 25
    assert metrics["perf/memory/learn_device_used_bytes"] == 60


def test_a_probe_that_raises_is_one_fault_and_sees_no_more(
    evaluator, device, make_experience, read_run, caplog
):
    device.broken = True
    evaluator.on_episode_start(0)
    for _ in range(3):
        evaluator.on_learn_batch_start()
        evaluator.on_learn_batch_end(make_experience())
    evaluator.on_episode_end(0)
    evaluator.close()
    record = read_run().episodes[0]
    assert record.faults == {"DeviceMemory: RuntimeError: no statistics": 1}
    assert record.metrics["perf/device/learn_s"] == 0.0


def test_a_phase_whose_end_is_missing_spoils_no_later_one(evaluator, device, read_run):
    evaluator.on_episode_start(0)
    evaluator.on_make_experience_start()
    evaluator.on_episode_end(0)
    evaluator.on_episode_start(1)
    with evaluator.phase("generate"):
        device.now_ms += 10
    evaluator.on_episode_end(1)
    evaluator.close()
    assert read_run().episodes[1].metrics["perf/device/generate_s"] == 0.01


def test_phases_left_open_inside_another_end_with_it():
    device = Device()
    memory = DeviceMemory(device)
    memory.enter("learn")
    memory.enter("learn/score")
    device.take_memory(5, 6)
    memory.leave("learn")
    peaks = memory.take()
    assert peaks["perf/memory/learn_allocated_bytes"] == 5
    assert peaks["perf/memory/score_allocated_bytes"] == 5


@pytest.mark.parametrize("timing", ["device", "gpu"])
def test_device_times_are_refused_where_there_are_none(timing):
    with pytest.raises(ValueError, match=f"timing is '{timing}'"):
        PerformanceEvaluator(1, 1, 1, 1, timing=timing)


def test_a_phase_left_open_inside_another_is_not_timed():
    device = Device()
    timer = DeviceTimer(device.event)
    timer.enter("learn")
    device.now_ms += 1000
    timer.enter("learn/score")
    device.now_ms += 500
    timer.leave("learn")
    assert device_seconds(timer.take()) == {"perf/device/learn_s": 1.5}
