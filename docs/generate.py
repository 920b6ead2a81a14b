"""Write docs/metrics.md from the catalogue, or with --check see that it is up to date."""

from __future__ import annotations

import sys
from pathlib import Path

from coati_perf import catalogue
from coati_perf.catalogue import CATALOGUE
from coati_perf.metric import Combined, Devices, Measured, Metric, Ratio
from coati_perf.names import NAMES, Alias

TARGET = Path(__file__).parent / "metrics.md"

HEAD = """\
# Metrics

Generated from `coati_perf/catalogue.py` by `docs/generate.py`; do not edit.

Values are finite floats; an undefined value (such as 0 ÷ 0) is absent. A phase that you name
yourself appears as `perf/time/<name>_s`, reduced like the other times. Of a mean, a rank without
the value counts as 0, so that phases + other − overlap = episode over ranks too.

| metric | unit | over ranks, or formula | meaning |
|---|---|---|---|
"""

SINKS = """

Of each sink, by its name (`wandb`, `csv`, a class), as it was when the record was made:

| metric | meaning |
|---|---|
"""

THEIR_NAMES = """
## Under other trainers' names

For dashboards that exist: the sink `as:verl:wandb` gets these beside ours, from any other trainer.

| trainer | its name | is |
|---|---|---|
"""

_DEVICES = {
    Devices.ALL: "all devices",
    Devices.ROLLOUT: "rollout devices",
    Devices.TRAINER: "trainer devices",
}


def how(metric: Metric) -> str:
    """Return how a metric comes about, in the words of the table."""
    if isinstance(metric, Measured):
        return metric.reduction.value
    if isinstance(metric, Combined):
        joined = ", ".join(f"`{part}`" for part in metric.parts)
        return f"{'least' if metric.least else 'sum'} of {joined}"
    if isinstance(metric, Ratio):
        scale = "" if metric.scale == 1 else f"{metric.scale:g} × "
        which = "" if metric.devices is None else f" × {_DEVICES[metric.devices]}"
        peak = "" if metric.peak is None else " × peak"
        return f"{scale}`{metric.numerator}` ÷ (`{metric.denominator}`{which}{peak})"
    return "of the record as a whole"


def stands_for(alias: Alias) -> str:
    """Return what a name of another trainer stands for, in the words of the table."""
    scale = "" if alias.scale == 1 else f"{alias.scale:g} × "
    below = "" if alias.denominator is None else f" ÷ `{alias.denominator}`"
    return f"{scale}`{alias.numerator}`{below}"


def render() -> str:
    """Return the whole file."""
    rows = (
        f"| `{metric.name}` | {metric.unit} | {how(metric)} | {metric.meaning} |"
        for metric in CATALOGUE.values()
    )
    sinks = "\n".join(
        f"| `perf/sink/<name>_{what}` | {meaning} |"
        for what, meaning in catalogue.SINK_HEALTH.items()
    )
    reserved = ", ".join(f"`{name}`" for name in sorted(catalogue.RESERVED_PHASE_NAMES))
    tail = f"\n\nNames that a phase of your own cannot have: {reserved}.\n"
    names = "\n".join(
        f"| {trainer} | `{name}` | {stands_for(alias)} |"
        for trainer, aliases in NAMES.items()
        for name, alias in aliases.items()
    )
    return HEAD + "\n".join(rows) + SINKS + sinks + tail + THEIR_NAMES + names + "\n"


def main() -> int:
    """Write the file, or compare it with --check; return the exit status."""
    if "--check" not in sys.argv:
        TARGET.write_text(render(), encoding="utf-8")
    elif TARGET.read_text(encoding="utf-8") != render():
        sys.stderr.write("docs/metrics.md is not what the catalogue says: run docs/generate.py\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
