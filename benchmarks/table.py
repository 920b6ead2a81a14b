"""The rows that every benchmark here yields, and how they are printed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One thing that ours does, beside what does the same elsewhere, from one run."""

    what: str
    ours: float
    peer: str
    theirs: float
    unit: str = "ns"
    aim: str = ""
    ours_p99: float | None = None
    theirs_p99: float | None = None

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs

    def as_dict(self) -> dict[str, object]:
        return {**dataclasses.asdict(self), "ratio": self.ratio}


_HEADINGS = ("", "ours", "p99", "theirs", "p99", "unit", "ratio", "beside", "aim")
_LEFT = {0, 5, 7, 8}


def render(comparisons: Sequence[Comparison]) -> str:
    """Return the rows as a table of text."""
    lines = [_HEADINGS, *(_cells(row) for row in comparisons)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADINGS))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in _LEFT else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _cells(row: Comparison) -> tuple[str, ...]:
    return (
        row.what,
        f"{row.ours:,.0f}",
        "" if row.ours_p99 is None else f"{row.ours_p99:,.0f}",
        f"{row.theirs:,.0f}",
        "" if row.theirs_p99 is None else f"{row.theirs_p99:,.0f}",
        row.unit,
        f"{row.ratio:.2f}" if row.ratio >= 0.1 else f"{row.ratio:.4f}",
        row.peer,
        row.aim,
    )
