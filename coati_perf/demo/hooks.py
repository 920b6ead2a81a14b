"""Several callbacks called as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coati_perf.callback import Callback


class CallbackList(Callback):
    """Passes each hook on to every callback, in the order given. Exceptions pass through."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = tuple(callbacks)

    def on_fit_start(self) -> None:
        for callback in self._callbacks:
            callback.on_fit_start()

    def on_fit_end(self) -> None:
        for callback in self._callbacks:
            callback.on_fit_end()

    def on_episode_start(self, episode: int) -> None:
        for callback in self._callbacks:
            callback.on_episode_start(episode)

    def on_episode_end(self, episode: int) -> None:
        for callback in self._callbacks:
            callback.on_episode_end(episode)

    def on_make_experience_start(self) -> None:
        for callback in self._callbacks:
            callback.on_make_experience_start()

    def on_make_experience_end(self, experience: Any) -> None:
        for callback in self._callbacks:
            callback.on_make_experience_end(experience)

    def on_learn_epoch_start(self, epoch: int) -> None:
        for callback in self._callbacks:
            callback.on_learn_epoch_start(epoch)

    def on_learn_epoch_end(self, epoch: int) -> None:
        for callback in self._callbacks:
            callback.on_learn_epoch_end(epoch)

    def on_learn_batch_start(self) -> None:
        for callback in self._callbacks:
            callback.on_learn_batch_start()

    def on_learn_batch_end(self, experience: Any) -> None:
        for callback in self._callbacks:
            callback.on_learn_batch_end(experience)
