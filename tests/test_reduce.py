"""Reduction over ranks, by hand-made rows."""

from __future__ import annotations

import pytest

from coati_perf import catalogue
from coati_perf.reduce import reduce_rows
from coati_perf.row import Row, decode_row, encode


def row(rank=0, episode_s=10.0, seconds=None, amounts=None, faults=None):
    return Row(rank, 0, 0, episode_s, seconds or {}, amounts or {}, faults or {})


def test_counts_are_summed_and_times_averaged():
    rows = [
        row(0, 10.0, {"learn": 4.0}, {catalogue.LEARNED: 24.0}),
        row(1, 12.0, {"learn": 8.0}, {catalogue.LEARNED: 48.0}),
    ]
    metrics = reduce_rows(rows, 2, None).metrics
    assert metrics[catalogue.LEARNED] == 72
    assert metrics[catalogue.LEARN_S] == 6
    assert metrics[catalogue.EPISODE_S] == 11
    assert metrics["perf/throughput/learn_samples_per_s"] == 72 / 6


def test_a_rate_is_sum_over_sum_and_never_a_mean_of_rates():
    """Ranks of 100 samples in 1 s and 1 sample in 99 s: 101 samples in a mean of 50 s."""
    rows = [
        row(0, 100, {"learn": 1.0}, {catalogue.LEARNED: 100.0}),
        row(1, 100, {"learn": 99.0}, {catalogue.LEARNED: 1.0}),
    ]
    assert reduce_rows(rows, 2, None).metrics["perf/throughput/learn_samples_per_s"] == 101 / 50


def test_tflops_per_device_divide_by_the_seconds_of_all_devices():
    rows = [row(rank, 10, {"learn": 2.0}, {catalogue.LEARN_FLOP: 3e12}) for rank in range(4)]
    metrics = reduce_rows(rows, 4, None).metrics
    assert metrics["perf/tflops/learn_per_device"] == pytest.approx(1.5)
    assert metrics["perf/tflops/overall_per_device"] == pytest.approx(0.3)


def test_a_phase_of_some_ranks_counts_as_zero_on_the_others():
    rows = [row(0, 10, {"evaluate": 6.0}), row(1, 10), row(2, 10)]
    reduced = reduce_rows(rows, 3, None)
    assert reduced.metrics["perf/time/evaluate_s"] == 2
    assert reduced.metrics[catalogue.OTHER_S] == 8


def test_the_worst_ranks_overhead_is_reported():
    rows = [row(rank, amounts={catalogue.TRAINING_THREAD_S: rank * 1.0}) for rank in range(3)]
    assert reduce_rows(rows, 3, None).metrics[catalogue.TRAINING_THREAD_S] == 2


def test_the_rank_that_others_wait_for_is_named_and_not_the_one_that_waits():
    """Rank 1 generates 5 s longer; rank 0 waits for it by as much in the next phase."""
    rows = [
        row(0, 12, {"make_experience": 5.0, "learn": 7.0}),
        row(1, 12, {"make_experience": 10.0, "learn": 2.0}),
    ]
    reduced = reduce_rows(rows, 2, None)
    assert (reduced.slowest.rank, reduced.slowest.phase) == (1, "make_experience")
    assert reduced.metrics[catalogue.SLOWDOWN] == 10 / 7.5


def test_missing_ranks_are_counted():
    metrics = reduce_rows([row(0), row(2)], 4, None).metrics
    assert metrics[catalogue.RANKS_REPORTED] == 2
    assert metrics[catalogue.RANKS_MISSING] == 2


def test_undefined_ratios_are_absent():
    metrics = reduce_rows([row(0, 0.0, {"learn": 0.0}, {catalogue.LEARNED: 3.0})], 1, None).metrics
    assert not [name for name in metrics if "throughput" in name]


def test_values_that_are_not_finite_are_absent():
    metrics = reduce_rows([row(0, amounts={catalogue.LEARNED: float("inf")})], 1, None).metrics
    assert catalogue.LEARNED not in metrics


def test_faults_are_summed_over_ranks():
    rows = [row(0, faults={"a": 1}), row(1, faults={"a": 2, "b": 1})]
    assert reduce_rows(rows, 2, None).faults == {"a": 3, "b": 1}


def test_a_row_crosses_unchanged_to_the_last_bit():
    sent = row(3, 0.1 + 0.2, {"x": 2.0**-1074}, {catalogue.LEARN_FLOP: 1.7976931348623157e308})
    assert decode_row(encode(sent)) == sent
