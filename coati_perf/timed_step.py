"""A step of a trainer that something else has timed: its controller, or an inference engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from coati_perf import catalogue
from coati_perf.batches import token_counts
from coati_perf.cost import Amounts
from coati_perf.flops import CostModel


class TimedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step, for ``PerformanceEvaluator.record_step``: what took how long, over which samples.

    Its batches count as packed: no padding is executed. Of a sample of several turns, response
    tokens are those that the model sampled, and prompt tokens all others: the FLOP are the same in
    whatever order they come.

    Args:
        wall_s: seconds of the whole step.
        seconds: those of each phase by its name; phases should not hold each other.
        prompts: prompt tokens of each sample, a list or a tensor (B,) on any device.
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
    prompts: Any
    responses: Any
    scored: Sequence[str] = ()
    learned: Sequence[str] = ()
    epochs: int = 1
    responses_per_prompt: int = 1
    cached: Any = 0

    def lengths(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return prompts, responses and cached tokens (B,), or raise ValueError."""
        prompts, responses = torch.as_tensor(self.prompts), torch.as_tensor(self.responses)
        if prompts.dim() != 1 or prompts.shape != responses.shape:
            message = (
                f"prompts have shape {tuple(prompts.shape)} and responses"
                f" {tuple(responses.shape)}; expected one length of each for every sample"
            )
            raise ValueError(message)
        return prompts, responses, torch.as_tensor(self.cached).expand_as(prompts)

    def amounts(
        self,
        models: Mapping[str, CostModel],
        prompts: torch.Tensor,
        responses: torch.Tensor,
        cached: torch.Tensor,
    ) -> Amounts:
        """Return what the step amounts to, from its lengths on the host."""
        prompts, responses = prompts.to(torch.float64), responses.to(torch.float64)
        lengths = prompts + responses
        amounts: Amounts = {
            catalogue.GENERATED: float(len(prompts)),
            catalogue.COLLECT_STEPS: 1.0,
            **token_counts(prompts, responses),
        }
        if self.learned:
            amounts[catalogue.LEARNED] = float(len(prompts) * self.epochs)
            amounts[catalogue.LEARN_TOKENS] = float(lengths.sum()) * self.epochs
        actor = models.get("actor")
        if actor is not None:
            options: dict[str, Any] = {
                "shared_prompt": self.responses_per_prompt,
                "cached": cached.to(torch.float64),
            }
            generated = float(actor.generate(prompts, responses, **options).sum())
            amounts[catalogue.GENERATE_FLOP] = generated
            amounts[catalogue.GENERATE_EXECUTED] = generated
            if actor.memory is not None:
                moved = actor.generate_bytes(prompts, responses, **options)
                amounts[catalogue.GENERATE_BYTES] = moved
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
