"""The evaluators of ColossalChat's Ray actors, under upstream's names and hooks."""

from __future__ import annotations

from typing import Any

from coati_perf import PerformanceEvaluator


class ExperienceMakerPerformanceEvaluator:
    """For an experience maker: each batch that it makes and sends is an episode.

    Args:
        actor_num_params, critic_num_params, initial_model_num_params, reward_model_num_params:
            as of ``PerformanceEvaluator``.
        options: further keyword arguments of ``PerformanceEvaluator``.
    """

    def __init__(
        self,
        actor_num_params: int,
        critic_num_params: int,
        initial_model_num_params: int,
        reward_model_num_params: int,
        **options: Any,
    ) -> None:
        self.evaluator = PerformanceEvaluator(
            actor_num_params,
            critic_num_params,
            initial_model_num_params,
            reward_model_num_params,
            **options,
        )
        self._batch = 0
        self._send = self.evaluator.phase("send")

    def on_loop_start(self) -> None:
        """The maker begins its work."""
        self.evaluator.on_fit_start()

    def on_loop_end(self) -> None:
        """The maker has done its work."""
        self.evaluator.on_fit_end()

    def on_batch_start(self) -> None:
        """A batch begins."""
        self.evaluator.on_episode_start(self._batch)

    def on_batch_end(self) -> None:
        """The batch has been made and sent."""
        self.evaluator.on_episode_end(self._batch)
        self._batch += 1

    def on_make_experience_start(self) -> None:
        """Experience is about to be made."""
        self.evaluator.on_make_experience_start()

    def on_make_experience_end(self, experience: Any) -> None:
        """Experience has been made."""
        self.evaluator.on_make_experience_end(experience)

    def on_send_start(self) -> None:
        """Experience is about to be sent to the trainers."""
        self._send.__enter__()

    def on_send_end(self) -> None:
        """Experience has been sent."""
        self._send.__exit__(None, None, None)


class TrainerPerformanceEvaluator:
    """For a trainer that gets its experience from makers.

    ``on_update_…`` bounds the moving of weights to the makers: the phase ``weight_sync``.

    Args:
        actor_num_params, critic_num_params, enable_grad_checkpoint: as of
            ``PerformanceEvaluator``.
        ignore_first_episodes: as its ``ignore_episodes``.
        options: further keyword arguments of ``PerformanceEvaluator``.
    """

    def __init__(
        self,
        actor_num_params: int,
        critic_num_params: int,
        enable_grad_checkpoint: bool = False,  # noqa: FBT001, FBT002 - upstream's
        ignore_first_episodes: int = 1,
        **options: Any,
    ) -> None:
        self.evaluator = PerformanceEvaluator(
            actor_num_params,
            critic_num_params,
            0,
            0,
            enable_grad_checkpoint,
            ignore_first_episodes,
            **options,
        )
        self._update = self.evaluator.phase("weight_sync")

    def on_fit_start(self) -> None:
        """Training is about to begin."""
        self.evaluator.on_fit_start()

    def on_fit_end(self) -> None:
        """Training has ended."""
        self.evaluator.on_fit_end()

    def on_episode_start(self, episodes: int) -> None:
        """Episode number ``episodes`` begins."""
        self.evaluator.on_episode_start(episodes)

    def on_episode_end(self, episodes: int) -> None:
        """Episode number ``episodes`` has ended."""
        self.evaluator.on_episode_end(episodes)

    def on_epoch_start(self, epoch: int) -> None:
        """An epoch over the experience begins."""

    def on_epoch_end(self, epoch: int) -> None:
        """The epoch has ended."""

    def on_batch_start(self) -> None:
        """Learning from one batch begins."""
        self.evaluator.on_learn_batch_start()

    def on_batch_end(self, metrics: dict[str, Any], experience: Any) -> None:
        """Learning from the batch ``experience`` has ended."""
        self.evaluator.on_learn_batch_end(experience)

    def on_update_start(self) -> None:
        """New weights are about to be sent to the makers."""
        self._update.__enter__()

    def on_update_end(self) -> None:
        """The makers have the new weights."""
        self._update.__exit__(None, None, None)
