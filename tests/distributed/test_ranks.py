"""Fits of several ranks without a launcher: no one ends a rank but the rank itself."""

from __future__ import annotations

import pytest

from coati_perf import read_journal

RANKS = pytest.mark.parametrize("ranks", [2, 4])


@RANKS
def test_a_crash_never_changes_what_the_others_all_reduce(fork, said, read_run, ranks):
    """Upstream's evaluator turned a sum of 2000 into 1000 here."""
    ended = fork(ranks, "corruption")
    assert "ValueError: boom" in ended.stderr
    for rank in range(ranks - 1):
        assert said("sums", rank) == [1000.0 * ranks] * 6
        assert len(said("errors", rank)) == 1  # the next sum never came: its peer was gone
    run = read_run()
    assert [record.ranks_missing for record in run.episodes] == [[]]
    assert run.summary.status == "failed"
    assert "ValueError: boom" in run.summary.error


@RANKS
def test_the_corruption_test_sees_a_collective_at_the_fits_end(fork, said, ranks):
    """The control: an evaluator that reduces at the end of the fit gives a sum that is wrong."""
    fork(ranks, "corruption_by_upstream")
    for rank in range(ranks - 1):
        assert said("sums", rank)[:6] == [1000.0 * ranks] * 6
        assert said("sums", rank)[6] == pytest.approx(1000.0 * (ranks - 1) + 0.005)


def test_no_collective_is_called_from_fit_start_to_fit_end(fork, said, read_run):
    ended = fork(2, "no_collective")
    assert ended.status == 0, ended.stderr
    for rank in range(2):
        assert said("noticed", rank) == [["all_reduce", "ProcessGroup.allreduce"]]
        assert said("called", rank) == [[]]
    assert [record.ranks_missing for record in read_run().episodes] == [[], [], []]


def test_a_group_may_come_after_the_evaluator_and_go_before_the_fits_end(fork, said, tmp_path):
    """World size is read at fit start, each fit is a run of its own, and no rank's hook raises."""
    ended = fork(2, "group_comes_and_goes")
    assert ended.status == 0, ended.stderr
    assert [said("ended", rank) for rank in range(2)] == [[0, 1], [0, 1]]
    segments = read_journal(tmp_path / "run").segments
    assert [segment.header.world_size for segment in segments] == [2, 2]
    assert len({segment.header.run_id for segment in segments}) == 2
    for segment, episodes in zip(segments, ([0, 1], [0, 1, 2]), strict=True):
        assert [record.episode for record in segment.episodes] == episodes
        assert all(record.ranks_missing == [] for record in segment.episodes)
        assert all(record.metrics["perf/samples/generated"] == 4 for record in segment.episodes)
        assert segment.summary.status == "finished"


def test_fits_of_one_group_do_not_mix(fork, tmp_path):
    """A rank that has left one fit is not gone from the next, where it is late."""
    ended = fork(2, "two_fits_of_one_group")
    assert ended.status == 0, ended.stderr
    first, second = read_journal(tmp_path / "run").segments
    for segment, generated in ((first, 4), (second, 6)):
        assert [record.ranks_missing for record in segment.episodes] == [[], []]
        for record in segment.episodes:
            assert record.metrics["perf/samples/generated"] == generated
        assert segment.summary.status == "finished"


def test_a_job_whose_store_is_a_file_gets_a_store_of_ours(fork, read_run):
    ended = fork(2, "file_store")
    assert ended.status == 0, ended.stderr
    run = read_run()
    assert run.header.exchange == "store"
    assert [record.episode for record in run.episodes] == [0, 1, 2]
    assert [record.ranks_missing for record in run.episodes] == [[], [], []]
    assert run.episodes[-1].metrics["perf/samples/learned"] == 4


def test_a_silent_rank_costs_a_deadline_and_a_flag_and_hangs_nothing(fork, said, read_run, report):
    ended = fork(2, "silent_rank")
    assert ended.status == 0, ended.stderr
    run = read_run()
    assert [record.ranks_missing for record in run.episodes] == [[], [], [1]]
    assert run.episodes[-1].metrics["perf/samples/generated"] == 2
    assert said("given_up_after_s", 0)[0] < 2
    assert said("done", 0)[0] < 1
    assert "INCOMPLETE: in 1 episode(s)" in report()


def test_a_dead_rank_holds_up_the_fits_end_for_the_close_timeout_at_most(fork, said, read_run):
    ended = fork(2, "dead_rank")
    assert ended.status == 0, ended.stderr
    assert [record.ranks_missing for record in read_run().episodes] == [[], [], [1]]
    assert said("done", 0)[0] < 1.5


@RANKS
def test_a_killed_rank_is_named_by_its_silence(fork, read_run, ranks):
    fork(ranks, "kill_rank_1")
    run = read_run()
    assert [record.episode for record in run.episodes] == [0, 1]
    assert run.summary.status == "failed"
    assert "rank 0: RuntimeError: " in run.summary.error
    assert "; no word from rank 1" in run.summary.error  # others may be waiting for it still


def test_a_dead_rank_0_does_not_stop_the_others(fork, said):
    """The store's server dies with rank 0: the figures are lost, the training goes on."""
    fork(2, "rank_0_ends_first")
    assert said("done", 1)[0] < 1


def test_a_killed_run_keeps_its_episodes_and_can_be_resumed(fork, tmp_path, report):
    """A torn last line is skipped, and the next fit in the directory is a segment of its own."""
    fork(1, "kill_in_episode_5")
    text = report()
    assert "CUT OFF after episode 4" in text
    assert "5 episodes (0 to 4) on 1 rank" in text
    assert "torn" not in text
    killed = read_journal(tmp_path / "run").segments[0]

    path = tmp_path / "run" / "journal.jsonl"
    last = path.read_bytes().splitlines()[-1]
    with path.open("ab") as file:
        file.write(last[: len(last) // 2])
    text = report()
    assert "CUT OFF after episode 4" in text
    assert "1 torn line(s) were skipped" in text

    ended = fork(1, "finish_3_episodes")
    assert ended.status == 0, ended.stderr
    journal = read_journal(tmp_path / "run")
    assert journal.segments[0] == killed
    assert [record.episode for record in killed.episodes] == [0, 1, 2, 3, 4]
    assert [record.episode for record in journal.segments[1].episodes] == [0, 1, 2]
    assert (journal.segments[1].header.segment, journal.torn_lines) == (1, 1)
    text = report()
    assert "Segment 2 of 2" in text
    assert "CUT OFF after episode 4" in text


@RANKS
def test_real_lengths_of_all_ranks_are_summed(fork, read_run, ranks):
    ended = fork(ranks, "real_lengths")
    assert ended.status == 0, ended.stderr
    episodes = read_run().episodes
    assert [record.episode for record in episodes] == [0, 1, 2]
    short = range(2, ranks + 2)
    for record in episodes:
        metrics = record.metrics
        assert record.ranks_missing == []
        assert record.faults == {}
        assert metrics["perf/tokens/prompt"] == 2 * ranks
        assert metrics["perf/tokens/response"] == sum(short) + 9 * ranks - 2 * ranks
        assert metrics["perf/tokens/response_max"] == 8
        assert metrics["perf/tokens/padding_fraction"] == sum(9 - n for n in short) / (18 * ranks)
        assert metrics["perf/flops/score"] == sum(n**2 for n in short) + 81 * ranks
        assert metrics["perf/flops/learn_executed"] == 3 * 2 * 81 * ranks


def test_ranks_that_never_end_their_fit_lose_nothing(fork, read_run):
    ended = fork(2, "never_closed")
    assert ended.status == 0, ended.stderr
    run = read_run()
    assert [record.episode for record in run.episodes] == [0, 1, 2]
    assert [record.ranks_missing for record in run.episodes] == [[], [], []]


def test_rows_on_their_way_are_sent_before_a_failure_is(fork, read_run):
    ended = fork(2, "crash_with_real_lengths")
    assert "ValueError: boom" in ended.stderr
    run = read_run()
    first = run.episodes[0]
    assert (first.episode, first.ranks_missing) == (0, [])
    assert first.metrics["perf/tokens/prompt"] == 4
    assert "rank 1: ValueError: boom" in run.summary.error
