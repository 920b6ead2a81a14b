"""Our metrics under the names that other trainers' dashboards have, in their units.

What a name means there is read from the source that is named; a name whose meaning none of our
metrics has is left out. Where theirs go by a formula of FLOP, such as verl's MFU, the figure is
ours: exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from coati_perf import catalogue

_GIB = 2.0**-30
_PER_DEVICE = "_tokens_per_s_per_device"
_LEARN_ALLOCATED, _LEARN_RESERVED, _ = catalogue.memory_peaks("learn")


class Alias(NamedTuple):
    """``scale`` × ``numerator`` ÷ ``denominator``, of our metrics by name."""

    numerator: str
    denominator: str | None = None
    scale: float = 1.0

    def of(self, metrics: Mapping[str, float]) -> float | None:
        """Return the figure; None where a metric is missing or nothing is to be divided by."""
        value = metrics.get(self.numerator)
        below = 1.0 if self.denominator is None else metrics.get(self.denominator)
        return self.scale * value / below if value is not None and below else None


# verl 0.9.1: trainer/ppo/metric_utils.py, workers/engine_workers.py. Its "GB" are GiB.
_VERL = {
    "timing_s/step": Alias(catalogue.EPISODE_S),
    "timing_s/gen": Alias(catalogue.GENERATE_S),
    "timing_s/reward": Alias("perf/time/reward_s"),
    "timing_s/update_actor": Alias(catalogue.LEARN_S),
    "timing_s/update_weights": Alias(catalogue.WEIGHT_SYNC_S),
    "timing_per_token_ms/gen": Alias(catalogue.GENERATE_S, catalogue.RESPONSE_TOKENS, 1000.0),
    "timing_per_token_ms/update_actor": Alias(catalogue.LEARN_S, catalogue.MADE_TOKENS, 1000.0),
    "perf/total_num_tokens": Alias(catalogue.MADE_TOKENS),
    "perf/time_per_step": Alias(catalogue.EPISODE_S),
    "perf/throughput": Alias(f"perf/throughput/overall{_PER_DEVICE}"),
    "perf/mfu/actor": Alias("perf/mfu/learn"),
    "perf/mfu/actor_infer": Alias("perf/mfu/score"),
    "perf/max_memory_allocated_gb": Alias(_LEARN_ALLOCATED, scale=_GIB),
    "perf/max_memory_reserved_gb": Alias(_LEARN_RESERVED, scale=_GIB),
    "response_length/mean": Alias("perf/tokens/response_mean"),
    "response_length/max": Alias(catalogue.RESPONSE_MAX),
    "prompt_length/mean": Alias(catalogue.PROMPT_TOKENS, catalogue.RESPONSES),
}
# NeMo-RL 7ea279ab: algorithms/grpo.py, algorithms/utils.py. Tokens are prompt and response.
_NEMO_RL = {
    "timing/train/total_step_time": Alias(catalogue.EPISODE_S),
    "timing/train/generation": Alias(catalogue.GENERATE_S),
    "timing/train/reward_calculation": Alias("perf/time/reward_s"),
    "timing/train/policy_and_reference_logprobs": Alias(catalogue.SCORE_S),
    "timing/train/policy_training": Alias(catalogue.LEARN_S),
    "timing/train/weight_sync": Alias(catalogue.WEIGHT_SYNC_S),
    "performance/samples_per_sec": Alias(catalogue.GENERATED, catalogue.EPISODE_S),
    "performance/tokens_per_sec": Alias(catalogue.MADE_TOKENS, catalogue.EPISODE_S),
    "performance/tokens_per_sec_per_gpu": Alias(f"perf/throughput/overall{_PER_DEVICE}"),
    "performance/generation_tokens_per_sec": Alias(catalogue.MADE_TOKENS, catalogue.GENERATE_S),
    "performance/policy_training_tokens_per_sec_per_gpu": Alias(
        f"perf/throughput/learn{_PER_DEVICE}"
    ),
    "performance/train_flops_per_gpu": Alias("perf/tflops/learn_per_device"),
    "performance/train_fp_utilization": Alias("perf/mfu/learn"),
    "train/mean_prompt_length": Alias(catalogue.PROMPT_TOKENS, catalogue.RESPONSES),
    "train/total_num_tokens": Alias(catalogue.MADE_TOKENS),
}
# prime-rl 559b4477: trainer/rl/train.py, trainer/perf.py. Its tokens are packed, with the padding.
_PRIME_RL = {
    "time/step": Alias(catalogue.EPISODE_S),
    "time/forward_backward": Alias(catalogue.LEARN_S),
    "time/broadcast_weights": Alias(catalogue.WEIGHT_SYNC_S),
    "perf/throughput": Alias(catalogue.LEARN_PADDED, catalogue.LEARN_S),
    "perf/mfu": Alias("perf/mfu/learn", scale=100.0),
    "perf/peak_memory": Alias(_LEARN_RESERVED, scale=_GIB),
    "progress/input_tokens": Alias(catalogue.PROMPT_TOKENS),
    "progress/output_tokens": Alias(catalogue.RESPONSE_TOKENS),
}
NAMES: Mapping[str, Mapping[str, Alias]] = {
    "verl": _VERL,
    "nemo_rl": _NEMO_RL,
    "prime_rl": _PRIME_RL,
}


def named(metrics: Mapping[str, float], names: Mapping[str, Alias]) -> dict[str, float]:
    """Return the metrics with those that they give under other names."""
    found = {name: alias.of(metrics) for name, alias in names.items()}
    return {**metrics, **{name: value for name, value in found.items() if value is not None}}
