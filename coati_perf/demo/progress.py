"""A progress bar with the live mean reward and figures of the caller's choice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TextIO

from tqdm import tqdm

from coati_perf.callback import Callback
from coati_perf.demo import ranks

# From here on a figure needs no decimals.
_LARGE = 100


def _no_figures() -> Mapping[str, float]:
    return {}


class ProgressBar(Callback):
    """Shows the episode, the mean reward of the last answers, and ``figures``; on rank 0 only.

    ``figures`` is called on the training thread after each collect step and each episode, and
    returns what to show by name. Give this callback after the one that ``figures`` asks. The
    reward is this rank's own mean. ``file`` is where to draw, by default standard error.
    """

    def __init__(
        self,
        episodes: int,
        figures: Callable[[], Mapping[str, float]] = _no_figures,
        file: TextIO | None = None,
    ) -> None:
        self._episodes = episodes
        self._figures = figures
        self._file = file
        self._bar: tqdm[Any] | None = None
        self._reward: float | None = None

    def on_fit_start(self) -> None:
        self._reward = None
        if ranks.rank() == 0:
            self._bar = tqdm(total=self._episodes, desc="episode", unit="episode", file=self._file)

    def on_make_experience_end(self, experience: Any) -> None:
        if self._bar is not None:
            self._reward = experience.reward.mean().item()
            self._show(self._bar)

    def on_episode_end(self, episode: int) -> None:
        del episode
        if self._bar is not None:
            self._show(self._bar)
            self._bar.update()

    def on_fit_end(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _show(self, bar: tqdm[Any]) -> None:
        shown = {} if self._reward is None else {"reward": f"{self._reward:.2f}"}
        shown.update({name: _format(value) for name, value in self._figures().items()})
        bar.set_postfix(shown)


def _format(value: float) -> str:
    """Format with three significant digits, and no exponent for the sizes that occur."""
    return f"{value:,.0f}" if abs(value) >= _LARGE else f"{value:.3g}"
