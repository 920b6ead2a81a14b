"""Turns what verl's controller knows of each step into records."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch

from coati_perf import CostModel, PerformanceEvaluator, catalogue
from coati_perf.arguments import number_or_none
from coati_perf.batches import token_counts
from coati_perf.cost import Amounts, ModelCosts

_logger = logging.getLogger(__name__)

# Both trainers call it once a step, with the batch, the stopwatches and the number of GPUs (0.4).
SEAM = "compute_throughout_metrics"
MODULES = ("verl.trainer.ppo.ray_trainer", "verl.trainer.ppo.v1.trainer_base")

# verl's stopwatches by our phases. Others inside "gen" would count twice.
_GENERATE = ("gen",)
_SCORE = {"old_log_prob": "actor", "ref": "initial", "RefPolicy": "initial", "values": "critic"}
_LEARN = {"update_actor": "actor", "update_critic": "critic"}
_WEIGHT_SYNC = ("update_weights",)
_OWN = ("reward", "adv", "save_checkpoint", "dump_rollout_generations")


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
                self.evaluator._fault("a step of verl", error)
            return original(batch=batch, timing_raw=timing_raw, n_gpus=n_gpus)

        return watched

    def _record(self, batch: Any, timings: Mapping[str, float], gpus: int) -> None:
        evaluator = self.evaluator
        declared = evaluator._settings.declared
        if self.step == 0 and declared.trainer_devices is None:
            evaluator._settings = msgspec.structs.replace(
                evaluator._settings,
                declared=msgspec.structs.replace(declared, trainer_devices=int(gpus)),
            )
        prompts, responses = _lengths(batch.batch)
        step, self.step = self.step, self.step + 1
        with evaluator.episode(step):
            evaluator.record("episode", seconds=float(timings["step"]))
            for phase, names in {
                "generate": _GENERATE,
                "score": _SCORE,
                "learn": _LEARN,
                "weight_sync": _WEIGHT_SYNC,
                **{name: (name,) for name in _OWN},
            }.items():
                seconds = sum(float(timings[name]) for name in names if name in timings)
                if seconds:
                    evaluator.record(phase, seconds=seconds)
            workload = evaluator._settings.workload
            models = workload.models if isinstance(workload, ModelCosts) else {}
            work = _Work(models, frozenset(timings), self.epochs, self.responses_per_prompt)
            evaluator.defer(work.amounts, prompts, responses)


def _lengths(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of each prompt and each response (B,), as verl counts them."""
    if "prompt_length" in batch.keys():  # noqa: SIM118 - a TensorDict's ``in`` looks for a value
        return batch["prompt_length"], batch["response_length"]
    width = batch["responses"].shape[-1]
    mask = batch["attention_mask"]
    return mask[:, :-width].sum(-1), mask[:, -width:].sum(-1)


@dataclasses.dataclass(frozen=True)
class _Work:
    """What a step's phases amount to; verl's batches are packed, so that no padding runs."""

    models: Mapping[str, CostModel]
    ran: frozenset[str]
    epochs: int
    responses_per_prompt: int

    def amounts(self, prompts: torch.Tensor, responses: torch.Tensor) -> Amounts:
        prompts, responses = prompts.to(torch.float64), responses.to(torch.float64)
        lengths = prompts + responses
        amounts: Amounts = {
            catalogue.GENERATED: float(len(prompts)),
            catalogue.COLLECT_STEPS: 1.0,
            catalogue.LEARNED: float(len(prompts) * self.epochs),
            catalogue.LEARN_TOKENS: float(lengths.sum()) * self.epochs,
            **token_counts(prompts, responses),
        }
        actor = self.models.get("actor")
        if actor is not None:
            shared = self.responses_per_prompt
            generated = float(actor.generate(prompts, responses, shared_prompt=shared).sum())
            amounts |= {
                catalogue.GENERATE_FLOP: generated,
                catalogue.GENERATE_EXECUTED: generated,
            }
            if actor.memory is not None:
                amounts[catalogue.GENERATE_BYTES] = actor.generate_bytes(
                    prompts, responses, shared_prompt=shared
                )
        for name, role in _SCORE.items():
            if name in self.ran and role in self.models:
                flop = float(self.models[role].forward(lengths).sum())
                scored = {catalogue.SCORE_FLOP: flop, catalogue.SCORE_EXECUTED: flop}
                catalogue.merge(amounts, scored)
        for name, role in _LEARN.items():
            if name in self.ran and role in self.models:
                cost = self.models[role]
                useful = self.epochs * float(cost.forward_backward(lengths).sum())
                # Recomputed where it is, and not padded, as ``executed=True`` would.
                executed = self.epochs * float(cost._executed_forward_backward(lengths).sum())
                learned = {catalogue.LEARN_FLOP: useful, catalogue.LEARN_EXECUTED: executed}
                catalogue.merge(amounts, learned)
        return amounts
