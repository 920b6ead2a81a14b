"""What forwards that were seen amount to, worked out on a background thread."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from coati_perf import catalogue
from coati_perf.cost import Amounts, ModelCosts
from coati_perf.flops import CostModel
from coati_perf.generated import generated_amounts


@dataclasses.dataclass(frozen=True)
class Logits:
    """At how many positions a forward over one batch computes logits.

    ``computed`` is that of each sequence; None where it is at the real ones alone. ``real`` is a
    tensor (B,) of those that count, None for all real positions. ``again`` says that the backward
    computes them once more.
    """

    computed: int | None
    real: torch.Tensor | None = None
    again: bool = False


@dataclasses.dataclass(frozen=True)
class Forward:
    """A forward of a model over (batch, length) positions."""

    cost: CostModel
    batch: int
    length: int
    logits: Logits

    def learned(self, real: torch.Tensor, *real_logits: torch.Tensor) -> Amounts:
        """Return all amounts of it with its backward: see ``_real_lengths`` for ``real``."""
        tokens = _real_lengths(real)
        padded = self.batch * self.length
        return {
            catalogue.LEARNED: float(len(tokens)),
            catalogue.LEARN_BATCHES: 1.0,
            catalogue.LEARN_PADDED: float(padded),
            catalogue.LEARN_TOKENS: float(tokens.sum()),
            catalogue.LEARN_PADDING: padded - float(tokens.sum()),
            **self.learning(real, *real_logits),
        }

    def learning(self, real: torch.Tensor, *real_logits: torch.Tensor) -> Amounts:
        """Return the FLOP alone of it with its backward."""
        tokens = _real_lengths(real)
        lengths, computed = self._executed(*real_logits)
        executed = self.cost.forward_backward(lengths, logits=computed, executed=True).sum()
        if self.logits.again:
            executed += self.cost.head.forward * sum(computed)
        useful = self.cost.forward_backward(tokens, logits=_of_each(tokens, *real_logits)).sum()
        return {catalogue.LEARN_FLOP: float(useful), catalogue.LEARN_EXECUTED: float(executed)}

    def scored(self, real: torch.Tensor, *real_logits: torch.Tensor) -> Amounts:
        """Return the amounts of it alone."""
        tokens = _real_lengths(real)
        useful_logits = _of_each(tokens, *real_logits)
        lengths, computed = self._executed(*real_logits)
        return {
            catalogue.SCORE_FLOP: float(self.cost.forward(tokens, logits=useful_logits).sum()),
            catalogue.SCORE_EXECUTED: float(
                self.cost.forward(lengths, logits=computed, executed=True).sum()
            ),
        }

    def _executed(self, *real_logits: torch.Tensor) -> tuple[list[int], list[float]]:
        """Return the padded length of each sequence, and at how many positions it has logits."""
        # Of the real ones alone it makes no difference in which sequence they are.
        known = self.logits.computed
        real = sum(float(positions.sum()) for positions in real_logits)
        computed = real / self.batch if known is None else float(known)
        return [self.length] * self.batch, [computed] * self.batch


@dataclasses.dataclass
class Run:
    """Forwards of a generation that follow each other: over a prompt, or ``steps`` single tokens.

    Without a cache each step is over all positions again, and a run of its own. ``logits`` is at
    how many positions each has logits, None for all; ``cached`` how many keys there were before.
    """

    batch: int
    positions: int
    logits: int | None = None
    cached: int = 0
    steps: int = 1


@dataclasses.dataclass(frozen=True)
class Generation:
    """A generation of responses, by the forwards that ran; none were seen of an inference engine.

    ``padded`` is the positions of the tensors that hold prompts and responses.
    """

    actor: CostModel
    runs: Sequence[Run]
    padded: int
    shared_prompt: int = 1

    def generated(self, prompts: torch.Tensor, responses: torch.Tensor) -> Amounts:
        """Return the amounts of generation, from the real tokens of each sample."""
        real = float((prompts + responses).sum())
        return {
            # What runs in an inference engine is not seen; it has no padding.
            **generated_amounts(self.actor, prompts, responses, shared_prompt=self.shared_prompt),
            catalogue.MAKE_EXPERIENCE_PADDED: float(self.padded),
            catalogue.PADDING: self.padded - real,
            **executed_generation(self.actor, self.runs),
        }


class ObservedCosts(ModelCosts):
    """What batches cost beside what is seen of the forwards: the useful part of generation."""

    def padded_generation(self, batch: int, prompt: int, response: int) -> Amounts:
        return {}

    def padded_scoring(self, batch: int, length: int) -> Amounts:
        return {}

    def padded_learning(self, batch: int, length: int) -> Amounts:
        return {}

    def real_scoring(self, lengths: torch.Tensor) -> Amounts:
        return {}

    def real_learning(self, lengths: torch.Tensor) -> Amounts:
        return {}


def executed_generation(actor: CostModel, runs: Sequence[Run]) -> Amounts:
    """Return the FLOP of the forwards of generation; nothing where none were seen."""
    flop, cached = 0.0, 0
    for run in runs:
        if run.positions == 1 and cached:
            flop += run.batch * actor.decode(cached, run.steps)
            cached += run.steps
            continue
        forward = actor.prefill if run.logits == 1 else actor.forward
        flop += run.batch * forward(run.positions)
        if run.cached:  # the attention to what is cached alone
            steps = run.positions
            flop += run.batch * (actor.decode(run.cached, steps) - actor.decode(0, steps))
        cached = run.cached + run.positions
    return {catalogue.GENERATE_EXECUTED: flop} if runs else {}


def _real_lengths(real: torch.Tensor) -> torch.Tensor:
    """Return the lengths (B,) as given, or those of a packed row from its positions (1, L)."""
    if real.dim() == 1:
        return real.to(torch.float64)
    starts = torch.nonzero(real.reshape(-1) == 0).reshape(-1)
    ends = torch.cat([starts[1:], torch.tensor([real.numel()])])
    return (ends - starts).to(torch.float64)


def _of_each(tokens: torch.Tensor, *logits: torch.Tensor) -> torch.Tensor | None:
    """Return the positions with logits of each sequence; None where that is not known."""
    known = [positions.to(torch.float64) for positions in logits if len(positions) == len(tokens)]
    return known[0] if known else None
