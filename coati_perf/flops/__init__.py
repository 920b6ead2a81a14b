"""Exact FLOP and bytes of any causal LM, as closed forms that are read off the model itself."""

from coati_perf.flops.conventions import ConventionError
from coati_perf.flops.model import BytesUnknownError, CostModel, NotGenerativeError
from coati_perf.flops.skeleton import UntraceableModelError

__all__ = [
    "BytesUnknownError",
    "ConventionError",
    "CostModel",
    "NotGenerativeError",
    "UntraceableModelError",
]
