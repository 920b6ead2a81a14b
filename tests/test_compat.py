"""The helpers under upstream's names."""

from __future__ import annotations

import math

from coati_perf import Timer, all_reduce_mean, divide, get_world_size, save_eval_result_rank_0


def test_divide_by_zero_and_infinity():
    assert divide(1, 0) == math.inf
    assert math.isnan(divide(1, math.inf))
    assert divide(3, 2) == 1.5


def test_one_process_is_a_world_of_its_own():
    assert get_world_size() == 1
    assert all_reduce_mean(0.1, 1) == 0.1


def test_results_are_appended(tmp_path):
    path = tmp_path / "r.txt"
    save_eval_result_rank_0("one", str(path), a=1, b="x")
    save_eval_result_rank_0("two", str(path))
    assert path.read_text(encoding="utf-8") == "1; x\none\n\ntwo\n"


def test_a_timer_adds_intervals_up(clock):
    timer = Timer(clock)
    for seconds in (1, 2):
        timer.start()
        clock.advance(seconds)
        timer.end()
    assert timer.duration == 3
    timer.reset()
    assert timer.duration == 0


def test_a_timers_end_without_start_adds_nothing(caplog):
    timer = Timer()
    timer.end()
    assert timer.duration == 0
    assert "end() was called without start()" in caplog.text
