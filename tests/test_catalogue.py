"""The catalogue: names, units, and that every metric recorded is in it."""

from __future__ import annotations

import re

import pytest

from coati_perf import catalogue
from coati_perf.catalogue import CATALOGUE
from coati_perf.metric import DuplicateMetricError, Measured, Reduction


def test_names_hold_only_what_every_tracker_takes():
    for name in CATALOGUE:
        assert re.fullmatch(r"perf/[a-z]+/[A-Za-z0-9_.-]+", name)


def test_a_duplicate_name_is_an_error():
    metric = Measured(name="perf/a/b", unit="s", reduction=Reduction.SUM, meaning="x")
    with pytest.raises(DuplicateMetricError, match="'perf/a/b' is declared twice"):
        catalogue._by_name((metric, metric))


def test_formulas_name_metrics_of_the_catalogue():
    for ratio in catalogue.RATIOS:
        assert ratio.numerator in CATALOGUE
        assert ratio.denominator in CATALOGUE
    for combined in catalogue.COMBINED:
        assert all(isinstance(CATALOGUE[part], Measured) for part in combined.parts)


def test_every_metric_of_a_record_is_in_the_catalogue(make_evaluator, make_experience, read_run):
    evaluator = make_evaluator()
    with evaluator.episode(0):
        evaluator.on_make_experience_start()
        evaluator.on_make_experience_end(make_experience())
        evaluator.record("generate", seconds=9.0, prompt_lengths=[1], response_lengths=[2])
        evaluator.record("learn", seconds=9.0, prompt_lengths=[1], response_lengths=[2])
    evaluator.close()
    record = read_run().episodes[0]
    assert set(record.metrics) <= set(CATALOGUE)
    assert record.convention == "coati"


@pytest.mark.parametrize(
    ("asked", "legal"),
    [("generate", "generate"), ("MFU (%)", "MFU"), ("a b/c", "a_b_c"), ("§", "unnamed"),
     ("other", "other_"), ("episode", "episode_"), ("", "unnamed")],
)  # fmt: skip
def test_phase_names_are_made_legal(asked, legal):
    assert catalogue.to_phase_name(asked) == legal
    assert catalogue.is_phase_name(legal)
