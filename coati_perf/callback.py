"""The hooks that an on-policy trainer calls."""

from __future__ import annotations

from typing import Any


class Callback:
    """Base of every callback: each hook does nothing until a subclass overrides it.

    A trainer calls them in this order, on every rank and on one thread::

        on_fit_start()
        for each episode:
            on_episode_start(episode)
            for each collect step:
                on_make_experience_start(); on_make_experience_end(experience)
            for each update step:
                on_learn_epoch_start(epoch)
                for each batch:
                    on_learn_batch_start(); on_learn_batch_end(experience)
                on_learn_epoch_end(epoch)
            on_episode_end(episode)     # in a ``finally`` block: also after an exception
        on_fit_end()                    # likewise

    ``experience`` is duck-typed: ``sequences`` is a (B, S) tensor of token ids, a left-padded
    prompt and then the response, right-padded; ``action_mask`` is (B, A), with A the length of
    the response part.
    """

    def on_fit_start(self) -> None:
        """Training is about to begin."""

    def on_fit_end(self) -> None:
        """Training has ended, with or without an exception."""

    def on_episode_start(self, episode: int) -> None:
        """Episode number ``episode`` begins."""

    def on_episode_end(self, episode: int) -> None:
        """Episode number ``episode`` has ended, with or without an exception."""

    def on_make_experience_start(self) -> None:
        """A collect step begins."""

    def on_make_experience_end(self, experience: Any) -> None:
        """A collect step has made ``experience``."""

    def on_learn_epoch_start(self, epoch: int) -> None:
        """Update step number ``epoch`` begins."""

    def on_learn_epoch_end(self, epoch: int) -> None:
        """Update step number ``epoch`` has ended."""

    def on_learn_batch_start(self) -> None:
        """Learning from one batch begins."""

    def on_learn_batch_end(self, experience: Any) -> None:
        """Learning from the batch ``experience`` has ended."""
