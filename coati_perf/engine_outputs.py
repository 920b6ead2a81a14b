"""What vLLM and SGLang say of the requests that they have done; neither is imported.

Sources: vLLM 0.34 (``outputs.py``, ``v1/metrics/stats.py``) and SGLang 0.5.23
(``tokenizer_manager.py``, ``meta_info``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec


class EngineOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """The samples of a batch of requests, each a list with one element per sample.

    ``cached`` are prompt tokens that the prefix cache had, None where an engine does not say.
    Samples that were preempted are computed again, which no engine reports: they are counted, and
    the FLOP are then a lower bound. ``seconds`` are those from the first request's start to the
    last token by the engine's clock, None where it keeps none.
    """

    prompts: list[int]
    responses: list[int]
    cached: list[int] | None
    preempted: int
    seconds: float | None


def read_outputs(outputs: Any) -> EngineOutputs:
    """Read the finished outputs of ``LLM.generate`` of vLLM, or ``Engine.generate`` of SGLang.

    Of several samples of one request vLLM keeps the cache hits of one alone: the first counts as
    computed, and each other with these hits.

    Raises:
        TypeError: an output is of neither kind; says what it is.
    """
    if isinstance(outputs, Mapping) or not isinstance(outputs, Iterable):
        outputs = [outputs]
    samples = [sample for output in outputs for sample in _samples(output)]
    cached = [sample.cached for sample in samples if sample.cached is not None]
    starts = [sample.start for sample in samples if sample.start is not None]
    ends = [sample.end for sample in samples if sample.end is not None]
    return EngineOutputs(
        prompts=[sample.prompt for sample in samples],
        responses=[sample.response for sample in samples],
        cached=cached if len(cached) == len(samples) else None,
        preempted=sum(sample.preempted for sample in samples),
        seconds=max(ends) - min(starts) if starts and len(ends) == len(samples) else None,
    )


class _Sample(NamedTuple):
    prompt: int
    response: int
    cached: int | None
    preempted: bool
    start: float | None
    end: float | None


def _samples(output: Any) -> Iterator[_Sample]:
    if isinstance(output, Mapping) and "meta_info" in output:
        yield _of_sglang(output["meta_info"])
    elif hasattr(output, "outputs") and hasattr(output, "prompt_token_ids"):
        yield from _of_vllm(output)
    else:
        message = (
            f"got {type(output).__name__}; expected vLLM's RequestOutput or SGLang's dict with"
            " meta_info. Give record() the lengths instead"
        )
        raise TypeError(message)


def _of_sglang(info: Mapping[str, Any]) -> _Sample:
    return _Sample(
        prompt=info["prompt_tokens"],
        response=info["completion_tokens"],
        cached=info.get("cached_tokens"),
        preempted=bool(info.get("num_retractions")),
        start=0.0 if "e2e_latency" in info else None,  # all requests of a call arrive together
        end=info.get("e2e_latency"),
    )


def _of_vllm(output: Any) -> Iterator[_Sample]:
    metrics = getattr(output, "metrics", None)  # None unless disable_log_stats=False
    hits = getattr(output, "num_cached_tokens", None)
    for place, completion in enumerate(output.outputs):
        yield _Sample(
            prompt=len(output.prompt_token_ids),
            response=len(completion.token_ids),
            cached=hits if hits is None or len(output.outputs) == 1 or place else 0,
            preempted=not place and bool(getattr(metrics, "num_preemptions", 0)),
            # The engine's own clock; 0.0 where it has not come to that.
            start=getattr(metrics, "scheduled_ts", None) or None,
            end=getattr(metrics, "last_token_ts", None) or None,
        )
