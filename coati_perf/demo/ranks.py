"""Data parallelism over the ranks of a process group, or none."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
from torch import Tensor, distributed, nn


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """Join the gloo process group that ``torchrun`` announces, and leave it at the end.

    Without ``torchrun``, with one process, or inside a process group already there: does nothing.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or distributed.is_initialized():
        yield
        return
    distributed.init_process_group("gloo")
    try:
        yield
    finally:
        distributed.destroy_process_group()


def rank() -> int:
    """Return this process's number, 0 without a process group."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def world_size() -> int:
    """Return the number of processes, 1 without a process group."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def mean_over_ranks(value: Tensor) -> Tensor:
    """Return the mean of ``value`` over ranks. Every rank must call it, with the same shape."""
    if world_size() == 1:
        return value
    total = value.detach().clone()
    distributed.all_reduce(total)
    return total / world_size()


def broadcast_parameters(model: nn.Module) -> None:
    """Give every rank the parameters of rank 0. Every rank must call it."""
    if world_size() > 1:
        for parameter in model.parameters():
            distributed.broadcast(parameter.data, src=0)


def average_gradients(model: nn.Module) -> None:
    """Replace each gradient by its mean over ranks, in one message. Every rank must call it."""
    if world_size() == 1:
        return
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    mean = mean_over_ranks(torch.cat([gradient.flatten() for gradient in gradients]))
    parts = mean.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
