"""The kinds of metric: measured by the ranks, combined, a ratio, or derived from the record.

A *measured* metric comes from the ranks and is reduced over them. A *combined* metric and a
*ratio* are computed from measured ones after the reduction: a ratio is always sum ÷ sum and never
a mean of rates. A *derived* metric describes the record as a whole.
"""

from __future__ import annotations

import enum

import msgspec


class Reduction(enum.Enum):
    """How the values of all ranks become one."""

    SUM = "sum"
    MEAN = "mean"  # over every rank that reported; a rank without the value counts as 0
    MAX = "max"


class Devices(enum.Enum):
    """Which devices share a piece of work."""

    ALL = "all"
    ROLLOUT = "rollout"
    TRAINER = "trainer"


class Peak(enum.Enum):
    """What a device can do at most per second: 10¹² FLOP, or 10¹² bytes of its memory."""

    TFLOPS = "tflops"
    BANDWIDTH = "bandwidth"


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A metric that each rank measures; over the episodes of a run it adds up, a MAX stays one.

    With ``per_replica`` the ranks of one data-parallel replica each count the same work, which
    is there once.
    """

    name: str
    unit: str
    reduction: Reduction
    meaning: str
    per_replica: bool = False


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """A metric computed as ``scale`` · numerator ÷ denominator, absent where that is undefined.

    Numerator and denominator name measured metrics, already reduced. With ``devices`` the
    denominator is multiplied by their number, so that a sum over ranks is divided by device
    seconds and not by wall seconds; with ``peak`` by what one of them can do.
    """

    name: str
    unit: str
    numerator: str
    denominator: str
    meaning: str
    scale: float = 1.0
    devices: Devices | None = None
    peak: Peak | None = None


class Combined(msgspec.Struct, frozen=True, kw_only=True):
    """A metric made of measured ones after the reduction: their sum, or the least of them.

    A part that is absent counts as 0; where every part is absent, so is the metric.
    """

    name: str
    unit: str
    parts: tuple[str, ...]
    meaning: str
    least: bool = False


class Derived(msgspec.Struct, frozen=True, kw_only=True):
    """A metric of the record as a whole, such as which rank was slowest."""

    name: str
    unit: str
    meaning: str


Metric = Measured | Combined | Ratio | Derived


class DuplicateMetricError(ValueError):
    """Two metrics of one name were declared."""
