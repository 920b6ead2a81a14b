"""The step time of TRL's GRPO with the callback beside that without it, in turns.

``python benchmarks/trl_overhead.py``: 20 pairs of runs of a small model on the CPU, about three
minutes. Step times are TRL's own.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "trl"))

from tiny import llama, prompts, reward_of_length, tokenizer
from trl import GRPOConfig, GRPOTrainer

from coati_perf_trl import CoatiPerfCallback


def step_times(folder: Path, steps: int, *, measured: bool) -> list[float]:
    """Train, and return the seconds of each step but the first."""
    arguments = GRPOConfig(
        output_dir=str(folder / "trainer"), report_to=[], max_steps=steps, logging_steps=1,
        per_device_train_batch_size=8, num_generations=4, max_completion_length=64,
        save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=llama(),
        reward_funcs=reward_of_length,
        args=arguments,
        train_dataset=prompts(),
        processing_class=tokenizer(),
    )
    if measured:
        options = {"run_dir": folder / "run", "sinks": ["tensorboard"], "peak_tflops": 1.0}
        trainer.add_callback(CoatiPerfCallback(trainer, **options))
    with contextlib.redirect_stdout(open(os.devnull, "w")):  # noqa: PTH123
        trainer.train()
    return [log["step_time"] for log in trainer.state.log_history if "step_time" in log][1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--pairs", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=12, help="default: %(default)s")
    arguments = parser.parse_args()
    seconds: dict[bool, list[float]] = {True: [], False: []}
    ratios = []
    for pair in range(arguments.pairs):
        medians = {}
        for measured in (pair % 2 == 0, pair % 2 == 1):
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                times = step_times(Path(folder), arguments.steps, measured=measured)
                time.sleep(0.2)
            seconds[measured] += times
            medians[measured] = statistics.median(times)
        ratios.append(medians[True] / medians[False])
        print(f"pair {pair}: {ratios[-1]:.4f}", file=sys.stderr)
    with_it, without = (1e3 * statistics.median(seconds[measured]) for measured in (True, False))
    print(f"median step with the callback {with_it:.2f} ms, without {without:.2f} ms")
    of_pairs = statistics.median(ratios)
    print(f"ratio {with_it / without:.4f}; median of the pairs' ratios {of_pairs:.4f}")


if __name__ == "__main__":
    main()
