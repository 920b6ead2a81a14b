"""Fits of several ranks under torchrun: figures, crashes, kills and restarts."""

from __future__ import annotations

import math

import pytest

from coati_perf import read_journal

RANKS = pytest.mark.parametrize("ranks", [2, 4])


def mean(values):
    values = list(values)
    return math.fsum(values) / len(values)


@RANKS
def test_unequal_work_is_summed_and_times_are_means(torchrun, read_run, said, ranks):
    """Counts and FLOP are the true sums over ranks, seconds the means, the slow rank is named."""
    ended = torchrun(ranks, "unequal_work")
    assert ended.status == 0, ended.stderr
    run = read_run()
    assert (run.header.world_size, run.header.exchange) == (ranks, "store")
    assert run.summary.status == "finished"
    assert [record.episode for record in run.episodes] == [0, 1, 2]

    everyone = range(ranks)
    slow = ranks // 2
    batches = {rank: [2 * rank + step + 1 for step in range(rank + 1)] for rank in everyone}
    length = {rank: 8 + rank for rank in everyone}
    actions = {rank: 3 + rank for rank in everyone}
    learned = {rank: (2 * rank + 1) * (rank + 1) for rank in everyone}
    make_s = {rank: (rank + 1) * (5.0 if rank == slow else 1.0) for rank in everyone}
    learn_s = {rank: (2 * rank + 1) * 0.25 for rank in everyone}
    by_hand = {2: (1 + 7, 1 + 6), 4: (1 + 7 + 18 + 34, 1 + 6 + 15 + 28)}[ranks]
    assert by_hand == (sum(map(sum, batches.values())), sum(learned.values()))
    # The coati convention (shared/SEED.md), with 10, 20, 30 and 40 parameters.
    generate_flop = sum(
        2 * 10 * batch * (2 * length[rank] - actions[rank] - 1) * actions[rank] // 2
        for rank in everyone
        for batch in batches[rank]
    )
    expected = {
        "perf/samples/generated": by_hand[0],
        "perf/samples/learned": by_hand[1],
        "perf/steps/make_experience": ranks * (ranks + 1) // 2,
        "perf/steps/learn": ranks**2,
        "perf/tokens/make_experience_padded": sum(sum(batches[r]) * length[r] for r in everyone),
        "perf/tokens/learn_padded": sum(learned[r] * length[r] for r in everyone),
        "perf/flops/generate": generate_flop,
        "perf/flops/score": sum(2 * sum(batches[r]) * length[r] * 100 for r in everyone),
        "perf/flops/learn": sum(2 * learned[r] * length[r] * 30 * 3 for r in everyone),
        "perf/time/make_experience_s": mean(make_s.values()),
        "perf/time/learn_s": mean(learn_s.values()),
        "perf/time/episode_s": mean(make_s[r] + learn_s[r] for r in everyone),
        "perf/time/other_s": 0,
        "perf/ranks/reported": ranks,
        "perf/ranks/missing": 0,
        "perf/ranks/slowest": slow,
    }
    for record in run.episodes:
        assert {name: record.metrics[name] for name in expected} == expected
        assert (record.ranks, record.ranks_missing, record.faults) == (ranks, [], {})
        assert record.slowest.rank == slow
        assert record.slowest.phase == "make_experience"
        assert record.slowest.seconds == make_s[slow]
        assert record.slowest.mean_s == mean(make_s.values())
    assert len(set(said("keys", 0))) == 1  # an episode leaves nothing in the store


@RANKS
@pytest.mark.parametrize("crashing", [0, 1])
def test_a_rank_that_raises_is_heard_at_once_and_the_run_is_marked_failed(
    torchrun, read_run, said, report, ranks, crashing
):
    """Nothing masks or delays the exception; the journal has what was finished, and why it ended.

    The other ranks are in an all-reduce that only the launcher, or the end of the crashed
    process, gets them out of.
    """
    ended = torchrun(ranks, f"crash_on_rank_{crashing}")
    assert ended.status == 1, ended.stderr
    boom = f"ValueError: boom on rank {crashing}"
    assert boom in ended.stderr
    assert "During handling of the above exception" not in ended.stderr
    assert said("left_after_s", crashing)[0] < 2
    run = read_run()
    assert [record.episode for record in run.episodes] == [0, 1, 2]
    assert [record.ranks_missing for record in run.episodes] == [[], [], []]
    first = run.failures[0]
    assert (first.rank, first.episode, first.error) == (crashing, 3, boom)
    assert run.summary is None or run.summary.status == "failed"
    ending = report().partition(f"run {run.header.run_id}: ")[2].splitlines()[0]
    assert ending.startswith("FAILED after episode 2")
    assert boom in ending


def test_a_restart_by_the_launcher_is_not_poisoned_by_the_failed_attempt(torchrun, tmp_path):
    """The launcher's store outlives the attempt, and with it the keys of the failed one."""
    ended = torchrun(2, "crash_once_and_restart", "--max-restarts", "1")
    assert ended.status == 0, ended.stderr
    failed, finished = read_journal(tmp_path / "run").segments
    assert [record.episode for record in failed.episodes] == [0, 1, 2]
    assert failed.failures
    assert (finished.header.segment, finished.summary.status) == (1, "finished")
    assert finished.failures == []
    assert [record.ranks_missing for record in finished.episodes] == [[], [], []]


def test_a_killed_rank_0_leaves_the_finished_episodes(torchrun, read_run, report):
    ended = torchrun(2, "kill_in_episode_5")
    assert ended.status == 1, ended.stderr
    run = read_run()
    assert [record.episode for record in run.episodes] == [0, 1, 2, 3, 4]
    assert [record.ranks_missing for record in run.episodes] == [[]] * 5
    assert run.summary is None
    text = report()
    assert "CUT OFF after episode 4" in text
    assert "5 episodes (0 to 4) on 2 ranks" in text
