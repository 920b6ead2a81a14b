"""One rank of a GRPO run under torchrun; writes torch's count of FLOP and TRL's of tokens."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "benchmarks")]

from tiny import llama, prompts, reward_of_length, tokenizer
from trl import GRPOConfig, GRPOTrainer

from coati_perf_trl import CoatiPerfCallback
from independent_count import executed_flop


def main() -> None:
    folder = Path(sys.argv[1])
    os.environ["COATI_PERF_CACHE"] = str(folder / "cache")
    trainer = GRPOTrainer(
        model=llama(),
        reward_funcs=reward_of_length,
        args=GRPOConfig(
            output_dir=str(folder / "trainer"), report_to=[], max_steps=4, logging_steps=1,
            per_device_train_batch_size=4, num_generations=4, max_completion_length=12,
            save_strategy="no", use_cpu=True, disable_tqdm=True,
        ),
        train_dataset=prompts(),
        processing_class=tokenizer(),
    )  # fmt: skip
    callback = CoatiPerfCallback(trainer, attention="full", run_dir=folder / "run", peak_tflops=1.0)
    trainer.add_callback(callback)
    flop = executed_flop(trainer.train)
    counts = [log["num_tokens"] for log in trainer.state.log_history if "num_tokens" in log]
    result = {"flop": flop, "num_tokens": counts[-1] if counts else None}
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(result))


main()
