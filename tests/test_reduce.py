"""Reduction over ranks, by hand-made rows."""

from __future__ import annotations

import pytest

from coati_perf import catalogue
from coati_perf.machine import Machine
from coati_perf.reduce import reduce_rows
from coati_perf.row import Row, decode_row, encode


def row(rank=0, episode_s=10.0, seconds=None, amounts=None, faults=None):
    return Row(rank, 0, 0, episode_s, seconds or {}, amounts or {}, faults or {})


def test_counts_are_summed_and_times_averaged():
    rows = [
        row(0, 10.0, {"learn": 4.0}, {catalogue.LEARNED: 24.0}),
        row(1, 12.0, {"learn": 8.0}, {catalogue.LEARNED: 48.0}),
    ]
    metrics = reduce_rows(rows, Machine(ranks=2)).metrics
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
    assert (
        reduce_rows(rows, Machine(ranks=2)).metrics["perf/throughput/learn_samples_per_s"]
        == 101 / 50
    )


def test_tflops_per_device_divide_by_the_seconds_of_all_devices():
    rows = [row(rank, 10, {"learn": 2.0}, {catalogue.LEARN_FLOP: 3e12}) for rank in range(4)]
    metrics = reduce_rows(rows, Machine(ranks=4)).metrics
    assert metrics["perf/tflops/learn_per_device"] == pytest.approx(1.5)
    assert metrics["perf/tflops/overall_per_device"] == pytest.approx(0.3)


def test_a_phase_of_some_ranks_counts_as_zero_on_the_others():
    rows = [row(0, 10, {"evaluate": 6.0}), row(1, 10), row(2, 10)]
    reduced = reduce_rows(rows, Machine(ranks=3))
    assert reduced.metrics["perf/time/evaluate_s"] == 2
    assert reduced.metrics[catalogue.OTHER_S] == 8


def test_the_worst_ranks_overhead_is_reported():
    rows = [row(rank, amounts={catalogue.TRAINING_THREAD_S: rank * 1.0}) for rank in range(3)]
    assert reduce_rows(rows, Machine(ranks=3)).metrics[catalogue.TRAINING_THREAD_S] == 2


def test_the_rank_that_others_wait_for_is_named_and_not_the_one_that_waits():
    """Rank 1 generates 5 s longer; rank 0 waits for it by as much in the next phase."""
    rows = [
        row(0, 12, {"make_experience": 5.0, "learn": 7.0}),
        row(1, 12, {"make_experience": 10.0, "learn": 2.0}),
    ]
    reduced = reduce_rows(rows, Machine(ranks=2))
    assert (reduced.slowest.rank, reduced.slowest.phase) == (1, "make_experience")
    assert reduced.metrics[catalogue.SLOWDOWN] == 10 / 7.5


def test_missing_ranks_are_counted():
    metrics = reduce_rows([row(0), row(2)], Machine(ranks=4)).metrics
    assert metrics[catalogue.RANKS_REPORTED] == 2
    assert metrics[catalogue.RANKS_MISSING] == 2


def test_undefined_ratios_are_absent():
    metrics = reduce_rows(
        [row(0, 0.0, {"learn": 0.0}, {catalogue.LEARNED: 3.0})], Machine(ranks=1)
    ).metrics
    assert not [name for name in metrics if "throughput" in name]


def test_values_that_are_not_finite_are_absent():
    metrics = reduce_rows(
        [row(0, amounts={catalogue.LEARNED: float("inf")})], Machine(ranks=1)
    ).metrics
    assert catalogue.LEARNED not in metrics


def test_faults_are_summed_over_ranks():
    rows = [row(0, faults={"a": 1}), row(1, faults={"a": 2, "b": 1})]
    assert reduce_rows(rows, Machine(ranks=2)).faults == {"a": 3, "b": 1}


def test_a_row_crosses_unchanged_to_the_last_bit():
    sent = row(3, 0.1 + 0.2, {"x": 2.0**-1074}, {catalogue.LEARN_FLOP: 1.7976931348623157e308})
    assert decode_row(encode(sent)) == sent


def test_ranks_that_share_a_replica_count_its_samples_once():
    """4 ranks, tensor parallel over 2: each pair sees the same 8 samples and 8e12 FLOP."""
    rows = [
        row(rank, 10.0, {"learn": 2.0}, {catalogue.LEARNED: 8.0, catalogue.LEARN_FLOP: 8e12})
        for rank in range(4)
    ]
    metrics = reduce_rows(rows, Machine(ranks=4, data_parallel_size=2, peak_tflops=10)).metrics
    assert metrics[catalogue.LEARNED] == 16
    assert metrics[catalogue.LEARN_FLOP] == 16e12
    assert metrics["perf/tflops/learn_per_device"] == 16 / 2 / 4
    assert metrics["perf/mfu/learn"] == 16 / 2 / 4 / 10
    assert metrics["perf/lost/learn_s"] == 2 - 16 / (4 * 10)


def test_rollout_devices_are_counted_apart_from_those_that_train():
    rows = [
        row(
            0,
            10.0,
            {"make_experience": 6.0, "make_experience/generate": 4.0, "learn": 2.0},
            {catalogue.GENERATE_FLOP: 24e12, catalogue.LEARN_FLOP: 8e12},
        )
    ]
    metrics = reduce_rows(rows, Machine(ranks=1, rollout_devices=3)).metrics
    assert metrics["perf/tflops/generate_per_device"] == 24 / 4 / 3
    assert metrics["perf/tflops/learn_per_device"] == 8 / 2 / 1
    assert metrics["perf/tflops/overall_per_device"] == 32 / 10 / 4
