"""The methods of TRL's trainers between which the phases of an episode lie.

None of these is public. TRL has had them since the versions named here and has them in 1.16; a
trainer that lacks one is measured without that phase.
"""

from __future__ import annotations

from typing import Any

from coati_perf.provenance import installed_version

# Generation, scoring and rewards of one rollout (0.16). What it returns has the masks.
ROLLOUT = "_generate_and_score_completions"
# Within it: generation (0.24), whose first two results are the token ids of each prompt and of
# each response.
GENERATE = "_generate"
# The old policy's and the reference's log-probabilities; learning calls it too (0.20, 0.16).
LOG_PROBS = ("_get_per_token_logps_and_entropies", "_get_per_token_logps")
# The reward functions and models (0.20).
REWARDS = "_calculate_rewards"

# PPO's generation of samples to look at (1.12), which is no training.
SAMPLES = "generate_completions"

BY_FORWARDS = ("OnlineDPO", "XPO", "NashMD", "PPO")
ONLINE = ("GRPO", "RLOO", *BY_FORWARDS)


def missing(trainer: Any) -> list[str]:
    """Return the phases that cannot be told apart in this trainer; none of one that only learns."""
    if not is_online(trainer):
        return []
    if told_by_forwards(trainer):  # where they run in this process
        return ["generate"] if getattr(trainer.args, "use_vllm", False) else []
    seams = {
        "make_experience": (ROLLOUT,),
        "generate": (GENERATE,),
        "score": LOG_PROBS,
        "reward": (REWARDS,),
    }
    return [
        phase for phase, names in seams.items() if not any(hasattr(trainer, name) for name in names)
    ]


def is_online(trainer: Any) -> bool:
    """Say whether a trainer makes the experience that it learns from."""
    return hasattr(trainer, ROLLOUT) or _is_named(trainer, ONLINE)


def told_by_forwards(trainer: Any) -> bool:
    """Say whether a trainer has no methods for its phases, and never had."""
    return not hasattr(trainer, ROLLOUT) and _is_named(trainer, BY_FORWARDS)


def has_own_loop(trainer: Any) -> bool:
    """Say whether a trainer trains without ``training_step``: PPO's, up to 1.12."""
    return _is_named(trainer, ("PPO",))


def policy_of(trainer: Any) -> Any:
    """Return the model that learns; PPO's is beside its critic in one module."""
    return trainer.policy_model if has_own_loop(trainer) else trainer.model


def forward_of(trainer: Any, model: Any) -> Any:
    """Return the module whose forward runs for a model: PPO calls those below the scores' heads."""
    below_head = has_own_loop(trainer) and hasattr(model, "score")
    return getattr(model, model.base_model_prefix) if below_head else model


def version_of(trainer: Any) -> str:
    """Return what to call the trainer and its package in a message."""
    package = type(trainer).__module__.partition(".")[0]
    return f"{type(trainer).__name__} of {package} {installed_version(package)}"


def steps_per_rollout(trainer: Any) -> tuple[int, int]:
    """Return the micro-batches between two rollouts, and those of one optimiser step."""
    arguments = trainer.args
    accumulation = int(arguments.gradient_accumulation_steps)
    # 0.18 and older make experience at each optimiser step.
    per_generation = getattr(arguments, "steps_per_generation", None) or accumulation
    iterations = getattr(arguments, "num_iterations", None) or 1
    return int(per_generation) * int(iterations), accumulation


def _is_named(trainer: Any, starts: tuple[str, ...]) -> bool:
    return any(kind.__name__.startswith(starts) for kind in type(trainer).__mro__)
