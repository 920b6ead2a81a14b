"""Counts the FLOP of everything that runs inside it, the attention apart from the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from coati_perf.flops.attention import backward_products
from coati_perf.flops.operators import operator_flop, operator_name
from coati_perf.flops.repeats import Repeats
from coati_perf.flops.visibility import Visibility


class OperatorCounter(TorchDispatchMode):
    """Counts by operator; ``attention`` is FLOP per pair of a query and a key, by visibility.

    ``experts`` holds the weights that grouped products went over, by (experts, rows).

    Raises, out of what runs inside it, UnknownOperatorError for an operator that may multiply
    matrices and has no formula.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_operator: dict[str, int] = {}
        self.attention: dict[Visibility, float] = {}
        self.experts: dict[tuple[int, int], int] = {}
        self._repeats = Repeats()

    def __add__(self, other: OperatorCounter) -> OperatorCounter:
        both = OperatorCounter()
        for part in (self, other):
            for name, flop in part.by_operator.items():
                both.by_operator[name] = both.by_operator.get(name, 0) + flop
            for visibility, per_pair in part.attention.items():
                both.attention[visibility] = both.attention.get(visibility, 0) + per_pair
        return both

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = self._repeats.call(func, args, kwargs or {})
        if func is torch.ops.coati_perf.attention.default:
            query, _, value, kind, size = args
            self._attend(query, value, Visibility(kind, size), (1, 1))
        elif func is torch.ops.coati_perf.attention_backward.default:
            query, _, value, kind, size, needed = args
            self._attend(query, value, Visibility(kind, size), backward_products(needed))
        elif flop := operator_flop(func, args, out):
            name = operator_name(func)
            self.by_operator[name] = self.by_operator.get(name, 0) + flop
            if name == "aten._grouped_mm":
                self._group(*args[:2])
        return out

    def _group(self, rows: torch.Tensor, weights: torch.Tensor) -> None:
        if weights.dim() == 3:  # noqa: PLR2004 - experts, in, out; in a backward it has no experts
            key = (weights.shape[0], rows.shape[0])
            self.experts[key] = self.experts.get(key, 0) + weights.numel()

    def _attend(
        self,
        query: torch.Tensor,
        value: torch.Tensor,
        visibility: Visibility,
        products: tuple[int, int],
    ) -> None:
        batch, heads = query.shape[:2]
        dims = products[0] * query.shape[-1] + products[1] * value.shape[-1]
        per_pair = 2 * batch * heads * dims
        self.attention[visibility] = self.attention.get(visibility, 0) + per_pair
