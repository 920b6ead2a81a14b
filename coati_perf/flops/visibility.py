"""Which keys a query may see, and how many pairs of a query and a key that makes."""

from __future__ import annotations

from typing import Literal

import msgspec
import torch

Kind = Literal["all", "sliding", "chunked"]


class Visibility(msgspec.Struct, frozen=True):
    """The keys that the query at position t = 1, 2, … sees in causal attention.

    ``all``: t keys. ``sliding``: the last ``size``, itself included. ``chunked``: those of its own
    chunk of ``size`` positions.
    """

    kind: Kind = "all"
    size: int = 0

    def causal_pairs(self, length: torch.Tensor) -> torch.Tensor:
        """Return Σ over queries 1 … length of the keys each sees; elementwise, float64."""
        if self.kind == "all":
            return _triangle(length)
        if self.kind == "sliding":
            start = length.clamp(max=self.size)
            return _triangle(start) + (length - start) * self.size
        chunks = torch.floor(length / self.size)
        whole_chunk = self.size * (self.size + 1) / 2
        return chunks * whole_chunk + _triangle(length - chunks * self.size)

    def cached_pairs(self, length: torch.Tensor) -> torch.Tensor:
        """Return the same sum over the keys that a cache holds: with ``chunked``, the last size.

        A decode step without a mask runs over all of these.
        """
        if self.kind == "chunked":
            return Visibility("sliding", self.size).causal_pairs(length)
        return self.causal_pairs(length)

    def __str__(self) -> str:
        return self.kind if self.kind == "all" else f"{self.kind} {self.size}"


def _triangle(length: torch.Tensor) -> torch.Tensor:
    return length * (length + 1) / 2
