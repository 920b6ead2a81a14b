"""Our metrics under other trainers' names: their formulas over the same figures."""

from __future__ import annotations

import pytest

from coati_perf import SinkError, TimedStep, catalogue
from coati_perf.names import NAMES, Alias, named
from coati_perf.sinks.registry import parse_sinks
from coati_perf.sinks.renamed import RenamedSink

PROMPTS, RESPONSES, WALL, GENERATE, LEARN, GPUS = [3, 5], [6, 2], 10.0, 4.0, 3.0, 8
TOKENS = 3 + 5 + 6 + 2


class Kept:
    def __init__(self):
        self.records = []

    def open(self, header): ...
    def write(self, record):
        self.records.append(record)

    def close(self, summary): ...


@pytest.fixture
def under(make_evaluator):
    """Return the metrics that a sink gets of one step, with the names of a trainer."""

    def under(names):
        kept = Kept()
        evaluator = make_evaluator(sinks=[RenamedSink(kept, names)], trainer_devices=GPUS)
        step = TimedStep(
            wall_s=WALL,
            seconds={"generate": GENERATE, "learn": LEARN, "reward": 0.5},
            prompts=PROMPTS,
            responses=RESPONSES,
            learned=("actor",),
        )
        evaluator.record_step(0, step)
        evaluator.close()
        return kept.records[0].metrics

    return under


def test_verls_figures(under):
    """By the formulas of verl 0.9.1's compute_throughout_metrics and compute_timing_metrics."""
    metrics = under("verl")
    expected = {
        "timing_s/step": WALL,
        "timing_s/gen": GENERATE,
        "timing_s/reward": 0.5,
        "timing_s/update_actor": LEARN,
        "timing_per_token_ms/gen": GENERATE * 1000 / sum(RESPONSES),
        "timing_per_token_ms/update_actor": LEARN * 1000 / TOKENS,
        "perf/total_num_tokens": TOKENS,
        "perf/throughput": TOKENS / (WALL * GPUS),
        "response_length/mean": 4,
        "response_length/max": 6,
        "prompt_length/mean": 4,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert "perf/mfu/actor" not in metrics  # no model is known
    assert metrics[catalogue.EPISODE_S] == WALL  # ours are there too


def test_nemo_rls_figures(under):
    """By the formulas of nemo_rl/algorithms/utils.py."""
    metrics = under("nemo_rl")
    expected = {
        "timing/train/total_step_time": WALL,
        "performance/samples_per_sec": 2 / WALL,
        "performance/tokens_per_sec": TOKENS / WALL,
        "performance/tokens_per_sec_per_gpu": TOKENS / WALL / GPUS,
        "performance/generation_tokens_per_sec": TOKENS / GENERATE,
        "performance/policy_training_tokens_per_sec_per_gpu": TOKENS / LEARN / GPUS,
        "train/mean_prompt_length": 4,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_units_are_theirs():
    """prime-rl's MFU is in percent, its memory and verl's in GiB."""
    metrics = {"perf/mfu/learn": 0.25, "perf/memory/learn_reserved_bytes": 3 * 2**30}
    assert named(metrics, NAMES["prime_rl"]) == {
        **metrics,
        "perf/mfu": 25.0,
        "perf/peak_memory": 3.0,
    }
    verl = named(metrics, NAMES["verl"])
    assert (verl["perf/mfu/actor"], verl["perf/max_memory_reserved_gb"]) == (0.25, 3.0)


def test_what_would_be_divided_by_nothing_is_left_out():
    assert named({"a": 1.0, "b": 0.0}, {"c": Alias("a", "b"), "d": Alias("e")}) == {
        "a": 1.0,
        "b": 0.0,
    }


def test_names_of_ones_own(under):
    metrics = under({"mine/minutes": Alias(catalogue.EPISODE_S, scale=1 / 60)})
    assert metrics["mine/minutes"] == WALL / 60


@pytest.mark.parametrize("trainer", NAMES)
def test_every_name_stands_for_a_metric_of_ours(trainer):
    for alias in NAMES[trainer].values():
        for name in filter(None, (alias.numerator, alias.denominator)):
            assert name in catalogue.CATALOGUE or name == "perf/time/reward_s"
    assert not set(NAMES[trainer]) & set(catalogue.CATALOGUE)


@pytest.mark.parametrize(
    ("sink", "message"),
    [
        ("as", "expected a trainer and a sink: 'as:verl:wandb'"),
        ("as:verl", "expected a trainer and a sink"),
        ("as:varl:csv", "no names of 'varl'; there are those of verl, nemo_rl, prime_rl"),
        ("as:verl:nothing", "there is no sink named 'nothing'"),
    ],
)
def test_bad_names_are_refused_at_once(sink, message):
    with pytest.raises(SinkError, match=message):
        parse_sinks([sink])


def test_what_the_other_sink_can_do_is_passed_on():
    class Abandoned(Kept):
        needs_whole_run = True

        def abandon(self):
            return "abandoned"

    sink = RenamedSink(Abandoned(), "verl")
    assert sink.needs_whole_run
    assert sink.abandon() == "abandoned"
    assert not hasattr(RenamedSink(Kept(), "verl"), "abandon")
