"""The callback for Lightning's trainer."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from coati_perf import LearningMeter, PerformanceEvaluator
from coati_perf.sinks import Sink


class CoatiPerfCallback(Callback):
    """Measures a fit: ``Trainer(callbacks=[CoatiPerfCallback()])``.

    An episode is ``log_every_n_steps`` optimiser steps of the trainer. Its loggers get our figures
    too: an open wandb run is joined, and TensorBoard's folder gets a file more.

    Args:
        model: the name of the module's attribute that holds the language model, by default that of
            its only child.
        steps_per_episode: optimiser steps of an episode, in place of the above.
        options: further arguments of ``LearningMeter``.

    Raises, at fit start:
        AttributeError, TypeError, ValueError: there is no such model, or what ``LearningMeter``
            raises.
    """

    def __init__(
        self, *, model: str | None = None, steps_per_episode: int | None = None, **options: Any
    ) -> None:
        self._name = model
        self._steps_per_episode = steps_per_episode
        self._options = options
        self._meter: LearningMeter | None = None
        self._seen_steps = 0

    @property
    def evaluator(self) -> PerformanceEvaluator | None:
        """The evaluator of the current or last fit."""
        return None if self._meter is None else self._meter.evaluator

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        between_logs: int = getattr(trainer, "log_every_n_steps", 1)  # set late, and not declared
        options = {"sinks": _loggers(trainer), **self._options}
        self._meter = LearningMeter(
            _language_model(pl_module, self._name),
            steps_per_episode=self._steps_per_episode or between_logs or 1,
            **options,
        )
        self._seen_steps = trainer.global_step
        self._meter.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Not by the optimisers' hooks: DeepSpeed's engine makes its steps itself. Where there are
        # several optimisers, Lightning counts a step for each.
        if self._meter is not None and trainer.global_step > self._seen_steps:
            self._seen_steps = trainer.global_step
            self._meter.step_ended()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._meter is not None:
            self._meter.stop()


def _language_model(module: LightningModule, name: str | None) -> nn.Module:
    if name is not None:
        model = getattr(module, name)
        assert isinstance(model, nn.Module), f"{name} is no torch.nn.Module"
        return model
    children = dict(module.named_children())
    if len(children) == 1:
        return next(iter(children.values()))
    message = (
        f"{type(module).__name__} has {len(children)} children ({', '.join(children) or 'none'});"
        " expected the language model alone. Give CoatiPerfCallback(model=…) its name"
    )
    raise ValueError(message)


def _loggers(trainer: Trainer) -> list[str | Sink]:
    """Return sinks that join the trainer's loggers, by the names of their classes."""
    sinks: list[str | Sink] = []
    for logger in trainer.loggers if trainer.is_global_zero else []:
        kind = type(logger).__name__
        if kind == "WandbLogger":
            _ = getattr(logger, "experiment", None)  # starts the run, which the sink then joins
            sinks.append("wandb")
        elif kind == "TensorBoardLogger":
            from coati_perf_tensorboard import TensorBoardSink

            sinks.append(TensorBoardSink(str(logger.log_dir), own_folder=False))
    return sinks
