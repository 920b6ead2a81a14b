"""A row that still waits for the device, and for its cost to be worked out."""

from __future__ import annotations

import msgspec

from coati_perf import catalogue
from coati_perf.batches import Batches
from coati_perf.cost import Workload
from coati_perf.device_timer import Timing, device_seconds
from coati_perf.row import Row


class UnresolvedRow(msgspec.Struct, frozen=True):
    """What the training thread hands over of a finished episode."""

    row: Row
    batches: Batches
    workload: Workload
    timings: list[Timing] = []

    def resolve(self) -> Row:
        """Wait for the device, and return the whole row; a fault where that fails."""
        amounts, faults = dict(self.row.amounts), dict(self.row.faults)
        try:
            self.batches.wait()
            self.batches.add_counts(amounts)
            amounts.update(device_seconds(self.timings))
            self.batches.add_costs(amounts, self.workload)
        except Exception as error:  # noqa: BLE001 - someone's device, or cost function
            fault = (
                f"what the batches cost could not be worked out: {type(error).__name__}: {error}"
            )
            faults[fault] = faults.get(fault, 0) + 1
            amounts[catalogue.HOOK_FAULTS] = amounts.get(catalogue.HOOK_FAULTS, 0.0) + 1
        floats = {name: float(amount) for name, amount in amounts.items()}
        return msgspec.structs.replace(self.row, amounts=floats, faults=faults)
