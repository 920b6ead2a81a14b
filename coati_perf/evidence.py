"""A small file for each kind of figure that no device could reach: enough to reproduce it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from coati_perf import catalogue
from coati_perf.metric import Ratio
from coati_perf.record import EpisodeRecord, Header

FOLDER = "impossible"


def write_evidence(header: Header, record: EpisodeRecord) -> None:
    """Write, below the run's folder, the inputs of each impossible figure; raises OSError.

    One file per metric, of its first time: later ones have the same cause.
    """
    folder = Path(header.run_dir) / FOLDER
    for name in record.impossible:
        path = folder / f"{name.replace('/', '_')}.json"
        if not path.exists():
            folder.mkdir(exist_ok=True)
            content = msgspec.json.encode(_inputs(name, header, record))
            path.write_bytes(msgspec.json.format(content, indent=1) + b"\n")


def _inputs(name: str, header: Header, record: EpisodeRecord) -> Mapping[str, Any]:
    ratio = catalogue.CATALOGUE[name]
    assert isinstance(ratio, Ratio)
    return {
        "metric": name,
        "unit": ratio.unit,
        "value": record.impossible[name].value,
        "limit": record.impossible[name].limit,
        "reason": record.impossible[name].reason,
        "is": "scale · numerator ÷ (denominator · devices · peak)",
        "scale": ratio.scale,
        "numerator": {ratio.numerator: record.metrics[ratio.numerator]},
        "denominator": {ratio.denominator: record.metrics[ratio.denominator]},
        "devices": 1 if ratio.devices is None else header.machine.devices(ratio.devices),
        "peak": 1 if ratio.peak is None else header.machine.peak(ratio.peak),
        "run_id": record.run_id,
        "episode": record.episode,
        "convention": header.convention,
        "cost_model": header.cost_model,
        "machine": header.machine,
        "device": header.device,
        "versions": header.versions,
    }
