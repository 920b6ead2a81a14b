"""Plain and Accelerate loops that only learn, beside torch's own count of FLOP."""

from __future__ import annotations

import copy

import pytest
import torch

from coati_perf import CostModel, measure_learning, read_journal
from independent_count import executed_flop

BATCH, LENGTH, REAL = 2, 12, 9  # as in conftest.py
TOKENS = REAL + LENGTH


def train(model, batches, optimizer, every=1):
    for number, batch in enumerate(batches, 1):
        (model(**batch).loss / every).backward()
        if number % every == 0:
            optimizer.step()
            optimizer.zero_grad()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture
def measured(tmp_path):
    """Return a function that runs a loop within the measurement: (its segment, torch's FLOP)."""

    def measured(work, model, optimizer, **options):
        options = {"attention": "full", "run_dir": tmp_path / "run", "peak_tflops": 1.0} | options

        with measure_learning(model, optimizer, **options):
            flop = executed_flop(work)
        return read_journal(tmp_path / "run").segments[-1], flop

    return measured


def total(segment, name):
    return sum(record.metrics.get(name, 0.0) for record in segment.episodes)


@pytest.mark.parametrize(("every", "steps_per_episode"), [(1, 1), (1, 4), (2, 1), (3, 2)])
def test_a_plain_loop_is_measured_as_torch_has_it(
    model, batches, measured, every, steps_per_episode
):
    optimizer = sgd(model)
    segment, flop = measured(
        lambda: train(model, batches, optimizer, every),
        model,
        optimizer,
        steps_per_episode=steps_per_episode,
    )
    episodes = -(-len(batches) // every // steps_per_episode)
    assert [record.episode for record in segment.episodes] == list(range(episodes))
    assert total(segment, "perf/flops/learn_executed") == flop
    useful = CostModel.traced(model, attention="full").forward_backward([REAL, LENGTH]).sum()
    assert total(segment, "perf/flops/learn") == len(batches) * useful
    assert total(segment, "perf/tokens/learned") == len(batches) * TOKENS
    assert total(segment, "perf/tokens/learn_padding") == len(batches) * (LENGTH - REAL)
    assert total(segment, "perf/samples/learned") == len(batches) * BATCH
    assert not any(record.faults for record in segment.episodes)
    for record in segment.episodes:
        assert 0 < record.phases["learn"] <= record.metrics["perf/time/episode_s"]


def test_the_weights_are_those_without_the_measurement(model, batches, tmp_path):
    plain = copy.deepcopy(model)
    train(plain, batches, sgd(plain))
    optimizer = sgd(model)
    with measure_learning(model, optimizer, run_dir=tmp_path / "run"):
        train(model, batches, optimizer)
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_a_validation_is_no_learning(model, batches, measured):
    optimizer = sgd(model)

    def work():
        train(model, batches[:2], optimizer)
        model.eval()
        with torch.no_grad():
            model(**batches[0])
        model.train()
        train(model, batches[2:4], optimizer)

    segment, _ = measured(work, model, optimizer, steps_per_episode=4)
    (record,) = segment.episodes
    assert record.metrics["perf/samples/learned"] == 4 * BATCH
    assert "perf/flops/score" not in record.metrics
    assert record.metrics["perf/time/other_s"] > 0


def test_an_accelerate_loop_with_accumulation(model, batches, measured):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    prepared, optimizer = accelerator.prepare(model, sgd(model))

    def work():
        for batch in batches:
            with accelerator.accumulate(prepared):
                accelerator.backward(prepared(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()

    segment, flop = measured(work, prepared, optimizer)
    assert len(segment.episodes) == 3
    assert total(segment, "perf/flops/learn_executed") == flop


def test_a_loop_that_fails_is_a_failed_run(model, batches, measured, tmp_path):
    optimizer = sgd(model)

    def work():
        train(model, batches[:3], optimizer)
        message = "no more"
        raise RuntimeError(message)

    with pytest.raises(RuntimeError, match="no more"):
        measured(work, model, optimizer)
    segment = read_journal(tmp_path / "run").segments[-1]
    assert len(segment.episodes) == 3
    assert segment.summary.status == "failed"


def test_a_model_that_cannot_be_traced_is_counted_by_its_parameters(measured):
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(50))

        def forward(self, input_ids):
            if self.weight.sum() > 0:  # looks into data
                return self.weight[input_ids]
            return input_ids

    odd = Odd()
    optimizer = sgd(odd)

    def work():
        odd(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
        optimizer.step()

    segment, _ = measured(work, odd, optimizer)
    assert total(segment, "perf/flops/learn") == 6 * 50 * 6
    assert any("cannot be traced" in warning for warning in segment.episodes[0].warnings)
