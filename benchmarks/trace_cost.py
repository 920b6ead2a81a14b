"""What it costs to trace published models: seconds, and memory above that of the imports.

python benchmarks/trace_cost.py
"""

from __future__ import annotations

import importlib
import os
import resource
import tempfile
import time

import torch

from coati_perf.flops import CostModel
from published_configs import published_configs


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    configs = published_configs()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["COATI_PERF_CACHE"] = folder
        print(f"torch {torch.__version__}")
        started = time.perf_counter()
        importlib.import_module("transformers.modeling_utils")
        print(f"import of transformers' models: {time.perf_counter() - started:.2f} s")
        print(f"{'model':<20}{'first, s':>12}{'cached, ms':>12}{'MiB more':>12}")
        for name in ("Llama-3 8B", "Llama-3 70B", "DeepSeek-V3 671B"):
            before, started = peak_mib(), time.perf_counter()
            CostModel.traced(configs[name])
            first = time.perf_counter()
            CostModel.traced(configs[name])
            cached = time.perf_counter()
            print(
                f"{name:<20}{first - started:>12.2f}{1000 * (cached - first):>12.1f}"
                f"{peak_mib() - before:>12.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
