"""Every metric: its name, unit, meaning, and how it is reduced over ranks.

The documentation's table, the TensorBoard layout, the reduction and the report all read this
module; nothing else in the project knows what a metric means.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from coati_perf.metric import (
    Combined,
    Derived,
    DuplicateMetricError,
    Measured,
    Metric,
    Ratio,
    Reduction,
)

EPISODE_S = "perf/time/episode_s"
MAKE_EXPERIENCE_S = "perf/time/make_experience_s"
GENERATE_S = "perf/time/generate_s"
SCORE_S = "perf/time/score_s"
LEARN_S = "perf/time/learn_s"
WEIGHT_SYNC_S = "perf/time/weight_sync_s"
OTHER_S = "perf/time/other_s"
OVERLAP_S = "perf/time/overlap_s"

GENERATED = "perf/samples/generated"
LEARNED = "perf/samples/learned"
EFFECTIVE = "perf/samples/effective"

MAKE_EXPERIENCE_PADDED = "perf/tokens/make_experience_padded"
LEARN_PADDED = "perf/tokens/learn_padded"
PROMPT_TOKENS = "perf/tokens/prompt"
RESPONSE_TOKENS = "perf/tokens/response"
LEARN_TOKENS = "perf/tokens/learned"

COLLECT_STEPS = "perf/steps/make_experience"
LEARN_BATCHES = "perf/steps/learn"

GENERATE_FLOP = "perf/flops/generate"
SCORE_FLOP = "perf/flops/score"
LEARN_FLOP = "perf/flops/learn"
MAKE_EXPERIENCE_FLOP = "perf/flops/make_experience"
OVERALL_FLOP = "perf/flops/overall"

TRAINING_THREAD_S = "perf/overhead/training_thread_s"
HOOK_FAULTS = "perf/health/hook_faults"
IMPOSSIBLE_FIGURES = "perf/health/impossible_figures"

RANKS_REPORTED = "perf/ranks/reported"
RANKS_MISSING = "perf/ranks/missing"
SLOWEST_RANK = "perf/ranks/slowest"
SLOWDOWN = "perf/ranks/slowdown"

_PHASE_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_PHASE_MEANINGS = {
    "make_experience": "making experience: generation, scoring and what lies between",
    "generate": "generating responses, where the trainer marks that phase",
    "score": "scoring with the models, where the trainer marks that phase",
    "learn": "learning from batches, from each batch's start to its end",
    "weight_sync": "moving new weights to the generator, where the trainer marks that phase",
}
RESERVED_PHASE_NAMES = frozenset({"episode", "other", "overlap"})


def is_phase_name(name: str) -> bool:
    """Say whether a phase may have this name: letters, digits, ``_``, ``-``, ``.``; not reserved.

    Names outside this set are refused by some trackers (MLflow: parentheses and %).
    """
    return bool(_PHASE_NAME.fullmatch(name)) and name not in RESERVED_PHASE_NAMES


def to_phase_name(name: str) -> str:
    """Return the nearest name that a phase may have."""
    legal = "_".join(_PHASE_NAME.findall(name)) or "unnamed"
    return f"{legal}_" if legal in RESERVED_PHASE_NAMES else legal


def phase_time(phase: str) -> Measured:
    """Return the metric of the seconds spent in ``phase``, a built-in phase or a user's own."""
    return Measured(
        name=f"perf/time/{phase}_s",
        unit="s",
        reduction=Reduction.MEAN,
        meaning="seconds in " + _PHASE_MEANINGS.get(phase, f"the phase {phase!r}"),
    )


def _count(name: str, unit: str, meaning: str) -> Measured:
    return Measured(name=name, unit=unit, reduction=Reduction.SUM, meaning=meaning)


def _per_second(name: str, unit: str, count: str, seconds: str, meaning: str) -> Ratio:
    return Ratio(
        name=f"perf/throughput/{name}",
        unit=unit,
        numerator=count,
        denominator=seconds,
        meaning=meaning,
    )


def _tflops(phase: str, flop: str, seconds: str) -> Ratio:
    return Ratio(
        name=f"perf/tflops/{phase}_per_device",
        unit="TFLOP/s",
        numerator=flop,
        denominator=seconds,
        meaning=f"10¹² floating-point operations per second and device: {phase}",
        scale=1e-12,
        per_device=True,
    )


def _by_name(metrics: Iterable[Metric]) -> Mapping[str, Metric]:
    catalogue: dict[str, Metric] = {}
    for metric in metrics:
        if metric.name in catalogue:
            message = f"metric {metric.name!r} is declared twice; give one of them another name"
            raise DuplicateMetricError(message)
        catalogue[metric.name] = metric
    return MappingProxyType(catalogue)


CATALOGUE = _by_name(
    (
        Measured(
            name=EPISODE_S,
            unit="s",
            reduction=Reduction.MEAN,
            meaning="wall seconds of the whole episode",
        ),
        *(phase_time(phase) for phase in _PHASE_MEANINGS),
        Measured(
            name=OTHER_S,
            unit="s",
            reduction=Reduction.MEAN,
            meaning="seconds of the episode in no phase: phases + other − overlap = episode",
        ),
        Measured(
            name=OVERLAP_S,
            unit="s",
            reduction=Reduction.MEAN,
            meaning="seconds that recorded phases exceed the episode by, as they ran side by side",
        ),
        _count(GENERATED, "samples", "samples in the experience made"),
        _count(LEARNED, "samples", "samples learned from, repeats counted"),
        Combined(
            name=EFFECTIVE,
            unit="samples",
            parts=(GENERATED, LEARNED),
            meaning="the smaller of generated and learned",
            least=True,
        ),
        _count(COLLECT_STEPS, "steps", "collect steps"),
        _count(LEARN_BATCHES, "batches", "batches learned from"),
        _count(
            MAKE_EXPERIENCE_PADDED,
            "positions",
            "token positions in the experience, padding included",
        ),
        _count(
            LEARN_PADDED, "positions", "token positions in the batches learned, padding included"
        ),
        _count(PROMPT_TOKENS, "tokens", "prompt tokens, where the driver gives real lengths"),
        _count(RESPONSE_TOKENS, "tokens", "response tokens, where the driver gives real lengths"),
        _count(LEARN_TOKENS, "tokens", "tokens learned from, where the driver gives real lengths"),
        _count(GENERATE_FLOP, "FLOP", "floating-point operations of generation"),
        _count(SCORE_FLOP, "FLOP", "floating-point operations of the scoring forwards"),
        Combined(
            name=MAKE_EXPERIENCE_FLOP,
            unit="FLOP",
            parts=(GENERATE_FLOP, SCORE_FLOP),
            meaning="generation and scoring together",
        ),
        _count(LEARN_FLOP, "FLOP", "floating-point operations of learning"),
        Combined(
            name=OVERALL_FLOP,
            unit="FLOP",
            parts=(GENERATE_FLOP, SCORE_FLOP, LEARN_FLOP),
            meaning="generation, scoring and learning together",
        ),
        _per_second(
            "make_experience_samples_per_s",
            "samples/s",
            GENERATED,
            MAKE_EXPERIENCE_S,
            "samples made per second of make_experience",
        ),
        _per_second(
            "generate_samples_per_s",
            "samples/s",
            GENERATED,
            GENERATE_S,
            "samples generated per second of generate",
        ),
        _per_second(
            "learn_samples_per_s",
            "samples/s",
            LEARNED,
            LEARN_S,
            "samples learned from per second of learn",
        ),
        _per_second(
            "overall_samples_per_s",
            "samples/s",
            EFFECTIVE,
            EPISODE_S,
            "effective samples per second of the episode",
        ),
        _per_second(
            "make_experience_padded_tokens_per_s",
            "positions/s",
            MAKE_EXPERIENCE_PADDED,
            MAKE_EXPERIENCE_S,
            "token positions made per second of make_experience, padding included",
        ),
        _per_second(
            "learn_padded_tokens_per_s",
            "positions/s",
            LEARN_PADDED,
            LEARN_S,
            "token positions learned per second of learn, padding included",
        ),
        _per_second(
            "response_tokens_per_s",
            "tokens/s",
            RESPONSE_TOKENS,
            GENERATE_S,
            "response tokens per second of generate",
        ),
        _per_second(
            "learn_tokens_per_s",
            "tokens/s",
            LEARN_TOKENS,
            LEARN_S,
            "tokens learned from per second of learn",
        ),
        _tflops("generate", GENERATE_FLOP, GENERATE_S),
        _tflops("score", SCORE_FLOP, SCORE_S),
        _tflops("make_experience", MAKE_EXPERIENCE_FLOP, MAKE_EXPERIENCE_S),
        _tflops("learn", LEARN_FLOP, LEARN_S),
        _tflops("overall", OVERALL_FLOP, EPISODE_S),
        Measured(
            name=TRAINING_THREAD_S,
            unit="s",
            reduction=Reduction.MAX,
            meaning="seconds that the training thread spent inside this evaluator's hooks, on the"
            " worst rank; an episode's hand-over counts in the next episode",
        ),
        _count(HOOK_FAULTS, "faults", "hook calls that could not be measured as they came"),
        Derived(
            name=IMPOSSIBLE_FIGURES,
            unit="figures",
            meaning="figures left out of the metrics since no device could reach them",
        ),
        Derived(name=RANKS_REPORTED, unit="ranks", meaning="ranks whose figures are in the record"),
        Derived(name=RANKS_MISSING, unit="ranks", meaning="ranks that sent none in time"),
        Derived(
            name=SLOWEST_RANK,
            unit="rank",
            meaning="the rank furthest above the mean in any phase; of phases that tie within 5 %"
            " the earliest, since a late rank makes the others wait in the next phase",
        ),
        Derived(
            name=SLOWDOWN,
            unit="ratio",
            meaning="that rank's seconds in that phase ÷ the mean over ranks",
        ),
    )
)

COMBINED = tuple(metric for metric in CATALOGUE.values() if isinstance(metric, Combined))
RATIOS = tuple(metric for metric in CATALOGUE.values() if isinstance(metric, Ratio))
