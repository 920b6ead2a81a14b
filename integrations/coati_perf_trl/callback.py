"""The callback for TRL's and Transformers' trainers."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from coati_perf import CostModel, PerformanceEvaluator
from coati_perf.arguments import model_dtype, number_or_none
from coati_perf.forwards import Forwards
from coati_perf.phase import PhaseSwitch
from coati_perf.seen import Generation
from coati_perf_trl import seams
from coati_perf_trl.by_forwards import ByForwards
from coati_perf_trl.fused_head import fused_logits

_logger = logging.getLogger(__name__)

# The trackers of ``report_to`` that we have a sink for, by its name.
_SINKS = ("wandb", "tensorboard", "mlflow")


class CoatiPerfCallback(TrainerCallback):
    """Measures a trainer: ``trainer.add_callback(CoatiPerfCallback(trainer))``.

    An episode is a rollout and all that is learned from it; of a trainer that only learns (SFT,
    DPO, reward, Transformers' own), ``logging_steps`` steps. What its models run is seen by
    torch's forward hooks, and its phases by the methods in ``seams``; what a version of TRL lacks
    is not measured, and said once.

    Args:
        trainer: made already; its models and settings are found from it.
        steps_per_episode: optimiser steps of an episode, in place of the above.
        attention: as for ``CostModel.traced``.
        options: further arguments of ``PerformanceEvaluator``. ``sinks`` are by default the
            trackers of ``report_to``, whose open runs are joined, and ``train_config`` the
            trainer's arguments.

    Raises:
        TypeError, ValueError: as ``PerformanceEvaluator`` does.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        steps_per_episode: int | None = None,
        attention: Literal["causal", "full"] = "causal",
        **options: Any,
    ) -> None:
        number_or_none("steps_per_episode", steps_per_episode)
        self._trainer = trainer
        self._steps = steps_per_episode or _steps_per_episode(trainer)
        watched = _models(trainer)
        # A loop of its own leaves the models as they are.
        checkpointing = trainer.args.gradient_checkpointing and not seams.has_own_loop(trainer)
        costs = {
            role: CostModel.traced(
                model,
                attention=attention,
                gradient_checkpointing=bool(checkpointing) and role == "actor",
                dtype=model_dtype(watched["actor"]),
                fallback="num_params",
            )
            for role, model in watched.items()
        }
        report_to = trainer.args.report_to or []
        options.setdefault("sinks", [name for name in report_to if name in _SINKS])
        options.setdefault("train_config", trainer.args.to_dict())
        self.evaluator = PerformanceEvaluator(0, 0, 0, 0, models=costs, **options)
        self._forwards = Forwards(self.evaluator, counted=True, logits=fused_logits)
        self._actor = costs["actor"]
        self._learning = PhaseSwitch(self.evaluator.phase("learn"))
        self._optimizing = PhaseSwitch(self.evaluator.phase("optimizer"))
        self._in_rollout = False
        self._generated: Any = None
        self._wrapped: list[str] = []
        self._by_forwards: ByForwards | None = None
        if getattr(trainer.args, "torch_compile", False):
            _logger.warning("torch_compile=True: FLOP and tokens of learning cannot be seen")
        else:
            for role, model in watched.items():
                if isinstance(model, nn.Module):
                    self._forwards.watch(
                        seams.forward_of(trainer, model),
                        costs[role],
                        costs.get("initial"),
                        counted=role == "actor",
                    )
        self._attach(watched)

    # Transformers' events.

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._optimizing.off()  # where the fit before failed
        self._learning.off()
        self.evaluator.on_fit_start()
        if seams.has_own_loop(self._trainer):  # there is no on_step_begin
            self._forwards.purpose = "measure"
            self.evaluator.on_episode_start(0)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if state.global_step % self._steps == 0 or not self.evaluator.in_episode:
            self.evaluator.on_episode_start(state.global_step // self._steps)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._optimizing.off()
        self._learning.off()
        if state.global_step % self._steps == 0:  # the step has been counted by now
            episode = state.global_step // self._steps
            self.evaluator.on_episode_end(episode - 1)
            if seams.has_own_loop(self._trainer) and state.global_step < state.max_steps:
                self.evaluator.on_episode_start(episode)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self.evaluator.in_episode:  # fewer steps than an episode has
            self.evaluator.on_episode_end(state.global_step // self._steps)
        self._forwards.purpose = "ignore"
        self.evaluator.on_fit_end()

    def detach(self) -> None:
        """Leave the trainer as it was, but for its list of callbacks."""
        for name in self._wrapped:
            vars(self._trainer).pop(name, None)
        self._forwards.stop()
        if self._by_forwards is not None:
            self._by_forwards.stop()

    # Phases within a step.

    def _attach(self, models: Mapping[str, Any]) -> None:
        lacking = seams.missing(self._trainer)
        if lacking:
            what = seams.version_of(self._trainer)
            _logger.warning("%s lacks what marks %s: not measured", what, ", ".join(lacking))
        self._wrap("training_step", self._training_step)
        if not seams.is_online(self._trainer):
            return
        if seams.told_by_forwards(self._trainer):
            self._by_forwards = ByForwards(self, models)
            self._wrap(seams.SAMPLES, self._unmeasured)
            return
        self._wrap(seams.ROLLOUT, self._rollout)
        self._wrap(seams.GENERATE, self._generate, in_rollout=True)
        rewards = getattr(self._trainer, "reward_funcs", ())
        by_models = any(isinstance(function, nn.Module) for function in rewards)
        phases = {seams.REWARDS: "score" if by_models else "reward"}
        phases |= dict.fromkeys(seams.LOG_PROBS, "score")
        for name, phase in phases.items():
            self._wrap(name, functools.partial(self._in_phase, phase), in_rollout=True)

    def _wrap(self, name: str, wrapper: Callable[..., Any], *, in_rollout: bool = False) -> None:
        """Put a wrapper in front of a method of this one trainer, where it has that method.

        ``in_rollout`` says that it is for calls within a rollout alone.
        """
        original = getattr(self._trainer, name, None)
        if original is None:
            return

        @functools.wraps(original)
        def wrapped(*arguments: Any, **options: Any) -> Any:
            if in_rollout and not self._in_rollout:
                return original(*arguments, **options)
            return wrapper(original, *arguments, **options)

        setattr(self._trainer, name, wrapped)
        self._wrapped.append(name)

    def _unmeasured(self, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        with self._forwards.are("ignore"):
            return original(*arguments, **options)

    def _training_step(self, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self._learning.on()
        try:
            with self._forwards.are("measure"):
                result = original(*arguments, **options)
        except BaseException:
            # No event tells of it: the trainer's own events end here.
            self.evaluator.on_episode_end(self._trainer.state.global_step // self._steps)
            raise
        if self._trainer.accelerator.sync_gradients:  # the optimiser comes next
            self._optimizing.on()
        else:
            self._learning.off()
        return result

    def _rollout(self, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if not self._trainer.model.training:  # an evaluation
            return original(*arguments, **options)
        self._learning.off()
        self._in_rollout = True
        self._generated = None
        try:
            with self.evaluator.phase("make_experience"):
                result = original(*arguments, **options)
        finally:
            self._in_rollout = False
            self._learning.on()
        try:
            self._count_generation(result)
        except Exception as error:  # noqa: BLE001 - training goes on
            self.evaluator.fault("what the rollout returns", error)
        return result

    def _generate(self, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        with self.evaluator.phase("generate"), self._forwards.are("generate"):
            self._generated = original(*arguments, **options)
        return self._generated

    def _in_phase(
        self, phase: str, original: Callable[..., Any], *arguments: Any, **options: Any
    ) -> Any:
        with self.evaluator.phase(phase):
            return original(*arguments, **options)

    def _count_generation(self, experience: Any) -> None:
        runs = self._forwards.take_generation()
        generated, self._generated = self._generated, None
        if generated is None:  # before TRL 0.24
            lengths = experience["prompt_mask"].sum(-1), experience["completion_mask"].sum(-1)
        else:
            lengths = _lengths(generated[0]), _lengths(generated[1])
        padded = experience["prompt_ids"].numel() + experience["completion_ids"].numel()
        # An inference engine fills its cache once for all responses to a prompt.
        group = 1 if runs else int(getattr(self._trainer, "num_generations", 1))
        shared = group if len(lengths[0]) % group == 0 else 1
        generation = Generation(self._actor, runs, padded, shared)
        self.evaluator.defer(generation.generated, *lengths)


def _models(trainer: Any) -> dict[str, Any]:
    """Return the models by role; the config of what a PEFT model is without adapters."""
    actor = seams.policy_of(trainer)
    models: dict[str, Any] = {"actor": actor}
    reference = getattr(trainer, "ref_model", None)
    if reference is not None:
        models["initial"] = reference
    elif hasattr(actor, "peft_config"):
        models["initial"] = actor.config
    for role, name in (("critic", "value_model"), ("reward", "reward_model")):
        if isinstance(getattr(trainer, name, None), nn.Module):
            models[role] = getattr(trainer, name)
    rewards = [f for f in getattr(trainer, "reward_funcs", ()) if isinstance(f, nn.Module)]
    models |= {f"reward {number}": model for number, model in enumerate(rewards)}
    return models


def _steps_per_episode(trainer: Any) -> int:
    """Return optimiser steps from one rollout to the next, or those between two logs."""
    if seams.told_by_forwards(trainer):
        return 1
    if seams.is_online(trainer):
        between, accumulation = seams.steps_per_rollout(trainer)
        return math.lcm(between, accumulation) // accumulation
    steps = trainer.args.logging_steps
    return int(steps) if steps >= 1 else 1


def _lengths(sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.tensor([len(sequence) for sequence in sequences])
