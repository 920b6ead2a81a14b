"""The arithmetic of PPO: pure functions of tensors, all (B, A) unless said otherwise.

Masks are 1 on actions and 0 on the padding after them.
Sources: Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage
Estimation" (2015) and "Proximal Policy Optimization Algorithms" (2017).
"""

from __future__ import annotations

import torch
from torch import Tensor


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of ``values`` where ``mask`` is 1, a scalar; 0 for an empty mask."""
    return (values * mask).sum() / mask.sum().clamp(min=1)


def normalised(values: Tensor, mask: Tensor) -> Tensor:
    """Return ``values`` shifted and scaled to mean 0 and variance 1 over the mask."""
    centred = values - masked_mean(values, mask)
    variance = masked_mean(centred.square(), mask)
    return centred * (variance + 1e-8).rsqrt() * mask


def selected_log_probs(logits: Tensor, actions: Tensor) -> Tensor:
    """Return the log probability (B, A) in nat that ``logits`` (B, A, V) give to ``actions``."""
    log_probs = torch.log_softmax(logits, dim=-1)
    return log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)


def rewards_with_kl_penalty(
    reward: Tensor, log_probs: Tensor, initial_log_probs: Tensor, mask: Tensor, coefficient: float
) -> Tensor:
    """Return the reward of each action: the KL penalty, and at the last action ``reward`` (B,).

    The penalty is ``coefficient`` times the log ratio of the actor to the initial model, which is
    an unbiased estimate of their KL divergence.
    """
    rewards = -coefficient * (log_probs - initial_log_probs) * mask
    last = mask.sum(dim=1, keepdim=True).long() - 1
    return rewards.scatter_add(1, last, reward.unsqueeze(1).to(rewards.dtype))


def generalised_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, discount: float = 1.0, decay: float = 0.95
) -> Tensor:
    """Return the generalised advantage estimates of ``rewards`` under ``values``.

    ``decay`` is the method's lambda. The value after the last action is 0.
    """
    values = values * mask
    advantages = torch.zeros_like(rewards)
    following_value = following_advantage = torch.zeros_like(rewards[:, 0])
    for step in reversed(range(rewards.size(1))):
        error = rewards[:, step] + discount * following_value - values[:, step]
        following_advantage = (error + discount * decay * following_advantage) * mask[:, step]
        following_value = values[:, step]
        advantages[:, step] = following_advantage
    return advantages


def clipped_policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, clip: float = 0.2
) -> Tensor:
    """Return PPO's clipped surrogate objective, negated to be minimised; a scalar."""
    ratio = (log_probs - old_log_probs).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1.0 - clip, 1.0 + clip) * advantages)
    return -masked_mean(surrogate, mask)


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float = 0.2
) -> Tensor:
    """Return half the mean squared error of ``values``, kept near ``old_values``; a scalar."""
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    error = torch.maximum((values - returns).square(), (clipped - returns).square())
    return 0.5 * masked_mean(error, mask)
