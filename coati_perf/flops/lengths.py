"""Lengths of sequences in whatever form they come, as one float64 tensor."""

from __future__ import annotations

from typing import Any

import torch


def to_tensor(lengths: Any) -> torch.Tensor:
    """Return a length, or one per sequence, as a float64 tensor on the CPU of 0 or 1 dimensions.

    float64 holds every count of FLOP up to 9e15 exactly, and any above to 1e-16.

    Raises:
        ValueError: a length is negative or not finite, or there is more than one dimension.
        TypeError: ``lengths`` is no number, list, array or tensor.
    """
    try:
        tensor = torch.as_tensor(lengths, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        message = f"lengths is {lengths!r}; expected a number of tokens, or one per sequence"
        raise TypeError(message) from error
    if tensor.dim() > 1:
        message = f"lengths has shape {tuple(tensor.shape)}; expected a number or one dimension"
        raise ValueError(message)
    if not bool(((tensor >= 0) & tensor.isfinite()).all()):
        message = f"lengths is {lengths!r}; expected finite numbers of at least 0"
        raise ValueError(message)
    return tensor
