"""The synchronous trainer in outline: names, signatures and order of calls of OpenRLHF 0.11.2."""

from __future__ import annotations

import time
from types import SimpleNamespace

import ray
import torch


def get_tokenizer(*args, **kwargs):
    return SimpleNamespace(decode=lambda *args, **kwargs: ["text"])


def prepare_datasets(strategy, tokenizer):
    return [], None, 2


def process_response_into_experience(response):
    mask = torch.zeros(1, len(response["observation_tokens"]), dtype=torch.long)
    for start, end in response["action_ranges"]:
        mask[0, start:end] = 1
    reward = response.get("reward")
    return SimpleNamespace(
        sequences=torch.tensor([response["observation_tokens"]]),
        action_mask=mask[:, 1:],
        rewards=None if reward is None else torch.tensor([reward]),
        total_length=torch.tensor([float(mask.shape[1])]),
        info={},
    )


class SamplesGenerator:
    """Makes the samples of two steps."""

    def __init__(self, **kwargs):
        self.left = 2

    def generate_samples(self, **kwargs):
        if not self.left:
            return [], None, 0, True
        self.left -= 1
        response = {"observation_tokens": list(range(7)), "action_ranges": [(4, 7)], "reward": 1.0}
        return [process_response_into_experience(response)] * 2, None, 1, False


class RemoteExperienceMaker:
    def __init__(self, *args, **kwargs):
        pass

    def make_experience_batch(self, rollout_samples):
        return rollout_samples


class BasePPOTrainer:
    def __init__(self, strategy, actor, critic, reward, reference, vllm_engines, tokenizer):
        self.strategy, self.args = strategy, strategy.args
        self.actor_model_group, self.critic_model_group = actor, critic
        self.reward_model_group, self.reference_model_group = reward, reference
        self.vllm_engines, self.tokenizer = vllm_engines, tokenizer
        self.experience_maker = RemoteExperienceMaker()

    def train_step(self, rollout_samples, global_step):
        t0 = time.time()
        experiences = self.experience_maker.make_experience_batch(rollout_samples)
        make_experience_time = time.time() - t0
        self.tokenizer.decode(experiences[0].sequences[0].unsqueeze(0), skip_special_tokens=True)
        t0 = time.time()
        status = self.ppo_train(global_step)
        ppo_train_time = time.time() - t0
        t0 = time.time()
        self.broadcast_to_vllm()
        status["timing/make_experience"] = make_experience_time
        status["timing/ppo_train"] = ppo_train_time
        status["timing/broadcast"] = time.time() - t0
        return status, global_step + 1

    def ppo_train(self, global_steps):
        grouped = hasattr(self.args, "critic")
        args = self.args
        freezing = args.critic.freezing_steps if grouped else args.freezing_actor_steps
        if self.critic_model_group is not None:
            self.critic_model_group.async_run_method(method_name="fit")
        if global_steps > freezing:
            self.actor_model_group.async_run_method(method_name="fit", kl_ctl=0.1)
        return {}

    def broadcast_to_vllm(self):
        self.actor_model_group.async_run_method(method_name="broadcast_to_vllm")

    def save_logs_and_checkpoints(self, global_step, logs_dict=None, client_states=None):
        ckpt = getattr(self.args, "ckpt", self.args)
        for group in (self.actor_model_group, self.critic_model_group):
            if ckpt.save_steps and group is not None:
                group.async_run_method(method_name="save_checkpoint", tag=global_step)


@ray.remote
class PPOTrainer(BasePPOTrainer):
    def __init__(
        self, pretrain, strategy, actor, critic, reward, reference, vllm_engines, **generate_kwargs
    ):
        tokenizer = get_tokenizer(pretrain, None, "left", strategy)
        loader, eval_loader, self.max_steps = prepare_datasets(strategy, tokenizer)
        self.samples_generator = SamplesGenerator(
            strategy=strategy,
            prompts_dataloader=loader,
            eval_dataloader=eval_loader,
            tokenizer=tokenizer,
            vllm_engines=vllm_engines,
        )
        super().__init__(strategy, actor, critic, reward, reference, vllm_engines, tokenizer)

    def get_max_steps(self):
        return self.max_steps

    def fit(self, global_step=0):
        while True:
            start = time.time()
            samples, _, _, is_exhausted = self.samples_generator.generate_samples()
            generation_time = time.time() - start
            if is_exhausted:
                break
            status, global_step = self.train_step(samples, global_step)
            status["timing/generation"] = generation_time
            status["timing/step_total"] = sum(
                v for k, v in status.items() if k.startswith("timing/")
            )
            self.save_logs_and_checkpoints(global_step, status, {})
