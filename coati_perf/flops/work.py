"""The FLOP of one pass over a sequence, as a closed form of its length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec
import torch

from coati_perf.flops.visibility import Visibility

Attention = Literal["causal", "full"]


class Chunked(msgspec.Struct, frozen=True):
    """Work over the length rounded up to a multiple of ``size``: linear attention in chunks."""

    size: int
    per_token: float
    per_square: float = 0.0


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """FLOP of one sequence: ``constant`` + ``per_token`` · L + chunks + attention.

    ``per_call`` + ``per_call_token`` · L is work that a batch of any size takes once, such as
    merging adapters into weights; each of its sequences carries an equal part. ``pairs`` gives
    the FLOP of one pair of a query and a key, of all layers with that visibility. For a decode
    step, L is the number of positions in the cache.
    """

    constant: float = 0.0
    per_token: float = 0.0
    per_call: float = 0.0
    per_call_token: float = 0.0
    chunks: tuple[Chunked, ...] = ()
    pairs: tuple[tuple[Visibility, float], ...] = ()

    def over(self, length: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Return the FLOP of a pass over a batch, for each ``length`` in it; 0 for one of 0."""
        once = (self.per_call + self.per_call_token * length) / max(length.numel(), 1)
        flop = self.constant + self.per_token * length + once
        for chunk in self.chunks:
            padded = torch.ceil(length / chunk.size) * chunk.size
            flop = flop + chunk.per_token * padded + chunk.per_square * padded**2
        for visibility, per_pair in self.pairs:
            pairs = length**2 if attention == "full" else visibility.causal_pairs(length)
            flop = flop + per_pair * pairs
        return torch.where(length > 0, flop, 0.0)

    def decoding(
        self, context: torch.Tensor, steps: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """Return the FLOP of ``steps`` decode steps from a cache of ``context`` positions on.

        Per sequence of a batch, which steps on until its last sequence is done.
        """
        cached = steps * context + steps * (steps - 1) / 2  # Σ of the cache's lengths
        flop = self.constant * steps + self.per_token * cached
        if self.per_call and steps.numel():
            flop = flop + self.per_call * steps.max() / steps.numel()
        for visibility, per_pair in self.pairs:
            flop = flop + per_pair * pairs_decoded(visibility, context, steps, attention)
        return flop

    def formula(self, symbol: str = "L") -> str:
        """Return the closed form for people, such as ``1.5e+10·L + 5.2e+05·L(L+1)/2``."""
        terms = [f"{self.constant:.6g}"] if self.constant else []
        if self.per_token:
            terms.append(f"{self.per_token:.6g}·{symbol}")
        if self.per_call or self.per_call_token:
            terms.append(f"({self.per_call:.6g} + {self.per_call_token:.6g}·{symbol})/batch")
        for chunk in self.chunks:
            padded = f"⌈{symbol}/{chunk.size}⌉·{chunk.size}"
            terms.append(f"{chunk.per_token:.6g}·({padded})")
            if chunk.per_square:
                terms.append(f"{chunk.per_square:.6g}·({padded})²")
        terms.extend(
            f"{per_pair:.6g}·pairs[{visibility}]({symbol})" for visibility, per_pair in self.pairs
        )
        return " + ".join(terms) or "0"


def pairs_decoded(
    visibility: Visibility, context: torch.Tensor, steps: torch.Tensor, attention: Attention
) -> torch.Tensor:
    """Return how many pairs of a query and a key the decode steps make, elementwise.

    ``full`` counts the keys that a cache holds, ``causal`` those that the query may see; they
    differ for chunked attention alone.
    """
    count: Callable[[torch.Tensor], torch.Tensor] = (
        visibility.cached_pairs if attention == "full" else visibility.causal_pairs
    )
    return count(context + steps) - count(context)
