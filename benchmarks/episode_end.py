"""The episode's end on the training thread, beside the same values logged synchronously."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from coati_perf import PerformanceEvaluator
from hook_pairs import PARAMETERS, experience
from table import Comparison
from timing import percentile

if TYPE_CHECKING:
    import wandb
    from torch.utils.tensorboard import SummaryWriter

AIM = "≤ 150 µs"
_SINKS = ("tensorboard", "wandb")
_WARM_UP = 5
# Stands for generation and learning, in which the background threads get their time.
_EPISODE_S = 0.03


def compare(folder: Path, *, world_sizes: tuple[int, ...], episodes: int) -> Iterator[Comparison]:
    """Yield rank 0 and, pooled, the other ranks, for each number of gloo ranks on this machine."""
    for world_size in world_sizes:
        out = folder / f"{world_size}-ranks"
        out.mkdir()
        torch.multiprocessing.spawn(
            _rank, args=(world_size, _free_port(), str(out), episodes), nprocs=world_size
        )
        ranks = [json.loads((out / f"{rank}.json").read_text()) for rank in range(world_size)]
        yield _comparison(f"episode end, rank 0 of {world_size}", ranks[:1])
        if world_size > 1:
            yield _comparison(f"episode end, other ranks of {world_size}", ranks[1:])


def _comparison(name: str, ranks: list[dict[str, list[float]]]) -> Comparison:
    ours = [microseconds for rank in ranks for microseconds in rank["ours"]]
    theirs = [microseconds for rank in ranks for microseconds in rank["synchronous"]]
    return Comparison(
        name,
        statistics.median(ours),
        "all-reduces, add_scalar, wandb.log",
        statistics.median(theirs),
        unit="µs",
        aim=AIM,
        ours_p99=percentile(ours, 99),
        theirs_p99=percentile(theirs, 99),
    )


def _rank(rank: int, world_size: int, port: int, folder: str, episodes: int) -> None:
    """Run one rank: ours and the synchronous way in turns, each after a barrier."""
    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_DIR=folder)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size
    )
    out = Path(folder)
    evaluator = PerformanceEvaluator(
        *PARAMETERS, save_path=out / "report.txt", sinks=_SINKS, run_dir=out / "run"
    )
    evaluator.on_fit_start()
    synchronous = Synchronous(out, rank, world_size)
    ours: list[float] = []
    theirs: list[float] = []
    for episode in range(_WARM_UP + episodes):
        values = _episode(evaluator, episode)
        dist.barrier()  # the ranks' own differences are no cost of either side
        began = time.perf_counter()
        evaluator.on_episode_end(episode)
        ours.append(1e6 * (time.perf_counter() - began))
        metrics = _metrics_of(evaluator, episode) if rank == 0 else {}
        time.sleep(_EPISODE_S)
        dist.barrier()
        began = time.perf_counter()
        synchronous.log(episode, values, metrics)
        theirs.append(1e6 * (time.perf_counter() - began))
    evaluator.on_fit_end()
    synchronous.close()
    if rank == 0:
        _check_delivery(evaluator, _WARM_UP + episodes)
    figures = {"ours": ours[_WARM_UP:], "synchronous": theirs[_WARM_UP:]}
    (out / f"{rank}.json").write_text(json.dumps(figures))
    dist.destroy_process_group()


def _episode(evaluator: PerformanceEvaluator, episode: int) -> list[float]:
    """Run an episode up to its end, and return the values that this rank has to share."""
    batch = experience()
    evaluator.on_episode_start(episode)
    evaluator.on_make_experience_start()
    with evaluator.phase("generate"):
        time.sleep(_EPISODE_S)
    with evaluator.phase("score"):
        pass
    evaluator.on_make_experience_end(batch)
    for _ in range(4):
        evaluator.on_learn_batch_start()
        evaluator.on_learn_batch_end(batch)
    tally = evaluator._tally
    assert tally is not None
    row = tally.row(0, 0, time.perf_counter())
    return [row.episode_s, *row.seconds.values(), *row.amounts.values()]


def _metrics_of(evaluator: PerformanceEvaluator, episode: int) -> Mapping[str, float]:
    """Wait for the background thread's record of an episode, and return what it logs."""
    while (record := evaluator.latest_record) is None or record.episode != episode:
        time.sleep(0.001)
    return record.metrics


def _check_delivery(evaluator: PerformanceEvaluator, episodes: int) -> None:
    """A sink that failed would have cost nothing: fail where one did not get every record."""
    assert evaluator._last_fit is not None
    run = evaluator._last_fit._run
    assert run is not None
    assert len(run._workers) == 1 + len(_SINKS)
    for worker in run._workers.values():
        assert worker.delivered() == episodes, (worker.label, worker.delivered(), worker.last_error)


class Synchronous:
    """Reduces each value on its own as the seed does, and logs on rank 0's training thread."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self._world_size = world_size
        self._writer: SummaryWriter | None = None
        self._run: wandb.Run | None = None
        if rank == 0:
            import wandb
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder / "synchronous"))
            # A run apart, so that ours does not join it.
            self._run = wandb.init(project="synchronous", dir=folder, reinit="create_new")

    def log(self, episode: int, values: list[float], metrics: Mapping[str, float]) -> None:
        if self._world_size > 1:
            for value in values:
                dist.all_reduce(torch.tensor(value))
        if self._writer is not None and self._run is not None:
            for name, metric in metrics.items():
                self._writer.add_scalar(name, metric, episode)
            self._run.log({"perf/episode": episode, **metrics})

    def close(self) -> None:
        if self._writer is not None and self._run is not None:
            self._writer.close()
            self._run.finish()


def _free_port() -> int:
    with contextlib.closing(socket.socket()) as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port
