"""The callback for SkyRL's trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from coati_perf import PerformanceEvaluator, TimedStep
from coati_perf.timed_step import phase_seconds

# SkyRL's stopwatches (0.3) by our phases: those that lie side by side inside "step". Others lie in
# these, such as "policy_train" in the first of learning, or outside, such as "eval".
_PHASES = {
    "timing/generate": "generate",
    "timing/fwd_logprobs_values_reward": "score",
    "timing/train_critic_and_policy": "learn",
    "timing/sync_weights": "weight_sync",
    "timing/postprocess_generator_output": "postprocess_generator_output",
    "timing/convert_to_training_input": "convert_to_training_input",
    "timing/apply_reward_kl_penalty": "apply_reward_kl_penalty",
    "timing/compute_advantages_and_returns": "compute_advantages_and_returns",
    "timing/save_checkpoints": "save_checkpoints",
    "timing/save_hf_model": "save_hf_model",
    "timing/update_ref_with_policy": "update_ref_with_policy",
}
# What the forwards before learning leave in the batch, None where there was none.
_SCORED = {"action_log_probs": "actor", "base_action_log_probs": "initial", "values": "critic"}


class CoatiPerfCallback:
    """Records every step: ``trainer.add_callback(CoatiPerfCallback(evaluator))``.

    It has the methods of SkyRL's ``TrainingCallback``, changes nothing that it is given and never
    raises. The batch comes with ``on_step_end``, the times of the step with ``on_log``; the end of
    training closes the evaluator. Episodes count from 0 in each process.

    Args:
        evaluator: made in the process that trains (SkyRL's ``skyrl_entrypoint``), with ``models=``
            of configs: ``actor``, and ``critic`` and ``initial`` where they run. Its devices are
            those of SkyRL's ``placement`` and ``inference_engine`` unless they are given.

    Raises:
        TypeError: it is no evaluator.
    """

    def __init__(self, evaluator: PerformanceEvaluator) -> None:
        if not isinstance(evaluator, PerformanceEvaluator):
            message = f"evaluator is {evaluator!r}; expected a PerformanceEvaluator"
            raise TypeError(message)
        self.evaluator = evaluator
        self._step = 0
        # What is known of a step until its times are logged: all that a record has but them.
        self._learned: dict[str, Any] | None = None

    def on_step_end(self, trainer: Any, callback_input: Any, control: Any) -> None:
        """Keep the lengths of the batch, and who scored it and learned from it."""
        try:
            if self._learned is not None:
                self.evaluator.fault("SkyRL did not log 'timing/step' of a step")
                self._learned = None
            if self._step == 0:
                self.evaluator.declare_devices(*_devices(trainer.cfg, critic=trainer.has_critic))
            self._learned = _learned(trainer, callback_input.batch)
        except Exception as error:  # noqa: BLE001 - training goes on
            self.evaluator.fault("a step of SkyRL", error)

    def on_log(self, trainer: Any, callback_input: Any, control: Any) -> None:
        """Record the step, where these are the figures of one and not of an evaluation."""
        try:
            logs = callback_input.logs
            if "timing/step" not in logs or self._learned is None:
                return
            learned, self._learned = self._learned, None
            step, self._step = self._step, self._step + 1
            seconds = phase_seconds(logs, _PHASES)
            timed = TimedStep(wall_s=float(logs["timing/step"]), seconds=seconds, **learned)
            self.evaluator.record_step(step, timed)
        except Exception as error:  # noqa: BLE001 - training goes on
            self.evaluator.fault("a step of SkyRL", error)

    def on_train_end(self, trainer: Any, callback_input: Any, control: Any) -> None:
        """Write what is left."""
        self.evaluator.close()

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return what ignores an event: the other seven, and any of a later version."""
        if not name.startswith("on_"):
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(message)
        return lambda *_: None


def _learned(trainer: Any, batch: Any) -> dict[str, Any]:
    prompts, responses = _lengths(batch)
    generator = trainer.cfg.generator
    return {
        "prompts": prompts,
        "responses": responses,
        "scored": [role for key, role in _SCORED.items() if batch.get(key) is not None],
        "learned": ["actor", "critic"] if trainer.has_critic else ["actor"],
        "epochs": int(trainer.cfg.trainer.update_epochs_per_batch),
        # A sample is a turn there, and turns have prompts of their own.
        "responses_per_prompt": (
            1 if generator.step_wise_trajectories else int(generator.n_samples_per_prompt)
        ),
    }


def _lengths(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of each prompt and each response (B,), without the rows that pad."""
    samples = batch.batch_size - batch.metadata.get("pad_size", 0)
    total = batch["attention_mask"][:samples].sum(-1)
    answers = batch["response_mask"][:samples].sum(-1)
    # Of several turns, the response has the environment's tokens too, of which there is no loss;
    # and of a sample that was filtered out there is none at all.
    sampled = (batch["loss_mask"][:samples] > 0).sum(-1)
    responses = torch.where(sampled > 0, sampled, answers)
    return total - responses, responses


def _devices(cfg: Any, *, critic: bool) -> tuple[int, int | None]:
    """Return how many devices train, and how many generate where these are others."""
    placement, engine = cfg.trainer.placement, cfg.generator.inference_engine
    trainers = placement.policy_num_nodes * placement.policy_num_gpus_per_node
    if placement.colocate_all:
        return trainers, None
    if critic:
        trainers += placement.critic_num_nodes * placement.critic_num_gpus_per_node
    return trainers, (
        engine.num_engines
        * engine.tensor_parallel_size
        * engine.pipeline_parallel_size
        * engine.data_parallel_size
    )
