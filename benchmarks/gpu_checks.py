"""Checks that need a GPU: device times, MFU, and that no hook synchronises. Prints each figure.

    python benchmarks/gpu_checks.py [--output results/gpu.json]

Exits with 1 where a figure is outside its limit. Needs coati_perf alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from coati_perf import CostModel, PerformanceEvaluator, read_journal

SIZE = 8192
PRODUCTS = 40
FLOP = 2 * SIZE**3 * PRODUCTS


def run(folder: Path) -> dict[str, Any]:
    """Run two episodes of matrix products, the second one measured by events of its own too."""
    device = torch.device("cuda")
    left = torch.randn(SIZE, SIZE, device=device, dtype=torch.bfloat16)
    mask = torch.ones(2, 16, device=device, dtype=torch.long)
    experience = SimpleNamespace(
        sequences=torch.zeros(2, 16, device=device, dtype=torch.long),
        attention_mask=mask,
        action_mask=mask[:, 8:].bool(),
    )
    # Each of the two samples costs half of the products.
    cost = CostModel.custom(forward=lambda length: length * 0, backward=lambda n: n * 0 + FLOP / 2)
    evaluator = PerformanceEvaluator(
        0, 0, 0, 0, run_dir=folder / "run", models={"critic": cost}, timing="device"
    )
    start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    for episode in range(2):
        torch.cuda.set_sync_debug_mode("error" if episode else "default")
        evaluator.on_episode_start(episode)
        evaluator.on_make_experience_start()
        with evaluator.phase("generate"):
            left @ left
        evaluator.on_make_experience_end(experience)
        evaluator.on_learn_batch_start()
        start.record()
        for _ in range(PRODUCTS):
            left @ left
        end.record()
        evaluator.on_learn_batch_end(experience)
        evaluator.on_episode_end(episode)
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    own_s = start.elapsed_time(end) / 1000
    evaluator.close()
    segment = read_journal(folder / "run").segments[-1]
    record, machine = segment.episodes[-1], segment.header.machine
    device_s = record.metrics["perf/device/learn_s"]
    return {
        "device": segment.header.device,
        "torch": torch.__version__,
        "peak_tflops": machine.peak_tflops,
        "peak_source": machine.peak_source,
        "own_s": own_s,
        "device_s": device_s,
        "device_time_error": device_s / own_s - 1,
        "own_mfu": FLOP / own_s / 1e12 / (machine.peak_tflops or float("nan")),
        "mfu": record.metrics["perf/device/learn_mfu"],
        "host_s": record.metrics["perf/time/learn_s"],
        "faults": record.faults,
        "memory": {k: v for k, v in record.metrics.items() if k.startswith("perf/memory/")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU here")
    with tempfile.TemporaryDirectory() as folder:
        figures = run(Path(folder))
    print(json.dumps(figures, indent=1))
    if options.output:
        options.output.write_text(json.dumps(figures, indent=1) + "\n")
    mfu_error = figures["mfu"] / figures["own_mfu"] - 1
    limits = {
        "device time within 2 %": abs(figures["device_time_error"]) < 0.02,
        "MFU within 3 %": abs(mfu_error) < 0.03,
        "no synchronisation in a hook, and no other fault": not figures["faults"],
    }
    for what, met in limits.items():
        print(f"{'met' if met else 'NOT MET'}: {what}")
    sys.exit(not all(limits.values()))


if __name__ == "__main__":
    main()
