"""FLOP of what a real model executes, counted by torch's own counter and not by ours."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

aten = torch.ops.aten


def executed_flop(work: Callable[[], object]) -> int:
    """Return the FLOP of everything that ``work`` runs."""
    # What torch's counter lacks (triangular solves, grouped products, products added in place), or
    # has wrong (the backward of a grouped convolution), from the operators' definitions. It hands
    # over shapes.
    counter = FlopCounterMode(
        display=False,
        custom_mapping={
            aten.convolution_backward: _convolution_backward,
            aten.linalg_solve_triangular: _solve_triangular,
            aten._grouped_mm: _grouped_mm,
            aten.addmm_: _addmm_in_place,
        },
    )
    counter.mod_tracker = _Untracked()
    with counter:
        work()
    return int(counter.get_total_flops())


class _Untracked(contextlib.nullcontext):
    """Only the sum of all modules: torch's tracker fails where one is given a view of a weight.

    That is without gradients, as in the convolutions of Mamba in transformers 5.25.
    """

    parents = frozenset({"Global"})


def _convolution_backward(
    grad: Any, x: Any, weight: Any, *rest: Any, out_shape: Any = None, **_: Any
) -> int:
    """Per element of the gradient and per weight of its channel, a product for x and one for w."""
    wanted = sum(gradient is not None for gradient in out_shape[:2])
    return 2 * math.prod(grad) * math.prod(weight[1:]) * wanted


def _solve_triangular(matrix: Any, right: Any, *rest: Any, **_: Any) -> int:
    """Row i of each solution takes i products, i sums and a division."""
    n = matrix[-1]
    return sum(2 * i + 1 for i in range(n)) * math.prod(right) // n


def _grouped_mm(left: Any, right: Any, *rest: Any, **_: Any) -> int:
    """Each row meets the weights of its one expert."""
    return 2 * left[0] * left[1] * right[-1]


def _addmm_in_place(total: Any, left: Any, right: Any, *rest: Any, **_: Any) -> int:
    """Each element of the product takes a product and a sum per column of the left matrix."""
    return 2 * left[0] * left[1] * right[1]
