"""A step of a trainer that something else has timed: its controller, or an inference engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from coati_perf import catalogue
from coati_perf.batches import given_lengths
from coati_perf.cost import Amounts
from coati_perf.flops import CostModel
from coati_perf.generated import generated_amounts


def phase_seconds(timings: Mapping[str, Any], phases: Mapping[str, str]) -> dict[str, float]:
    """Sum stopwatches by the phase that each belongs to; those that are not named are left out."""
    seconds: dict[str, float] = {}
    for name, phase in phases.items():
        if name in timings:
            seconds[phase] = seconds.get(phase, 0.0) + float(timings[name])
    return seconds


class TimedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step, for ``PerformanceEvaluator.record_step``: what took how long, over which samples.

    Its batches count as packed: no padding is executed. Of a sample of several turns, response
    tokens are those that the model sampled, and prompt tokens all others: the FLOP are the same in
    whatever order they come.

    Args:
        wall_s: seconds of the whole step.
        seconds: those of each phase by its name; phases should not hold each other.
        prompts: prompt tokens of each sample, a list or a tensor (B,) on any device; None where
            nobody knows them, for times alone.
        responses: response tokens, likewise.
        scored: the roles of the models that scored the samples, one for each forward.
        learned: the roles of the models that learned from them.
        epochs: how often each sample was learned from.
        responses_per_prompt: how many responses share the prefill of their prompt.
        cached: prompt tokens of each sample that a prefix cache had, where the engine says so; in
            place of ``responses_per_prompt``.
    """

    wall_s: float
    seconds: Mapping[str, float]
    prompts: Any = None
    responses: Any = None
    scored: Sequence[str] = ()
    learned: Sequence[str] = ()
    epochs: int = 1
    responses_per_prompt: int = 1
    cached: Any = None

    def lengths(self) -> tuple[torch.Tensor, ...]:
        """Return prompts, responses and, where known, cached tokens (B,), or raise ValueError."""
        prompts, responses = torch.as_tensor(self.prompts), torch.as_tensor(self.responses)
        if prompts.dim() != 1 or prompts.shape != responses.shape:
            message = (
                f"prompts have shape {tuple(prompts.shape)} and responses"
                f" {tuple(responses.shape)}; expected one length of each for every sample"
            )
            raise ValueError(message)
        if self.cached is None:
            return prompts, responses
        if self.responses_per_prompt != 1:
            message = (
                f"cached and responses_per_prompt={self.responses_per_prompt} are both given;"
                " expected one of them, for what is cached need not be shared"
            )
            raise ValueError(message)
        return prompts, responses, given_lengths("cached", self.cached, len(prompts))

    def amounts(
        self,
        models: Mapping[str, CostModel],
        prompts: torch.Tensor,
        responses: torch.Tensor,
        cached: torch.Tensor | None = None,
    ) -> Amounts:
        """Return what the step amounts to, from its lengths on the host."""
        amounts = generated_amounts(
            models.get("actor"),
            prompts,
            responses,
            shared_prompt=self.responses_per_prompt,
            cached=cached,
        )
        lengths = (prompts + responses).to(torch.float64)
        if self.learned:
            amounts[catalogue.LEARNED] = float(len(lengths) * self.epochs)
            amounts[catalogue.LEARN_TOKENS] = float(lengths.sum()) * self.epochs
        for role in self.scored:
            if role in models:
                flop = float(models[role].forward(lengths).sum())
                scored = {catalogue.SCORE_FLOP: flop, catalogue.SCORE_EXECUTED: flop}
                catalogue.merge(amounts, scored)
        for role in self.learned:
            if role in models:
                cost = models[role]
                useful = self.epochs * float(cost.forward_backward(lengths).sum())
                # Recomputed where it is, and not padded, as ``executed=True`` would.
                executed = self.epochs * float(cost._executed_forward_backward(lengths).sum())
                learned = {catalogue.LEARN_FLOP: useful, catalogue.LEARN_EXECUTED: executed}
                catalogue.merge(amounts, learned)
        return amounts
