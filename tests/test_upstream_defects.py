"""Each row of the table "Where upstream is wrong" (shared/SEED.md) and what ours does instead.

The rows that need several processes are in ``distributed/``; exact FLOP (padding, LoRA, MoE,
attention) are another convention than the one that these parameter counts give, and the record
says which convention it used.
"""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace

import pytest
import torch

from coati_perf import OutputError, PerformanceEvaluator, Timer, catalogue
from coati_perf.callback import Callback
from coati_perf.recorded import COUNTED_PHASES


def run_episode(evaluator, experience, episode=0):
    evaluator.on_episode_start(episode)
    evaluator.on_make_experience_start()
    evaluator.on_make_experience_end(experience)
    evaluator.on_learn_epoch_start(0)
    evaluator.on_learn_batch_start()
    evaluator.on_learn_batch_end(experience)
    evaluator.on_learn_epoch_end(0)
    evaluator.on_episode_end(episode)


def fit(evaluator, experience, episodes=1):
    evaluator.on_fit_start()
    for episode in range(episodes):
        run_episode(evaluator, experience, episode)
    evaluator.on_fit_end()


def test_no_train_config_is_empty_metadata(make_evaluator, make_experience, read_run, tmp_path):
    fit(make_evaluator(save_path=tmp_path / "report.txt"), make_experience())
    assert read_run().header.train_config == {}
    lines = (tmp_path / "report.txt").read_text(encoding="utf-8").splitlines()
    assert lines[:2] == ["", "Performance summary:"]


def test_no_save_path_still_writes_the_other_sinks(make_evaluator, make_experience, read_run):
    received = []
    sink = SimpleNamespace(open=received.append, write=received.append, close=received.append)
    fit(make_evaluator(sinks=[sink]), make_experience())
    run = read_run()
    assert received == [run.header, *run.episodes, run.summary]


def test_the_folders_of_save_path_are_made(make_evaluator, make_experience, tmp_path):
    path = tmp_path / "a" / "b" / "report.txt"
    fit(make_evaluator(save_path=path), make_experience())
    assert "Performance summary:" in path.read_text(encoding="utf-8")


def test_an_unwritable_save_path_is_an_error_at_fit_start(make_evaluator, tmp_path):
    (tmp_path / "file").write_text("")
    evaluator = make_evaluator(save_path=tmp_path / "file" / "report.txt")
    with pytest.raises(OutputError, match=r"save_path .*report\.txt.* cannot be written"):
        evaluator.on_fit_start()


def test_an_unwritable_run_dir_is_an_error_at_fit_start(make_evaluator, tmp_path):
    (tmp_path / "file").write_text("")
    evaluator = make_evaluator(run_dir=tmp_path / "file" / "run")
    with pytest.raises(OutputError, match=r"run_dir .*run.* cannot be written"):
        evaluator.on_fit_start()


def test_the_sums_of_a_run_are_float64(make_evaluator, make_experience, clock, read_run):
    """float32 has 24 bits: 2**24 s and 1 ms would lose the millisecond."""
    evaluator = make_evaluator()
    evaluator.on_fit_start()
    evaluator.on_episode_start(0)
    evaluator.on_learn_batch_start()
    clock.advance(2.0**24)
    clock.advance(0.001)
    evaluator.on_learn_batch_end(make_experience())
    evaluator.on_episode_end(0)
    evaluator.on_fit_end()
    assert read_run().episodes[0].metrics[catalogue.LEARN_S] == 2.0**24 + 0.001


def test_a_step_of_the_wall_clock_changes_nothing(tmp_path, make_experience, monkeypatch, read_run):
    evaluator = PerformanceEvaluator(1, 1, 1, 1, run_dir=tmp_path / "run")
    evaluator.on_fit_start()
    evaluator.on_episode_start(0)
    evaluator.on_learn_batch_start()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    evaluator.on_learn_batch_end(make_experience())
    evaluator.on_episode_end(0)
    evaluator.on_fit_end()
    assert 0 < read_run().episodes[0].metrics[catalogue.LEARN_S] < 10

    timer = Timer()
    timer.start()
    monkeypatch.setattr(time, "time", lambda: -60.0)
    timer.end()
    assert 0 < timer.duration < 10


def test_each_fit_is_a_run_of_its_own(make_evaluator, make_experience, read_run, tmp_path):
    evaluator = make_evaluator(save_path=tmp_path / "report.txt")
    fit(evaluator, make_experience(batch=8))
    fit(evaluator, make_experience(batch=8))
    assert read_run().header.segment == 1
    assert [e.metrics[catalogue.GENERATED] for e in read_run().episodes] == [8.0]
    report = (tmp_path / "report.txt").read_text(encoding="utf-8")
    assert report.count("Generate 8 samples") == 2


@pytest.mark.parametrize(
    ("misuse", "fault"),
    [
        (lambda e, x: e.on_learn_batch_end(x), "on_learn_batch_end without its start"),
        (lambda e, x: e.on_make_experience_end(x), "on_make_experience_end without its start"),
        (lambda e, x: (e.on_learn_batch_start(), e.on_learn_batch_start(), e.on_learn_batch_end(x)),
         "on_learn_batch_start before the last one's end"),
        (lambda e, x: e.on_learn_batch_end(SimpleNamespace(sequences=torch.zeros(2, 3, 4))),
         "on_learn_batch_end: ValueError: sequences has shape (2, 3, 4); expected (batch, length)"),
        (lambda e, x: e.on_learn_batch_end(object()),
         "on_learn_batch_end: AttributeError: 'object' object has no attribute 'sequences'"),
        (lambda e, x: e.record("learn", seconds=-1.0),
         "record: ValueError: seconds is -1.0; expected a finite number of at least 0"),
        (lambda e, x: e.record("learn", prompt_lengths=[1], response_lengths=[]),
         "record: ValueError: there are 1 prompt_lengths and 0 response_lengths; expected as many"),
        (lambda e, x: e.record("learn", samples=-2),
         "record: ValueError: samples is -2; expected at least 0"),
        (lambda e, x: e.record("learn", samples=3, prompt_lengths=[1], response_lengths=[1]),
         "record: ValueError: samples is 3, with the lengths of 1; expected as many"),
        (lambda e, x: e.record("learn", prompt_lengths=[-1], response_lengths=[1]),
         "record: ValueError: prompt_lengths has -1; expected lengths of at least 0"),
        (lambda e, x: e.record("a", samples=1),
         "record: ValueError: phase 'a' counts no samples; " + ", ".join(COUNTED_PHASES) + " do"),
        (lambda e, x: e.record("learn", samples=2),
         "record('learn', samples=…) without lengths: their tokens and FLOP are left out"),
        (lambda e, x: e.phase([]),
         "phase: TypeError: unhashable type: 'list'"),
    ],
)  # fmt: skip
def test_misuse_is_logged_once_and_counted_and_training_goes_on(
    misuse, fault, make_evaluator, make_experience, read_run, caplog
):
    evaluator = make_evaluator()
    evaluator.on_fit_start()
    evaluator.on_episode_start(0)
    with caplog.at_level(logging.WARNING):
        misuse(evaluator, make_experience())
        evaluator.on_episode_end(0)
        run_episode(evaluator, make_experience(), 1)
        evaluator.on_fit_end()
    bad, good = read_run().episodes
    assert bad.faults[fault] == 1
    assert bad.metrics[catalogue.HOOK_FAULTS] == sum(bad.faults.values())
    assert good.faults == {}
    assert sum(fault in message for message in caplog.messages) == 1


def test_an_action_mask_of_none_counts_all_but_the_flop_of_generation(
    make_evaluator, make_experience, read_run
):
    fit(make_evaluator(), make_experience(batch=4, length=64, actions=None))
    record = read_run().episodes[0]
    assert record.metrics[catalogue.GENERATED] == 4
    assert record.metrics[catalogue.SCORE_FLOP] == 2 * 4 * 64 * (10 + 20 + 30 + 40)
    assert catalogue.GENERATE_FLOP not in record.metrics
    assert any("action_mask is None" in fault for fault in record.faults)


def test_an_episode_left_by_an_exception_is_named_though_training_goes_on(
    make_evaluator, make_experience, read_run, tmp_path
):
    evaluator = make_evaluator(save_path=tmp_path / "report.txt")
    for number in range(4):
        try:
            with evaluator.episode(number):
                if number in (1, 2):
                    raise ValueError("a bad batch")
        except ValueError:
            pass
    evaluator.close()
    run = read_run()
    assert run.summary.status == "finished"
    assert [failure.episode for failure in run.failures] == [1, 2]
    report = (tmp_path / "report.txt").read_text(encoding="utf-8")
    assert (
        "Left by an exception, and not counted:\n"
        "  rank 0, episode 1: ValueError: a bad batch\n"
        "  rank 0, episode 2: ValueError: a bad batch\n"
    ) in report


def test_an_exception_in_an_episode_marks_the_run_as_failed(
    make_evaluator, make_experience, read_run, tmp_path
):
    evaluator = make_evaluator(save_path=tmp_path / "report.txt")
    seen = []
    try:
        evaluator.on_fit_start()
        try:
            run_episode(evaluator, make_experience())
            evaluator.on_episode_start(1)
            try:
                evaluator.on_make_experience_start()
                raise ValueError("boom\nand more")
            finally:
                evaluator.on_episode_end(1)
        finally:
            evaluator.on_fit_end()
    except ValueError as error:
        seen.append(error)
    assert [error.args for error in seen] == [("boom\nand more",)]
    assert seen[0].__context__ is None, "the evaluator added an exception of its own"
    run = read_run()
    assert [record.episode for record in run.episodes] == [0], "the partial episode is no result"
    assert [(f.rank, f.episode, f.error) for f in run.failures] == [(0, 1, "ValueError: boom")]
    assert (run.summary.status, run.summary.error) == ("failed", "ValueError: boom")
    assert run.summary.last_episode == 0
    report = (tmp_path / "report.txt").read_text(encoding="utf-8")
    assert "FAILED after episode 0: ValueError: boom" in report


def test_an_exception_that_was_there_before_the_fit_is_not_its_failure(
    make_evaluator, make_experience, read_run
):
    """A trainer that is started again inside ``except`` runs below an old exception."""
    try:
        raise MemoryError
    except MemoryError:
        fit(make_evaluator(), make_experience())
    assert read_run().summary.status == "finished"


def test_a_process_group_is_looked_for_at_fit_start(make_evaluator, monkeypatch):
    evaluator = make_evaluator()
    asked = []
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: bool(asked.append(1)))
    evaluator.on_fit_start()
    assert asked


@pytest.mark.parametrize("config", [{"s": 1, "save_path": 2}, {1: "x", (2, 3): None}])
def test_any_mapping_is_a_train_config(config, make_evaluator, make_experience, read_run, tmp_path):
    fit(make_evaluator(train_config=config, save_path=tmp_path / "r.txt"), make_experience())
    assert read_run().header.train_config == {str(key): config[key] for key in config}
    report = (tmp_path / "r.txt").read_text(encoding="utf-8")
    assert report.splitlines()[0] == "; ".join(str(value) for value in config.values())
    for key, value in config.items():
        assert f"  {key} = {value}" in report.splitlines(), "keys follow in our own lines"


def test_no_finished_episode_keeps_the_seeds_lines_and_ours_say_so(
    make_evaluator, make_experience, tmp_path
):
    evaluator = make_evaluator(ignore_episodes=5, save_path=tmp_path / "report.txt")
    fit(evaluator, make_experience(), episodes=3)
    report = (tmp_path / "report.txt").read_text(encoding="utf-8")
    assert "Overall time per sample: inf s\n" in report
    assert "Learn time per sample: inf s, nan%\n" in report
    assert "Nothing was measured on 1 rank" in report


def test_later_callbacks_get_their_hook_when_ours_cannot_write(
    make_evaluator, make_experience, monkeypatch
):
    called = []

    class Later(Callback):
        def on_fit_end(self):
            called.append(True)

    evaluator = make_evaluator()
    evaluator.on_fit_start()
    run_episode(evaluator, make_experience())
    monkeypatch.setattr(evaluator._fit, "close", lambda error: 1 / 0)
    for callback in (evaluator, Later()):
        callback.on_fit_end()
    assert called


def test_an_impossible_figure_is_marked_and_never_among_the_metrics(
    make_experience, clock, read_run, tmp_path
):
    """1e12 parameters · 6 · 256 positions in 1 ms are 1.536e6 TFLOP/s."""
    evaluator = PerformanceEvaluator(
        10**12,
        0,
        0,
        0,
        save_path=tmp_path / "report.txt",
        run_dir=tmp_path / "run",
        clock=clock,
        peak_tflops=1e9,
    )
    evaluator.on_fit_start()
    evaluator.on_episode_start(0)
    evaluator.on_learn_batch_start()
    clock.advance(0.001)
    evaluator.on_learn_batch_end(make_experience(batch=4, length=64))
    clock.advance(1e6)
    evaluator.on_episode_end(0)
    evaluator.on_fit_end()
    record = read_run().episodes[0]
    name = "perf/tflops/learn_per_device"
    assert name not in record.metrics
    assert record.impossible[name].value == pytest.approx(1.536e6)
    assert record.impossible[name].limit == 5000
    assert record.metrics[catalogue.IMPOSSIBLE_FIGURES] == 1
    assert "perf/tflops/overall_per_device" in record.metrics, "that one is possible"
    report = (tmp_path / "report.txt").read_text(encoding="utf-8")
    assert f"(to reproduce: {tmp_path / 'run' / 'impossible'}):\n  {name} " in report
    assert "1,536,000 TFLOP/s, where 5,000 is most: above the peak of any device" in report


def test_the_peak_of_the_device_is_the_limit_where_it_is_given(
    make_evaluator, make_experience, clock, read_run
):
    """6 · (10 + 20) parameters · 256 positions in 1 s are 4.608e-8 TFLOP/s."""
    evaluator = make_evaluator(peak_tflops=4e-8)
    evaluator.on_fit_start()
    evaluator.on_episode_start(0)
    evaluator.on_learn_batch_start()
    clock.advance(1.0)
    evaluator.on_learn_batch_end(make_experience(batch=4, length=64))
    evaluator.on_episode_end(0)
    evaluator.on_fit_end()
    flaw = read_run().episodes[0].impossible["perf/tflops/learn_per_device"]
    assert (flaw.value, flaw.limit) == (pytest.approx(4.608e-8), 4e-8)
