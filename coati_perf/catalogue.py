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
    Devices,
    DuplicateMetricError,
    Measured,
    Metric,
    Peak,
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
MADE_TOKENS = "perf/tokens/made"
LEARN_TOKENS = "perf/tokens/learned"
PADDING = "perf/tokens/padding"
LEARN_PADDING = "perf/tokens/learn_padding"
RESPONSE_MAX = "perf/tokens/response_max"
CACHED_TOKENS = "perf/tokens/prompt_cached"
UNMASKED_BATCHES = "perf/tokens/unmasked_batches"
RESPONSES = "perf/samples/responses"
PREEMPTED = "perf/samples/preempted"

COLLECT_STEPS = "perf/steps/make_experience"
LEARN_BATCHES = "perf/steps/learn"

GENERATE_FLOP = "perf/flops/generate"
SCORE_FLOP = "perf/flops/score"
LEARN_FLOP = "perf/flops/learn"
MAKE_EXPERIENCE_FLOP = "perf/flops/make_experience"
OVERALL_FLOP = "perf/flops/overall"
GENERATE_EXECUTED = f"{GENERATE_FLOP}_executed"
SCORE_EXECUTED = f"{SCORE_FLOP}_executed"
LEARN_EXECUTED = f"{LEARN_FLOP}_executed"
GENERATE_BYTES = "perf/bytes/generate"

TRAINING_THREAD_S = "perf/overhead/training_thread_s"
HOOK_FAULTS = "perf/health/hook_faults"
IMPOSSIBLE_FIGURES = "perf/health/impossible_figures"
JOURNAL_WAITING = "perf/health/journal_waiting"
JOURNAL_LOST = "perf/health/journal_lost"

# The health of each sink, by the name that the user gave: ``perf/sink/wandb_errors``.
_SINK_PREFIX = "perf/sink/"
SINK_HEALTH = {
    "lag_episodes": "episodes recorded before this one that the sink has not taken in yet",
    "errors": "calls that failed, since the run began",
    "retries": "times that it was tried again",
    "dropped": "episodes that it can never get, as neither journal nor memory could hold them",
}

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
_LOST = {
    "generate": "generate (at the memory's peak, where that takes longer)",
    "score": "score",
    "learn": "learn",
}
RESERVED_PHASE_NAMES = frozenset({"episode", "other", "overlap"})


def sink_metric(sink: str, what: str) -> str:
    """Return the name of a metric of a sink's health, ``what`` of ``SINK_HEALTH``."""
    return f"{_SINK_PREFIX}{to_phase_name(sink)}_{what}"


def is_phase_time(name: str) -> bool:
    """Say whether a name outside the catalogue is the time of a user's own phase."""
    return name not in CATALOGUE and not name.startswith(_SINK_PREFIX)


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
    return Measured(
        name=name, unit=unit, reduction=Reduction.SUM, meaning=meaning, per_replica=True
    )


def _per_second(  # noqa: PLR0913, PLR0917 - one row of the table
    name: str, unit: str, count: str, seconds: str, meaning: str, devices: Devices | None = None
) -> Ratio:
    return Ratio(
        name=f"perf/throughput/{name}",
        unit=unit,
        numerator=count,
        denominator=seconds,
        meaning=meaning,
        devices=devices,
    )


def _tokens_per_second(
    name: str, count: str, seconds: str, devices: Devices, meaning: str
) -> tuple[Ratio, Ratio]:
    return (
        _per_second(f"{name}_tokens_per_s", "tokens/s", count, seconds, meaning),
        _per_second(
            f"{name}_tokens_per_s_per_device",
            "tokens/s",
            count,
            seconds,
            f"{meaning}, and device",
            devices,
        ),
    )


def _flops(phase: str, meaning: str) -> tuple[Measured, Measured]:
    return (
        _count(
            f"perf/flops/{phase}",
            "FLOP",
            f"floating-point operations of {meaning}, on real tokens",
        ),
        _count(
            f"perf/flops/{phase}_executed",
            "FLOP",
            f"floating-point operations of {meaning}, those on padding and to compute activations"
            " again too",
        ),
    )


def _combined_flops(name: str, useful: tuple[str, ...], meaning: str) -> tuple[Combined, Combined]:
    executed = tuple(f"{part}_executed" for part in useful)
    return (
        Combined(name=name, unit="FLOP", parts=useful, meaning=meaning),
        Combined(
            name=f"{name}_executed", unit="FLOP", parts=executed, meaning=f"{meaning}, executed"
        ),
    )


def _speeds(phase: str, flop: str, seconds: str, devices: Devices) -> tuple[Ratio, ...]:
    """Return the speeds of a phase: useful and executed, absolute and of the device's peak."""
    kinds = (
        (
            f"perf/tflops/{phase}_per_device",
            flop,
            None,
            f"10¹² floating-point operations on real tokens per second and device: {phase}",
        ),
        (
            f"perf/tflops/{phase}_executed_per_device",
            f"{flop}_executed",
            None,
            f"10¹² floating-point operations executed per second and device: {phase}",
        ),
        (
            f"perf/mfu/{phase}",
            flop,
            Peak.TFLOPS,
            f"model FLOPs utilisation, those on real tokens ÷ the device's peak: {phase}",
        ),
        (
            f"perf/hfu/{phase}",
            f"{flop}_executed",
            Peak.TFLOPS,
            f"hardware FLOPs utilisation, those executed ÷ the device's peak: {phase}",
        ),
    )
    return tuple(
        Ratio(
            name=name,
            unit="TFLOP/s" if peak is None else "of peak",
            numerator=numerator,
            denominator=seconds,
            meaning=meaning,
            scale=1e-12,
            devices=devices,
            peak=peak,
        )
        for name, numerator, peak, meaning in kinds
    )


def device_time(phase: str) -> str:
    """Return the name of the metric of the device's seconds in ``phase``."""
    return f"perf/device/{phase}_s"


def memory_peaks(phase: str) -> tuple[str, str, str]:
    """Return the names of the metrics of memory allocated, reserved and used in ``phase``."""
    prefix = f"perf/memory/{phase}"
    return f"{prefix}_allocated_bytes", f"{prefix}_reserved_bytes", f"{prefix}_device_used_bytes"


def _device_metrics(phase: str) -> tuple[Measured, ...]:
    meanings = (
        "peak of the memory that tensors had",
        "peak of the memory that torch's allocator had",
        "most of the device's memory that all processes used, seen at the borders of phases",
    )
    return (
        Measured(
            name=device_time(phase),
            unit="s",
            reduction=Reduction.MEAN,
            meaning=f"seconds between the device's events at the borders of {phase}"
            ' (timing="device")',
        ),
        *(
            Measured(
                name=name,
                unit="bytes",
                reduction=Reduction.MAX,
                meaning=f"{meaning}, in {phase}, on the worst rank",
            )
            for name, meaning in zip(memory_peaks(phase), meanings, strict=True)
        ),
    )


def lost_seconds(phase: str) -> str:
    """Return the name of the metric of the seconds that ``phase`` took above its least."""
    return f"perf/lost/{phase}_s"


def _lost(phase: str, meaning: str) -> Derived:
    return Derived(
        name=lost_seconds(phase),
        unit="s",
        meaning=f"seconds of {meaning} above what it takes at the device's peak",
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
        _count(
            UNMASKED_BATCHES,
            "batches",
            "batches without an attention_mask: their padded lengths stand for the real ones",
        ),
        _count(
            PROMPT_TOKENS, "tokens", "prompt tokens, from the masks or as the driver gives them"
        ),
        _count(RESPONSE_TOKENS, "tokens", "response tokens, likewise"),
        _count(
            CACHED_TOKENS,
            "tokens",
            "prompt tokens that a prefix cache had, as the inference engine says: not computed",
        ),
        _count(
            PREEMPTED,
            "samples",
            "samples that the inference engine preempted: what it computed again is not counted",
        ),
        Ratio(
            name="perf/tokens/prompt_cached_fraction",
            unit="fraction",
            numerator=CACHED_TOKENS,
            denominator=PROMPT_TOKENS,
            meaning="share of the prompt tokens that a prefix cache had",
        ),
        Combined(
            name=MADE_TOKENS,
            unit="tokens",
            parts=(PROMPT_TOKENS, RESPONSE_TOKENS),
            meaning="prompt and response tokens together",
        ),
        _count(LEARN_TOKENS, "tokens", "tokens learned from, repeats counted, likewise"),
        _count(RESPONSES, "responses", "responses whose lengths are known"),
        Ratio(
            name="perf/tokens/response_mean",
            unit="tokens",
            numerator=RESPONSE_TOKENS,
            denominator=RESPONSES,
            meaning="mean length of a response",
        ),
        Measured(
            name=RESPONSE_MAX,
            unit="tokens",
            reduction=Reduction.MAX,
            meaning="length of the longest response",
        ),
        _count(PADDING, "positions", "positions of the experience that hold no token"),
        _count(LEARN_PADDING, "positions", "positions learned from that hold no token"),
        Ratio(
            name="perf/tokens/padding_fraction",
            unit="fraction",
            numerator=PADDING,
            denominator=MAKE_EXPERIENCE_PADDED,
            meaning="share of the experience's positions that hold no token",
        ),
        Ratio(
            name="perf/tokens/learn_padding_fraction",
            unit="fraction",
            numerator=LEARN_PADDING,
            denominator=LEARN_PADDED,
            meaning="share of the learned positions that hold no token",
        ),
        *_flops("generate", "generation"),
        *_flops("score", "the scoring forwards"),
        *_combined_flops(
            MAKE_EXPERIENCE_FLOP, (GENERATE_FLOP, SCORE_FLOP), "generation and scoring together"
        ),
        *_flops("learn", "learning"),
        *_combined_flops(
            OVERALL_FLOP,
            (GENERATE_FLOP, SCORE_FLOP, LEARN_FLOP),
            "generation, scoring and learning together",
        ),
        Ratio(
            name="perf/flops/per_sample",
            unit="FLOP",
            numerator=OVERALL_FLOP,
            denominator=EFFECTIVE,
            meaning="generation, scoring and learning per effective sample",
        ),
        _count(
            GENERATE_BYTES,
            "bytes",
            "bytes that generation must move to and from device memory: weights and KV cache",
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
        *_tokens_per_second(
            "prompt",
            PROMPT_TOKENS,
            GENERATE_S,
            Devices.ROLLOUT,
            "prompt tokens per second of generate",
        ),
        *_tokens_per_second(
            "response",
            RESPONSE_TOKENS,
            GENERATE_S,
            Devices.ROLLOUT,
            "response tokens per second of generate",
        ),
        *_tokens_per_second(
            "make_experience",
            MADE_TOKENS,
            MAKE_EXPERIENCE_S,
            Devices.ALL,
            "prompt and response tokens per second of make_experience",
        ),
        *_tokens_per_second(
            "learn", LEARN_TOKENS, LEARN_S, Devices.TRAINER, "tokens per second of learn"
        ),
        *_tokens_per_second(
            "overall",
            MADE_TOKENS,
            EPISODE_S,
            Devices.ALL,
            "prompt and response tokens per second of the episode",
        ),
        *_speeds("generate", GENERATE_FLOP, GENERATE_S, Devices.ROLLOUT),
        *_speeds("score", SCORE_FLOP, SCORE_S, Devices.TRAINER),
        *_speeds("make_experience", MAKE_EXPERIENCE_FLOP, MAKE_EXPERIENCE_S, Devices.ALL),
        *_speeds("learn", LEARN_FLOP, LEARN_S, Devices.TRAINER),
        *_speeds("overall", OVERALL_FLOP, EPISODE_S, Devices.ALL),
        Ratio(
            name="perf/mbu/generate",
            unit="of peak",
            numerator=GENERATE_BYTES,
            denominator=GENERATE_S,
            meaning="memory-bandwidth utilisation of generate: bytes moved ÷ the memory's peak",
            scale=1e-12,
            devices=Devices.ROLLOUT,
            peak=Peak.BANDWIDTH,
        ),
        *(metric for phase in _PHASE_MEANINGS for metric in _device_metrics(phase)),
        *(
            Ratio(
                name=f"perf/device/{phase}_mfu",
                unit="of peak",
                numerator=f"perf/flops/{phase}",
                denominator=device_time(phase),
                meaning="model FLOPs utilisation by the device's own time, which leaves out what"
                f" it waited for before and after: {phase}",
                scale=1e-12,
                devices=devices,
                peak=Peak.TFLOPS,
            )
            for phase, devices in (
                ("generate", Devices.ROLLOUT),
                ("score", Devices.TRAINER),
                ("learn", Devices.TRAINER),
            )
        ),
        *(_lost(phase, meaning) for phase, meaning in _LOST.items()),
        Measured(
            name=TRAINING_THREAD_S,
            unit="s",
            reduction=Reduction.MAX,
            meaning="seconds that the training thread spent inside this evaluator's hooks, on the"
            " worst rank; an episode's hand-over counts in the next episode",
        ),
        Measured(
            name=HOOK_FAULTS,
            unit="faults",
            reduction=Reduction.SUM,
            meaning="hook calls that could not be measured as they came",
        ),
        Derived(
            name=IMPOSSIBLE_FIGURES,
            unit="figures",
            meaning="figures left out of the metrics since no device could reach them",
        ),
        Derived(
            name=JOURNAL_WAITING,
            unit="lines",
            meaning="lines before this one that the journal could not take, kept in memory",
        ),
        Derived(
            name=JOURNAL_LOST,
            unit="lines",
            meaning="lines given up, as the journal could take none for too long",
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


def merge(amounts: dict[str, float], more: Mapping[str, float], times: int = 1) -> None:
    """Add ``times`` ``more`` to ``amounts``; of a metric that is a maximum, take the larger."""
    for name, amount in more.items():
        if name in _MAXIMA:
            amounts[name] = max(amounts.get(name, amount), amount)
        else:
            amounts[name] = amounts.get(name, 0) + times * amount


_MAXIMA = frozenset(
    metric.name
    for metric in CATALOGUE.values()
    if isinstance(metric, Measured) and metric.reduction is Reduction.MAX
)
