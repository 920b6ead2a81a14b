"""The coati convention against 16 exact outputs of the real upstream class.

``data/golden_seed_reports.json`` was made by running upstream's evaluator with its clock
scripted; the same script drives ours here, from 0.0 s on, as upstream's clock did.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from coati_perf import PerformanceEvaluator, catalogue
from coati_perf.machine import Machine
from coati_perf.totals import RunTotals

GOLDEN = json.loads(
    (Path(__file__).parent / "data" / "golden_seed_reports.json").read_text(encoding="utf-8")
)


def drive(evaluator, episodes, clock):
    evaluator.on_fit_start()
    for number, steps in enumerate(episodes):
        evaluator.on_episode_start(number)
        for step in steps:
            # torch.empty on the meta device: the shapes are real, the memory is not.
            experience = SimpleNamespace(
                sequences=torch.empty(step["batch_size"], step["seq_len"], device="meta"),
                action_mask=torch.empty(step["batch_size"], step["num_actions"], device="meta"),
            )
            clock.advance(step["gap_s"])
            if step["phase"] == "make_experience":
                evaluator.on_make_experience_start()
                clock.advance(step["duration_s"])
                evaluator.on_make_experience_end(experience)
            else:
                evaluator.on_learn_batch_start()
                clock.advance(step["duration_s"])
                evaluator.on_learn_batch_end(experience)
        evaluator.on_episode_end(number)
    evaluator.on_fit_end()


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
def test_counts_durations_and_report_are_upstreams(case, tmp_path, clock, read_run):
    report = tmp_path / "report.txt"
    evaluator = PerformanceEvaluator(
        *case["params"],
        case["grad_checkpoint"],
        case["ignore_episodes"],
        case["train_config"],
        str(report),
        run_dir=tmp_path / "run",
        clock=clock,
    )
    drive(evaluator, case["episodes"], clock)

    totals = RunTotals(Machine(ranks=1))
    for record in read_run().episodes:
        totals.add(record)
    figures, _ = totals.figures()
    expected = case["expected"]
    assert figures.get(catalogue.GENERATED, 0) == expected["make_experience_num_samples"]
    assert figures.get(catalogue.LEARNED, 0) == expected["learn_num_samples"]
    assert figures.get(catalogue.MAKE_EXPERIENCE_S, 0) == expected["make_experience_duration_s"]
    assert figures.get(catalogue.LEARN_S, 0) == expected["learn_duration_s"]
    assert figures.get(catalogue.EPISODE_S, 0) == expected["overall_duration_s"]
    assert figures.get(catalogue.LEARN_FLOP, 0) == expected["learn_flop"]
    flop = figures.get(catalogue.MAKE_EXPERIENCE_FLOP, 0)
    assert flop == expected["make_experience_flop"]
    assert report.read_text(encoding="utf-8").startswith(expected["report"])


def test_the_episodes_parts_add_up(clock, tmp_path, read_run):
    for case in GOLDEN:
        evaluator = PerformanceEvaluator(
            *case["params"], run_dir=tmp_path / case["name"], clock=clock
        )
        drive(evaluator, case["episodes"], clock)
        for record in read_run(tmp_path / case["name"]).episodes:
            parts = sum(
                record.metrics.get(name, 0.0)
                for name in (catalogue.MAKE_EXPERIENCE_S, catalogue.LEARN_S, catalogue.OTHER_S)
            )
            assert parts == pytest.approx(record.metrics[catalogue.EPISODE_S], abs=1e-9)
