"""The helper functions that ColossalChat's evaluator module exports, under the same names."""

from __future__ import annotations

import torch
import torch.distributed as dist


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def get_world_size() -> int:
    """Return the number of ranks of the default process group, 1 where there is none."""
    return dist.get_world_size() if _is_distributed() else 1


def get_rank() -> int:
    """Return this process's rank in the default process group, 0 where there is none."""
    return dist.get_rank() if _is_distributed() else 0


def divide(x: float, y: float) -> float:
    """Return x ÷ y, with inf for y == 0 and nan for y == inf, never an exception."""
    if y == 0:
        return float("inf")
    if y == float("inf"):
        return float("nan")
    return x / y


def all_reduce_mean(x: float, world_size: int) -> float:
    """Return the mean of ``x`` over ranks, as float64.

    A collective on the default process group: every rank must call it at the same point. The
    evaluator itself never does; this is here for code that imports it.
    """
    if world_size == 1:
        return x
    on_cpu = any(backend in dist.get_backend() for backend in ("gloo", "mpi"))
    device = torch.device("cpu") if on_cpu else torch.accelerator.current_accelerator()
    value = torch.tensor([x], dtype=torch.float64, device=device)
    dist.all_reduce(value)
    return float(value.item()) / world_size


def save_eval_result_rank_0(s: str, save_path: str, **kwargs: object) -> None:
    """Append to ``save_path``, on rank 0: a line of the values of ``kwargs``, then ``s``."""
    if get_rank() != 0:
        return
    values = "; ".join(str(value) for value in kwargs.values())
    with open(save_path, "a", encoding="utf-8") as file:  # noqa: PTH123 - any path-like, as upstream
        file.write(f"{values}\n{s}\n")
