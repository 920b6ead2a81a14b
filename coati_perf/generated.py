"""What generating responses amounts to, from the real lengths of the samples."""

from __future__ import annotations

import torch

from coati_perf import catalogue
from coati_perf.batches import token_counts
from coati_perf.cost import Amounts
from coati_perf.flops import CostModel


def generated_amounts(
    actor: CostModel | None,
    prompts: torch.Tensor,
    responses: torch.Tensor,
    *,
    shared_prompt: int = 1,
    cached: torch.Tensor | None = None,
) -> Amounts:
    """Return counts, and with an actor FLOP and bytes, of generation without padding.

    Args:
        actor: what generates; None where it is not known.
        prompts: prompt tokens of each sample (B,), on the host.
        responses: response tokens, likewise.
        shared_prompt: how many samples share a prefill.
        cached: prompt tokens that a prefix cache had (B,); None where there is no telling.
    """
    prompts, responses = prompts.to(torch.float64), responses.to(torch.float64)
    amounts: Amounts = {
        catalogue.GENERATED: float(len(prompts)),
        catalogue.COLLECT_STEPS: 1.0,
        **token_counts(prompts, responses),
    }
    if cached is None:
        cached = torch.zeros_like(prompts)
    else:
        amounts[catalogue.CACHED_TOKENS] = float(cached.sum())
    if actor is not None:
        flop = actor.generate(prompts, responses, shared_prompt=shared_prompt, cached=cached).sum()
        amounts[catalogue.GENERATE_FLOP] = amounts[catalogue.GENERATE_EXECUTED] = float(flop)
        if actor.memory is not None:
            amounts[catalogue.GENERATE_BYTES] = actor.generate_bytes(
                prompts, responses, shared_prompt=shared_prompt, cached=cached
            )
    return amounts
