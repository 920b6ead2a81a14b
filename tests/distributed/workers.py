"""What one rank does in a scenario; run by ``launch.py``, never imported by pytest.

``workers.py SCENARIO FOLDER`` is one rank, told by the environment which (torchrun sets it).
``workers.py --fork N SCENARIO FOLDER`` imports torch once and forks N ranks, each of which ends
as an interpreter of its own does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from coati_perf import CostModel, PerformanceEvaluator, recorder

ACTOR, CRITIC, INITIAL, REWARD = 10, 20, 30, 40
# A rank's seconds in make_experience and learn, by the scripted clock, per call.
MAKE_S, SLOW_MAKE_S, LEARN_S = 1.0, 5.0, 0.25
STEP_VALUE = 1000.0


class ScriptedClock:
    """A clock that moves only when told to, so that times can be checked to the last digit."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Rank:
    """One rank: who it is, where it writes, and what it says to the test."""

    def __init__(self, folder: Path):
        self.number = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.folder = folder

    def evaluator(self, **options):
        options = {"run_dir": self.folder / "run", **options}
        return PerformanceEvaluator(ACTOR, CRITIC, INITIAL, REWARD, **options)

    def join(self, **options):
        options = {"timeout": timedelta(seconds=30), **options}
        dist.init_process_group("gloo", **options)

    def say(self, what, value):
        """Leave a value for the test, on the disk at once."""
        with (self.folder / f"{what}-{self.number}.jsonl").open("a") as file:
            file.write(json.dumps(value) + "\n")


@contextlib.contextmanager
def fit_of(evaluator):
    """Call the fit's hooks as ColossalChat's OLTrainer does: the end in a ``finally`` block."""
    evaluator.on_fit_start()
    try:
        yield
    finally:
        evaluator.on_fit_end()


@contextlib.contextmanager
def episode_of(evaluator, episode):
    evaluator.on_episode_start(episode)
    try:
        yield
    finally:
        evaluator.on_episode_end(episode)


def experience(batch=2, length=6, actions=4):
    return SimpleNamespace(
        sequences=torch.zeros(batch, length, dtype=torch.long),
        action_mask=torch.ones(batch, actions, dtype=torch.bool),
    )


def collect(evaluator, made, work=lambda: None):
    evaluator.on_make_experience_start()
    work()
    evaluator.on_make_experience_end(made)


def learn(evaluator, batch, work=lambda: None):
    evaluator.on_learn_batch_start()
    work()
    evaluator.on_learn_batch_end(batch)


def small_episode(evaluator, episode, work=lambda: None):
    with episode_of(evaluator, episode):
        collect(evaluator, experience())
        learn(evaluator, experience(), work)


def training_step():
    """Do what a training step does with the other ranks; return the sum of their values."""
    value = torch.tensor([STEP_VALUE])
    dist.all_reduce(value)
    return value.item()


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.005)


def until_recorded(evaluator, episode):
    until(lambda: evaluator.latest_record and evaluator.latest_record.episode == episode)


def job_store():
    return dist.distributed_c10d._get_default_store()


# The scenarios.


def unequal_work(rank):
    """Rank r makes r + 1 collect steps; the middle rank is the slow one; keys are freed."""
    rank.join()
    clock = ScriptedClock()
    evaluator = rank.evaluator(clock=clock)
    slow = rank.number == rank.world_size // 2

    def spend(seconds):
        clock.now += seconds

    dist.barrier()
    with fit_of(evaluator):
        for episode in range(3):
            with episode_of(evaluator, episode):
                for step in range(rank.number + 1):
                    made = experience(2 * rank.number + step + 1, 8 + rank.number, 3 + rank.number)
                    collect(evaluator, made, lambda: spend(SLOW_MAKE_S if slow else MAKE_S))
                for _ in range(2 * rank.number + 1):
                    batch = experience(rank.number + 1, 8 + rank.number)
                    learn(evaluator, batch, lambda: spend(LEARN_S))
            if rank.number == 0:
                until(lambda: evaluator.latest_record)
                until(lambda number=episode: evaluator.latest_record.episode == number)
                rank.say("keys", job_store().num_keys())
            dist.barrier()
    dist.destroy_process_group()


def crash(rank, crashing):
    """One rank raises in episode 3, while the others train on."""
    rank.join()
    evaluator = rank.evaluator()
    dist.barrier()
    raised = None
    try:
        with fit_of(evaluator):
            for episode in range(6):
                with episode_of(evaluator, episode):
                    collect(evaluator, experience())
                    if episode == 3 and rank.number == crashing:
                        raised = time.monotonic()
                        raise ValueError(f"boom on rank {rank.number}")
                    learn(evaluator, experience(), training_step)
    finally:
        if raised is not None:
            rank.say("left_after_s", time.monotonic() - raised)


def crash_on_rank_0(rank):
    crash(rank, 0)


def crash_on_rank_1(rank):
    crash(rank, 1)


def crash_once_and_restart(rank):
    """The launcher starts all ranks again after the crash; the second attempt finishes.

    torchrun gives the attempts one store. Gloo (torch 2.13) trips over its own keys from before;
    they are deleted here, so that what a backend meets that does not trip can be seen.
    """
    if rank.attempt == 0:
        try:
            crash(rank, 1)
        finally:
            if rank.number == 1:
                until(lambda: b'"failure"' in (rank.folder / "run/journal.jsonl").read_bytes())
                server = TCPStore(
                    os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
                )
                for key in server.list_keys():
                    if "/cpu/" in key:
                        server.delete_key(key)
    rank.join()
    evaluator = rank.evaluator()
    with fit_of(evaluator):
        for episode in range(3):
            small_episode(evaluator, episode, training_step)
    dist.barrier()
    dist.destroy_process_group()


class UpstreamEvaluator:
    """As ColossalChat's does, it reduces a scalar over the ranks when the fit ends."""

    def __getattr__(self, hook):
        return lambda *arguments: None

    def on_fit_end(self):
        dist.all_reduce(torch.tensor([0.005]))


def train_on_beside_a_crash(rank, evaluator):
    """The last rank leaves its fit by an exception; the others wait for it in an all-reduce."""
    crashing = rank.number == rank.world_size - 1
    with fit_of(evaluator):
        for episode in range(4):
            with episode_of(evaluator, episode):
                collect(evaluator, experience())
                for step in range(4):
                    if crashing and (episode, step) == (1, 2):
                        time.sleep(0.3)  # by now the others are in the all-reduce
                        raise ValueError("boom")
                    try:
                        rank.say("sums", training_step())
                    except Exception as error:
                        rank.say("errors", str(error))
                        raise
                    learn(evaluator, experience())


def corruption(rank):
    rank.join()
    train_on_beside_a_crash(rank, rank.evaluator())


def corruption_by_upstream(rank):
    rank.join()
    train_on_beside_a_crash(rank, UpstreamEvaluator())


# Of torch.distributed and of the process group's own C++ object: whatever waits for a peer.
COLLECTIVES = [
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "monitored_barrier",
    "new_group",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
]
GROUP_OPERATIONS = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "_allgather_base",
    "_reduce_scatter_base",
    "allreduce_coalesced",
    "allgather_coalesced",
]


def no_collective(rank):
    """Every collective is noted while the evaluator works; the notes must stay empty."""
    rank.join()
    called = []

    def note(name):
        return lambda *arguments, **options: called.append(name)

    dist.barrier()
    for name in COLLECTIVES:
        setattr(dist, name, note(name))
        setattr(dist.distributed_c10d, name, note(name))
    for name in GROUP_OPERATIONS:
        setattr(dist.ProcessGroup, name, note(f"ProcessGroup.{name}"))
    dist.all_reduce(None)
    dist.group.WORLD.allreduce(None)
    rank.say("noticed", list(called))
    called.clear()
    evaluator = rank.evaluator()
    with fit_of(evaluator):
        for episode in range(3):
            small_episode(evaluator, episode)
    rank.say("called", called)


def kill_in_episode_5(rank):
    """Rank 0 is killed in the middle of episode 5."""
    if rank.world_size > 1:
        rank.join()
    evaluator = rank.evaluator()
    with fit_of(evaluator):
        for episode in range(8):
            with episode_of(evaluator, episode):
                collect(evaluator, experience())
                if rank.world_size > 1:
                    learn(evaluator, experience(), training_step)
                if episode == 5 and rank.number == 0:
                    until_recorded(evaluator, 4)
                    os.kill(os.getpid(), signal.SIGKILL)


def kill_rank_1(rank):
    """Rank 1 is killed in episode 2; the others fail at the all-reduce that it does not come to."""
    rank.join()
    evaluator = rank.evaluator()
    with fit_of(evaluator):
        for episode in range(4):
            if rank.number == 1 and episode == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            small_episode(evaluator, episode, training_step)


def finish_3_episodes(rank):
    evaluator = rank.evaluator()
    with fit_of(evaluator):
        for episode in range(3):
            small_episode(evaluator, episode)


def group_comes_and_goes(rank):
    """The process group is made after the evaluator, and destroyed before the fit's end, twice."""
    evaluator = rank.evaluator()
    for number in range(2):
        os.environ["MASTER_PORT"] = os.environ[f"MASTER_PORT_{number}"]
        rank.join()
        with fit_of(evaluator):
            for episode in range(2 + number):
                small_episode(evaluator, episode, training_step)
            dist.destroy_process_group()
        rank.say("ended", number)


def two_fits_of_one_group(rank):
    """Rank 1 has left the first fit for good, and is late in the second."""
    rank.join()
    evaluator = rank.evaluator()
    for number in range(2):
        with fit_of(evaluator):
            for episode in range(2):
                with episode_of(evaluator, episode):
                    collect(evaluator, experience(2 + number))
                    if rank.number == 1 and number == 1:
                        time.sleep(2 * recorder._ASK_AFTER_S)
    dist.barrier()
    dist.destroy_process_group()


def file_store(rank):
    """The job's store is a FileStore, whose ``set`` waits."""
    rank.join(
        init_method=f"file://{rank.folder}/store", rank=rank.number, world_size=rank.world_size
    )
    evaluator = rank.evaluator()
    with fit_of(evaluator):
        for episode in range(3):
            small_episode(evaluator, episode, training_step)
        if rank.number == 0:
            until_recorded(evaluator, 2)
    dist.barrier()
    dist.destroy_process_group()


def silent_rank(rank):
    """Rank 1 never ends its last episode, says nothing, and stays; rank 0 gives its row up."""
    rank.join()
    evaluator = rank.evaluator()
    evaluator.on_fit_start()
    for episode in range(3):
        evaluator.on_episode_start(episode)
        collect(evaluator, experience())
        learn(evaluator, experience(), training_step)
        if rank.number == 1 and episode == 2:
            until((rank.folder / "done-0.jsonl").exists)
            os._exit(0)
        if rank.number == 0 and episode == 2:
            until_recorded(evaluator, 1)  # what came before is there, however busy the machine is
            recorder.GATHER_TIMEOUT_S = 0.3
        evaluator.on_episode_end(episode)
    if rank.number == 0:
        began = time.monotonic()
        until_recorded(evaluator, 2)
        rank.say("given_up_after_s", time.monotonic() - began)
        began = time.monotonic()
        evaluator.on_fit_end()
        rank.say("done", time.monotonic() - began)


def dead_rank(rank):
    """Rank 1's process ends in mid-episode without a word, before rank 0's fit ends."""
    rank.join()
    evaluator = rank.evaluator(close_timeout_s=1.0)
    evaluator.on_fit_start()
    for episode in range(3):
        evaluator.on_episode_start(episode)
        collect(evaluator, experience())
        learn(evaluator, experience(), training_step)
        if episode == 2:
            if rank.number == 0:
                until_recorded(evaluator, 1)
            dist.barrier()  # rank 1 has sent all that it had, however busy the machine is
            if rank.number == 1:
                os._exit(0)
        evaluator.on_episode_end(episode)
    began = time.monotonic()
    evaluator.on_fit_end()
    rank.say("done", time.monotonic() - began)


def rank_0_ends_first(rank):
    """Rank 0, whose process serves the store, is gone while rank 1 still measures."""
    rank.join()
    evaluator = rank.evaluator(close_timeout_s=1.0)
    with fit_of(evaluator):
        for episode in range(3):
            small_episode(evaluator, episode, training_step)
        if rank.number == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.3)
        began = time.monotonic()
        for episode in range(3, 6):
            small_episode(evaluator, episode)
    rank.say("done", time.monotonic() - began)


def masked_experience(lengths):
    """Return experience whose first token is the prompt and whose other real ones the response."""
    width = max(lengths)
    mask = torch.tensor([[1] * length + [0] * (width - length) for length in lengths])
    return SimpleNamespace(
        sequences=torch.zeros_like(mask), attention_mask=mask, action_mask=mask[:, 1:].bool()
    )


def real_lengths(rank):
    """Rank r has episodes of (r + 2, 9) tokens; a forward costs the square of the length."""
    rank.join()
    cost = CostModel.custom(forward=lambda length: length**2)
    evaluator = rank.evaluator(models={"critic": cost}, peak_tflops=1e9)
    with fit_of(evaluator):
        for episode in range(3):
            made = masked_experience([rank.number + 2, 9])
            with episode_of(evaluator, episode):
                collect(evaluator, made)
                learn(evaluator, made, training_step)


def never_closed(rank):
    """No rank ends its fit, and rank 1 comes to its exit right after its last episode."""
    rank.join()
    slow = CostModel.custom(forward=lambda length: time.sleep(0.05) or length)
    evaluator = rank.evaluator(models={"critic": slow})
    evaluator.on_fit_start()
    for episode in range(3):
        made = masked_experience([rank.number + 2, 9])
        with episode_of(evaluator, episode):
            collect(evaluator, made)
    if rank.number == 0:
        until_recorded(evaluator, 2)


def crash_with_real_lengths(rank):
    """Rank 1 raises in its second episode, when the lengths of its first are just on their way."""
    rank.join()
    evaluator = rank.evaluator(models={"critic": CostModel.custom(forward=lambda length: length)})
    with fit_of(evaluator):
        for episode in range(2):
            made = masked_experience([rank.number + 2, 9])
            with episode_of(evaluator, episode):
                collect(evaluator, made)
                if rank.number == 1 and episode == 1:
                    raise ValueError("boom")
                learn(evaluator, made)


def fork(ranks: int) -> None:
    """Return in each of ``ranks`` child processes; the parent waits for them and exits."""
    children = {}
    for number in range(ranks):
        pid = os.fork()
        if pid == 0:
            os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(ranks))
            return
        children[pid] = number
    failed = False
    for pid in children:
        failed |= os.waitpid(pid, 0)[1] != 0
    os._exit(int(failed))


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[0] == "--fork":
        fork(int(arguments[1]))
        arguments = arguments[2:]
    scenario, folder = arguments
    globals()[scenario](Rank(Path(folder)))


if __name__ == "__main__":
    main()
