"""Turns what ROLL's pipelines log of each step into records, beside one of its trackers."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from coati_perf import PerformanceEvaluator, TimedStep

# What a pipeline calls, by its module (0.3). The first two are methods: one begins a step of the
# pipelines for RLVR, one sees its batch; the third sees the batch of the agentic pipeline.
MANAGER = "roll.utils.metrics.metrics_manager"
BEGIN, BATCH = "clear_metrics", "add_all_metrics"
AGENTIC, AGENTIC_BATCH = "roll.pipeline.agentic.agentic_pipeline", "compute_train_data_metrics"

# ROLL's stopwatches, of both kinds of pipeline, by our phases. Others run beside these or in them.
_PHASES = {
    "step_generate": "generate",
    "step_rollout": "generate",
    "ref_log_probs_values": "score",
    "old_log_probs": "score",
    "step_ref_log_probs_values_reward": "score",
    "step_old_log_probs_values": "score",
    "step_train": "learn",
    "step_model_update": "weight_sync",
    # These four once for each domain.
    "get_sample_level_mask": "reward",
    "reward_postprocess": "reward",
    "get_token_reward": "reward",
    "compute_advantage": "reward",
    "step_cal_response_level_mask": "reward",
    "step_cal_norm_rewards": "reward",
    "step_cal_token_reward": "reward",
    "step_adv": "reward",
    "step_stop_server": "stop_server",
    "val_step": "validation",
    "step_shrink": "shrink",
    "step_compute_data_metrics": "data_metrics",
    "step_log": "log",
}


def attach(evaluator: PerformanceEvaluator, track_with: str | None = "wandb") -> Callable[[], None]:
    """Record every step of the pipelines made after this; return what stops it.

    To be called in the process that makes the pipeline, before. The evaluator's devices are those
    of ROLL's ``device_mapping`` unless they are given, and ``models`` should name those that there
    are: ``actor``, and ``critic`` and ``initial`` where they run. Episodes count from 0 in each
    process.

    Args:
        evaluator: made with ``models=`` of configs.
        track_with: the tracker that the pipeline's config names, which does its work as before.
            None makes one for a config without: let that say ``track_with: coati_perf``.

    Raises:
        ImportError: there is no ROLL here.
        RuntimeError: this version of ROLL has not what is watched.
        ValueError: ROLL has no tracker of that name.
    """
    tracking = importlib.import_module("roll.utils.tracking")
    manager = getattr(importlib.import_module(MANAGER), "MetricsManager", None)
    missing = [name for name in (BEGIN, BATCH) if not hasattr(manager, name)]
    if missing:
        message = f"this ROLL has no {MANAGER}.MetricsManager.{missing[0]}: nothing to measure by"
        raise RuntimeError(message)
    trackers = tracking.tracker_registry
    if track_with and track_with not in trackers:
        expected = ", ".join(map(repr, trackers))
        message = f"track_with is {track_with!r}; expected one of ROLL's trackers, {expected}"
        raise ValueError(message)
    recorder = _Recorder(evaluator)
    patches = [(manager, BEGIN, getattr(manager, BEGIN)), (manager, BATCH, getattr(manager, BATCH))]
    setattr(manager, BEGIN, recorder.after(getattr(manager, BEGIN)))
    setattr(manager, BATCH, recorder.beside(getattr(manager, BATCH)))
    name = track_with or "coati_perf"
    original = trackers[name] if track_with else lambda *_, **__: tracking.BaseTracker()

    def make(config: Any, **options: Any) -> Any:
        # Now, for a tracker may change what it is given; and the pipeline is imported by now.
        recorder.read(config)
        agentic = sys.modules.get(AGENTIC)
        if hasattr(agentic, AGENTIC_BATCH):
            patches.append((agentic, AGENTIC_BATCH, getattr(agentic, AGENTIC_BATCH)))
            setattr(agentic, AGENTIC_BATCH, recorder.beside_agentic(patches[-1][2]))
        return _Tracker(original(config, **options), recorder)

    trackers[name] = make

    def detach() -> None:
        for owner, attribute, function in reversed(patches):
            setattr(owner, attribute, function)
        if track_with:
            trackers[name] = original
        else:
            del trackers[name]

    return detach


class _Tracker:
    """A tracker of ROLL's, and the record beside it."""

    def __init__(self, inner: Any, recorder: _Recorder) -> None:
        self._inner = inner
        self._recorder = recorder

    def log(self, values: Any, step: Any = None, **options: Any) -> Any:
        """Log, and then record, the step."""
        result = self._inner.log(values=values, step=step, **options)
        self._recorder.logged(values, step)
        return result

    def finish(self) -> Any:
        """Finish both."""
        self._recorder.evaluator.close()
        return self._inner.finish()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@dataclasses.dataclass
class _Recorder:
    evaluator: PerformanceEvaluator
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    step: int = 0
    # The clock when ROLL's step began; and of the step that is on: its number and its lengths.
    begun: float | None = None
    batch: tuple[int, torch.Tensor, torch.Tensor] | None = None

    def read(self, config: Any) -> None:
        """Keep the settings of a pipeline that is being made."""
        try:
            self.config = dict(config)
            self.evaluator.declare_devices(*_devices(self.config))
        except Exception as error:  # noqa: BLE001 - training goes on
            self.evaluator.fault("the settings of ROLL", error)

    def after(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method that also begins a step."""

        @functools.wraps(original)
        def watched(manager: Any) -> Any:
            result = original(manager)
            self.begun, self.batch = self.evaluator.clock(), None
            return result

        return watched

    def beside(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method that also keeps the lengths of the step's batch."""

        @functools.wraps(original)
        def watched(manager: Any, global_step: Any, batch: Any, *given: Any, **named: Any) -> Any:
            self._keep(batch, global_step)
            return original(manager, global_step, batch, *given, **named)

        return watched

    def beside_agentic(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that also keeps the lengths of the step's batch."""

        @functools.wraps(original)
        def watched(batch: Any) -> Any:
            self._keep(batch)
            return original(batch=batch)

        return watched

    def logged(self, values: Mapping[str, Any], step: Any) -> None:
        """Record the step, where it is the one whose batch was seen and no old one of a resume."""
        try:
            if self.batch is None or step != self.batch[0]:
                return
            _, prompts, responses = self.batch
            wall_s = self._wall_s(values)
            self.begun = self.batch = None
            scored, learned = self._roles(int(step))
            timed = TimedStep(
                wall_s=wall_s,
                seconds=_seconds(values),
                prompts=prompts,
                responses=responses,
                scored=scored,
                learned=learned,
                epochs=int(self.config["ppo_epochs"]),
                responses_per_prompt=int(self.config.get("num_return_sequences_in_group") or 1),
            )
            episode, self.step = self.step, self.step + 1
            self.evaluator.record_step(episode, timed)
        except Exception as error:  # noqa: BLE001 - training goes on
            self.evaluator.fault("a step of ROLL", error)

    def _keep(self, batch: Any, global_step: Any = None) -> None:
        try:
            number = batch.meta_info["global_step"] if global_step is None else global_step
            total = batch.batch["attention_mask"].sum(-1)
            # The first token is never a response's, and ROLL counts them so.
            responses = batch.batch["response_mask"][:, 1:].sum(-1)
            self.batch = int(number), total - responses, responses
        except Exception as error:  # noqa: BLE001 - training goes on
            self.evaluator.fault("a batch of ROLL", error)

    def _wall_s(self, values: Mapping[str, Any]) -> float:
        # The total that a pipeline for RLVR logs is of the step before.
        if "time/step_rollout" in values:
            return float(values["time/step_total"])
        if self.begun is None:
            message = f"ROLL logged a step that did not begin by {BEGIN}"
            raise ValueError(message)
        return self.evaluator.clock() - self.begun

    def _roles(self, step: int) -> tuple[list[str], list[str]]:
        """Return who scored and who learned, by the settings."""
        critic = self.config["adv_estimator"] == "gae"
        scored = {
            "initial": self.config["enable_reference"],
            "actor": self.config["enable_old_logprobs_recompute"],
            "critic": critic,
        }
        learned = {"actor": step >= self.config["critic_warmup"], "critic": critic}
        return [role for role in scored if scored[role]], [
            role for role in learned if learned[role]
        ]


def _seconds(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of each phase, over all domains."""
    seconds: dict[str, float] = {}
    for key, value in values.items():
        domain, _, name = key.rpartition("time/")
        phase = _PHASES.get(name)
        if phase is not None and (not domain or phase == "reward"):
            seconds[phase] = seconds.get(phase, 0.0) + float(value)
    return seconds


def _devices(config: Mapping[str, Any]) -> tuple[int, int | None]:
    """Return how many devices train, and how many generate where these are not the same."""
    trainers = set(config["actor_train"]["device_mapping"])
    if config["adv_estimator"] == "gae":
        trainers |= set(config["critic"]["device_mapping"])
    rollout = set(config["actor_infer"]["device_mapping"])
    return len(trainers), None if rollout == trainers else len(rollout)
