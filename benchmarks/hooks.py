"""Measure what the hooks cost the training thread, beside what does the same elsewhere.

Prints one table of medians and their ratios (ours ÷ theirs; below 1 ours is cheaper), all from
this run. The aims are printed for the reader; nothing is asserted. Run it with
``python benchmarks/hooks.py``; it takes about two minutes, with ``--quick`` some seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import warnings
from pathlib import Path

import torch

import episode_end
import hook_pairs
import peers
from table import Comparison, render


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run; its figures are rough")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the rows as JSON")
    arguments = parser.parse_args()

    comparisons = measure(quick=arguments.quick)
    machine = describe_machine()
    print(render(comparisons))
    print("\n" + ", ".join(f"{name} {value}" for name, value in machine.items()))
    if arguments.output is not None:
        rows = [comparison.as_dict() for comparison in comparisons]
        arguments.output.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


def measure(*, quick: bool) -> list[Comparison]:
    calls, rounds = (2_000, 3) if quick else (50_000, 15)
    with tempfile.TemporaryDirectory(prefix="coati_perf-benchmark-") as temporary:
        folder = Path(temporary)
        return [
            *hook_pairs.compare(folder, calls=calls, rounds=rounds, episodes=20 if quick else 300),
            *peers.compare(folder, calls=calls, rounds=rounds),
            *episode_end.compare(
                folder,
                world_sizes=(1, 2) if quick else (1, 2, 4),
                episodes=10 if quick else 200,
            ),
        ]


def describe_machine() -> dict[str, object]:
    return {
        "cpus": os.cpu_count(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    main()
