"""Trainers of the installed TRL over tiny models."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")

# The tiny models lie beside this file; the benchmark's independent count serves the tests too.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "benchmarks")]

from tiny import llama, prompts, reward_of_length, tokenizer  # noqa: E402


@pytest.fixture
def settings(tmp_path):
    """Return the arguments that every trainer here has; more come on top."""

    def settings(kind, **more):
        common = {
            "output_dir": str(tmp_path / "trainer"), "report_to": [], "max_steps": 4,
            "per_device_train_batch_size": 4, "logging_steps": 1, "save_strategy": "no",
            "use_cpu": True, "disable_tqdm": True,
        }  # fmt: skip
        return kind(**common | more)

    return settings


@pytest.fixture
def online(settings):
    """Return a maker of GRPO's trainer, or another of its kind."""
    from trl import GRPOConfig, GRPOTrainer

    def make(
        trainer=GRPOTrainer, config=GRPOConfig, *, model=None, peft=None, rewards=None, **more
    ):
        more = {"num_generations": 4, "max_completion_length": 12} | more
        rewards = [reward_of_length] if rewards is None else rewards
        return trainer(
            model=llama() if model is None else model,
            reward_funcs=rewards,
            reward_processing_classes=[tokenizer() for _ in rewards],
            args=settings(config, **more),
            train_dataset=prompts(),
            eval_dataset=prompts().select(range(8)),
            processing_class=tokenizer(),
            peft_config=peft,
        )

    return make
