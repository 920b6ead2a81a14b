"""The asynchronous trainer in outline: one Ray actor makes the others, from this module's names."""

from __future__ import annotations

import time

import ray

from openrlhf.trainer.ppo_trainer import BasePPOTrainer, SamplesGenerator, get_tokenizer


class Queue:
    """In place of Ray's: it holds the rollouts of two steps."""

    def __init__(self, maxsize):
        generator = SamplesGenerator()
        self.payloads = [(generator.generate_samples()[0], {}, None, 1.0) for _ in range(2)]
        self.payloads.append("done")

    def get(self, block):
        return self.payloads.pop(0)

    def put(self, item, block):
        pass


@ray.remote
class TrainingActor(BasePPOTrainer):
    def __init__(
        self, pretrain, strategy, actor_model_group, critic_model_group, reward_model_group,
        reference_model_group, vllm_engines, *, vllm_lock, rollout_queue, rollout_slots,
    ):  # fmt: skip
        super().__init__(
            strategy,
            actor_model_group,
            critic_model_group,
            reward_model_group,
            reference_model_group,
            vllm_engines,
            get_tokenizer(pretrain, None, "left", strategy),
        )
        self.rollout_queue, self.rollout_slots = rollout_queue, rollout_slots

    def fit(self, global_step=0):
        step_start_time = time.time()
        while (payload := self.rollout_queue.get(block=True)) != "done":
            rollout_samples, client_states, _, generation_time = payload
            self.rollout_slots.put(global_step, block=True)
            status, global_step = self.train_step(rollout_samples, global_step)
            status["timing/generation"] = generation_time
            status["timing/step_total"] = time.time() - step_start_time
            step_start_time = time.time()
            self.save_logs_and_checkpoints(global_step, status, client_states)


@ray.remote
class PPOTrainerAsync:
    def __init__(
        self, pretrain, strategy, actor, critic, reward, reference, vllm_engines, **generate_kwargs
    ):
        self.trainer_actor = TrainingActor.remote(
            pretrain=pretrain,
            strategy=strategy,
            actor_model_group=actor,
            critic_model_group=critic,
            reward_model_group=reward,
            reference_model_group=reference,
            vllm_engines=vllm_engines,
            vllm_lock=None,
            rollout_queue=Queue(maxsize=1),
            rollout_slots=Queue(maxsize=1),
        )

    def get_max_steps(self):
        return 2

    def fit(self):
        ray.get([self.trainer_actor.fit.remote(global_step=0)])
