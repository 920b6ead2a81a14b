"""A PPO trainer. To measure a trainer of your own, call the hooks where this one does."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import nn

from coati_perf.callback import Callback
from coati_perf.demo import objective, ranks
from coati_perf.demo.experience import Experience
from coati_perf.demo.hooks import CallbackList
from coati_perf.demo.models import Models
from coati_perf.demo.rollout import (
    ExperienceMaker,
    Phase,
    action_log_probs,
    action_values,
    no_phase,
)
from coati_perf.demo.task import Task


@dataclasses.dataclass(frozen=True)
class PPOConfig:
    """How long to train and how. Numbers of prompts and sequences are per rank.

    An episode is ``collect_steps`` times ``prompts_per_collect`` answers, learned from
    ``update_steps`` times over in batches of ``batch_size`` sequences.
    """

    episodes: int = 14
    collect_steps: int = 2
    prompts_per_collect: int = 64
    update_steps: int = 2
    batch_size: int = 16
    learning_rate: float = 1e-3
    gradient_norm: float = 1.0
    kl_coefficient: float = 0.002
    clip: float = 0.2
    seed: int = 0


class PPOTrainer:
    """Trains ``models`` on ``task`` and tells ``callbacks`` at each step what it does.

    If torch.distributed is initialised, every rank makes experience from prompts of its own, and
    gradients are averaged over ranks.

    ``phase`` marks the parts "generate" and "score" of making experience: it is called with the
    name and returns a context manager, such as ``PerformanceEvaluator.phase``.

    ``mean_rewards`` has one number per finished episode of the last fit: the mean reward of the
    episode's answers over all ranks, before the episode's update.
    """

    def __init__(
        self,
        models: Models,
        task: Task,
        config: PPOConfig | None = None,
        callbacks: Sequence[Callback] = (),
        phase: Phase = no_phase,
    ) -> None:
        self.config = config or PPOConfig()
        self.mean_rewards: list[float] = []
        self._models = models
        self._task = task
        self._callbacks = CallbackList(callbacks)
        self._maker = ExperienceMaker(models, task, self.config.kl_coefficient, phase)
        self._optimizers = [
            (model, torch.optim.Adam(model.parameters(), lr=self.config.learning_rate))
            for model in (models.actor, models.critic)
        ]
        self._generator = torch.Generator()

    def fit(self) -> list[float]:
        """Train for ``config.episodes`` episodes and return ``mean_rewards``.

        Seeds torch's global random state, differently on each rank, so that a run repeats exactly.
        With several ranks all must call it together.
        """
        # Far apart, so that seed 0 on rank 1 is not seed 1 on rank 0.
        seed = 1_000_003 * self.config.seed + ranks.rank()
        torch.manual_seed(seed)
        self._generator.manual_seed(seed)
        self.mean_rewards = []
        self._callbacks.on_fit_start()
        try:
            for model in (self._models.actor, self._models.critic):
                ranks.broadcast_parameters(model)
            for episode in range(self.config.episodes):
                self._run_episode(episode)
        finally:
            self._callbacks.on_fit_end()
        return self.mean_rewards

    def _run_episode(self, episode: int) -> None:
        self._callbacks.on_episode_start(episode)
        try:
            experiences = [self._collect() for _ in range(self.config.collect_steps)]
            for epoch in range(self.config.update_steps):
                self._callbacks.on_learn_epoch_start(epoch)
                for experience in experiences:
                    order = torch.randperm(len(experience.reward), generator=self._generator)
                    for batch in experience.shuffled_batches(self.config.batch_size, order):
                        self._learn(batch)
                self._callbacks.on_learn_epoch_end(epoch)
            reward = torch.cat([experience.reward for experience in experiences]).mean()
            self.mean_rewards.append(ranks.mean_over_ranks(reward).item())
        finally:
            self._callbacks.on_episode_end(episode)

    def _collect(self) -> Experience:
        prompts = self._task.sample_prompts(self.config.prompts_per_collect, self._generator)
        self._callbacks.on_make_experience_start()
        experience = self._maker.make_experience(prompts)
        self._callbacks.on_make_experience_end(experience)
        return experience

    def _learn(self, batch: Experience) -> None:
        self._callbacks.on_learn_batch_start()
        self._loss(batch).backward()
        for model, optimizer in self._optimizers:
            ranks.average_gradients(model)
            nn.utils.clip_grad_norm_(model.parameters(), self.config.gradient_norm)
            optimizer.step()
            optimizer.zero_grad()
        self._callbacks.on_learn_batch_end(batch)

    def _loss(self, batch: Experience) -> torch.Tensor:
        """Return the sum of the actor's and the critic's loss; they share no parameter."""
        inputs = batch.sequences, batch.attention_mask, batch.action_mask.size(1)
        policy_loss = objective.clipped_policy_loss(
            action_log_probs(self._models.actor, *inputs),
            batch.action_log_probs,
            objective.normalised(batch.advantages, batch.action_mask),
            batch.action_mask,
            self.config.clip,
        )
        value_loss = objective.clipped_value_loss(
            action_values(self._models.critic, *inputs),
            batch.values,
            batch.advantages + batch.values,
            batch.action_mask,
            self.config.clip,
        )
        return policy_loss + value_loss
