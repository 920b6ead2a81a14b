"""What the forwards that were seen amount to, worked out on a background thread."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from coati_perf import CostModel, catalogue
from coati_perf.batches import token_counts

Amounts = dict[str, float]


@dataclasses.dataclass(frozen=True)
class Forward:
    """A forward of a model over (batch, length) positions.

    ``logits`` is at how many positions of each sequence the logits are computed, None for all.
    ``fused`` says that TRL's own head computes them, which does so once more in the backward.
    """

    cost: CostModel
    batch: int
    length: int
    logits: int | None = None
    fused: bool = False

    def learned(self, real: torch.Tensor, logits: torch.Tensor) -> Amounts:
        """Return the amounts of a forward with backward, from each sequence's real positions."""
        tokens = real_lengths(real)
        padded = self.batch * self.length
        positions = self._logits_executed(logits)
        executed = self.cost.forward_backward(
            [self.length] * self.batch, logits=positions, executed=True
        ).sum()
        if self.fused:
            executed = executed + self._head(positions)
        useful = self.cost.forward_backward(tokens, logits=_useful_logits(tokens, logits)).sum()
        return {
            catalogue.LEARNED: float(len(tokens)),
            catalogue.LEARN_BATCHES: 1.0,
            catalogue.LEARN_PADDED: float(padded),
            catalogue.LEARN_TOKENS: float(tokens.sum()),
            catalogue.LEARN_PADDING: padded - float(tokens.sum()),
            catalogue.LEARN_FLOP: float(useful),
            catalogue.LEARN_EXECUTED: float(executed),
        }

    def scored(self, real: torch.Tensor, logits: torch.Tensor) -> Amounts:
        """Return the amounts of a forward alone."""
        tokens = real_lengths(real)
        executed = self.cost.forward(
            [self.length] * self.batch, logits=self._logits_executed(logits), executed=True
        )
        useful = self.cost.forward(tokens, logits=_useful_logits(tokens, logits))
        return {
            catalogue.SCORE_FLOP: float(useful.sum()),
            catalogue.SCORE_EXECUTED: float(executed.sum()),
        }

    def _logits_executed(self, logits: torch.Tensor) -> Any:
        if self.fused and self.logits is None:  # at the positions that count alone, over the batch
            return torch.full((self.batch,), float(logits.sum()) / self.batch)
        return self.logits

    def _head(self, positions: Any) -> torch.Tensor:
        lengths = [self.length] * self.batch
        with_head = self.cost.forward(lengths, logits=positions, executed=True)
        without: torch.Tensor = self.cost.forward(lengths, logits=0, executed=True)
        return (with_head - without).sum()


@dataclasses.dataclass
class Run:
    """Forwards of a generation that follow each other: over a prompt, or ``steps`` single tokens.

    Without a cache each step is over all positions again, and a run of its own.
    """

    batch: int
    positions: int
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
        prompts, responses = prompts.to(torch.float64), responses.to(torch.float64)
        useful = float(
            self.actor.generate(prompts, responses, shared_prompt=self.shared_prompt).sum()
        )
        amounts = {
            catalogue.GENERATED: float(len(prompts)),
            catalogue.COLLECT_STEPS: 1.0,
            **token_counts(prompts, responses),
            catalogue.MAKE_EXPERIENCE_PADDED: float(self.padded),
            catalogue.PADDING: self.padded - float((prompts + responses).sum()),
            catalogue.GENERATE_FLOP: useful,
            # What runs in an inference engine is not seen; it has no padding.
            catalogue.GENERATE_EXECUTED: self._executed() if self.runs else useful,
        }
        if self.actor.memory is not None:
            amounts[catalogue.GENERATE_BYTES] = self.actor.generate_bytes(
                prompts, responses, shared_prompt=self.shared_prompt
            )
        return amounts

    def _executed(self) -> float:
        flop, cached = 0.0, 0
        for run in self.runs:
            if run.positions == 1 and cached:
                flop += run.batch * self.actor.decode(cached, run.steps)
                cached += run.steps
            else:
                flop += run.batch * self.actor.prefill(run.positions)
                cached = run.positions
        return flop


def real_lengths(real: torch.Tensor) -> torch.Tensor:
    """Return the lengths of sequences: as given, or from the positions of one packed row."""
    if real.dim() == 1:
        return real.to(torch.float64)
    starts = torch.nonzero(real.reshape(-1) == 0).reshape(-1)
    ends = torch.cat([starts[1:], torch.tensor([real.numel()])])
    return (ends - starts).to(torch.float64)


def _useful_logits(tokens: torch.Tensor, logits: torch.Tensor) -> Any:
    """Return the positions of each sequence whose logits count; None for all of them."""
    return logits.to(torch.float64) if len(logits) == len(tokens) else None


def lengths_of(sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return how many tokens each sequence has."""
    return torch.tensor([len(sequence) for sequence in sequences])
