"""Makes OpenRLHF's trainers record each step, within the Ray actor that they run in."""

from __future__ import annotations

import dataclasses
import importlib
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coati_perf import PerformanceEvaluator, TimedStep
from coati_perf.provenance import installed_version
from coati_perf.timed_step import phase_seconds

# The Ray actors that train: OpenRLHF's synchronous trainer, and one half of its asynchronous one.
TRAINERS = {
    "openrlhf.trainer.ppo_trainer": "PPOTrainer",
    "openrlhf.trainer.ppo_trainer_async": "TrainingActor",
}
# A fit calls the other two once a step: one with the rollout, then one with the stopwatches.
SEAMS = ("fit", "train_step", "save_logs_and_checkpoints")

_PHASES = {
    "timing/generation": "generate",
    "timing/make_experience": "score",
    "timing/ppo_train": "learn",
    "timing/broadcast": "weight_sync",
}
# OpenRLHF's arguments: since 0.10 in groups, and as they were before.
_ARGUMENTS = {
    "asynchronous": ("train.async_enable", "async_train"),
    "epochs": ("train.max_epochs", "max_epochs"),
    "freezing_steps": ("critic.freezing_steps", "freezing_actor_steps"),
    "responses_per_prompt": ("rollout.n_samples_per_prompt", "n_samples_per_prompt"),
    "prefix_caching": ("vllm.enable_prefix_caching", "enable_prefix_caching"),
    "engines": ("vllm.num_engines", "vllm_num_engines"),
    "engine_gpus": ("vllm.tensor_parallel_size", "vllm_tensor_parallel_size"),
    "colocate_all": ("train.colocate_all", "colocate_all_models"),
    "colocate_actor_ref": ("train.colocate_actor_ref", "colocate_actor_ref"),
    "colocate_critic_reward": ("train.colocate_critic_reward", "colocate_critic_reward"),
    **{
        f"{role}_{size}": (f"{role}.{size}", f"{role}_{size}")
        for role in ("actor", "ref", "critic", "reward")
        for size in ("num_nodes", "num_gpus_per_node")
    },
}


def measure(**options: Any) -> Callable[[], None]:
    """Record every step of OpenRLHF's trainers; return what stops it for trainers made later.

    To be called in the script that launches the training, before OpenRLHF's ``train``. In place of
    its trainers come classes derived from them, which make their own evaluator in the Ray actor.

    Args:
        options: those of ``PerformanceEvaluator``, to be pickled for the actor. ``models`` should
            hold configs: ``actor``, and ``critic``, ``initial`` and ``reward`` where they run.

    Raises:
        ImportError: OpenRLHF, or something that its trainers need, is not installed here.
        RuntimeError: this version of OpenRLHF lacks what is measured by; says what.
        TypeError, ValueError, UntraceableModelError, SinkError: as ``PerformanceEvaluator``.
    """
    PerformanceEvaluator(0, 0, 0, 0, **options)  # what is wrong with them is said here
    ray = importlib.import_module("ray")
    modules = {importlib.import_module(module): name for module, name in TRAINERS.items()}
    trainers = [(module, name, _trainer(module, name)) for module, name in modules.items()]
    originals = [(module, name, getattr(module, name)) for module, name in modules.items()]
    for module, name, trainer in trainers:
        setattr(module, name, ray.remote(_measured(trainer, options)))

    def restore() -> None:
        for module, name, original in originals:
            setattr(module, name, original)

    return restore


def _trainer(module: Any, name: str) -> Any:
    """Return the class that ``ray.remote`` made an actor of, if it can be measured."""
    actor = getattr(module, name, None)
    decorated = getattr(getattr(actor, "__ray_metadata__", None), "modified_class", None)
    trainer = getattr(decorated, "__ray_actor_class__", None)
    missing = [seam for seam in SEAMS if not hasattr(trainer, seam)]
    if missing:
        version = installed_version("openrlhf")
        lacking = f"Ray actor {name}" if trainer is None else f"{name}.{missing[0]}"
        message = f"openrlhf {version} has no {lacking} in {module.__name__}: nothing to measure by"
        raise RuntimeError(message)
    return trainer


def _measured(trainer: Any, options: Mapping[str, Any]) -> Any:
    """Return the trainer that also records its steps."""

    class Measured(trainer):  # type: ignore[misc]  # Ray's class is not known here
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._coati_perf = _Recorder(PerformanceEvaluator(0, 0, 0, 0, **options))
            super().__init__(*args, **kwargs)

        def fit(self, *args: Any, **kwargs: Any) -> Any:
            self._coati_perf.start()
            try:
                return super().fit(*args, **kwargs)
            finally:
                self._coati_perf.evaluator.close()

        def train_step(self, rollout_samples: Any, global_step: int) -> Any:
            self._coati_perf.take_rollout(self, rollout_samples, global_step)
            return super().train_step(rollout_samples, global_step)

        def save_logs_and_checkpoints(
            self, global_step: int, logs_dict: Any = None, client_states: Any = None
        ) -> Any:
            self._coati_perf.record(logs_dict)
            return super().save_logs_and_checkpoints(global_step, logs_dict, client_states)

    Measured.__name__ = Measured.__qualname__ = trainer.__name__  # Ray's logs say it
    return Measured


@dataclasses.dataclass
class _Recorder:
    evaluator: PerformanceEvaluator
    step: int = 0
    started: float = 0.0
    # What is known of the step before its times are; None where it was not understood.
    rollout: dict[str, Any] | None = None
    asynchronous: bool = False

    def start(self) -> None:
        """Begin the first step."""
        self.started = self.evaluator.clock()

    def take_rollout(self, trainer: Any, samples: Sequence[Any], global_step: int) -> None:
        """Keep what the step generated and will learn from; never raises."""
        self.rollout = None
        try:
            if self.step == 0:
                self.asynchronous = bool(_argument(trainer.args, "asynchronous"))
                self.evaluator.declare_devices(*_devices(trainer))
            self.rollout = _rollout(trainer, samples, global_step)
        except Exception as error:  # noqa: BLE001 - training goes on
            self.evaluator.fault("a step of OpenRLHF", error)

    def record(self, logs: Mapping[str, float] | None) -> None:
        """Record the step that ends here; never raises."""
        rollout, self.rollout = self.rollout, None
        now = self.evaluator.clock()
        started, self.started = self.started, now
        if rollout is None or logs is None:
            return
        step, self.step = self.step, self.step + 1
        try:
            # A synchronous trainer's step_total is but the sum of the others.
            wall_s = float(logs["timing/step_total"]) if self.asynchronous else now - started
            seconds = phase_seconds(logs, _PHASES)
            self.evaluator.record_step(step, TimedStep(wall_s=wall_s, seconds=seconds, **rollout))
        except Exception as error:  # noqa: BLE001 - training goes on
            self.evaluator.fault("a step of OpenRLHF", error)


def _rollout(trainer: Any, samples: Sequence[Any], global_step: int) -> dict[str, Any]:
    """Return what a ``TimedStep`` says of the samples, each an Experience of one response."""
    args = trainer.args
    responses = [int(sample.action_mask.sum()) for sample in samples]
    totals = [int(sample.total_length) for sample in samples]
    rewarded = samples[0].rewards is not None
    scored = {
        "actor": trainer.actor_model_group,
        "initial": trainer.reference_model_group,
        "critic": trainer.critic_model_group,
        "reward": None if rewarded else trainer.reward_model_group,
    }
    frozen = global_step <= _argument(args, "freezing_steps")
    learned = {
        "actor": None if frozen else trainer.actor_model_group,
        "critic": trainer.critic_model_group,
    }
    # Each response is a request of its own, which finds the prompt in the cache or prefills it.
    shared = _argument(args, "prefix_caching")
    return {
        "prompts": [total - n for total, n in zip(totals, responses, strict=True)],
        "responses": responses,
        "scored": [role for role, group in scored.items() if group is not None],
        "learned": [role for role, group in learned.items() if group is not None],
        "epochs": _argument(args, "epochs"),
        "responses_per_prompt": _argument(args, "responses_per_prompt") if shared else 1,
    }


def _devices(trainer: Any) -> tuple[int, int | None]:
    """Return how many GPUs train and score, and how many generate: None where they are the same.

    As ``train`` of ``openrlhf.cli.train_ppo_ray`` places the models.
    """
    args = trainer.args
    together = _argument(args, "colocate_all")
    critic_reward = _argument(args, "colocate_critic_reward")
    critic = trainer.critic_model_group is not None
    own = ["actor"]
    if trainer.reference_model_group is not None:
        own += [] if together or _argument(args, "colocate_actor_ref") else ["ref"]
    if critic:
        own += [] if together and not critic_reward else ["critic"]
    if trainer.reward_model_group is not None:
        own += [] if together or (critic and critic_reward) else ["reward"]
    trainers = sum(
        _argument(args, f"{role}_num_nodes") * _argument(args, f"{role}_num_gpus_per_node")
        for role in own
    )
    if together and not _argument(args, "asynchronous"):
        return trainers, None
    return trainers, _argument(args, "engines") * _argument(args, "engine_gpus")


def _argument(args: Any, name: str) -> Any:
    """Return one of OpenRLHF's arguments, by our name for it."""
    grouped, flat = _ARGUMENTS[name]
    return operator.attrgetter(grouped if hasattr(args, "rollout") else flat)(args)
