"""The command in outline: arguments in groups, or flat ones as before 0.10, and the placement."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import ray

from openrlhf.trainer.ray.launcher import RayActorGroup

GROUPS = {
    "train": {
        "async_enable": False, "max_epochs": 1, "colocate_all": False,
        "colocate_actor_ref": False, "colocate_critic_reward": False,
    },
    "rollout": {"n_samples_per_prompt": 1},
    "vllm": {"num_engines": 1, "tensor_parallel_size": 1, "enable_prefix_caching": False},
    "critic": {"freezing_steps": -1, "model_name_or_path": None},
    "reward": {"model_name_or_path": None},
    "ckpt": {"save_steps": 0},
}  # fmt: skip
FLAT = {
    "async_train": False, "max_epochs": 1, "colocate_all_models": False,
    "colocate_actor_ref": False, "colocate_critic_reward": False, "n_samples_per_prompt": 1,
    "vllm_num_engines": 1, "vllm_tensor_parallel_size": 1, "enable_prefix_caching": False,
    "freezing_actor_steps": -1, "critic_pretrain": None, "reward_pretrain": None,
    "save_steps": 0,
}  # fmt: skip
SIZES = {"num_nodes": 1, "num_gpus_per_node": 8}


def parse(words):
    """Take ``--name value`` and ``--switch``; names with a dot are those in groups."""
    grouped = any("." in word for word in words)
    for role in ("actor", "ref", "critic", "reward"):
        GROUPS.setdefault(role, {}).update(SIZES)
        FLAT.update({f"{role}_{size}": number for size, number in SIZES.items()})
    for position, word in enumerate(words):
        if word.startswith("--"):
            value = words[position + 1 : position + 2]
            given = value[0] if value and not value[0].startswith("--") else True
            given = int(given) if str(given).isdigit() else given
            group, _, name = word[2:].rpartition(".")
            (GROUPS[group] if grouped else FLAT)[name] = given
    groups = {name: SimpleNamespace(**group) for name, group in GROUPS.items()}
    return SimpleNamespace(**(groups if grouped else FLAT)), grouped


def train(args, grouped):
    if not ray.is_initialized():
        ray.init(num_cpus=2, include_dashboard=False)
    critic = args.critic.model_name_or_path if grouped else args.critic_pretrain
    reward = args.reward.model_name_or_path if grouped else args.reward_pretrain
    if args.train.async_enable if grouped else args.async_train:
        from openrlhf.trainer.ppo_trainer_async import PPOTrainerAsync as PPOTrainer
    else:
        from openrlhf.trainer.ppo_trainer import PPOTrainer
    ppo_trainer = PPOTrainer.remote(
        "pretrain",
        SimpleNamespace(args=args),
        RayActorGroup(1, 1, None),
        RayActorGroup(1, 1, None) if critic or reward else None,
        RayActorGroup(1, 1, None) if reward else None,
        RayActorGroup(1, 1, None),
        [],
        do_sample=True,
    )
    ray.get(ppo_trainer.get_max_steps.remote())
    ray.get(ppo_trainer.fit.remote())


if __name__ == "__main__":
    train(*parse(sys.argv[1:]))
