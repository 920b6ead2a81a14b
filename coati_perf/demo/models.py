"""The four models of PPO, each a tiny Hugging Face model made from a configuration."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, TypedDict

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
)

from coati_perf.demo import task as tasks
from coati_perf.demo.reward_model import build_reward_model
from coati_perf.demo.task import Task


@dataclasses.dataclass(frozen=True)
class Models:
    """The trained ``actor`` and ``critic``, and the frozen ``initial`` and ``reward`` models.

    ``actor`` and ``initial`` give logits (B, S, V), ``critic`` a value (B, S, 1) per position,
    ``reward`` a score (B, 1) per sequence.
    """

    actor: LlamaForCausalLM
    critic: LlamaForTokenClassification
    initial: LlamaForCausalLM
    reward: LlamaForSequenceClassification


def build_models(task: Task, seed: int = 0) -> Models:
    """Build the models, the same for the same ``seed``; the caller's random state stays as it is.

    Also sets transformers' own logging to errors only, for the whole process.
    """
    transformers.logging.set_verbosity_error()
    settings: dict[str, Any] = {
        "vocab_size": task.vocabulary_size,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "pad_token_id": tasks.PAD,
        "bos_token_id": tasks.BEGIN,
        "eos_token_id": tasks.END,
        "num_labels": 1,
        "classifier_dropout": 0.0,
    }
    config = LlamaConfig(**settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        actor: LlamaForCausalLM = AutoModelForCausalLM.from_config(config)
        critic = LlamaForTokenClassification(config)
        reward = build_reward_model(task)
    initial = copy.deepcopy(actor).requires_grad_(requires_grad=False).eval()
    return Models(actor, critic, initial, reward)


class ParameterCounts(TypedDict):
    """The number of parameters of each model, under PerformanceEvaluator's argument names."""

    actor_num_params: int
    critic_num_params: int
    initial_model_num_params: int
    reward_model_num_params: int


def count_parameters(models: Models) -> ParameterCounts:
    """Return each model's number of parameters, under PerformanceEvaluator's argument names."""
    return {
        "actor_num_params": models.actor.num_parameters(),
        "critic_num_params": models.critic.num_parameters(),
        "initial_model_num_params": models.initial.num_parameters(),
        "reward_model_num_params": models.reward.num_parameters(),
    }
