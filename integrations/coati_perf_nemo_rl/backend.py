"""Turns what a trainer of NeMo-RL logs of each step into records."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coati_perf import PerformanceEvaluator, TimedStep
from coati_perf.arguments import number_or_none
from coati_perf.timed_step import phase_seconds

# What is used of NeMo-RL's ``Logger`` (0.6): the backends that it hands everything to, and the one
# method by which the lengths of each sample go, that it hands to none.
BACKENDS = "loggers"
SAMPLES = "log_batched_dict_as_jsonl"

# The stopwatches by our phases: those that lie side by side inside "total_step_time". Others lie in
# these, such as "policy_training/…" and most of "idle/…", or outside, such as "init/total".
_PHASES = {
    "generation": "generate",
    "logprob_inference_prep": "score",
    "policy_and_reference_logprobs": "score",
    "value_inference": "score",
    "training_prep": "learn",
    "policy_training": "learn",
    "value_training_prep": "learn",
    "value_training": "learn",
    "prepare_for_generation/total": "weight_sync",
    "weight_sync": "weight_sync",
    "reward_calculation": "reward",
    "idle/validation": "validation",
    # What training waits for, of generation beside it: as ``generate`` it would be the time of all
    # that was generated, and the rate far too high.
    "exposed_generation": "exposed_generation",
    "data_processing": "data_processing",
    "advantage_calculation": "advantage_calculation",
    "recompute_kv_scales": "recompute_kv_scales",
    "offload_before_refit": "offload_before_refit",
    "checkpointing": "checkpointing",
}
_LEARNED = {"policy_training": "actor", "value_training": "critic"}
_SCORED = ("actor", "initial")

_FILE = re.compile(r"train_data_step(\d+)\.jsonl")


def attach(  # noqa: PLR0913 - what NeMo-RL's configuration says and its logger is not told
    logger: Any,
    evaluator: PerformanceEvaluator,
    *,
    trainer_devices: int,
    rollout_devices: int | None = None,
    scored: Sequence[str] = _SCORED,
    epochs: int = 1,
    responses_per_prompt: int = 1,
    samples_per_step: int | None = None,
) -> Callable[[], None]:
    """Record every step that is logged; return what stops it.

    To be called where the logger is, between ``setup`` and ``grpo_train``. Episodes count from 0 in
    each process.

    Args:
        logger: NeMo-RL's ``Logger``.
        evaluator: made with ``models=`` of configs: ``actor``, and ``initial`` and ``critic`` where
            they run. Device counts that it was given come before these.
        trainer_devices: how many GPUs train.
        rollout_devices: how many generate, where these are others.
        scored: who computes log probs before learning: not ``actor`` under
            ``loss_fn.force_on_policy_ratio`` without ``grpo.seq_logprob_error_threshold``, and not
            ``initial`` under ``grpo.skip_reference_policy_logprobs_calculation``.
        epochs: 1 for GRPO, ``ppo.ppo_epochs`` for PPO.
        responses_per_prompt: ``grpo.num_generations_per_prompt``; they share the prefill.
        samples_per_step: that times ``grpo.num_prompts_per_step``: with it, steps of which the
            samples are not logged (``env.should_log_nemo_gym_responses``) count as that many of
            equal length, of NeMo-RL's totals. Without, they have times alone.

    Raises:
        RuntimeError: the logger, or this version's, lacks what is used of it.
        TypeError, ValueError: an argument is not of the kind described above.
    """
    if not isinstance(evaluator, PerformanceEvaluator):
        message = f"evaluator is {evaluator!r}; expected a PerformanceEvaluator"
        raise TypeError(message)
    if isinstance(scored, str) or not set(scored) <= set(_SCORED):
        message = f"scored is {scored!r}; expected some of {_SCORED}"
        raise ValueError(message)
    number_or_none("trainer_devices", trainer_devices)
    number_or_none("rollout_devices", rollout_devices)
    number_or_none("epochs", epochs)
    number_or_none("responses_per_prompt", responses_per_prompt)
    number_or_none("samples_per_step", samples_per_step)
    for name in (BACKENDS, SAMPLES):
        if not hasattr(logger, name):
            nemo_rl = sys.modules.get("nemo_rl")
            version = getattr(nemo_rl, "__version__", "of no known version")
            message = (
                f"logger, a {type(logger).__name__}, has no {name}; expected the Logger of NeMo-RL"
                f" 0.6, and this is NeMo-RL {version}"
            )
            raise RuntimeError(message)
    evaluator.declare_devices(trainer_devices, rollout_devices)
    backend = _Backend(evaluator, list(scored), epochs, responses_per_prompt, samples_per_step)
    original = getattr(logger, SAMPLES)
    setattr(logger, SAMPLES, backend.beside(original))
    logger.loggers.append(backend)

    def detach() -> None:
        setattr(logger, SAMPLES, original)
        logger.loggers.remove(backend)

    return detach


@dataclasses.dataclass(eq=False)
class _Backend:
    """Records every step; it has the methods of NeMo-RL's ``LoggerInterface`` and never raises."""

    evaluator: PerformanceEvaluator
    scored: list[str]
    epochs: int
    responses_per_prompt: int
    samples_per_step: int | None
    episode: int = 0
    # Prompt and response tokens of each sample, by NeMo-RL's number of the step they are of.
    lengths: dict[int, tuple[list[int], list[int]]] = dataclasses.field(default_factory=dict)

    def beside(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method that also keeps the lengths of the samples."""

        @functools.wraps(original)
        def watched(to_log: Any, filename: str) -> Any:
            try:
                found = _FILE.fullmatch(filename)
                if found is not None:
                    self.lengths = {int(found[1]): _lengths(to_log)}
            except Exception as error:  # noqa: BLE001 - training goes on
                self.evaluator.fault("the samples of a step of NeMo-RL", error)
            return original(to_log, filename)

        return watched

    def log_metrics(
        self,
        metrics: Mapping[str, Any],
        step: int,
        prefix: str | None = "",
        step_metric: str | None = None,
        step_finished: bool = False,  # noqa: FBT001, FBT002 - as NeMo-RL calls it
    ) -> None:
        """Record the step with its times, which come last; until then, keep its totals."""
        try:
            if prefix == "train" and step not in self.lengths and "total_num_tokens" in metrics:
                self.lengths = self._equal_lengths(metrics, step)
            elif prefix == "timing/train":
                self._record(metrics, step)
        except Exception as error:  # noqa: BLE001 - training goes on
            self.evaluator.fault("a step of NeMo-RL", error)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Ignore them."""

    def log_histogram(self, histogram: list[Any], step: int, name: str) -> None:
        """Ignore it."""

    def log_plot(self, figure: Any, step: int, name: str) -> None:
        """Ignore it."""

    def _equal_lengths(
        self, metrics: Mapping[str, Any], step: int
    ) -> dict[int, tuple[list[int], list[int]]]:
        """Return NeMo-RL's totals as lengths of samples as equal as they can be, if it has them."""
        samples, mean = self.samples_per_step, metrics.get("mean_gen_tokens_per_sample")
        if samples is None or mean is None:
            return {}
        self.evaluator.fault(
            "NeMo-RL logs no lengths: samples count as equally long, which is the least of FLOP"
        )
        responses = round(float(mean) * samples)
        prompts = round(float(metrics["total_num_tokens"])) - responses
        return {step: (_equal_parts(prompts, samples), _equal_parts(responses, samples))}

    def _record(self, timings: Mapping[str, Any], step: int) -> None:
        prompts, responses = self.lengths.pop(step, (None, None))
        episode, self.episode = self.episode, self.episode + 1
        self.evaluator.record_step(
            episode,
            TimedStep(
                wall_s=float(timings["total_step_time"]),
                seconds=phase_seconds(timings, _PHASES),
                prompts=prompts,
                responses=responses,
                scored=self.scored + ["critic"] * ("value_inference" in timings),
                learned=[role for name, role in _LEARNED.items() if name in timings],
                epochs=self.epochs,
                responses_per_prompt=self.responses_per_prompt,
            ),
        )


def _lengths(samples: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Return the tokens of each prompt and each response (B,): what the model sampled is it."""
    responses = [int(sum(mask)) for mask in samples["token_loss_mask"]]
    totals = zip(samples["input_lengths"], responses, strict=True)
    return [int(total) - response for total, response in totals], responses


def _equal_parts(total: int, parts: int) -> list[int]:
    return [total // parts + (part < total % parts) for part in range(parts)]
