"""The bytes that a pass must move to and from device memory: weights, and the KV cache.

Activations are left out, as kernels keep most of them on the chip: the figures are a lower bound.
Decoding is bound by these bytes and not by FLOP.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import torch

from coati_perf.flops.visibility import Visibility


class Experts(msgspec.Struct, frozen=True):
    """Experts, ``active`` of ``number`` for each token, with ``elements`` weights in all."""

    number: int
    active: int
    elements: int

    def touched(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return how many weights a step over ``tokens`` reads, if the routing is even."""
        untouched = torch.pow(1 - self.active / self.number, tokens)
        return self.elements * (1 - untouched)


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """What a model keeps in device memory, in elements, with the size of one in bytes.

    ``weights`` are read in every step, ``experts`` as far as they are used; ``trained`` have
    gradients. ``cache`` holds the
    elements that one position adds, over all layers of a visibility; ``state`` those of a
    recurrent state, which each step reads and writes as a whole.
    """

    weights: int
    experts: tuple[Experts, ...] = ()
    trained: int = 0
    cache: tuple[tuple[Visibility, int], ...] = ()
    state: int = 0
    weight_size: int = 2
    cache_size: int = 2

    def forward(self, lengths: torch.Tensor) -> float:
        """Bytes of a forward over a batch: the weights, once."""
        return self._weights_read(lengths.sum())

    def forward_backward(self, lengths: torch.Tensor) -> float:
        """Bytes of learning from a batch: the weights in both directions, and the gradients."""
        return 2 * self._weights_read(lengths.sum()) + self.weight_size * self.trained

    def prefill(self, lengths: torch.Tensor, cached: torch.Tensor) -> float:
        """Bytes of filling the cache with a batch of prompts, ``cached`` tokens of which it has."""
        new = (lengths - cached).sum()
        # A kernel reads what the last cached position sees, once for all new ones.
        read = self.cache_size * self._cache_read(cached - 1, cached)
        return self._weights_read(new) + read + self._cache_written(new)

    def decode(self, context: torch.Tensor, steps: torch.Tensor) -> float:
        """Bytes of decoding a batch, each sequence for its own number of steps."""
        context, steps = context.reshape(-1), steps.reshape(-1)
        read = 2 * self.state * float(steps.sum()) + self._cache_read(context, context + steps)
        weights = sum(count * self._weights_read(active) for count, active in _steps_by_size(steps))
        return float(weights + self.cache_size * read + self._cache_written(steps.sum()))

    def _cache_read(self, start: torch.Tensor, end: torch.Tensor) -> float:
        """Return the elements that each position from ``start`` + 1 to ``end`` sees."""
        return sum(
            per_position * float((seen.cached_pairs(end) - seen.cached_pairs(start)).sum())
            for seen, per_position in self.cache
        )

    def _weights_read(self, tokens: torch.Tensor) -> float:
        experts = sum(float(expert.touched(tokens)) for expert in self.experts)
        return self.weight_size * (self.weights + experts)

    def _cache_written(self, positions: torch.Tensor) -> float:
        per_position = sum(elements for _, elements in self.cache)
        return self.cache_size * per_position * float(positions)


def _steps_by_size(steps: torch.Tensor) -> Iterator[tuple[float, torch.Tensor]]:
    """Yield how many steps are made while how many sequences of a batch are not done yet."""
    done = torch.zeros((), dtype=steps.dtype)
    lasts, counts = torch.unique(steps, return_counts=True)
    active = counts.sum() - torch.cumsum(counts, 0) + counts
    for last, sequences in zip(lasts, active, strict=True):
        yield float(last - done), sequences
        done = last
