"""The evaluator for ColossalChat's own trainers."""

from __future__ import annotations

import functools
import importlib.util
import sys
from typing import Any

import msgspec
from torch import nn

import coati_perf
from coati_perf.arguments import model_dtype
from coati_perf.flops import CostModel
from coati_perf.flops.skeleton import unwrap
from coati_perf.flops.work import Attention
from coati_perf.forwards import Forwards
from coati_perf.seen import ObservedCosts, executed_generation
from coati_perf.sinks import Sink, parse_sinks


class PerformanceEvaluator(coati_perf.PerformanceEvaluator):
    """``coati_perf.PerformanceEvaluator``, which can also follow a trainer.

    Without ``follow`` it is the same: the parameter counts of the constructor give the coati
    convention, ``models`` exact figures from the shapes that the hooks see.
    """

    def follow(self, trainer: Any, *, attention: Attention = "causal") -> None:
        """Count what the models of a PPO or GRPO trainer run, and join its writers' runs.

        To be called before ``fit``; a second call follows another trainer instead. Each forward of
        its models is seen by torch's own hooks: inference mini-batches, the PTX loss, several
        generations per prompt, and whether generation used its KV cache, which Transformers 5
        silently does without. Generation is told from scoring by ``use_cache=False``, which
        ColossalChat's experience maker gives when it scores.
        When the fit starts, an open wandb run and the trainer's TensorBoard folder get our figures
        too.

        Raises:
            ValueError: the trainer has no actor, or splits its models (``use_tp``): give their
                configs as ``models`` and ``data_parallel_size`` instead.
        """
        if getattr(trainer, "use_tp", False) or not isinstance(
            getattr(trainer, "actor", None), nn.Module
        ):
            message = (
                f"{type(trainer).__name__} has no actor that is whole; expected one without"
                " use_tp. Give models= the models' configs and data_parallel_size= the number of"
                " replicas instead"
            )
            raise ValueError(message)
        maker = getattr(trainer, "experience_maker", None)
        models = {
            "actor": trainer.actor,
            "critic": getattr(trainer, "critic", None),
            "initial": getattr(maker, "initial_model", None),
            "reward": getattr(maker, "reward_model", None),
        }
        # A reward that is computed by rules has no parameters.
        modules = {
            role: unwrap(model)
            for role, model in models.items()
            if isinstance(model, nn.Module) and any(True for _ in model.parameters())
        }
        dtype = model_dtype(modules["actor"])
        costs = {
            role: CostModel.traced(model, attention=attention, dtype=dtype, fallback="num_params")
            for role, model in modules.items()
        }
        self.unfollow()
        forwards = Forwards(self, counted=False)
        for role, model in modules.items():
            forwards.watch(model, costs[role], generates=role == "actor")
        self._settings = msgspec.structs.replace(
            self._settings,
            workload=ObservedCosts(costs),
            declared=msgspec.structs.replace(self._settings.declared, dtype=dtype),
        )
        self._trainer = trainer
        self._count_forwards(forwards, costs["actor"])

    def unfollow(self) -> None:
        """Leave the trainer's models as they were. Without a trainer, nothing is done."""
        followed = vars(self).pop("_followed", None)
        if followed is not None:
            forwards, hooks = followed
            forwards.stop()
            vars(self).update(hooks)
            del self._trainer

    def on_fit_start(self) -> None:
        trainer = vars(self).get("_trainer")
        if trainer is not None:
            known = {source.label.partition(":")[0] for source in self._settings.sinks}
            joined = parse_sinks(_writers(trainer, known))
            self._settings = msgspec.structs.replace(
                self._settings, sinks=(*self._settings.sinks, *joined)
            )
        super().on_fit_start()

    def _count_forwards(self, forwards: Forwards, actor: CostModel) -> None:
        """Let the hooks say what forwards are for; on this instance, as they are hot."""
        make_start, make_end = self.on_make_experience_start, self.on_make_experience_end
        learn_start, learn_end = self.on_learn_batch_start, self.on_learn_batch_end

        def on_make_experience_start() -> None:
            make_start()
            forwards.purpose = "make"

        def on_make_experience_end(experience: Any, lengths: tuple[Any, Any] | None = None) -> None:
            forwards.purpose = "ignore"
            make_end(experience, lengths)
            self.defer(functools.partial(executed_generation, actor, forwards.take_generation()))

        def on_learn_batch_start() -> None:
            learn_start()
            forwards.purpose = "measure"

        def on_learn_batch_end(experience: Any, lengths: Any = None) -> None:
            forwards.purpose = "ignore"
            learn_end(experience, lengths)

        self._followed = (
            forwards,
            {
                "on_make_experience_start": make_start,
                "on_make_experience_end": make_end,
                "on_learn_batch_start": learn_start,
                "on_learn_batch_end": learn_end,
            },
        )
        vars(self).update(
            on_make_experience_start=on_make_experience_start,
            on_make_experience_end=on_make_experience_end,
            on_learn_batch_start=on_learn_batch_start,
            on_learn_batch_end=on_learn_batch_end,
        )


def _writers(trainer: Any, known: set[str]) -> list[str | Sink]:
    """Return sinks for what the trainer writes to, but for those that are there already."""
    sinks: list[str | Sink] = []
    wandb = sys.modules.get("wandb")
    if "wandb" not in known and getattr(wandb, "run", None) is not None:
        sinks.append("wandb")
    folder = getattr(getattr(trainer, "writer", None), "log_dir", None)
    has_tensorboard = importlib.util.find_spec("tensorboard") is not None
    if folder and has_tensorboard and not known & {"tensorboard", "TensorBoardSink"}:
        from coati_perf_tensorboard import TensorBoardSink

        sinks.append(TensorBoardSink(str(folder), own_folder=False))
    return sinks
