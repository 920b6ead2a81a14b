"""The devices that a run has, and what one of them can do."""

from __future__ import annotations

import msgspec

from coati_perf.metric import Devices, Peak


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Declared once per run; every rate per device and every share of a peak is by it.

    ``ranks`` report. They train, each on one device, unless they report for ``trainer_devices``,
    as a driver does. ``rollout_devices`` generate apart from them, None where
    the ranks generate themselves. ``data_parallel_size`` is the number of replicas of the model
    among the ranks, None where each rank is one: the ranks of a replica see the same samples.
    ``peak_tflops`` is a device's dense peak in TFLOP/s for the dtype in use, ``bandwidth`` that
    of its memory in TB/s (10¹² bytes); ``peak_source`` says where these come from.
    """

    ranks: int
    trainer_devices: int | None = None
    rollout_devices: int | None = None
    data_parallel_size: int | None = None
    peak_tflops: float | None = None
    bandwidth: float | None = None
    peak_source: str | None = None

    def devices(self, which: Devices) -> int:
        """Return how many devices share such work."""
        trainers = self.ranks if self.trainer_devices is None else self.trainer_devices
        if which is Devices.TRAINER or self.rollout_devices is None:
            return trainers
        return self.rollout_devices + (trainers if which is Devices.ALL else 0)

    def peak(self, which: Peak) -> float | None:
        """Return a device's peak, in 10¹² FLOP or bytes per second; None where it is unknown."""
        return self.peak_tflops if which is Peak.TFLOPS else self.bandwidth

    @property
    def once(self) -> float:
        """What a sum over all ranks of per-replica counts is multiplied by to count each once."""
        return 1.0 if self.data_parallel_size is None else self.data_parallel_size / self.ranks
