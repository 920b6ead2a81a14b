"""The step time of TRL's GRPO with the callback beside that without it, in turns.

``python benchmarks/trl_overhead.py``: two processes train the same small model on the CPU, one of
them with the callback, a few steps each in turn, so that a machine whose speed drifts slows both
alike. Step times are TRL's own. About four minutes. ``--control`` says what ratio the machine gives
without any difference: a machine shared with others can be off by 5 %.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "trl"))

from tiny import llama, prompts, reward_of_length, tokenizer
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from coati_perf_trl import CoatiPerfCallback


class Turns(TrainerCallback):
    """Train ``steps`` steps each time that ``turn`` says so, and send their seconds back."""

    def __init__(self, turn: Connection, steps: int) -> None:
        self._turn = turn
        self._steps = steps

    def on_step_begin(self, _arguments, state, _control, **_):
        if state.global_step % self._steps == 0:
            self.end_turn(state)
            self._turn.recv()

    def on_train_end(self, _arguments, state, _control, **_):
        self.end_turn(state)

    def end_turn(self, state) -> None:
        times = [log["step_time"] for log in state.log_history if "step_time" in log]
        self._turn.send(times[-self._steps :])


def train(turn: Connection, turns: int, steps: int, *, measured: bool) -> None:
    """Train in turns, as one of the two processes."""
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        arguments = GRPOConfig(
            output_dir=f"{folder}/trainer", report_to=[], max_steps=turns * steps, logging_steps=1,
            per_device_train_batch_size=8, num_generations=4, max_completion_length=64,
            save_strategy="no", use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=llama(),
            reward_funcs=reward_of_length,
            args=arguments,
            train_dataset=prompts(),
            processing_class=tokenizer(),
            callbacks=[Turns(turn, steps)],
        )
        if measured:
            options = {"run_dir": f"{folder}/run", "sinks": ["tensorboard"], "peak_tflops": 1.0}
            trainer.add_callback(CoatiPerfCallback(trainer, **options))
        trainer.train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--pairs", type=int, default=60, help="default: %(default)s")
    parser.add_argument(
        "--steps", type=int, default=3, help="of one turn, the first uncounted; %(default)s"
    )
    parser.add_argument(
        "--control", action="store_true", help="measure in neither: what the machine alone does"
    )
    arguments = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    turns = {}
    for measured in (True, False):
        turns[measured], turn = spawn.Pipe()
        spawn.Process(
            target=train,
            args=(turn, arguments.pairs + 1, arguments.steps),
            kwargs={"measured": measured and not arguments.control},
            daemon=True,
        ).start()
        turns[measured].recv()  # it is set up, and waits for its turn
    seconds: dict[bool, list[float]] = {True: [], False: []}
    ratios = []
    for pair in range(arguments.pairs + 1):
        medians = {}
        for measured in (pair % 2 == 0, pair % 2 == 1):
            turns[measured].send("go on")
            # What the callback's threads do after a turn falls into the first step of the next.
            times = turns[measured].recv()[1:]
            medians[measured] = statistics.median(times)
            if pair > 0:  # the first pair warms up
                seconds[measured] += times
        if pair > 0:
            ratios.append(medians[True] / medians[False])
            print(f"pair {pair}: {ratios[-1]:.4f}", file=sys.stderr)
    with_it, without = (1e3 * statistics.median(seconds[measured]) for measured in (True, False))
    print(f"median step with the callback {with_it:.2f} ms, without {without:.2f} ms")
    of_pairs = statistics.median(ratios)
    fast, fast_without = (statistics.quantiles(seconds[it], n=10)[0] for it in (True, False))
    print(
        f"ratio {with_it / without:.4f}; median of the pairs' ratios {of_pairs:.4f}; "
        f"of the fastest tenths {fast / fast_without:.4f}"
    )


if __name__ == "__main__":
    main()
