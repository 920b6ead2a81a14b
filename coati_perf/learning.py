"""Learning alone: a loop that trains one model, seen by torch's own hooks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from coati_perf.arguments import model_dtype, number_or_none
from coati_perf.evaluator import PerformanceEvaluator
from coati_perf.flops import CostModel
from coati_perf.flops.skeleton import unwrap
from coati_perf.flops.work import Attention
from coati_perf.forwards import Forwards
from coati_perf.hooks import LEARN
from coati_perf.phase import PhaseSwitch


class LearningMeter:
    """Measures the optimiser steps of a loop, ``steps_per_episode`` to an episode.

    The phase ``learn`` goes from the first forward of a step to its end; what lies between, such as
    loading data or a validation, is ``other``. Forwards without a gradient or in evaluation mode
    are not counted.

    Args:
        model: a language model that takes ``input_ids``; DDP, FSDP or compiled ones too. What
            ``torch.compile`` runs past the hooks is not seen.
        steps_per_episode: optimiser steps.
        attention: as for ``CostModel.traced``.
        options: further arguments of ``PerformanceEvaluator``.

    Raises:
        TypeError, ValueError: as ``PerformanceEvaluator`` does.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        steps_per_episode: int = 1,
        attention: Attention = "causal",
        **options: Any,
    ) -> None:
        number_or_none("steps_per_episode", steps_per_episode)
        dtype = model_dtype(model)
        self._cost = CostModel.traced(
            model, attention=attention, dtype=dtype, fallback="num_params"
        )
        self.evaluator = PerformanceEvaluator(0, 0, 0, 0, models={"actor": self._cost}, **options)
        self._model = unwrap(model)
        self._steps_per_episode = steps_per_episode
        self._steps = 0
        self._learning = PhaseSwitch(self.evaluator.phase(LEARN))
        self._forwards = Forwards(self.evaluator, counted=True)
        self._handles: list[Any] = []

    def start(self) -> None:
        """Begin the fit; raises what ``PerformanceEvaluator.on_fit_start`` does."""
        self.evaluator.on_fit_start()
        self._steps = 0
        self.evaluator.on_episode_start(0)
        # Before that of Forwards, which asks what the forward is for.
        handle = self._model.register_forward_pre_hook(self._before_forward)
        self._handles.append(handle)
        self._forwards.watch(self._model, self._cost)

    def follow(self, optimizer: Any) -> None:
        """End a step whenever the optimiser has made one; Accelerate's are unwrapped."""
        inner = getattr(optimizer, "optimizer", optimizer)
        self._handles.append(inner.register_step_post_hook(lambda *_: self.step_ended()))

    def step_ended(self) -> None:
        """End a step, and its episode where that is full."""
        self._learning.off()
        self._steps += 1
        episode, rest = divmod(self._steps, self._steps_per_episode)
        if rest == 0:
            self.evaluator.on_episode_end(episode - 1)
            self.evaluator.on_episode_start(episode)

    def stop(self) -> None:
        """End the fit; an episode in which no step was made is dropped. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._forwards.stop()
        self._learning.off()
        episode, rest = divmod(self._steps, self._steps_per_episode)
        if rest:
            self.evaluator.on_episode_end(episode)
        elif sys.exc_info()[1] is None:
            self.evaluator.drop_episode()
        self.evaluator.close()

    def _before_forward(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        learning = module.training and torch.is_grad_enabled()
        self._forwards.purpose = "measure" if learning else "ignore"
        if learning:
            self._learning.on()


@contextlib.contextmanager
def measure_learning(
    model: nn.Module, optimizer: Any, **options: Any
) -> Iterator[PerformanceEvaluator]:
    """Measure the loop inside: any that trains one language model, of Accelerate or plain.

    Args:
        model: the model that it calls; as it is prepared, or the one inside.
        optimizer: a ``torch.optim.Optimizer`` or Accelerate's. A step that a gradient scaler skips
            belongs to the next one. DeepSpeed's engine makes its steps itself: use
            ``LearningMeter`` and call ``step_ended``.
        options: those of ``LearningMeter``.
    """
    meter = LearningMeter(model, **options)
    meter.start()
    meter.follow(optimizer)
    try:
        yield meter.evaluator
    finally:
        meter.stop()
