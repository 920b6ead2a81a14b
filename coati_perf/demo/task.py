"""The task of the demo: answer a random prompt with as many target words as possible."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

PAD, BEGIN, END, SEPARATOR = range(4)
_FIRST_WORD = 4


@dataclasses.dataclass(frozen=True)
class Prompts:
    """A batch of prompts, padded on the left to one length.

    ``tokens`` and ``attention_mask`` are (B, I) integer tensors; the mask is 1 on real tokens.
    """

    tokens: Tensor
    attention_mask: Tensor


@dataclasses.dataclass(frozen=True)
class Task:
    """A vocabulary, the prompts over it, and which answers are good.

    A prompt is ``BEGIN``, some random words and ``SEPARATOR``. The answer may be of any length up
    to ``longest_response`` tokens and stops at ``END`` or ``PAD``. Every ``target_every``-th word
    is a target word. Lengths are in tokens; ``shortest_prompt`` and ``longest_prompt`` count the
    words alone. ``separator_weight`` is how many words a separator counts for in the reward.
    """

    vocabulary_size: int = 64
    shortest_prompt: int = 4
    longest_prompt: int = 14
    longest_response: int = 24
    target_every: int = 6
    separator_weight: float = 4.0

    @property
    def prompt_length(self) -> int:
        """The length I of a batch of prompts, padding included."""
        return self.longest_prompt + 2

    @property
    def target_words(self) -> Tensor:
        """The token ids of the target words, in rising order."""
        return torch.arange(_FIRST_WORD, self.vocabulary_size, self.target_every)

    def sample_prompts(self, number: int, generator: torch.Generator) -> Prompts:
        """Draw ``number`` prompts of different lengths, as (number, prompt_length) tensors."""
        words = torch.randint(
            self.shortest_prompt, self.longest_prompt + 1, (number, 1), generator=generator
        )
        shape = (number, self.prompt_length)
        tokens = torch.randint(_FIRST_WORD, self.vocabulary_size, shape, generator=generator)
        tokens[:, -1] = SEPARATOR
        position = torch.arange(self.prompt_length)
        begin = self.longest_prompt - words
        tokens = torch.where(position == begin, BEGIN, tokens)
        attention_mask = (position >= begin).long()
        return Prompts(tokens * attention_mask, attention_mask)

    def action_mask(self, responses: Tensor) -> Tensor:
        """Return a mask like ``responses`` (B, A): 1 up to and including the token that ends it."""
        ended = ((responses == END) | (responses == PAD)).long()
        return (ended.cumsum(dim=1) - ended == 0).long()

    def reward(self, responses: Tensor) -> Tensor:
        """Return the reward (B,) of ``responses`` (B, A), from 0 to below 1, by counting.

        It is the fraction of target words in the answer, as if ``separator_weight`` more words had
        missed: a short answer, however good, has less than a long one. The reward model finds the
        same number in its forward pass.
        """
        counted = self.action_mask(responses) * ((responses != END) & (responses != PAD))
        hits = counted * torch.isin(responses, self.target_words)
        weights = torch.where(responses == SEPARATOR, self.separator_weight, 1.0)
        return hits.sum(dim=1) / (self.separator_weight + (counted * weights).sum(dim=1))
