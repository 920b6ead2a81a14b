"""A reward model whose weights are set by hand, so that its score has a known meaning."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForSequenceClassification

from coati_perf.demo import task as tasks
from coati_perf.demo.task import Task

# What each of the first channels of the hidden state says about a position.
_ONE, _SEPARATOR, _TARGET, _COUNTED, _ANSWER, _REWARD = range(6)
_HIDDEN = 64
_HEAD = 16
# A large constant channel keeps the norm of every hidden state, and so RMSNorm's factor, the same.
_CONSTANT = 64.0
# RMSNorm divides a hidden state by the root mean square of its channels; this undoes it.
_UNNORMALISE = _CONSTANT / _HIDDEN**0.5
# The attention logit between a position to look at and one to ignore; exp(-20) is 2e-9.
_SHARP = 20.0
# The rotary embedding turns the last pair of a head's channels by 1e-7 rad per position.
_STILL = _HEAD // 2 - 1
_ROTARY_BASE = 1e8


def build_reward_model(task: Task) -> LlamaForSequenceClassification:
    """Build a frozen two-layer Llama that scores the target words in an answer.

    Its score (B, 1) of ``input_ids`` (B, S), prompt and answer, agrees with :meth:`Task.reward` to
    2e-3. Layer 0 looks for the separator, and so marks the positions from there on. Layer 1 looks
    at all words there alike, and ``task.separator_weight`` times as much at the separator, and
    averages whether they are target words. The MLPs add nothing.
    """
    settings: dict[str, Any] = {
        "vocab_size": task.vocabulary_size,
        "hidden_size": _HIDDEN,
        "intermediate_size": 2 * _HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": _HIDDEN // _HEAD,
        "num_labels": 1,
        "pad_token_id": tasks.PAD,
        "bos_token_id": tasks.BEGIN,
        "eos_token_id": tasks.END,
        "rope_parameters": {"rope_type": "default", "rope_theta": _ROTARY_BASE},
        "use_cache": False,
    }
    model: Any = LlamaForSequenceClassification(LlamaConfig(**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.zero_()
        _set_embedding(model.model.embed_tokens.weight, task)
        finder, averager = model.model.layers
        _set_attention(finder, looks_at=(_SEPARATOR,), reads=_SEPARATOR, writes=_ANSWER)
        _set_attention(averager, looks_at=(_ANSWER, _COUNTED), reads=_TARGET, writes=_REWARD)
        model.score.weight[0, _REWARD] = _UNNORMALISE
    frozen: LlamaForSequenceClassification = model.requires_grad_(requires_grad=False).eval()
    return frozen


def _set_embedding(weight: Tensor, task: Task) -> None:
    weight[:, _ONE] = _CONSTANT
    weight[tasks.SEPARATOR, _SEPARATOR] = 1.0
    weight[task.target_words, _TARGET] = 1.0
    weight[:, _COUNTED] = 1.0
    weight[tasks.END, _COUNTED] = 0.0
    weight[tasks.SEPARATOR, _COUNTED] = 1.0 + math.log(task.separator_weight) / _SHARP


def _set_attention(layer: Any, *, looks_at: tuple[int, ...], reads: int, writes: int) -> None:
    """Let the first head average channel ``reads`` over the positions high in ``looks_at``."""
    attention = layer.self_attn
    attention.q_proj.weight[_STILL, _ONE] = _UNNORMALISE / _CONSTANT * _HEAD**0.5
    attention.k_proj.weight[_STILL, list(looks_at)] = _UNNORMALISE * _SHARP
    attention.v_proj.weight[0, reads] = _UNNORMALISE
    attention.o_proj.weight[writes, 0] = 1.0
