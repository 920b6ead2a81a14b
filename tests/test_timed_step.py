"""Steps that a trainer's controller timed become episodes."""

from __future__ import annotations

import pytest
import torch

from coati_perf import CostModel, TimedStep, catalogue

PROMPTS, RESPONSES = [3, 5], [6, 1]
SECONDS = {"generate": 4.0, "score": 1.0, "learn": 3.0, "weight_sync": 0.5, "packing": 0.25}


def costs(forward, backward):
    """Return a cost model of ``forward`` FLOP a token and ``backward`` more; 1 a decode step."""
    return CostModel.custom(
        forward=lambda length: forward * length,
        backward=lambda length: backward * length,
        decode=lambda context, steps: steps,
    )


def models():
    return {"actor": costs(10, 20), "critic": costs(100, 200), "initial": costs(1000, 0)}


def step(**options):
    return TimedStep(
        **{
            "wall_s": 10.0,
            "seconds": SECONDS,
            "prompts": PROMPTS,
            "responses": torch.tensor(RESPONSES),
            "scored": ("actor", "initial", "unknown"),
            "learned": ("actor",),
            **options,
        }
    )


def test_a_step_is_an_episode_with_the_work_of_its_own_roles(make_evaluator, read_run):
    """15 tokens in all; prefills of 3 and 5 tokens, 5 and 0 decode steps."""
    evaluator = make_evaluator(models=models())
    evaluator.record_step(7, step(epochs=2))
    evaluator.close()
    (record,) = read_run().episodes
    metrics = record.metrics
    assert record.episode == 7
    assert record.faults == {}
    assert record.phases == SECONDS
    assert metrics[catalogue.EPISODE_S] == 10.0
    assert metrics[catalogue.OTHER_S] == 10.0 - sum(SECONDS.values())
    assert metrics[catalogue.GENERATE_FLOP] == 10 * (3 + 5) + 5
    assert metrics[catalogue.SCORE_FLOP] == (10 + 1000) * 15
    assert metrics[catalogue.LEARN_FLOP] == 2 * 30 * 15
    assert metrics[catalogue.PROMPT_TOKENS] == 8
    assert metrics[catalogue.RESPONSE_TOKENS] == 7
    assert metrics[catalogue.RESPONSE_MAX] == 6
    assert metrics[catalogue.GENERATED] == 2
    assert metrics[catalogue.LEARNED] == 4
    assert metrics[catalogue.LEARN_TOKENS] == 30


def test_a_prefill_is_shared_or_partly_cached(make_evaluator, read_run):
    evaluator = make_evaluator(models=models())
    evaluator.record_step(0, step(responses_per_prompt=2))
    evaluator.record_step(1, step(cached=[0, 4]))
    evaluator.close()
    shared, cached = read_run().episodes
    assert shared.metrics[catalogue.GENERATE_FLOP] == 10 * (3 + 5) / 2 + 5
    assert cached.metrics[catalogue.GENERATE_FLOP] == 10 * (3 + 1) + 5
    assert cached.metrics[catalogue.CACHED_TOKENS] == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": [3]}, "prompts have shape (1,) and responses (2,); expected one length of"),
        ({"cached": [1]}, "cached has shape (1,); expected one for each of 2"),
        ({"cached": [1, 1], "responses_per_prompt": 2}, "cached and responses_per_prompt=2"),
        ({"seconds": None}, "'NoneType' object has no attribute 'items'"),
        ({"wall_s": -1.0}, "seconds is -1.0; expected a finite number of at least 0"),
    ],
)
def test_a_step_that_is_wrong_is_a_fault(make_evaluator, read_run, options, message):
    evaluator = make_evaluator(models=models())
    evaluator.record_step(0, step(**options))
    evaluator.record_step(1, step())
    evaluator.close()
    wrong, right = read_run().episodes
    assert any(message in fault for fault in wrong.faults)
    assert right.faults == {}


def test_times_alone_leave_the_rest_unknown(make_evaluator, read_run):
    evaluator = make_evaluator(models=models())
    evaluator.record_step(0, step(prompts=None, responses=None))
    evaluator.close()
    (record,) = read_run().episodes
    assert record.phases == SECONDS
    assert record.metrics[catalogue.EPISODE_S] == 10.0
    assert list(record.faults) == ["record_step without lengths: tokens and FLOP are left out"]
    assert not any("tflops" in name or "mfu" in name for name in record.metrics)


def test_ignored_steps_leave_no_record(make_evaluator, read_run):
    evaluator = make_evaluator(models=models(), ignore_episodes=1)
    for number in range(2):
        evaluator.record_step(number, step())
    evaluator.close()
    (record,) = read_run().episodes
    assert (record.episode, record.faults) == (1, {})
