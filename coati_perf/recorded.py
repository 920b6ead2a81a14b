"""What a driver says of a phase in numbers, for ``PerformanceEvaluator.record``."""

from __future__ import annotations

import collections
import operator
from collections.abc import Sequence
from typing import SupportsIndex

from coati_perf import catalogue
from coati_perf.batches import token_counts
from coati_perf.cost import Amounts, Workload
from coati_perf.flops.lengths import to_tensor

COUNTED_PHASES = ("generate", "make_experience", "score", "learn")
_SAMPLES = {
    "generate": catalogue.GENERATED,
    "make_experience": catalogue.GENERATED,
    "learn": catalogue.LEARNED,
}


def lengths_of_samples(
    prompts: Sequence[int] | None, responses: Sequence[int] | None, samples: SupportsIndex | None
) -> tuple[list[int], list[int]]:
    """Return the lengths as Python integers, as many of the ones as of the others, or raise.

    Raises:
        TypeError, ValueError: they are no lengths, or not of as many samples.
    """
    prompt_lengths = _whole("prompt_lengths", prompts)
    response_lengths = _whole("response_lengths", responses)
    if len(prompt_lengths) != len(response_lengths):
        message = (
            f"there are {len(prompt_lengths)} prompt_lengths and {len(response_lengths)}"
            " response_lengths; expected as many"
        )
        raise ValueError(message)
    number = len(prompt_lengths) if samples is None else operator.index(samples)
    if number < 0:
        message = f"samples is {number}; expected at least 0"
        raise ValueError(message)
    if prompt_lengths and number != len(prompt_lengths):
        message = (
            f"samples is {number}, with the lengths of {len(prompt_lengths)}; expected as many"
        )
        raise ValueError(message)
    return prompt_lengths, response_lengths


def recorded_amounts(
    workload: Workload,
    phase: str,
    prompts: Sequence[int],
    responses: Sequence[int],
    samples: int,
) -> Amounts:
    """Return what ``samples`` in a phase amount to, with real lengths or without any.

    ``generate`` counts tokens and generation, ``score`` the scoring forwards,
    ``make_experience`` both, ``learn`` the learning; any other phase nothing. There is no
    padding; the bytes are those of one batch.
    """
    amounts: Amounts = {}
    if samples and phase in _SAMPLES:
        amounts[_SAMPLES[phase]] = samples
    if not prompts:
        return amounts
    pairs = collections.Counter(zip(prompts, responses, strict=True))
    prompt, response = to_tensor(prompts), to_tensor(responses)
    if phase in ("generate", "make_experience"):
        catalogue.merge(amounts, token_counts(prompt, response))
        catalogue.merge(amounts, workload.real_generation(prompt, response))
        for pair, count in pairs.items():
            catalogue.merge(amounts, workload.padded_generation(1, *pair), count)
        catalogue.merge(amounts, workload.generation_bytes(prompt, response))
    if phase in ("score", "make_experience"):
        catalogue.merge(amounts, workload.real_scoring(prompt + response))
        for pair, count in pairs.items():
            catalogue.merge(amounts, workload.padded_scoring(1, sum(pair)), count)
    if phase == "learn":
        amounts[catalogue.LEARN_TOKENS] = float((prompt + response).sum())
        catalogue.merge(amounts, workload.real_learning(prompt + response))
        for pair, count in pairs.items():
            catalogue.merge(amounts, workload.padded_learning(1, sum(pair)), count)
    return amounts


def _whole(name: str, lengths: Sequence[int] | None) -> list[int]:
    """Return lengths from a list, a NumPy array or a tensor, or raise."""
    to_list = getattr(lengths, "tolist", None)
    values = () if lengths is None else lengths if to_list is None else to_list()
    whole = [operator.index(length) for length in values]
    if any(length < 0 for length in whole):
        message = f"{name} has {min(whole)}; expected lengths of at least 0"
        raise ValueError(message)
    return whole
