"""Makes the exact cost model of a model, or takes it from the cache on disk."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from coati_perf.flops import cache
from coati_perf.flops.model import TracedCost
from coati_perf.flops.skeleton import UntraceableModelError, skeleton_of, unwrap
from coati_perf.flops.trace import Trace, trace, trace_training
from coati_perf.flops.undisturbed import undisturbed
from coati_perf.flops.work import Attention, Work


class Traces(msgspec.Struct, frozen=True):
    """What the cache keeps: the traces of one model, and its learning as it is executed."""

    trace: Trace
    executed_learning: Work


def traced_cost(
    model: Any,
    *,
    attention: Attention,
    gradient_checkpointing: bool | None,
    dtype: torch.dtype,
) -> TracedCost:
    """Return the cost model; see ``CostModel.traced``."""
    if not isinstance(model, nn.Module) and not hasattr(model, "to_dict"):
        message = (
            f"got {type(model).__name__}; expected a Hugging Face config or a torch.nn.Module."
            " Give one of these, CostModel.from_num_params(n) or CostModel.custom(…)"
        )
        raise TypeError(message)
    if gradient_checkpointing is None:
        gradient_checkpointing = _is_checkpointing(model)
    key = cache.key_of(model, gradient_checkpointing=gradient_checkpointing)
    traces = cache.get_or_make(
        key, Traces, lambda: _trace(model, gradient_checkpointing=gradient_checkpointing)
    )
    memory = msgspec.structs.replace(
        traces.trace.memory, weight_size=dtype.itemsize, cache_size=dtype.itemsize
    )
    return TracedCost(
        trace=msgspec.structs.replace(traces.trace, memory=memory),
        executed_learning=traces.executed_learning,
        source=_name(model),
        attention=attention,
    )


def _trace(model: Any, *, gradient_checkpointing: bool) -> Traces:
    with undisturbed():
        try:
            return _trace_on("meta", model, gradient_checkpointing=gradient_checkpointing)
        except UntraceableModelError:
            # Some code asks for more than the meta device has, such as an autocast of its own.
            # Fake tensors, which take thrice as long, say that they are on the CPU.
            with FakeTensorMode():
                return _trace_on("cpu", model, gradient_checkpointing=gradient_checkpointing)


def _trace_on(device: str, model: Any, *, gradient_checkpointing: bool) -> Traces:
    if not gradient_checkpointing:
        plain = trace(skeleton_of(model, device=device))
        return Traces(plain, plain.forward_backward)
    # Useful work does not include what checkpointing computes again.
    plain = trace(skeleton_of(model, gradient_checkpointing=False, device=device))
    skeleton = skeleton_of(model, gradient_checkpointing=True, device=device)
    return Traces(plain, trace_training(skeleton))


def _is_checkpointing(model: Any) -> bool:
    """Say whether a Hugging Face module is set to compute activations again."""
    for name in ("is_activation_checkpointing", "is_gradient_checkpointing"):  # new name first
        if hasattr(model, name):
            return bool(getattr(model, name))
    return False


def _name(model: Any) -> str:
    inner = unwrap(model) if isinstance(model, nn.Module) else model
    return type(inner).__name__
