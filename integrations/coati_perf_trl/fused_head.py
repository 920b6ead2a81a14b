"""Where TRL's fused head computes logits (1.15)."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import torch

from coati_perf.seen import Logits

_HAS_TRITON = importlib.util.find_spec("triton") is not None
_IGNORED_LABEL = -100  # PyTorch's


def fused_logits(options: Mapping[str, Any], batch: int, length: int) -> Logits | None:
    """Return the logits of a forward with ``fused_lm_head``; None for any other.

    With Triton they are those of the labels alone; without it those of all positions but the
    last. The backward computes them again (``trl.kernels.chunked_logprob``, TRL 1.16).
    """
    labels = options.get("labels")
    if not options.get("fused_lm_head") or not isinstance(labels, torch.Tensor):
        return None
    real = (labels[:, 1:] != _IGNORED_LABEL).sum(-1)
    labels_alone = _HAS_TRITON and labels.device.type in ("cuda", "xpu")
    return Logits(None if labels_alone else length - 1, real, again=True)
