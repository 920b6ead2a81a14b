"""Runs upstream's own ``OLTrainer.fit`` over a toy, with its evaluator and ours side by side.

``python real_loop.py FOLDER`` under torchrun or alone; rank r writes ``FOLDER/rank-r.json``: what
upstream's evaluator has counted.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

# Upstream's evaluator reduces on a GPU, and its buffer asks for the device of one.
torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment]

from coati.trainer.base import OLTrainer
from coati.trainer.callbacks import PerformanceEvaluator as Upstream

from coati_perf_colossalchat import PerformanceEvaluator

COUNTS = (1_000, 2_000, 3_000, 4_000)


class Toy(OLTrainer):
    """Makes experience of 4 samples, 24 prompt tokens and 40 actions, and learns from it twice."""

    def _before_fit(self) -> None: ...

    def _setup_update_phrase_dataload(self) -> None: ...

    def _save_checkpoint(self, episode: int = 0) -> None: ...

    def _make_experience(self, collect_step: int) -> SimpleNamespace:
        return SimpleNamespace(
            sequences=torch.zeros(4, 64), action_mask=torch.ones(4, 40), attention_mask=None
        )

    def _learn(self, update_step: int) -> None:
        for experience in self.data_buffer:
            self._on_learn_batch_start()
            self._on_learn_batch_end(experience)


def main(folder: Path) -> None:
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    upstream = Upstream(*COUNTS, train_config={}, save_path=str(folder / "upstream.txt"))
    ours = PerformanceEvaluator(*COUNTS, run_dir=folder / "run", peak_tflops=1.0)
    trainer = Toy(None, None, [], False, False, callbacks=[upstream, ours])
    trainer.num_train_step = 0
    trainer.fit(3, 2, 2)
    counted = {
        "samples": upstream.make_experience_num_samples,
        "learned": upstream.learn_num_samples,
        "make_experience_flop": upstream.make_experience_flop,
        "learn_flop": upstream.learn_flop,
    }
    (folder / f"rank-{rank}.json").write_text(json.dumps(counted))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
