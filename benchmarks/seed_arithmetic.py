"""What ColossalChat's evaluator does in each hook, written anew from ``shared/SEED.md``.

The yardstick of the hooks: wall-clock stopwatches, sample counts and the FLOP formulas, and
nothing else. It is on no import path of coati_perf.
"""

from __future__ import annotations

import time
from typing import Any


class Stopwatch:
    """Adds up the wall-clock seconds between ``start`` and ``end``."""

    def __init__(self) -> None:
        self.duration = 0.0
        self.start_time: float | None = None

    def start(self) -> None:
        self.start_time = time.time()

    def end(self) -> None:
        assert self.start_time is not None
        self.duration += time.time() - self.start_time
        self.start_time = None


class SeedArithmetic:
    """The seed's hooks on one rank; the reduction at the fit's end is not part of them."""

    def __init__(
        self, actor: int, critic: int, initial: int, reward: int, ignore_episodes: int = 0
    ) -> None:
        self.actor = actor
        self.critic = critic
        self.initial = initial
        self.reward = reward
        self.grad_checkpoint = False
        self.ignore_episodes = ignore_episodes
        self.ignoring = False
        self.episode_watch = Stopwatch()
        self.experience_watch = Stopwatch()
        self.learn_watch = Stopwatch()
        self.samples_made = 0
        self.samples_learned = 0
        self.experience_flop = 0.0
        self.learn_flop = 0

    def on_episode_start(self, episode: int) -> None:
        self.ignoring = episode < self.ignore_episodes
        if self.ignoring:
            return
        self.episode_watch.start()

    def on_episode_end(self, episode: int) -> None:
        if self.ignoring:
            return
        self.episode_watch.end()

    def on_make_experience_start(self) -> None:
        if self.ignoring:
            return
        self.experience_watch.start()

    def on_make_experience_end(self, experience: Any) -> None:
        if self.ignoring:
            return
        self.experience_watch.end()
        batch, length = experience.sequences.shape
        self.samples_made += batch
        actions = experience.action_mask.size(1)
        # Every new token runs the whole prefix again; then each model scores the result.
        positions = (length - actions + length - 1) * actions / 2
        self.experience_flop += 2 * self.actor * batch * positions
        parameters = self.actor + self.critic + self.initial + self.reward
        self.experience_flop += 2 * batch * length * parameters

    def on_learn_batch_start(self) -> None:
        if self.ignoring:
            return
        self.learn_watch.start()

    def on_learn_batch_end(self, experience: Any) -> None:
        if self.ignoring:
            return
        self.learn_watch.end()
        batch, length = experience.sequences.shape
        self.samples_learned += batch
        passes = 3 + int(self.grad_checkpoint)
        self.learn_flop += 2 * batch * length * (self.actor + self.critic) * passes
