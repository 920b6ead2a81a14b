"""What one collect step has gathered."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Experience:
    """A batch of B prompts and answers. S is the padded length, the last A positions are actions.

    Fields:
        sequences: (B, S) token ids; a left-padded prompt, then the response, right-padded.
        action_log_probs: (B, A) log probability of each action when it was taken, in nat.
        values: (B, A) the critic's estimate before each action.
        reward: (B,) the reward model's score of the whole answer.
        kl: (B,) the summed log ratio of actor to initial model over the answer, in nat.
        advantages: (B, A) not normalised, so that ``advantages + values`` are the returns.
        attention_mask: (B, S) 1 on real tokens.
        action_mask: (B, A) 1 on actions, up to and including the end token.
    """

    sequences: Tensor
    action_log_probs: Tensor
    values: Tensor
    reward: Tensor
    kl: Tensor
    advantages: Tensor
    attention_mask: Tensor
    action_mask: Tensor

    def shuffled_batches(self, batch_size: int, order: Tensor) -> Iterator[Experience]:
        """Yield the rows in the given ``order`` (B,), at most ``batch_size`` at a time."""
        for rows in order.split(batch_size):
            yield Experience(
                **{
                    field.name: getattr(self, field.name)[rows]
                    for field in dataclasses.fields(self)
                }
            )
