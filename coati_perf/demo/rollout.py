"""Making experience: generate answers, then score them with all four models."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from transformers import GenerationConfig

from coati_perf.demo import objective
from coati_perf.demo import task as tasks
from coati_perf.demo.experience import Experience
from coati_perf.demo.models import Models
from coati_perf.demo.task import Prompts, Task

Phase = Callable[[str], AbstractContextManager[object]]


def no_phase(name: str) -> AbstractContextManager[None]:
    """Mark nothing: the default where a ``phase`` is asked for."""
    del name
    return contextlib.nullcontext()


class ExperienceMaker:
    """Turns prompts into experience; marks its parts "generate" and "score" by ``phase``."""

    def __init__(
        self, models: Models, task: Task, kl_coefficient: float, phase: Phase = no_phase
    ) -> None:
        self._models = models
        self._task = task
        self._kl_coefficient = kl_coefficient
        self._phase = phase
        # Without the filters of top_k and top_p, the actions are samples of the actor itself.
        self._generation = GenerationConfig(
            max_new_tokens=task.longest_response,
            do_sample=True,
            top_k=0,
            top_p=1.0,
            temperature=1.0,
            use_cache=True,
            pad_token_id=tasks.PAD,
            bos_token_id=tasks.BEGIN,
            eos_token_id=[tasks.END, tasks.PAD],
        )

    @torch.no_grad()
    def make_experience(self, prompts: Prompts) -> Experience:
        """Answer each of B prompts; A is the length of the longest answer. Uses torch's RNG."""
        with self._phase("generate"):
            sequences = self._models.actor.generate(  # pyright: ignore[reportAttributeAccessIssue]  # its stubs are at odds with themselves
                prompts.tokens,
                attention_mask=prompts.attention_mask,
                generation_config=self._generation,
            )
        with self._phase("score"):
            return self._score(sequences, prompts.attention_mask)

    def _score(self, sequences: Tensor, prompt_mask: Tensor) -> Experience:
        action_mask = self._task.action_mask(sequences[:, prompt_mask.size(1) :])
        attention_mask = torch.cat([prompt_mask, action_mask], dim=1)
        length = action_mask.size(1)
        models = self._models
        log_probs = action_log_probs(models.actor, sequences, attention_mask, length)
        initial_log_probs = action_log_probs(models.initial, sequences, attention_mask, length)
        values = action_values(models.critic, sequences, attention_mask, length)
        reward = models.reward(sequences, attention_mask=attention_mask).logits.squeeze(-1)
        rewards = objective.rewards_with_kl_penalty(
            reward, log_probs, initial_log_probs, action_mask, self._kl_coefficient
        )
        return Experience(
            sequences=sequences,
            action_log_probs=log_probs,
            values=values,
            reward=reward,
            kl=((log_probs - initial_log_probs) * action_mask).sum(dim=1),
            advantages=objective.generalised_advantages(rewards, values, action_mask),
            attention_mask=attention_mask,
            action_mask=action_mask,
        )


# Neither function passes position_ids: Llama's rotary embedding sees only distances between
# positions, so that padding on the left changes nothing.


def action_log_probs(
    model: torch.nn.Module, sequences: Tensor, attention_mask: Tensor, length: int
) -> Tensor:
    """Return the log probabilities (B, A) of the last A = ``length`` tokens, in nat."""
    logits = model(sequences, attention_mask=attention_mask, use_cache=False).logits
    return objective.selected_log_probs(logits[:, -length - 1 : -1], sequences[:, -length:])


def action_values(
    critic: torch.nn.Module, sequences: Tensor, attention_mask: Tensor, length: int
) -> Tensor:
    """Return the critic's value (B, A) before each of the last A = ``length`` tokens."""
    values = critic(sequences, attention_mask=attention_mask, use_cache=False).logits
    return torch.as_tensor(values[:, -length - 1 : -1, 0])
