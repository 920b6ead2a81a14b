"""Phases, plain loops, drivers that only have numbers, and trainers whose hooks are unreliable."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from coati_perf import PerformanceEvaluator, catalogue, read_journal


def test_phases_nest_and_the_parts_add_up_to_the_episode(make_evaluator, clock, read_run):
    evaluator = make_evaluator()
    with evaluator.episode(0):
        clock.advance(1)
        with evaluator.phase("make_experience"):
            clock.advance(2)
            with evaluator.phase("generate"):
                clock.advance(4)
            with evaluator.phase("score"):
                clock.advance(8)
        with evaluator.phase("weight_sync"):
            clock.advance(16)
    evaluator.close()
    record = read_run().episodes[0]
    assert record.phases == {
        "make_experience": 14,
        "make_experience/generate": 4,
        "make_experience/score": 8,
        "weight_sync": 16,
    }
    assert record.metrics[catalogue.OTHER_S] == 1
    assert record.metrics[catalogue.EPISODE_S] == 31
    assert record.metrics[catalogue.WEIGHT_SYNC_S] == 16


def test_a_phase_inside_one_of_its_name_counts_once(make_evaluator, clock, read_run):
    evaluator = make_evaluator()
    generate = evaluator.phase("generate")
    with evaluator.episode(0), generate:
        clock.advance(1)
        with generate:
            clock.advance(2)
    evaluator.close()
    record = read_run().episodes[0]
    assert record.metrics[catalogue.GENERATE_S] == 3
    assert record.metrics[catalogue.OTHER_S] == 0


def test_one_phase_in_two_places_is_summed_over_both(make_evaluator, clock, read_run):
    evaluator = make_evaluator()
    with evaluator.episode(0):
        with evaluator.phase("learn"), evaluator.phase("weight_sync"):
            clock.advance(1)
        with evaluator.phase("weight_sync"):
            clock.advance(2)
    evaluator.close()
    record = read_run().episodes[0]
    assert record.metrics[catalogue.WEIGHT_SYNC_S] == 3
    assert record.phases == {"learn": 1, "learn/weight_sync": 1, "weight_sync": 2}


def test_a_phase_decorates_a_function(make_evaluator, clock, read_run):
    evaluator = make_evaluator(clock=clock)

    @evaluator.phase("generate")
    def generate(tokens, *, seconds):
        """Generate."""
        clock.advance(seconds)
        return tokens

    with evaluator.episode(0):
        assert [generate(3, seconds=2.0), generate(4, seconds=1.0)] == [3, 4]
    evaluator.close()
    assert generate.__doc__ == "Generate."
    assert read_run().episodes[0].metrics["perf/time/generate_s"] == 3.0


def test_hooks_count_within_a_phase_of_the_trainers(
    make_evaluator, make_experience, clock, read_run
):
    evaluator = make_evaluator()
    with evaluator.episode(0), evaluator.phase("update"):
        evaluator.on_learn_batch_start()
        clock.advance(2)
        evaluator.on_learn_batch_end(make_experience())
    evaluator.close()
    assert read_run().episodes[0].metrics[catalogue.LEARN_S] == 2


def test_hooks_within_a_phase_of_their_name_count_once(
    make_evaluator, make_experience, clock, read_run
):
    evaluator = make_evaluator()
    with evaluator.episode(0), evaluator.phase("learn"):
        for _ in range(2):
            clock.advance(1)
            evaluator.on_learn_batch_start()
            clock.advance(2)
            evaluator.on_learn_batch_end(make_experience())
    evaluator.close()
    record = read_run().episodes[0]
    assert record.metrics[catalogue.LEARN_S] == 6
    assert record.metrics[catalogue.LEARNED] == 8
    assert record.faults == {}


def test_an_exception_leaves_a_phase_as_it_is(make_evaluator, clock, read_run):
    def score():
        with evaluator.phase("score"):
            clock.advance(1)
            raise KeyError

    evaluator = make_evaluator()
    with evaluator.episode(0), pytest.raises(KeyError):
        score()
    evaluator.close()
    record = read_run().episodes[0]
    assert record.metrics[catalogue.SCORE_S] == 1
    assert record.faults == {}


def test_tokens_per_second_are_those_of_all_micro_batches(
    make_evaluator, make_experience, clock, read_run
):
    """8 micro-batches of 4 x 128 tokens in 2.0 s are 2,048 tokens/s (FIELD_REPORTS)."""
    evaluator = make_evaluator()
    with evaluator.episode(0):
        for _ in range(8):
            evaluator.on_learn_batch_start()
            clock.advance(0.25)
            evaluator.on_learn_batch_end(make_experience(batch=4, length=128))
    evaluator.close()
    assert read_run().episodes[0].metrics["perf/throughput/learn_padded_tokens_per_s"] == 2048


def test_batches_of_many_shapes_are_all_counted(make_evaluator, make_experience, read_run):
    """More shapes than are remembered at once (256): by hand, the lengths 1 to 600 add up."""
    evaluator = make_evaluator()
    with evaluator.episode(0):
        for length in range(1, 601):
            evaluator.on_learn_batch_start()
            evaluator.on_learn_batch_end(make_experience(batch=2, length=length, actions=1))
            evaluator.on_make_experience_start()
            evaluator.on_make_experience_end(make_experience(batch=2, length=length, actions=1))
    evaluator.close()
    metrics = read_run().episodes[0].metrics
    assert metrics[catalogue.LEARN_BATCHES] == metrics[catalogue.COLLECT_STEPS] == 600
    assert metrics[catalogue.LEARNED] == metrics[catalogue.GENERATED] == 1200
    assert metrics[catalogue.LEARN_PADDED] == 2 * 600 * 601 / 2
    assert metrics[catalogue.LEARN_FLOP] == 6 * 30 * 2 * 600 * 601 / 2


def test_a_driver_that_has_only_numbers(make_evaluator, read_run):
    """Coati convention by hand, for prompts of 2 and 3 and responses of 4 and 1 tokens."""
    evaluator = make_evaluator()
    with evaluator.episode(0):
        evaluator.record("episode", seconds=10.0)
        evaluator.record(
            "generate", seconds=4.0, prompt_lengths=[2, 3], response_lengths=torch.tensor([4, 1])
        )
        evaluator.record("score", seconds=1.0, prompt_lengths=[2, 3], response_lengths=[4, 1])
        evaluator.record("learn", seconds=2.0, prompt_lengths=[2] * 8, response_lengths=[4] * 8)
    evaluator.close()
    metrics = read_run().episodes[0].metrics
    assert metrics[catalogue.PROMPT_TOKENS] == 5
    assert metrics[catalogue.RESPONSE_TOKENS] == 5
    assert metrics[catalogue.GENERATED] == 2
    assert metrics[catalogue.LEARNED] == 8
    # prefixes run over without a KV cache: 2+3+4+5 and 3 tokens, 2 FLOP x 10 parameters each
    assert metrics[catalogue.GENERATE_FLOP] == 2 * 10 * (2 + 3 + 4 + 5 + 3)
    assert metrics[catalogue.SCORE_FLOP] == 2 * 100 * (6 + 4)
    assert metrics[catalogue.LEARN_FLOP] == 8 * 6 * 30 * 6
    assert metrics[catalogue.OTHER_S] == 3
    assert metrics["perf/throughput/response_tokens_per_s"] == 1.25


def test_the_first_lines_of_a_plain_loops_report_go_by_its_phases(make_evaluator, clock, tmp_path):
    """2 samples in 3 + 1 s; 2 FLOP x 10 parameters x prefixes of 2+3 and 3+4 tokens are nothing."""
    evaluator = make_evaluator(save_path=tmp_path / "report.txt")
    with evaluator.episode(0):
        with evaluator.phase("generate"):
            clock.advance(3.0)
        with evaluator.phase("score"):
            clock.advance(1.0)
        evaluator.record("generate", prompt_lengths=[2, 3], response_lengths=[2, 2])
    evaluator.close()
    report = (tmp_path / "report.txt").read_text(encoding="utf-8")
    assert "Generate 2 samples, throughput: 0.50 samples/s, TFLOPS per GPU: 0.00\n" in report


def test_a_phase_name_that_trackers_refuse_is_made_legal_with_one_warning(
    make_evaluator, clock, read_run, caplog
):
    evaluator = make_evaluator()
    with evaluator.episode(0):
        for name in ("a/b", "a/b", "other"):
            with evaluator.phase(name):
                clock.advance(1.0)
    evaluator.close()
    record = read_run().episodes[0]
    assert record.phases == {"a_b": 2.0, "other_": 1.0}
    assert record.faults == {}
    assert [message.split(":")[0] for message in caplog.messages] == [
        "phase 'a/b' is shown as 'a_b'",
        "phase 'other' is shown as 'other_'",
    ]


def test_phases_that_overlap_are_accounted_for(make_evaluator, read_run):
    """In asynchronous training phases run side by side: phases + other - overlap = episode."""
    evaluator = make_evaluator()
    with evaluator.episode(0):
        evaluator.record("episode", seconds=10.0)
        evaluator.record("generate", seconds=9.0)
        evaluator.record("learn", seconds=4.0)
    evaluator.close()
    metrics = read_run().episodes[0].metrics
    assert metrics[catalogue.OVERLAP_S] == 3
    assert metrics[catalogue.OTHER_S] == 0


def test_ignored_episodes_leave_no_record(make_evaluator, make_experience, read_run):
    evaluator = make_evaluator(ignore_episodes=2)
    for episode in range(4):
        with evaluator.episode(episode), evaluator.phase("generate"):
            evaluator.on_learn_batch_start()
            evaluator.on_learn_batch_end(make_experience())
            evaluator.record("score", seconds=1.0)
    evaluator.close()
    assert [record.episode for record in read_run().episodes] == [2, 3]
    assert all(record.faults == {} for record in read_run().episodes)


def test_a_trainer_that_never_ends_its_episodes_loses_none(
    make_evaluator, make_experience, read_run
):
    evaluator = make_evaluator()
    for episode in range(3):
        evaluator.on_episode_start(episode)
        evaluator.on_learn_batch_start()
        evaluator.on_learn_batch_end(make_experience())
    evaluator.on_fit_end()
    run = read_run()
    assert [record.metrics[catalogue.LEARNED] for record in run.episodes] == [4, 4, 4]
    assert run.summary.status == "finished"
    assert run.episodes[0].faults == {"an episode began before the last one ended": 1}
    assert run.episodes[2].faults == {"the fit ended before its last episode did": 1}


def test_on_fit_end_and_close_are_idempotent(make_evaluator, make_experience, tmp_path):
    evaluator = make_evaluator(save_path=tmp_path / "report.txt")
    evaluator.on_fit_start()
    evaluator.on_fit_end()
    evaluator.on_fit_end()
    evaluator.close()
    report = (tmp_path / "report.txt").read_text(encoding="utf-8")
    assert report.count("Performance summary:") == 1
    assert len(read_journal(tmp_path / "run").segments) == 1


def test_hooks_outside_an_episode_are_logged_and_ignored(make_evaluator, make_experience, caplog):
    evaluator = make_evaluator()
    evaluator.on_fit_start()
    evaluator.on_learn_batch_start()
    evaluator.on_learn_batch_end(make_experience())
    with evaluator.phase("generate"):
        pass
    evaluator.on_episode_end(0)
    assert caplog.messages == [
        f"not measured as it came: {what} outside an episode; training goes on"
        for what in (
            "on_learn_batch_start",
            "on_learn_batch_end",
            "phase 'generate'",
            "on_episode_end",
        )
    ]


def test_the_evaluator_times_itself(tmp_path, make_experience, read_run):
    """With the real clock: more than nothing, less than the whole episode."""
    evaluator = PerformanceEvaluator(1, 1, 1, 1, run_dir=tmp_path / "run")
    for episode in range(2):
        with evaluator.episode(episode):
            for _ in range(100):
                evaluator.on_learn_batch_start()
                evaluator.on_learn_batch_end(make_experience())
    evaluator.close()
    for record in read_run().episodes:
        overhead = record.metrics[catalogue.TRAINING_THREAD_S]
        assert 0 < overhead < record.metrics[catalogue.EPISODE_S]


def test_the_tensors_of_an_experience_are_not_kept(make_evaluator, make_experience):
    """A reference to a batch would hold its device memory."""
    evaluator = make_evaluator()
    experience = make_experience()
    before = sys.getrefcount(experience.sequences), sys.getrefcount(experience.action_mask)
    with evaluator.episode(0):
        evaluator.on_make_experience_start()
        evaluator.on_make_experience_end(experience)
        evaluator.on_learn_batch_start()
        evaluator.on_learn_batch_end(experience)
        after = sys.getrefcount(experience.sequences), sys.getrefcount(experience.action_mask)
    assert after == before


PLAIN_LOOP = """
    import sys
    from coati_perf import PerformanceEvaluator
    evaluator = PerformanceEvaluator(
        1, 1, 1, 1, run_dir=sys.argv[1], save_path=sys.argv[1] + "/report.txt"
    )
    for episode in range(3):
        with evaluator.episode(episode), evaluator.phase("generate"):
            pass
"""


def run_script(script, *arguments):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_an_evaluator_that_is_never_closed_loses_nothing(tmp_path):
    run_script(PLAIN_LOOP, str(tmp_path))
    run = read_journal(tmp_path).segments[0]
    assert len(run.episodes) == 3
    assert run.summary.status == "finished"
    assert "Performance summary:" in (tmp_path / "report.txt").read_text(encoding="utf-8")


def test_an_uncaught_exception_without_on_fit_end_is_a_failed_run(tmp_path):
    done = run_script(PLAIN_LOOP + "    raise OSError('gone')\n", str(tmp_path))
    assert done.stderr.rstrip().endswith("OSError: gone")
    summary = read_journal(tmp_path).segments[0].summary
    assert (summary.status, summary.error) == ("failed", "OSError: gone")


def test_an_exit_inside_an_episode_is_a_failed_run(tmp_path):
    done = run_script(PLAIN_LOOP.replace("pass", "episode == 2 and sys.exit(3)"), str(tmp_path))
    assert done.returncode == 3
    run = read_journal(tmp_path).segments[0]
    assert len(run.episodes) == 2
    assert [failure.error for failure in run.failures] == ["SystemExit: 3"]


def test_a_forked_child_leaves_the_parents_run_alone(tmp_path):
    """A DataLoader worker inherits the evaluator; its exit must not end the parent's run."""
    script = (
        PLAIN_LOOP
        + """
    import gc, os
    child = os.fork()
    if child == 0:
        gc.collect()
        evaluator.close()
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    with evaluator.episode(3):
        pass
    """
    )
    done = run_script(script, str(tmp_path))
    assert done.returncode == 0, done.stderr
    run = read_journal(tmp_path).segments[0]
    assert [record.episode for record in run.episodes] == [0, 1, 2, 3]
    text = (tmp_path / "journal.jsonl").read_text(encoding="utf-8")
    assert text.count('"kind":"summary"') == 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"actor_num_params": -1}, ValueError, "actor_num_params is -1; expected an integer of"),
        ({"critic_num_params": 1.5}, TypeError, r"critic_num_params is 1.5 \(float\); expected an"),
        ({"reward_model_num_params": True}, TypeError, "reward_model_num_params is True"),
        ({"ignore_episodes": -2}, ValueError, "ignore_episodes is -2"),
        ({"train_config": [1]}, TypeError, "train_config is a list; expected a mapping such"),
        ({"save_path": 3}, TypeError, "save_path is 3; expected a path"),
        ({"run_dir": 3}, TypeError, "run_dir is 3; expected a path"),
        ({"clock": 3}, TypeError, "clock is 3; expected a callable"),
        ({"close_timeout_s": 0}, ValueError, "close_timeout_s is 0; expected a finite number"),
        ({"peak_tflops": "h100"}, ValueError, "peak_tflops is 'h100'; expected a finite number"),
        ({"dtype": "bf16"}, TypeError, "dtype is 'bf16'; expected a torch.dtype"),
        ({"models": {"acter": None}}, ValueError, "models has the roles none; expected 'actor'"),
        ({"models": {"acter": 1, "critic": 1}}, ValueError, "models has the roles 'acter', 'crit"),
        ({"models": {"initial": 1}}, ValueError, "models has the roles 'initial'; expected 'actor"),
        ({"sinks": "wandb"}, TypeError, r"expected a list of sinks, such as \['wandb'\]"),
    ],
)
def test_bad_input_is_an_error_at_construction(options, error, message):
    arguments = {
        "actor_num_params": 1,
        "critic_num_params": 1,
        "initial_model_num_params": 1,
        "reward_model_num_params": 1,
    }
    with pytest.raises(error, match=message):
        PerformanceEvaluator(**{**arguments, **options})


def test_nothing_of_ours_is_left_open(make_evaluator, tmp_path):
    evaluator = make_evaluator(save_path=tmp_path / "report.txt")
    with evaluator.episode(0):
        pass
    evaluator.close()
    opened = [str(Path(entry).resolve()) for entry in Path("/proc/self/fd").iterdir()]
    assert not [path for path in opened if path.startswith(str(tmp_path))]


def test_a_clock_that_raises_stops_no_training(make_evaluator, make_experience, clock):
    def broken():
        raise OSError("no clock")

    evaluator = make_evaluator()
    evaluator.on_fit_start()
    evaluator.clock = broken
    with evaluator.episode(0), evaluator.phase("generate"):
        pass
    evaluator.clock = clock
    evaluator.on_episode_start(1)
    evaluator.clock = broken
    with evaluator.phase("generate"):
        evaluator.on_make_experience_start()
        evaluator.on_make_experience_end(make_experience())
        evaluator.on_learn_batch_start()
        evaluator.on_learn_batch_end(make_experience())
        evaluator.record("learn", seconds=1.0)
    evaluator.on_episode_end(1)
    evaluator.on_fit_end()
