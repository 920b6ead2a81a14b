"""Turns what verl's controller knows of each step into records."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from coati_perf import PerformanceEvaluator, TimedStep
from coati_perf.arguments import number_or_none
from coati_perf.timed_step import phase_seconds

_logger = logging.getLogger(__name__)

# Both trainers call it once a step, with the batch, the stopwatches and the number of GPUs (0.4).
SEAM = "compute_throughout_metrics"
MODULES = ("verl.trainer.ppo.ray_trainer", "verl.trainer.ppo.v1.trainer_base")

# verl's stopwatches by our phases. Others inside "gen" would count twice.
_SCORE = {"old_log_prob": "actor", "ref": "initial", "RefPolicy": "initial", "values": "critic"}
_LEARN = {"update_actor": "actor", "update_critic": "critic"}
_PHASES = {
    "gen": "generate",
    **dict.fromkeys(_SCORE, "score"),
    **dict.fromkeys(_LEARN, "learn"),
    "update_weights": "weight_sync",
    "reward": "reward",
    "adv": "adv",
    "save_checkpoint": "save_checkpoint",
    "dump_rollout_generations": "dump_rollout_generations",
}


def attach(
    evaluator: PerformanceEvaluator, *, epochs: int = 1, responses_per_prompt: int = 1
) -> Callable[[], None]:
    """Record every step of the verl trainers of this process; return what stops it.

    To be called in the process that runs the trainer (its ``TaskRunner``), before ``fit``. The
    evaluator's ``trainer_devices`` are verl's GPUs unless they are given, and ``models`` should
    name those that there are: ``actor``, and ``critic`` and ``initial`` where they run.

    Args:
        evaluator: made with ``models=`` of configs.
        epochs: ``actor_rollout_ref.actor.ppo_epochs``, and the critic's.
        responses_per_prompt: ``actor_rollout_ref.rollout.n``; they share the prefill.

    Raises:
        ImportError: there is no verl here.
        RuntimeError: this version of verl has none of the functions that are watched.
        ValueError: a number is below 1.
    """
    number_or_none("epochs", epochs)
    number_or_none("responses_per_prompt", responses_per_prompt)
    recorder = _Recorder(evaluator, epochs, responses_per_prompt)
    verl = importlib.import_module("verl")
    modules = [module for name in MODULES if (module := _module(name)) is not None]
    originals = [(module, getattr(module, SEAM)) for module in modules if hasattr(module, SEAM)]
    if not originals:
        version = getattr(verl, "__version__", "of no known version")
        message = f"verl {version} has no {SEAM} in {' or '.join(MODULES)}: nothing to measure by"
        raise RuntimeError(message)
    for module, original in originals:
        setattr(module, SEAM, recorder.beside(original))

    def detach() -> None:
        for module, original in originals:
            setattr(module, SEAM, original)

    return detach


def _module(name: str) -> Any:
    """Import a trainer; None where this version, or this machine, does not have it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        _logger.info("%s is not measured: %s", name, error)
        return None


@dataclasses.dataclass
class _Recorder:
    evaluator: PerformanceEvaluator
    epochs: int
    responses_per_prompt: int
    step: int = 0

    def beside(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that also records the step."""

        @functools.wraps(original)
        def watched(batch: Any, timing_raw: Mapping[str, float], n_gpus: int) -> Any:
            try:
                self._record(batch, timing_raw, n_gpus)
            except Exception as error:  # noqa: BLE001 - training goes on
                self.evaluator.fault("a step of verl", error)
            return original(batch=batch, timing_raw=timing_raw, n_gpus=n_gpus)

        return watched

    def _record(self, batch: Any, timings: Mapping[str, float], gpus: int) -> None:
        if self.step == 0:
            self.evaluator.declare_devices(int(gpus))
        prompts, responses = _lengths(batch.batch)
        step, self.step = self.step, self.step + 1
        self.evaluator.record_step(
            step,
            TimedStep(
                wall_s=float(timings["step"]),
                seconds=phase_seconds(timings, _PHASES),
                prompts=prompts,
                responses=responses,
                scored=[role for name, role in _SCORE.items() if name in timings],
                learned=[role for name, role in _LEARN.items() if name in timings],
                epochs=self.epochs,
                responses_per_prompt=self.responses_per_prompt,
            ),
        )


def _lengths(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of each prompt and each response (B,), as verl counts them."""
    if "prompt_length" in batch.keys():  # noqa: SIM118 - a TensorDict's ``in`` looks for a value
        return batch["prompt_length"], batch["response_length"]
    width = batch["responses"].shape[-1]
    mask = batch["attention_mask"]
    return mask[:, :-width].sum(-1), mask[:, -width:].sum(-1)
