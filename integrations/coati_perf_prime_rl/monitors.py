"""Turns what prime-rl tells its monitors into records: times in one process, lengths in another.

The orchestrator knows the lengths of the samples, the trainer how long a step took. A file for each
step carries the lengths from the one to the other: ``<output_dir>/coati_perf/lengths-<step>.json``
with ``[prompts, responses]``, there before the samples are sent, and gone when it is read.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from coati_perf import PerformanceEvaluator, TimedStep
from coati_perf.arguments import number_or_none
from coati_perf.provenance import installed_version
from coati_perf.timed_step import phase_seconds

_logger = logging.getLogger(__name__)

# Both processes call the first once, through its module (0.8), and it fills the second.
MODULE = "prime_rl.monitors"
SEAM = ("setup", "MONITORS")
_SAMPLES = "prime_rl.orchestrator.trajectories"

# The trainer's times by our phases; none of them holds another. The wait for a batch is what
# training waits for, of generation beside it: as ``generate`` it would be the time of all that was
# generated, and the rate far too high.
_WALL = "time/step"
_PHASES = {
    "time/forward_backward": "learn",
    "time/broadcast_weights": "weight_sync",
    "time/wait_for_batch": "wait_for_batch",
    "time/load_data": "load_data",
    "time/save_ckpt": "save_ckpt",
}


def attach(
    evaluator: PerformanceEvaluator, *, rollout_devices: int, responses_per_prompt: int = 1
) -> Callable[[], None]:
    """Record every step of the trainer of this process; return what stops it.

    To be called on every rank before ``prime_rl.trainer.rl.train.main``; rank 0 alone records.
    The GPUs that train are as many as the ranks. Episodes count from 0 in each process.

    Args:
        evaluator: made with ``models=`` of the ``actor``'s config; with ``peak_tflops=``, as its
            fit begins before the trainer starts its GPU up. Device counts that it was given come
            before these.
        rollout_devices: how many GPUs generate.
        responses_per_prompt: the orchestrator's ``group_size``; they share the prefill.

    Raises:
        ImportError: there is no prime-rl here.
        RuntimeError: this version of prime-rl lacks what is used of it.
        TypeError, ValueError: an argument is not of the kind described above.
    """
    if not isinstance(evaluator, PerformanceEvaluator):
        message = f"evaluator is {evaluator!r}; expected a PerformanceEvaluator"
        raise TypeError(message)
    number_or_none("rollout_devices", rollout_devices)
    number_or_none("responses_per_prompt", responses_per_prompt)
    evaluator.declare_devices(int(os.environ.get("WORLD_SIZE", "1")), rollout_devices)

    def make(folder: Path) -> _Times:
        # Here and not at the first step: there is no process group yet, so that rank 0 does not
        # wait for figures of the others.
        evaluator.on_fit_start()
        return _Times(evaluator, folder, responses_per_prompt)

    return _add_after_setup(make, functools.partial(evaluator.fault, "prime-rl's monitors"))


def share_lengths() -> Callable[[], None]:
    """Tell the trainer the lengths of the samples; return what stops it.

    To be called before ``prime_rl.orchestrator.orchestrator.main``.

    Raises:
        ImportError: there is no prime-rl here.
        RuntimeError: this version of prime-rl lacks what is used of it.
    """
    return _add_after_setup(_Lengths, _warn)


def _add_after_setup(
    make: Callable[[Path], Any], fault: Callable[[Exception], None]
) -> Callable[[], None]:
    """Add a monitor once prime-rl has set up its own, on rank 0; return what undoes it."""
    monitors: Any = importlib.import_module(MODULE)
    for name in SEAM:
        if not hasattr(monitors, name):
            version = installed_version("prime-rl")
            message = f"prime-rl {version} has no {MODULE}.{name}: nothing to measure by"
            raise RuntimeError(message)
    original = monitors.setup
    added = []

    @functools.wraps(original)
    async def setup(*args: Any, **kwargs: Any) -> Any:
        result = await original(*args, **kwargs)
        try:
            if int(os.environ.get("RANK", os.environ.get("DP_RANK", "0"))) == 0:
                monitor = make(Path(kwargs["output_dir"]) / "coati_perf")
                monitors.MONITORS.append(monitor)
                added.append(monitor)
        except Exception as error:  # noqa: BLE001 - training goes on
            fault(error)
        return result

    monitors.setup = setup

    def detach() -> None:
        monitors.setup = original
        for monitor in added:
            if monitor in monitors.MONITORS:
                monitors.MONITORS.remove(monitor)

    return detach


def _warn(error: Exception) -> None:
    _logger.warning("the trainer is not told the lengths of the samples: %r", error)


class _Times:
    """The trainer's: records every step when its times come, with the lengths of its file."""

    def __init__(
        self, evaluator: PerformanceEvaluator, folder: Path, responses_per_prompt: int
    ) -> None:
        self.evaluator = evaluator
        self.folder = folder
        self.responses_per_prompt = responses_per_prompt
        self.episode = 0

    async def log(self, data: Any, step: int, kind: str = "train", subset: str = "") -> None:
        """Record the step, where these are its times."""
        try:
            if isinstance(data, dict) and "time/forward_backward" in data:
                self._record(data, step)
        except Exception as error:  # noqa: BLE001 - training goes on
            self.evaluator.fault("a step of prime-rl", error)

    async def finalize(self) -> None:
        """Write what is left."""
        self.evaluator.close()

    def _record(self, times: Mapping[str, Any], step: int) -> None:
        episode, self.episode = self.episode, self.episode + 1
        path = _path(self.folder, step)
        prompts, responses = None, None
        if path.exists():
            prompts, responses = json.loads(path.read_text())
            path.unlink()
        self.evaluator.record_step(
            episode,
            TimedStep(
                wall_s=float(times[_WALL]),
                seconds=phase_seconds(times, _PHASES),
                prompts=prompts,
                responses=responses,
                learned=["actor"],
                responses_per_prompt=self.responses_per_prompt,
            ),
        )


class _Lengths:
    """The orchestrator's: writes the lengths of each batch before it is sent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def log(self, data: Any, step: int, kind: str = "train", subset: str = "") -> None:
        """Write the lengths, where these are the episodes of a batch to learn from."""
        if isinstance(data, dict) or (kind, subset) != ("train", "effective"):
            return
        try:
            episodes = data if isinstance(data, list) else [data]
            await asyncio.to_thread(_write_lengths, _path(self.folder, step), episodes)
        except Exception as error:  # noqa: BLE001 - training goes on
            _warn(error)

    async def finalize(self) -> None:
        """Do nothing: everything is written."""


def _path(folder: Path, step: int) -> Path:
    return folder / f"lengths-{step}.json"


def _write_lengths(path: Path, episodes: list[Any]) -> None:
    """Write the tokens of each prompt and response, of the samples as prime-rl makes them.

    Where samples share a turn of the model, it is the first one's response and the others' prompt.
    """
    samples = importlib.import_module(_SAMPLES).iter_trainable_branches
    masks = [mask for episode in episodes for trace in episode.traces for _, mask in samples(trace)]
    responses = [sum(mask) for mask in masks]
    prompts = [len(mask) - count for mask, count in zip(masks, responses, strict=True)]
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps([prompts, responses]))
    partial.replace(path)
